"""Text from a decoder: how a token is drawn, batches of prompts that do not know of each other, and
stop strings.
"""

import codecs
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from model.decoding import Decoder, padded
from model.options import check_ranges, option

UNIFORMS = 1024  # random numbers that a sequence draws at a time


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled; the steps are applied in the order of the fields.

    Raises:
        ValueError: a value is out of range
    """

    # as in transformers: positive logits are divided by it, negative ones multiplied
    repetition_penalty: float = option(
        1.0,
        "penalty on the logits of tokens that already occur in the text; 1 disables it",
        above=0,
    )
    temperature: float = option(
        1.0,
        "divide the logits by this value; 0 always takes the most likely token (greedy decoding)",
        low=0,
    )
    top_k: int | None = option(
        None,
        "sample from the top_k most likely tokens (default: all tokens)",
        low=1,
    )
    top_p: float = option(
        1.0,
        "sample from the smallest set of most likely tokens whose total probability reaches top_p "
        "(nucleus sampling); 1 disables it",
        above=0,
        high=1,
    )
    min_p: float = option(
        0.0,
        "discard tokens less probable than min_p times the most likely one; 0 disables it",
        low=0,
        high=1,
    )

    def __post_init__(self):
        check_ranges(self)
        if math.isinf(self.repetition_penalty):
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty}: give a finite number above 0"
            )
        if math.isinf(self.temperature):
            raise ValueError(f"temperature={self.temperature}: give a finite number, 0 or more")


def probabilities(logits, sampling: Sampling):
    """logits (B, V) -> float64 (B, n), not normalised, and their tokens (B, n); None: in order."""
    logits, tokens = logits.double() / sampling.temperature, None
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        logits, tokens = logits.topk(sampling.top_k)
    elif sampling.top_p < 1:
        logits, tokens = logits.sort(descending=True, stable=True)
    p = logits.softmax(-1)
    if sampling.top_p < 1:  # a token stays while those before it have less than top_p together
        p = torch.where(p.cumsum(-1) - p < sampling.top_p, p, 0)
    if sampling.min_p > 0:
        p = torch.where(p >= sampling.min_p * p.amax(-1, keepdim=True), p, 0)
    return p, tokens


def draw(logits, sampling: Sampling, uniform, present=None):
    """logits (B, V), uniform float64 (B,) in [0, 1) -> token ids (B,).

    present: bool (B, V), the tokens that repetition_penalty lies on.
    """
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(present, penalised, logits)
    if sampling.temperature == 0:
        return logits.argmax(-1)
    p, tokens = probabilities(logits, sampling)
    edges = p.cumsum(-1)
    # The first token whose edge is above a point below the last edge (uniform < 1 keeps it there,
    # also rounded): never one of probability 0.
    point = uniform[:, None] * edges[:, -1:]
    index = torch.searchsorted(edges, point, right=True)
    return (index if tokens is None else tokens.gather(-1, index)).squeeze(-1)


class Generation:
    """New tokens, step by step, for at most as many prompts as the decoder has rows.

    Each step is a list: a token id for every prompt, None for one that has ended: by stop_token,
    which is not yielded, by max_new_tokens, or by `stop(row)`. A prompt's tokens depend on it and
    its seed alone, not on the batch. Past the decoder's length the oldest half of a text is dropped
    and the rest read anew. vocabulary: ids from there on, rows of the output layer that are no
    tokens, are never drawn. ValueError: no prompt, an empty one, or too many.
    """

    def __init__(
        self, decoder: Decoder, prompts: list[list[int]], max_new_tokens: int, sampling: Sampling, seeds: list[int],
        stop_token: int | None, vocabulary: int,
    ):  # fmt: skip
        rows, self.length = len(decoder.token), decoder.cache.length
        if not 0 < len(prompts) <= rows or not all(prompts):
            fix = "give 1 to that many, each of 1 token or more"
            raise ValueError(f"{len(prompts)} prompts for {rows} rows: {fix}")
        self.decoder, self.sampling, self.max_new_tokens = decoder, sampling, max_new_tokens
        self.stop_token, self.vocabulary, self.count = stop_token, vocabulary, len(prompts)
        self.contexts = [list(prompt)[-self.length :] for prompt in prompts]
        self.contexts += [[0]] * (rows - len(prompts))
        self.ended = [row >= len(prompts) for row in range(rows)]
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.present = None
        if sampling.repetition_penalty != 1:
            self.present = decoder.token.new_zeros(rows, vocabulary, dtype=torch.bool)
            for row, prompt in enumerate(prompts):
                self.present[row, prompt] = True

    def stop(self, row: int) -> None:
        """Let this prompt have no more tokens."""
        self.ended[row] = True

    def __iter__(self) -> Iterator[list[int | None]]:
        tokens = None
        for step in range(self.max_new_tokens):
            if all(self.ended):
                return
            tokens = draw(self.logits(tokens), self.sampling, self.uniform(step), self.present)
            if self.present is not None:
                self.present.scatter_(1, tokens[:, None], True)
            yield self.take(tokens.tolist())

    def take(self, tokens: list[int]) -> list[int | None]:
        """Append to each text its token; returns those that count."""
        for row, token in enumerate(tokens):
            if token == self.stop_token:
                self.stop(row)
            elif not self.ended[row]:
                self.contexts[row].append(token)
        counted = zip(tokens[: self.count], self.ended)
        return [None if ended else token for token, ended in counted]

    def logits(self, tokens):
        """Logits (B, vocabulary) after the texts so far; tokens (B,): their last, None at first."""
        if tokens is not None and self.decoder.cache.tokens < self.length:
            return self.decoder.step(tokens)[:, : self.vocabulary]
        for row, context in enumerate(self.contexts):
            if self.ended[row]:
                self.contexts[row] = context[-1:]
            elif len(context) > self.length:
                self.contexts[row] = context[-max(self.length // 2, 1) :]
        ids = padded(self.contexts, self.decoder.token.device)
        return self.decoder.prefill(ids)[:, : self.vocabulary]

    def uniform(self, step: int):
        """A number in [0, 1) for each row, float64 (B,), which its seed and the step settle."""
        if self.sampling.temperature == 0:
            return None
        if step % UNIFORMS == 0:
            # drawn on the CPU: a GPU's generators give other numbers; rows without a prompt keep 0
            drawn = torch.zeros(len(self.ended), UNIFORMS, dtype=torch.float64)
            for row, generator in zip(drawn, self.generators):
                row.uniform_(generator=generator)
            self.uniforms = drawn.mT.to(self.decoder.token.device)
        return self.uniforms[step % UNIFORMS]


class Text:
    """A sequence's text as it comes: whole characters, up to the first of the stop strings."""

    def __init__(self, tokenizer, stop: list[str]):
        self.tokenizer, self.stop, self.held, self.stopped = tokenizer, stop, "", False
        self.characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """What can be shown with this token: not what may become a character or a stop string."""
        content = self.tokenizer.decode_single_token_bytes(token)
        return self.cut(self.characters.decode(content), final=False)

    def end(self) -> str:
        """What was held back, when no token follows."""
        return "" if self.stopped else self.cut(self.characters.decode(b"", final=True), final=True)

    def cut(self, new: str, final: bool) -> str:
        text = self.held + new
        found = [place for stop in self.stop if (place := text.find(stop)) >= 0]
        if found:
            self.stopped, self.held = True, ""
            return text[: min(found)]
        kept = [] if final else [beginning_at_the_end(text, stop) for stop in self.stop]
        shown = len(text) - max(kept, default=0)
        self.held = text[shown:]
        return text[:shown]


