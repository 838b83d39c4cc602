"""Generating text with a decoder: sampling a token, batches of independent prompts, stop strings."""

import codecs
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from configurator import check_ranges, option

from .decoding import Decoder, pad_left

# the smallest temperature above 0
MIN_TEMPERATURE = 1e-6

# number of random numbers that are drawn for a sequence at a time
UNIFORMS_PER_DRAW = 1024


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled: by these steps, in this order.

    Raises:
        ValueError: a value is out of range
    """

    # as in transformers: positive logits are divided by it, negative ones multiplied
    repetition_penalty: float = option(
        1.0,
        "penalty on the logits of tokens that already occur in the text; 1 disables it",
        low=1e-6,
        high=1e6,
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
        # the quotient with a smaller number might not be finite
        if math.isinf(self.temperature) or 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature}: give 0 or a finite number of at least "
                f"{MIN_TEMPERATURE:g}"
            )


def compute_probabilities(
    logits: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the probabilities of the tokens that may be sampled, up to a factor.

    logits: (B, V)

    Returns:
        float64 (B, n)
        the token ids of the n columns, (B, n); None if they are 0, ..., V-1
    """
    logits = logits.double() / sampling.temperature
    tokens = None
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        logits, tokens = logits.topk(sampling.top_k)
    elif sampling.top_p < 1:
        logits, tokens = logits.sort(descending=True, stable=True)
    p = logits.softmax(-1)
    if sampling.top_p < 1:
        # keep a token if the tokens before it have less than top_p together
        p = torch.where(p.cumsum(-1) - p < sampling.top_p, p, 0)
    if sampling.min_p > 0:
        p = torch.where(p >= sampling.min_p * p.amax(-1, keepdim=True), p, 0)
    return p, tokens


