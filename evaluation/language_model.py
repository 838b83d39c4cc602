"""A model as lm-evaluation-harness uses it: log-likelihoods of texts, and generated texts.

Tokenization, truncation and windows are those of lm-eval's own `hf` model with GPT-2's tokenizer,
so the results are the same. Only the way in which requests are batched differs (batches.py). With
several processes, each one computes a part of the batches that a single process would compute.
lm-eval itself is told that there is only one process: otherwise it would distribute the documents
itself, and draw other few-shot examples.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from data.tokenizer import Tokenizer
from evaluation.batches import Group, Request, batch_groups, group_requests, truncate_request
from model.decoding import Decoder, pad_left
from model.generation import Sampling, generate_text
from model.gpt import GPT
from training.distributed import World
from utils import machine

DEFAULT_MAX_NEW_TOKENS = 256  # lm-eval's default
MAX_LOGITS = 2**26  # number of logits that are computed at a time: 256 MiB in float32

Batch = TypeVar("Batch")


class GenerationSettings(NamedTuple):
    """How the texts of a task are generated."""

    sampling: Sampling
    stop: list[str]
    max_new_tokens: int


@dataclasses.dataclass(frozen=True)
class SharedDecoder:
    """A compiled decoder for many batches, which is made when the first of them needs it."""

    model: GPT
    batch_size: int
    length: int

    @functools.cached_property
    def decoder(self) -> Decoder:
        return Decoder(self.model, self.batch_size, self.length, compiled=True)


class PromptBatch(NamedTuple):
    """Prompts that are continued together."""

    indices: list[int]  # of the requests
    prompts: list[list[int]]  # their tokens
    settings: GenerationSettings
    shared_decoder: SharedDecoder | None  # None for a decoder of its own, which is not compiled


class Reading(NamedTuple):
    """A request, and which of its tokens a row of a forward pass reads."""

    request: Request
    row: int  # of the batch

    # index of the request's token that column 0 of the row reads; negative if the row is padded on
    # the left
    first: int


class LanguageModel(TemplateLM):
    """lm-eval's interface to a model.

    Args:
        model: in evaluation mode, on the device of `world`
        batch_size: maximum number of requests per forward pass
        autocast: context of the forward passes
        add_bos_token: begin every text with the end-of-text token, as documents in training do
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        world: World,
        batch_size: int,
        autocast: AbstractContextManager | None = None,
        add_bos_token: bool = False,
    ):
        super().__init__()
        self.model = model
        self.encoding = tokenizer
        self.world = world
        self.batch_size = batch_size
        self.autocast = autocast or nullcontext()
        self.add_bos_token = add_bos_token
        self.max_length = model.config.block_size
        # since the last call of `pop_notes`
        self.num_requests = 0
        self.num_truncated = 0
        self.swallowed: list[tuple[str, str]] = []  # contexts and their continuations
        # tqdm's `disable`; None shows a progress bar if the output is a terminal
        self.hide_progress = None if world.is_main else True

    @property
    def eot_token_id(self) -> int:
        return self.encoding.eot_token

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Return the tokens of a text, in which `<|endoftext|>` is one token."""
        tokens = self.encoding.encode(string, allowed_special="all")
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token and tokens[:1] != [self.eot_token_id]
        return [self.eot_token_id, *tokens] if add_special_tokens else tokens

    def pop_notes(self) -> list[str]:
        """Return what a user should know of the requests since the last call."""
        notes = []
        if self.num_truncated:
            notes.append(
                f"{self.num_truncated:,} of {self.num_requests:,} requests were cut on the left to "
                f"block_size={self.max_length}"
            )
        if self.swallowed:
            context, continuation = self.swallowed[0]
            notes.append(
                f"{len(self.swallowed):,} of {self.num_requests:,} continuations have no token of "
                f"their own, such as {continuation[:40]!r} after {context[-40:]!r}; they are "
                "tokenized without their context"
            )
        self.num_requests = 0
        self.num_truncated = 0
        self.swallowed = []
        return notes

    def batches_of_rank(
        self,
        batches: list[Batch],
        count_requests: Callable[[Batch], int],
        description: str,
        disable_tqdm: bool,
    ) -> Iterator[Batch]:
        """Yield the batches of this process, and show the progress over all requests."""
        num_requests = sum(map(count_requests, batches))
        hidden = disable_tqdm or self.hide_progress
        with tqdm(total=num_requests, desc=description, disable=hidden) as bar:
            for index, batch in enumerate(batches):
                if index % self.world.world_size == self.world.rank:
                    yield batch
                bar.update(count_requests(batch))

    # ---- log-likelihoods ----

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return what `_loglikelihood_tokens` returns, for requests (context, continuation)."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.hide_progress)

    @torch.no_grad()
    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: object,
    ) -> list[tuple[float, bool]]:
        """Score continuations.

        Args:
            requests: (texts or None, tokens of the context, tokens of the continuation)

        Returns:
            For each request the log-likelihood of the continuation in nats, and whether greedy
            decoding generates this continuation.

        Raises:
            ValueError: a continuation is longer than block_size
        """
        truncated = []
        for index, (texts, context, continuation) in enumerate(requests):
            # lm-eval moves blanks to the continuation, which may leave no token in the context
            context = context or [self.prefix_token_id]
            # a token may reach over the end of the context: "low" + "er" can be one token
            if not continuation:
                self.swallowed.append(texts)
                continuation = self.tok_encode(texts[1], add_special_tokens=False)
            if len(context) + len(continuation) > self.max_length + 1:
                self.num_truncated += 1
            # the likelihood of an empty text is 1
            if continuation:
                truncated.append(truncate_request(index, context, continuation, self.max_length))
        self.num_requests += len(requests)
        groups = group_requests(truncated, self.batch_size)
        batches = batch_groups(groups, self.batch_size, self.max_length)
        # for each request: log-likelihood, and number of tokens that are not the most likely ones
        sums = torch.zeros(2, len(requests), dtype=torch.float64, device=self.world.device)

        def count_requests(batch: list[Group]) -> int:
            return sum(len(group.requests) for group in batch)

        with self.autocast:
            for batch in self.batches_of_rank(batches, count_requests, "requests", disable_tqdm):
                self.score_batch(batch, sums)
        # each request was scored on one rank, and has zeros on the others
        if self.world.world_size > 1:
            torch.distributed.all_reduce(sums)
        return [(nats, num_missed == 0) for nats, num_missed in zip(*sums.tolist(), strict=True)]

    def score_batch(self, batch: list[Group], sums: torch.Tensor) -> None:
        """Read a batch, and add the scores of its requests to sums (2, number of requests)."""
        prefixes = [group.requests[0].tokens[: group.prefix_len] for group in batch]
        if batch[0].suffix_len == 0:
            hidden = self.model.hidden(self.pad_right(prefixes))
            readings = [
                Reading(request, row, first=0)
                for row, group in enumerate(batch)
                for request in group.requests
            ]
            self.add_scores(hidden, readings, sums)
            return

        # The prefixes are padded on the left, so that all of them end at the same position, where
        # the suffixes begin.
        longest_prefix = max(map(len, prefixes))
        longest_suffix = max(group.suffix_len for group in batch)
        ids = pad_left(prefixes, self.world.device)
        cache = self.model.new_cache(longest_prefix + longest_suffix)
        hidden = self.model.hidden(ids, cache, cache.reserve(ids))
        readings = [
            Reading(request, row, first=group.prefix_len - longest_prefix)
            for row, group in enumerate(batch)
            for request in group.requests
        ]
        self.add_scores(hidden, readings, sums)

        # Each request that has a suffix continues from a copy of the cache of its prefix.
        prefix_rows: list[int] = []
        readings = []
        for prefix_row, group in enumerate(batch):
            for request in group.requests:
                if request.num_read > group.prefix_len:
                    readings.append(Reading(request, row=len(readings), first=group.prefix_len))
                    prefix_rows.append(prefix_row)
        cache = cache.select(torch.tensor(prefix_rows, device=self.world.device))
        ids = self.pad_right([reading.request.tokens[reading.first : -1] for reading in readings])
        hidden = self.model.hidden(ids, cache, cache.reserve(ids))
        self.add_scores(hidden, readings, sums)

    def pad_right(self, sequences: list[list[int]]) -> torch.Tensor:
        """Return token ids int64 (B, T).

        Shorter sequences are padded with 0 on the right, which no scored token attends to.
        """
        longest = max(map(len, sequences))
        ids = [tokens + [0] * (longest - len(tokens)) for tokens in sequences]
        return torch.tensor(ids, device=self.world.device)

    def add_scores(
        self,
        hidden: torch.Tensor,
        readings: list[Reading],
        sums: torch.Tensor,
    ) -> None:
        """Add the scores of those scored tokens that are predicted by `hidden` to `sums`.

        Args:
            hidden: the normalized readout (B, T, d)
            readings: the requests that the rows of `hidden` have read, several for a row if they
                share it
            sums: float64 (2, number of requests)
        """
        seq_len = hidden.shape[1]
        # for each scored token: its place in the flattened batch, its id, and its request
        places: list[int] = []
        targets: list[int] = []
        request_indices: list[int] = []
        for request, row, first in readings:
            # the logits at tokens begin to end - 1 predict the tokens after them
            begin = max(request.num_read - request.num_scored, first)
            end = max(min(request.num_read, first + seq_len), begin)
            places += range(row * seq_len + begin - first, row * seq_len + end - first)
            targets += request.tokens[begin + 1 : end + 1]
            request_indices += [request.index] * (end - begin)
        if not targets:
            return
        # Requests of a group may need the same logits, which are computed once: choices that begin
        # alike, or that have one token each.
        unique_places, logits_rows = np.unique(places, return_inverse=True)
        order = np.argsort(logits_rows, kind="stable")
        logits_rows = logits_rows[order]
        sorted_targets = np.array(targets)[order]
        sorted_requests = np.array(request_indices)[order]
        chunk_size = max(MAX_LOGITS // self.model.config.vocab_size, 1)
        flat_hidden = hidden.flatten(0, 1)
        for start in range(0, len(unique_places), chunk_size):
            first, last = np.searchsorted(logits_rows, (start, start + chunk_size))
            rows = self.to_device(logits_rows[first:last] - start)
            target = self.to_device(sorted_targets[first:last])
            place = self.to_device(unique_places[start : start + chunk_size])
            logits = self.model.logits(flat_hidden[place])
            nats = logits[rows, target] - logits.logsumexp(-1)[rows]
            missed = logits.argmax(-1)[rows] != target
            scores = torch.stack((nats, missed)).to(sums.dtype)
            sums.index_add_(1, self.to_device(sorted_requests[first:last]), scores)

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Return an array as a tensor on the device."""
        return torch.from_numpy(array).to(self.world.device)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, read in windows of block_size without overlap."""
        windows = []
        text_indices = []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, 1
            ):
                context, continuation = make_disjoint_window(window)
                windows.append((None, context, continuation))
                text_indices.append(index)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        totals = [0.0] * len(requests)
        for index, (nats, _) in zip(text_indices, scores, strict=True):
            totals[index] += nats
        return totals

    # ---- generated text ----

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue texts up to the first of their `until` strings; by default with greedy decoding.

        Raises:
            ValueError: a setting is not supported, or leaves no room for a context
        """
        # texts with the same settings are generated together
        indices_by_settings: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            key = json.dumps(request.args[1], sort_keys=True)
            indices_by_settings.setdefault(key, []).append(index)
        self.num_requests += len(requests)
        batches = []
        for indices in indices_by_settings.values():
            settings = read_generation_settings(requests[indices[0]].args[1])
            max_context = self.max_length - settings.max_new_tokens
            if max_context < 1:
                raise ValueError(
                    f"the task generates up to {settings.max_new_tokens} tokens, but the model's "
                    f"block_size is {self.max_length}; set max_gen_toks below {self.max_length} in "
                    "the generation_kwargs of a task file of your own (--include_path)"
                )
            prompts = {}
            for index in indices:
                tokens = self.tok_encode(requests[index].args[0])
                if len(tokens) > max_context:
                    self.num_truncated += 1
                prompts[index] = tokens[-max_context:] or [self.eot_token_id]
            longest_first = sorted(indices, key=lambda index: len(prompts[index]), reverse=True)
            starts = range(0, len(longest_first), self.batch_size)
            shared_decoder = None
            num_steps = len(starts) * settings.max_new_tokens // self.world.world_size
            if machine.compiled_decoding_pays(self.world.device.type, num_steps):
                shared_decoder = SharedDecoder(
                    self.model,
                    batch_size=min(self.batch_size, len(longest_first)),
                    length=len(prompts[longest_first[0]]) + settings.max_new_tokens,
                )
            for start in starts:
                chosen = longest_first[start : start + self.batch_size]
                batches.append(
                    PromptBatch(
                        indices=chosen,
                        prompts=[prompts[index] for index in chosen],
                        settings=settings,
                        shared_decoder=shared_decoder,
                    )
                )

        texts: dict[int, str] = {}
        failure = None
        try:
            with self.autocast:
                for batch in self.batches_of_rank(
                    batches, lambda batch: len(batch.indices), "texts", disable_tqdm
                ):
                    texts.update(self.generate_batch(batch))
        except ValueError as error:
            # raised below on every rank, so that none waits for another one in the next task
            failure = str(error)
        if self.world.world_size > 1:
            results: list = [None] * self.world.world_size
            torch.distributed.all_gather_object(results, (texts, failure))
            texts = {index: text for part, _ in results for index, text in part.items()}
            failure = next((message for _, message in results if message is not None), None)
        if failure is not None:
            raise ValueError(failure)
        return [texts[index] for index in range(len(requests))]

    def generate_batch(self, batch: PromptBatch) -> dict[int, str]:
        """Return the continuations of prompts by the index of the request, which is its seed."""
        texts = dict.fromkeys(batch.indices, "")
        max_new_tokens = batch.settings.max_new_tokens
        if batch.shared_decoder is not None:
            decoder = batch.shared_decoder.decoder
        else:
            longest_prompt = max(map(len, batch.prompts))
            decoder = Decoder(self.model, len(batch.prompts), longest_prompt + max_new_tokens)
        pieces = generate_text(
            decoder,
            self.encoding,
            prompts=batch.prompts,
            max_new_tokens=max_new_tokens,
            sampling=batch.settings.sampling,
            seeds=batch.indices,
            stop=batch.settings.stop,
        )
        for row, piece, _ in pieces:
            texts[batch.indices[row]] += piece or ""
        return texts


def read_generation_settings(generation_kwargs: dict) -> GenerationSettings:
    """Convert the generation_kwargs of a task.

    Raises:
        ValueError: a key is not supported
    """
    settings = dict(normalize_gen_kwargs(generation_kwargs, DEFAULT_MAX_NEW_TOKENS))
    stop = settings.pop("until")
    max_new_tokens = settings.pop("max_gen_toks")
    do_sample = settings.pop("do_sample")
    # lm-eval's other models read these values as "all tokens"
    if settings.get("top_k", 1) in (0, None, -1):
        settings["top_k"] = None
    supported = sorted(field.name for field in dataclasses.fields(Sampling))
    for name in sorted(settings.keys() - set(supported)):
        raise ValueError(
            f"generation_kwargs: {name} is not supported; the supported keys are "
            f"{', '.join(supported)}"
        )
    if not do_sample:
        settings["temperature"] = 0.0
    return GenerationSettings(
        sampling=Sampling(**settings),
        stop=[text for text in stop if text],
        max_new_tokens=max_new_tokens,
    )
