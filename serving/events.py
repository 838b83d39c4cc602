"""What the page is sent of a generation: events, each token with its text and statistics."""

import time
from collections.abc import Callable, Iterator

from model.decoding import Decoder
from model.generation import Generation, Sampling, Text
from serving.statistics import recorded


class Pieces:
    """Tokens with the text that each adds, generated ones held back while a stop string may begin
    in them.

    A token that ends within a character adds nothing; the one that completes it adds the character,
    and they come together.
    """

    def __init__(self, tokenizer, stop: list[str]):
        self.tokenizer = tokenizer
        self.whole, self.shown = Text(tokenizer, []), Text(tokenizer, stop)
        self.held: list[dict] = []
        self.characters = 0  # of `held` that may be shown

    @property
    def stopped(self) -> bool:
        return self.shown.stopped

    def prompt(self, token: int, statistics: dict) -> dict:
        return self.piece(token, statistics, prompt=True)

    def add(self, token: int, statistics: dict) -> list[dict]:
        """The generated tokens that can be shown with this one."""
        self.held.append(self.piece(token, statistics, prompt=False))
        self.characters += len(self.shown.add(token))
        return self.released()

    def end(self) -> list[dict]:
        """Those held back, when no token follows."""
        if self.held:
            self.held[-1]["text"] += self.whole.end()
        self.characters += len(self.shown.end())
        return self.released()

    def piece(self, token: int, statistics: dict, prompt: bool) -> dict:
        text, label = self.whole.add(token), self.label(token)
        return {
            "id": token,
            "text": text,
            "label": label,
            "statistics": statistics,
            "prompt": prompt,
        }

    def label(self, token: int) -> str:
        """The token by itself: its text, or its bytes where those are not UTF-8."""
        data = self.tokenizer.decode_single_token_bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return f"bytes {data.hex(' ')}"

    def released(self) -> list[dict]:
        """Take from `held` whole tokens with at most `characters` of text, up to one that ends a
        character.
        """
        count, left = 0, self.characters
        for index, piece in enumerate(self.held):
            left -= len(piece["text"])
            if left >= 0 and piece["text"]:
                count, self.characters = index + 1, left
        ready, self.held = self.held[:count], self.held[count:]
        while self.stopped and self.characters:  # the stop string begins within a token's text
            piece = self.held.pop(0)
            piece["text"] = piece["text"][: self.characters]
            self.characters -= len(piece["text"])
            ready.append(piece)
        return ready


def events(
    model, tokenizer, prompt: list[int], max_new_tokens: int, sampling: Sampling, seed: int, stop: list[str],
    cancelled: Callable[[], bool],
) -> Iterator[dict]:  # fmt: skip
    """Yield {"seed"}, then {"tokens": [...]} as they are read, then {"end": why, "new_tokens",
    "seconds"}.

    A token is sent when the pass that reads it has been made, with the statistics of that pass: a
    generated one when its successor is drawn. So one more token is drawn than shown.
    """
    started, made, why = time.perf_counter(), 0, "all new tokens made"
    decoder = Decoder(model, 1, min(len(prompt) + max_new_tokens, model.config.block_size))
    generation = Generation(
        decoder,
        [prompt],
        max_new_tokens + 1,
        sampling,
        [seed],
        tokenizer.eot_token,
        tokenizer.n_vocab,
    )
    pieces = Pieces(tokenizer, stop)
    yield {"seed": seed}
    with recorded(model) as recorder:
        unread = prompt
        for [token] in generation:
            columns = recorder.take(len(unread))
            if made:
                shown = pieces.add(unread[0], columns[0])
            else:
                shown = [pieces.prompt(*pair) for pair in zip(prompt, columns)]
            if shown:
                yield {"tokens": shown}
            if pieces.stopped or token is None:
                why = "stop string" if pieces.stopped else "end of text"
                break
            if made == max_new_tokens:
                break
            if cancelled():
                why = "the server ends"
                break
            made, unread = made + 1, [token]
    if left := pieces.end():
        yield {"tokens": left}
    yield {"end": why, "new_tokens": made, "seconds": time.perf_counter() - started}


def each_under(context: Callable, source: Iterator) -> Iterator:
    """The source's items, each made inside a new context().

    For autocast: a thread has it for itself alone, and a server makes the items of one source in
    several threads.
    """
    try:
        while True:
            with context():
                item = next(source, None)
            if item is None:
                return
            yield item
    finally:
        source.close()
