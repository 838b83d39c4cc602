"""Generating text: sampling a token, batches of independent prompts, stop strings."""

import codecs
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from configurator import check_ranges, option

from .cache import Cache, pad_left
from .gpt import GPT

# the smallest temperature above 0
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled: by these steps, in this order.

    Raises:
        ValueError: a value is out of range
    """

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

    def __post_init__(self):
        check_ranges(self)
        # the quotient with a smaller number might not be finite
        if math.isinf(self.temperature) or 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature}: give 0 or a finite number of at least "
                f"{MIN_TEMPERATURE:g}"
            )


def sample(logits: torch.Tensor, sampling: Sampling, uniform: torch.Tensor | None) -> torch.Tensor:
    """Sample one token for each row, and return their ids (B,).

    Args:
        logits: (B, V), finite
        uniform: random numbers in [0, 1), float64 (B,); not used with temperature=0
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    logits = logits.double() / sampling.temperature
    tokens = None  # the ids of the columns; None if they are 0, ..., V-1
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        logits, tokens = logits.topk(sampling.top_k)
    elif sampling.top_p < 1:
        logits, tokens = logits.sort(descending=True, stable=True)
    p = logits.softmax(-1)
    if sampling.top_p < 1:
        # keep a token if the tokens before it have less than top_p together
        p = torch.where(p.cumsum(-1) - p < sampling.top_p, p, 0)
    # Inverse transform sampling: take the first token whose cumulative probability exceeds a point
    # below their sum. As uniform < 1, also after rounding, it never has probability 0.
    cumulative = p.cumsum(-1)
    index = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    if tokens is not None:
        index = tokens.gather(-1, index)
    return index.squeeze(-1)


class Generation:
    """Generates tokens step by step for several prompts at once; iterate over it.

    Each step yields a list with a token id for each prompt, or None for one that has ended, by
    stop_token (which is not yielded) or by `stop(row)`. The iteration ends after max_new_tokens
    steps, or when all prompts have ended. The tokens of a prompt depend on it and its seed alone,
    not on the batch. When a text exceeds block_size, its older half is dropped and the rest is read
    again.

    Args:
        prompts: token ids, one or more for each prompt
        seeds: of each prompt
        stop_token: the token that ends a text, or None
        vocab_size: number of tokens; the output layer may have more rows, which are never sampled
    """

    def __init__(
        self,
        model: GPT,
        prompts: list[list[int]],
        max_new_tokens: int,
        sampling: Sampling,
        seeds: list[int],
        stop_token: int | None,
        vocab_size: int,
    ):
        self.model = model
        self.max_new_tokens = max_new_tokens
        self.sampling = sampling
        self.stop_token = stop_token
        self.vocab_size = vocab_size
        longest = max(map(len, prompts))
        self.length = min(longest + max_new_tokens, model.config.block_size)
        self.contexts = [list(prompt)[-self.length :] for prompt in prompts]
        self.ended = [False] * len(prompts)
        # on the CPU, because generators of GPUs give other numbers
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.cache: Cache | None = None

    def stop(self, row: int) -> None:
        """End the text of this prompt."""
        self.ended[row] = True

    @torch.no_grad()
    def __iter__(self) -> Iterator[list[int | None]]:
        for _ in range(self.max_new_tokens):
            if all(self.ended):
                return
            logits = self.next_logits()[:, : self.vocab_size]
            if not logits.isfinite().all():
                raise ValueError("the logits of the model are not finite; it may have diverged")
            tokens = sample(logits, self.sampling, self.draw_uniform(logits.device)).tolist()
            for row, token in enumerate(tokens):
                self.contexts[row].append(token)  # also of a text that has ended
                if token == self.stop_token:
                    self.stop(row)
            yield [None if ended else token for token, ended in zip(tokens, self.ended)]

    def next_logits(self) -> torch.Tensor:
        """Return the logits (B, V) after the texts so far, of which all but one token are cached."""
        if self.cache is not None and self.cache.num_tokens < self.length:
            ids = torch.tensor([context[-1:] for context in self.contexts])
        else:
            for row, context in enumerate(self.contexts):
                if len(context) > self.length:
                    self.contexts[row] = context[-max(self.length // 2, 1) :]
            ids = pad_left(self.contexts)
            self.cache = self.model.new_cache(self.length)
        ids = ids.to(self.cache.position.device)
        hidden = self.model.hidden(ids, self.cache, self.cache.reserve(ids))
        return self.model.logits(hidden[:, -1])

    def draw_uniform(self, device: torch.device) -> torch.Tensor | None:
        """Return the next number in [0, 1) of each row's generator, float64 (B,)."""
        if self.sampling.temperature == 0:
            return None
        numbers = [
            torch.rand((), dtype=torch.float64, generator=generator)
            for generator in self.generators
        ]
        return torch.stack(numbers).to(device)


class Tokenizer(Protocol):
    """What text generation needs of a tokenizer; data/tokenizer.py has the whole interface."""

    # highest id + 1
    n_vocab: int

    # id of the end-of-text token
    eot_token: int

    def decode_single_token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text."""


class Text:
    """The text of one sequence as it grows, token by token, up to the first stop string.

    Text is held back while its last character is incomplete, or while a stop string may begin in
    it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: list[str]):
        if "" in stop:
            raise ValueError("an empty stop string would stop every text at once; omit it")
        self.tokenizer = tokenizer
        self.stop = stop
        self.stopped = False
        self.held_back = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """Append a token, and return the text that is certain now."""
        token_bytes = self.tokenizer.decode_single_token_bytes(token)
        self.held_back += self.decoder.decode(token_bytes)
        return self.release(
            max((overlap_with_start(self.held_back, stop) for stop in self.stop), default=0)
        )

    def end(self) -> str:
        """Return the text that was held back, as no token follows."""
        if self.stopped:
            return ""
        # an incomplete character becomes a replacement character
        self.held_back += self.decoder.decode(b"", final=True)
        return self.release(0)

    def release(self, num_uncertain: int) -> str:
        """Take from `held_back` all but its last characters, or what precedes a stop string."""
        starts = [index for stop in self.stop if (index := self.held_back.find(stop)) >= 0]
        self.stopped = bool(starts)
        end = min(starts) if starts else len(self.held_back) - num_uncertain
        text, self.held_back = self.held_back[:end], self.held_back[end:]
        return text


def overlap_with_start(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` with which the text ends."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def generate_text(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seeds: list[int],
    stop: list[str],
) -> Iterator[tuple[int, str, int]]:
    """Yield (prompt's index, piece of its text, number of tokens: 1, or 0 for text held back).

    A text ends at end-of-text or at a stop string, neither of which is yielded.

    Raises:
        ValueError: a stop string is empty, or the logits are not finite
    """
    texts = [Text(tokenizer, stop) for _ in prompts]
    generation = Generation(
        model, prompts, max_new_tokens, sampling, seeds, tokenizer.eot_token, tokenizer.n_vocab
    )
    for tokens in generation:
        for row, token in enumerate(tokens):
            if token is not None:
                yield row, texts[row].add(token), 1
                if texts[row].stopped:
                    generation.stop(row)
    for row, text in enumerate(texts):
        yield row, text.end(), 0
