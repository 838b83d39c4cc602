"""Generate text as events: each token with its text and the statistics of the residual stream."""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

import torch

from data.tokenizer import Tokenizer
from model.block import Site, State
from model.decoding import Decoder
from model.generation import Generation, Sampling, Text
from model.gpt import GPT
from model.residual import DeltaRewrite
from training.residual_statistics import ObservedStream, SiteWrite

Item = TypeVar("Item")


# ---- statistics of the residual stream ----


class StatisticInfo(NamedTuple):
    """The declared properties of a statistic: its range, and whether it is a gate."""

    range: tuple[float, float] | None  # the declared range
    is_ddl_gate: bool


class StatisticsRecorder(ObservedStream):
    """Records the statistics that the writes of a model report in its forward passes.

    Attributes:
        values: by statistic and site, the values (B, T) of each pass since the last `take_last`
        info: for each statistic, the distinct declarations of the sites that report it
    """

    def __init__(self):
        super().__init__(self.record)
        self.values: dict[str, dict[str, list[torch.Tensor]]] = {}
        self.info: dict[str, set[StatisticInfo]] = {}
        self.num_writes: Counter[str] = Counter()  # of each site in the current pass

    def begin(self, model: GPT, x: torch.Tensor, cache: list | None) -> State:
        # called at the start of every forward pass
        self.num_writes = Counter()
        return super().begin(model, x, cache)

    def record(self, site: Site, write: SiteWrite) -> None:
        """Record the statistics of a write."""
        label = f"{site.layer} {site.name}"
        self.num_writes[label] += 1
        # a model may use the same block several times
        if self.num_writes[label] > 1:
            label += f" ({self.num_writes[label]})"
        for name, values in write.statistics.items():
            self.values.setdefault(name, {}).setdefault(label, []).append(values)
            info = StatisticInfo(
                range=getattr(site.write, "ranges", {}).get(name),
                is_ddl_gate=name in ("beta", "beta_erase") and isinstance(site.write, DeltaRewrite),
            )
            self.info.setdefault(name, set()).add(info)

    def take_last(self, num_tokens: int) -> list[dict[str, list[float | None]]]:
        """Return the statistics of the last tokens of the first sequence, and forget all values.

        If a pass has read earlier tokens again, these come first, and are not among the last ones.

        Returns:
            For each token, the values at all sites by statistic; None for a value that is not
            finite.
        """
        by_token: list[dict[str, list[float | None]]] = [{} for _ in range(num_tokens)]
        for name, values_by_site in self.values.items():
            columns = [
                torch.cat(values, dim=1)[0, -num_tokens:] for values in values_by_site.values()
            ]
            rows = torch.stack(columns, dim=1).tolist()  # [token][site]
            for token, row in zip(by_token, rows):
                token[name] = [value if math.isfinite(value) else None for value in row]
            # the lists stay, so that the sites keep their order
            for values in values_by_site.values():
                values.clear()
        return by_token


@torch.no_grad()
def describe_statistics(model: GPT) -> list[dict]:
    """Describe the statistics that the writes of a model report.

    Returns:
        For each statistic its "name"; its "sites" in the order of a forward pass (`0 attn`, `0
        mlp`, ...); its "range" as the writes declare it, or None; and "gate", which is true for the
        gate of a delta rewrite (0 keeps the state, 1 overwrites it, 2 reflects it).
    """
    recorder = StatisticsRecorder()
    with model.through(recorder):
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.rope_cos.device))
    descriptions = []
    for name, values_by_site in recorder.values.items():
        info_of_sites = recorder.info[name]
        ranges = {info.range for info in info_of_sites}
        descriptions.append(
            {
                "name": name,
                "sites": list(values_by_site),
                # sites with different ranges have none in common
                "range": ranges.pop() if len(ranges) == 1 else None,
                "gate": all(info.is_ddl_gate for info in info_of_sites),
            }
        )
    return descriptions


# ---- texts of tokens ----


