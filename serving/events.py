"""What the page is sent of a generation: events, each token with its text and with what the model's
writes say of it.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import nn

from model.block import Site
from model.decoding import Decoder
from model.generation import Generation, Sampling, Text
from model.residual import DeltaRewrite
from training.residual_statistics import ObservedStream, SiteWrite


class Recorder(ObservedStream):
    """The statistics of the writes by name, as passes are made; `take` hands out the newest."""

    def __init__(self):
        super().__init__(self.see)
        self.passes: dict[str, dict[str, list]] = {}  # statistic -> site -> (B, T) of each pass
        self.about: dict[str, set] = {}  # statistic -> (its range, whether it is the gate of DDL)

    def begin(self, model, x, cache):
        self.met = Counter()
        return super().begin(model, x, cache)

    def see(self, site: Site, write: SiteWrite) -> None:
        label = f"{site.layer} {site.name}"
        self.met[label] += 1
        if self.met[label] > 1:  # a block that occurs several times in a model
            label += f" ({self.met[label]})"
        for name, values in write.statistics.items():
            self.passes.setdefault(name, {}).setdefault(label, []).append(values)
            gate = name == "beta" and isinstance(site.write, DeltaRewrite)
            limits = getattr(site.write, "ranges", {}).get(name)
            self.about.setdefault(name, set()).add((limits, gate))

    def take(self, tokens: int) -> list[dict[str, list[float | None]]]:
        """Of each of the first sequence's newest `tokens` tokens: {statistic: a number of each site
        that has it}, None for one that is not finite.

        A pass that read older tokens anew is known by its length: what was handed out before is
        left out.
        """
        found: list[dict] = [{} for _ in range(tokens)]
        for name, sites in self.passes.items():
            columns = [torch.cat(each, dim=1)[0, -tokens:] for each in sites.values()]
            for token, row in zip(found, torch.stack(columns, dim=1).tolist()):
                token[name] = [value if math.isfinite(value) else None for value in row]
            for each in sites.values():
                each.clear()
        return found


@torch.no_grad()
def declared(model: nn.Module) -> list[dict]:
    """The statistics of a model's writes: "name", "sites" in the order of a pass (`0 attn`, `0
    mlp`, ...), "range" as the writes declare it or None, and "gate": whether it is the beta of a
    delta rewrite, of which 0 keeps, 1 overwrites and 2 reflects.
    """
    recorder, found = Recorder(), []
    with model.through(recorder):
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.rope_cos.device))
    for name, sites in recorder.passes.items():
        limits, gates = map(set, zip(*recorder.about[name]))
        limit = limits.pop() if len(limits) == 1 else None
        found.append({"name": name, "sites": list(sites), "range": limit, "gate": gates == {True}})
    return found


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

    def piece(self, token: int, statistics: dict, prompt: bool = True) -> dict:
        """What is sent of a token. `label`: its text by itself, or its bytes if not UTF-8."""
        data = self.tokenizer.decode_single_token_bytes(token)
        try:
            label = data.decode("utf-8")
        except UnicodeDecodeError:
            label = f"bytes {data.hex(' ')}"
        about = {"id": token, "text": self.whole.add(token), "label": label}
        return about | {"statistics": statistics, "prompt": prompt}

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
    started, made, why, recorder = time.perf_counter(), 0, "all new tokens made", Recorder()
    decoder = Decoder(model, 1, min(len(prompt) + max_new_tokens, model.config.block_size))
    ends = tokenizer.eot_token, tokenizer.n_vocab
    generation = Generation(decoder, [prompt], max_new_tokens + 1, sampling, [seed], *ends)
    pieces, unread = Pieces(tokenizer, stop), prompt
    yield {"seed": seed}
    with model.through(recorder):
        for [token] in generation:
            columns = recorder.take(len(unread))
            if made:
                shown = pieces.add(unread[0], columns[0])
            else:
                shown = list(map(pieces.piece, prompt, columns))
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
    with contextlib.closing(source):
        while True:
            with context():
                item = next(source, None)
            if item is None:
                return
            yield item