def sample(
    logits: torch.Tensor,
    sampling: Sampling,
    uniform: torch.Tensor | None,
    present: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample one token for each row, and return their ids (B,).

    The id is V, which no token has, if a logit is NaN.

    Args:
        logits: (B, V)
        uniform: random numbers in [0, 1), float64 (B,); not used with temperature=0
        present: the tokens to which repetition_penalty applies, bool (B, V); not used without one
    """
    if sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(present, penalized, logits)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)  # the index of a NaN, if there is one
        is_nan = logits.gather(-1, tokens[:, None]).squeeze(-1).isnan()
        return torch.where(is_nan, logits.shape[-1], tokens)
    p, tokens = compute_probabilities(logits, sampling)
    # Inverse transform sampling: take the first token whose cumulative probability exceeds a point
    # below their sum. As uniform < 1, also after rounding, it never has probability 0.
    cumulative = p.cumsum(-1)
    point = uniform[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, point, right=True)
    if tokens is not None:
        num_columns = tokens.shape[-1]
        chosen = tokens.gather(-1, index.clamp(max=num_columns - 1))
        index = torch.where(index < num_columns, chosen, logits.shape[-1])
    return index.squeeze(-1)


class Generation:
    """Generates tokens step by step for several prompts at once; iterate over it.

    Each step yields a list with a token id for each prompt, or None for one that has ended, by
    stop_token (which is not yielded) or by `stop(row)`. The iteration ends after max_new_tokens
    steps, or when all prompts have ended. The tokens of a prompt depend on it and its seed alone,
    not on the batch. When a text exceeds the length of the decoder, its older half is dropped and
    the rest is read again.

    Args:
        decoder: a decoder of at least as many sequences as prompts
        prompts: token ids, one or more for each prompt
        seeds: of each prompt
        stop_token: the token that ends a text, or None
        vocab_size: number of tokens; the output layer may have more rows, which are never sampled

    Raises:
        ValueError: there is no prompt, an empty one, or too many
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: list[list[int]],
        max_new_tokens: int,
        sampling: Sampling,
        seeds: list[int],
        stop_token: int | None,
        vocab_size: int,
    ):
        num_rows = len(decoder.token)
        if not 0 < len(prompts) <= num_rows or not all(prompts):
            raise ValueError(
                f"got {len(prompts)} prompts for {num_rows} rows: give 1 to {num_rows} prompts, "
                "each of 1 token or more"
            )
        self.decoder = decoder
        self.sampling = sampling
        self.max_new_tokens = max_new_tokens
        self.stop_token = stop_token
        self.vocab_size = vocab_size
        self.length = decoder.cache.length
        self.num_prompts = len(prompts)
        # Rows without a prompt decode token 0, and have ended from the start.
        unused_rows = num_rows - len(prompts)
        self.contexts = [list(prompt)[-self.length :] for prompt in prompts]
        self.contexts += [[0]] * unused_rows
        self.ended = [False] * len(prompts) + [True] * unused_rows
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.present = None
        if sampling.repetition_penalty != 1:
            self.present = decoder.token.new_zeros(num_rows, vocab_size, dtype=torch.bool)
            for row, prompt in enumerate(prompts):
                self.present[row, prompt] = True

    def stop(self, row: int) -> None:
        """End the text of this prompt."""
        self.ended[row] = True

    def __iter__(self) -> Iterator[list[int | None]]:
        tokens = None
        for step in range(self.max_new_tokens):
            if all(self.ended):
                return
            logits = self.next_logits(tokens)
            tokens = sample(logits, self.sampling, self.uniform(step), self.present)
            ids = tokens.tolist()
            if max(ids) >= self.vocab_size:
                raise ValueError("the logits of the model are not finite; it may have diverged")
            if self.present is not None:
                self.present.scatter_(1, tokens[:, None], True)
            yield self.append(ids)

    def append(self, tokens: list[int]) -> list[int | None]:
        """Append a token to each text that has not ended; return these, and None for the others."""
        for row, token in enumerate(tokens):
            if token == self.stop_token:
                self.stop(row)
            elif not self.ended[row]:
                self.contexts[row].append(token)
        return [None if self.ended[row] else tokens[row] for row in range(self.num_prompts)]

    def next_logits(self, tokens: torch.Tensor | None) -> torch.Tensor:
        """Return the logits (B, vocab_size) after the texts so far.

        tokens: the last token of each text, (B,), which the decoder has not read; None at first
        """
        if tokens is not None and self.decoder.cache.num_tokens < self.length:
            return self.decoder.step(tokens)[:, : self.vocab_size]
        for row, context in enumerate(self.contexts):
            if self.ended[row]:
                self.contexts[row] = context[-1:]
            elif len(context) > self.length:
                self.contexts[row] = context[-max(self.length // 2, 1) :]
        ids = pad_left(self.contexts, self.decoder.token.device)
        return self.decoder.prefill(ids)[:, : self.vocab_size]

    def uniform(self, step: int) -> torch.Tensor | None:
        """Return a number in [0, 1) for each row, float64 (B,), given by its seed and the step."""
        if self.sampling.temperature == 0:
            return None
        if step % UNIFORMS_PER_DRAW == 0:
            # On the CPU, because generators of GPUs give other numbers; rows without a prompt get 0.
            drawn = torch.zeros(len(self.ended), UNIFORMS_PER_DRAW, dtype=torch.float64)
            for row, generator in zip(drawn, self.generators):
                row.uniform_(generator=generator)
            self.uniforms = drawn.mT.to(self.decoder.token.device)
        return self.uniforms[step % UNIFORMS_PER_DRAW]


class Tokenizer(Protocol):
    """What text generation needs of a tokenizer; data/tokenizer_base.py is the whole interface."""

    # highest id + 1
    n_vocab: int

    # id of the end-of-text token
    eot_token: int

    def decode_single_token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text."""


class TokenText(NamedTuple):
    """A token, and the text that it adds."""

    token: int
    text: str


class Text:
    """The text of one sequence as it grows, token by token, up to the first stop string.

    A token is held back while its last character is incomplete, or while a stop string may begin in
    it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: list[str]):
        self.tokenizer = tokenizer
        self.stop = stop
        self.stopped = False
        self.held_back: list[TokenText] = []
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> list[TokenText]:
        """Append a token, and return the tokens whose text is certain now.

        At a stop string, the text of the last one is cut there.
        """
        token_bytes = self.tokenizer.decode_single_token_bytes(token)
        self.held_back.append(TokenText(token, self.decoder.decode(token_bytes)))
        return self.release(final=False)

    def end(self) -> list[TokenText]:
        """Return the tokens that were held back, as no token follows."""
        if self.stopped or not self.held_back:
            return []
        token, text = self.held_back.pop()
        # an incomplete character becomes a replacement character
        self.held_back.append(TokenText(token, text + self.decoder.decode(b"", final=True)))
        return self.release(final=True)

    def release(self, final: bool) -> list[TokenText]:
        """Take from `held_back` the tokens whose text is certain, and return them."""
        text = join(self.held_back)
        starts = [index for stop in self.stop if (index := text.find(stop)) >= 0]
        if starts:
            self.stopped = True
            return cut(self.held_back, min(starts))
        num_certain = len(text)
        if not final:
            num_certain -= max((overlap_with_start(text, stop) for stop in self.stop), default=0)
        candidates = self.held_back
        # the last token may get more text, also if it ends a character before it begins another
        incomplete_bytes, _ = self.decoder.getstate()
        if incomplete_bytes:
            candidates = self.held_back[:-1]
        num_tokens = 0
        for index, (_, text) in enumerate(candidates):
            num_certain -= len(text)
            # a token without text begins a character, and waits for the token that completes it
            if num_certain >= 0 and text:
                num_tokens = index + 1
        released = self.held_back[:num_tokens]
        self.held_back = self.held_back[num_tokens:]
        return released


def cut(token_texts: list[TokenText], num_characters: int) -> list[TokenText]:
    """Return the tokens of the first characters; the text of the last one may be cut."""
    kept = []
    for token, text in token_texts:
        if num_characters == 0:
            break
        kept.append(TokenText(token, text[:num_characters]))
        num_characters -= len(kept[-1].text)
    return kept


def overlap_with_start(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of `stop` with which the text ends."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def join(token_texts: list[TokenText]) -> str:
    """Return the text of tokens."""
    return "".join(token_text.text for token_text in token_texts)


class Piece(NamedTuple):
    """A piece of generated text."""

    # index of the prompt
    row: int

    # None if the text of this prompt has ended
    text: str | None

    # number of tokens that it took: 1, or 0 for text that was kept back
    num_tokens: int


def generate_text(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    max_new_tokens: int,
    sampling: Sampling,
    seeds: list[int],
    stop: list[str],
) -> Iterator[Piece]:
    """Yield the text of each prompt piece by piece, and at its end a piece with text None.

    A text ends at end-of-text or at a stop string, neither of which is yielded.

    Raises:
        ValueError: a stop string is empty
    """
    if "" in stop:
        raise ValueError("an empty stop string would stop every text at once; omit it")
    generation = Generation(
        decoder,
        prompts=prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seeds=seeds,
        stop_token=tokenizer.eot_token,
        vocab_size=tokenizer.n_vocab,
    )
    texts = {row: Text(tokenizer, stop) for row in range(len(prompts))}
    for tokens in generation:
        for row, text in list(texts.items()):
            token = tokens[row]
            if token is not None:
                yield Piece(row, join(text.add(token)), num_tokens=1)
            if token is None or text.stopped:
                generation.stop(row)
                del texts[row]
                yield from end_text(row, text)
    for row, text in texts.items():
        yield from end_text(row, text)


def end_text(row: int, text: Text) -> Iterator[Piece]:
    """Yield the text that was kept back, and the end."""
    yield Piece(row, join(text.end()), num_tokens=0)
    yield Piece(row, None, num_tokens=0)