class Pieces:
    """Split a growing text into pieces, one per token, each with the text that its token adds.

    A token that ends within a character is sent together with the token that completes the
    character. Generated tokens are held back while a stop string may begin in them.
    """

    def __init__(self, tokenizer: Tokenizer, stop: list[str]):
        self.tokenizer = tokenizer
        # the prompt may contain a stop string, which only ends the generated text
        self.text = Text(tokenizer, [])  # all tokens
        self.text_before_stop = Text(tokenizer, stop)  # the generated tokens
        self.held_back: list[dict] = []
        self.num_ready = 0  # number of characters at the start of `held_back` that can be sent

    @property
    def stopped(self) -> bool:
        """Return whether the generated text contains a stop string."""
        return self.text_before_stop.stopped

    def make_piece(self, token: int, statistics: dict, prompt: bool = True) -> dict:
        """Return what is sent of a token.

        Its "label" is the text of the token by itself, or its bytes if they are not UTF-8.
        """
        data = self.tokenizer.decode_single_token_bytes(token)
        try:
            label = data.decode("utf-8")
        except UnicodeDecodeError:
            label = f"bytes {data.hex(' ')}"
        return {
            "id": token,
            "text": self.text.add(token),
            "label": label,
            "statistics": statistics,
            "prompt": prompt,
        }

    def add(self, token: int, statistics: dict) -> list[dict]:
        """Add a generated token, and return those that can now be sent."""
        self.held_back.append(self.make_piece(token, statistics, prompt=False))
        self.num_ready += len(self.text_before_stop.add(token))
        return self.release()

    def end(self) -> list[dict]:
        """Return the tokens that were held back, after the last one has been added."""
        if self.held_back:
            self.held_back[-1]["text"] += self.text.end()
        self.num_ready += len(self.text_before_stop.end())
        return self.release()

    def release(self) -> list[dict]:
        """Take from `held_back` the tokens whose text can be sent, up to the end of a character."""
        num_tokens = 0
        num_left = self.num_ready
        candidates = self.held_back
        # the last token may get more text, also if it ends a character before it begins another
        if self.text.ends_within_character():
            candidates = self.held_back[:-1]
        for index, piece in enumerate(candidates):
            num_left -= len(piece["text"])
            if num_left >= 0 and piece["text"]:
                num_tokens = index + 1
                self.num_ready = num_left
        released = self.held_back[:num_tokens]
        self.held_back = self.held_back[num_tokens:]
        # a stop string begins within the text of a token, which is cut there
        while self.stopped and self.num_ready:
            piece = self.held_back.pop(0)
            piece["text"] = piece["text"][: self.num_ready]
            self.num_ready -= len(piece["text"])
            released.append(piece)
        return released


# ---- events ----


def generate_events(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: list[int],
    max_new_tokens: int,
    *,
    sampling: Sampling,
    seed: int,
    stop: list[str],
    is_cancelled: Callable[[], bool],
) -> Generator[dict, None, None]:
    """Yield {"seed"}, then {"tokens"} several times, and at last {"end", "new_tokens", "seconds"}.

    The statistics of a token are those of the forward pass that reads it. A generated token is only
    read when the next one is sampled, so one more token is sampled than is sent.
    """
    start = time.perf_counter()
    recorder = StatisticsRecorder()
    # a text may become longer than the cache, which then holds its newest part
    decoder = Decoder(model, 1, min(len(prompt) + max_new_tokens, model.config.block_size))
    generation = Generation(
        decoder,
        prompts=[prompt],
        max_new_tokens=max_new_tokens + 1,
        sampling=sampling,
        seeds=[seed],
        stop_token=tokenizer.eot_token,
        vocab_size=tokenizer.n_vocab,
    )
    pieces = Pieces(tokenizer, stop)
    num_new_tokens = 0
    unread = prompt  # the tokens that the next pass reads for the first time
    reason = "reached max tokens"
    yield {"seed": seed}
    with model.through(recorder):
        for [token] in generation:
            statistics = recorder.take_last(len(unread))
            if num_new_tokens == 0:
                ready = [
                    pieces.make_piece(prompt_token, token_statistics)
                    for prompt_token, token_statistics in zip(prompt, statistics, strict=True)
                ]
            else:
                ready = pieces.add(unread[0], statistics[0])
            if ready:
                yield {"tokens": ready}
            if pieces.stopped:
                reason = "stop string"
                break
            if token is None:
                reason = "end of text"
                break
            # this token is the one that is sampled but not sent
            if num_new_tokens == max_new_tokens:
                break
            if is_cancelled():
                reason = "the server is shutting down"
                break
            num_new_tokens += 1
            unread = [token]
    if ready := pieces.end():
        yield {"tokens": ready}
    seconds = time.perf_counter() - start
    yield {"end": reason, "new_tokens": num_new_tokens, "seconds": seconds}


def iterate_under(
    make_context: Callable[[], AbstractContextManager], source: Generator[Item, None, None]
) -> Generator[Item, None, None]:
    """Yield the items of an iterator, each of which is computed inside a new context.

    Autocast is a setting of the current thread, but a server may compute the items of one iterator
    in several threads.
    """
    with contextlib.closing(source):
        while True:
            with make_context():
                item = next(source, None)
            if item is None:
                return
            yield item
