"""Generate text in chunks: each token with its text and the statistics of the residual stream."""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import nn

from data.tokenizer import Tokenizer
from model.block import Site, State
from model.ddl import DeltaRewrite
from model.generation import Generation, Sampling, Text
from model.gpt import GPT
from training.residual_statistics import ObservedStream, SiteWrite

Item = TypeVar("Item")


# ---- statistics of the residual stream ----


class StatisticsRecorder(ObservedStream):
    """Records the statistics that the writes of a model report in its forward passes.

    Attributes:
        values: by statistic and site, the values (B, T) of each pass since the last `take_last`
        writes: by statistic, the write modules that report it
    """

    def __init__(self):
        super().__init__(self.record)
        self.values: dict[str, dict[str, list[torch.Tensor]]] = {}
        self.writes: dict[str, list[nn.Module]] = {}
        self.num_writes: Counter[str] = Counter()  # of each site in the current pass

    def begin(self, model: GPT, x: torch.Tensor, cache: list | None) -> State:
        # called at the start of every forward pass
        self.num_writes = Counter()
        return super().begin(model, x, cache)

    def record(self, site: Site, write: SiteWrite) -> None:
        """Record the statistics of a write."""
        label = f"{site.layer} {site.name}"
        self.num_writes[label] += 1
        if self.num_writes[label] > 1:  # a model may use the same block several times
            label += f" ({self.num_writes[label]})"
        for name, values in write.statistics.items():
            self.values.setdefault(name, {}).setdefault(label, []).append(values)
            self.writes.setdefault(name, []).append(site.write)

    def take_last(self, num_tokens: int) -> list[dict[str, list[float | None]]]:
        """Return the statistics of the last tokens of the first sequence, and forget all values.

        If a pass has read earlier tokens again, these come first, and are not among the last ones.

        Returns:
            For each token, the values at all sites by statistic; None for a value that is not
            finite.
        """
        by_token: list[dict[str, list[float | None]]] = [{} for _ in range(num_tokens)]
        for name, by_site in self.values.items():
            columns = [torch.cat(values, dim=1)[0, -num_tokens:] for values in by_site.values()]
            for token, row in zip(by_token, torch.stack(columns, dim=1).tolist(), strict=True):
                token[name] = [value if math.isfinite(value) else None for value in row]
        self.values.clear()
        self.writes.clear()
        return by_token


@torch.no_grad()
def describe_statistics(model: GPT) -> list[dict]:
    """Describe the statistics that the writes of a model report.

    Returns:
        For each statistic its "name"; its "sites" in the order of a forward pass (`0 attn`, `0
        mlp`, ...); its "range" if all writes declare the same, or None; and "gate", which is true
        for the gate of a delta rewrite (0 keeps the state, 1 overwrites it, 2 reflects it).
    """
    recorder = StatisticsRecorder()
    with model.through(recorder):
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.rope_cos.device))
    descriptions = []
    for name, by_site in recorder.values.items():
        writes = recorder.writes[name]
        ranges = {getattr(write, "ranges", {}).get(name) for write in writes}
        is_gate = name == "beta"
        descriptions.append(
            {
                "name": name,
                "sites": list(by_site),
                "range": ranges.pop() if len(ranges) == 1 else None,
                "gate": is_gate and all(isinstance(write, DeltaRewrite) for write in writes),
            }
        )
    return descriptions


# ---- chunks of a completion ----


def label_token(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token by itself, or its bytes if they are not UTF-8."""
    token_bytes = tokenizer.decode_single_token_bytes(token)
    try:
        return token_bytes.decode("utf-8")
    except UnicodeDecodeError:
        return f"bytes {token_bytes.hex(' ')}"


def make_chunk(text: str, finish_reason: str | None, tokens: list[dict], **more: object) -> dict:
    """Return a part of a completion in the form of OpenAI's API, with the tokens as a key of ours."""
    return {
        "object": "text_completion",
        "choices": [{"index": 0, "text": text, "finish_reason": finish_reason}],
        "tokens": tokens,
        **more,
    }


def split_text(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    """Return the text that each token adds to a whole text."""
    text = Text(tokenizer, stop=[])
    texts = [text.add(token) for token in tokens]
    texts[-1] += text.end()
    return texts


def generate_chunks(
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
    """Yield a chunk with the tokens of the prompt, one for each new token, and a last one.

    The statistics of a token are those of the forward pass that reads it. A generated token is only
    read when the next one is sampled, so one more token is sampled than is sent. The last chunk has
    the reason of the end, and text that was held back because a stop string might have begun in it.
    """
    recorder = StatisticsRecorder()
    generation = Generation(
        model,
        prompts=[prompt],
        max_new_tokens=max_new_tokens + 1,
        sampling=sampling,
        seeds=[seed],
        stop_token=tokenizer.eot_token,
        vocab_size=tokenizer.n_vocab,
    )
    # the prompt may contain a stop string, which only ends the generated text
    text = Text(tokenizer, stop)
    num_new_tokens = 0
    finish_reason = "length"
    unread = prompt  # the tokens that the next pass reads for the first time
    texts = split_text(tokenizer, prompt)
    with model.through(recorder):
        for [token] in generation:
            is_prompt = num_new_tokens == 0
            tokens = [
                {
                    "id": unread_token,
                    "text": unread_text,
                    "label": label_token(tokenizer, unread_token),
                    "statistics": statistics,
                    "prompt": is_prompt,
                }
                for unread_token, unread_text, statistics in zip(
                    unread, texts, recorder.take_last(len(unread)), strict=True
                )
            ]
            yield make_chunk("" if is_prompt else texts[0], None, tokens, seed=seed)
            if text.stopped or token is None:
                finish_reason = "stop"
                break
            # this token is the one that is sampled but not sent
            if num_new_tokens == max_new_tokens:
                break
            if is_cancelled():
                finish_reason = "abort"
                break
            num_new_tokens += 1
            unread = [token]
            texts = [text.add(token)]
    usage = {
        "prompt_tokens": len(prompt),
        "completion_tokens": num_new_tokens,
        "total_tokens": len(prompt) + num_new_tokens,
    }
    yield make_chunk(text.end(), finish_reason, [], seed=seed, usage=usage)


def join_chunks(chunks: Iterable[dict]) -> dict:
    """Return the whole completion."""
    chunks = list(chunks)
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    tokens = [token for chunk in chunks for token in chunk["tokens"]]
    last = chunks[-1]
    choice = {**last["choices"][0], "text": text}
    return {**last, "choices": [choice], "tokens": tokens}


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