def beginning_at_the_end(text: str, stop: str) -> int:
    """Length of the longest beginning of `stop`, not all of it, that text ends with."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def generate_text(
    decoder: Decoder, tokenizer, prompts: list[list[int]], max_new_tokens: int, sampling: Sampling,
    seeds: list[int], stop: list[str],
) -> Iterator[tuple[int, str | None, int]]:  # fmt: skip
    """Yield (row, the next piece of its text, 1 for a new token); (row, None, 0): it has ended.

    End-of-text ends a row, and so do the stop strings, which are cut off. tokenizer: a tiktoken
    encoding. ValueError: an empty stop string.
    """
    if "" in stop:
        raise ValueError("an empty stop string would stop every text at once: leave it out")
    generation = Generation(
        decoder, prompts, max_new_tokens, sampling, seeds, tokenizer.eot_token, tokenizer.n_vocab
    )
    texts = {row: Text(tokenizer, stop) for row in range(len(prompts))}
    for tokens in generation:
        for row in list(texts):
            if tokens[row] is not None:
                yield row, texts[row].add(tokens[row]), 1
            if tokens[row] is None or texts[row].stopped:
                generation.stop(row)
                yield from ending(row, texts.pop(row))
    for row, text in texts.items():
        yield from ending(row, text)


def ending(row: int, text: Text):
    yield row, text.end(), 0
    yield row, None, 0
