"""A model as lm-evaluation-harness uses it: log-likelihoods of texts, and generated texts.

Tokenization, truncation and windows are those of lm-eval's own `hf` model with GPT-2's tokenizer,
so the results are the same. It is faster because requests with the same context, such as the
choices of a question, read it once. With several processes, each one computes a part of the batches
that a single process would compute. lm-eval itself is told that there is only one process:
otherwise it would distribute the documents itself, and draw other few-shot examples.
"""

import functools
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from data.tokenizer import Tokenizer
from model.cache import Cache
from model.decoding import Decoder, pad_left
from model.generation import Sampling, generate_text
from model.gpt import GPT
from utils.processes import World

MAX_LOGITS = 2**26  # number of logits that are computed at a time: 256 MiB in float32
# Number of token positions in a batch, with padding, so that a batch of long texts fits into memory.
MAX_BATCH_TOKENS = 2**16
# A request joins a group only if this saves at least this fraction of its own tokens, because the
# second forward pass has a cost of its own.
MIN_SAVED_FRACTION = 0.25


class Request(NamedTuple):
    """A text whose last tokens are scored; at most block_size + 1 tokens."""

    index: int  # among the requests of one call
    tokens: list[int]
    num_scored: int


@dataclass(frozen=True)
class Group:
    """Successive requests that begin with the same tokens, which the model reads once."""

    prefix: list[int]
    requests: list[Request]

    @functools.cached_property
    def suffix_len(self) -> int:
        """The largest number of tokens that a request reads after the prefix.

        The last token of a request is not read, because it is only predicted.
        """
        return max(len(request.tokens) for request in self.requests) - 1 - len(self.prefix)

    def get_suffix(self, request: Request) -> list[int]:
        """Return the tokens that a request of the group reads after the prefix."""
        return request.tokens[len(self.prefix) : -1]


class ScoredTokens(NamedTuple):
    """The scored tokens of a request, and the places in a batch that predict them."""

    index: int  # of the request
    targets: list[int]  # the tokens
    places: list[int]  # rows of the hidden states of the batch


def make_batches(requests: list[Request], max_requests: int, max_length: int) -> list[list[Group]]:
    """Group requests that begin alike, and put groups of similar lengths into batches.

    Args:
        max_requests: of a batch
        max_length: number of tokens that the model can read
    """

    def fits(batch: list[Group]) -> bool:
        num_requests = sum(len(group.requests) for group in batch)
        # all prefixes of a batch end at the same position, where the suffixes begin
        prefix_len = max(len(group.prefix) for group in batch)
        length = prefix_len + max(group.suffix_len for group in batch)
        has_room = num_requests <= max_requests and num_requests * length <= MAX_BATCH_TOKENS
        return has_room and length <= max_length

    # The choices of a question are successive requests.
    groups: list[Group] = []
    for request in requests:
        group = Group(request.tokens[:-1], [request])
        if groups:
            last = groups[-1]
            common = os.path.commonprefix([last.prefix, group.prefix])
            # The new request does not read the common tokens again, but the others have to read by
            # themselves what is no longer common to all.
            num_others = len(last.requests)
            num_saved = len(common) * num_others - len(last.prefix) * (num_others - 1)
            joined = Group(common, [*last.requests, request])
            if num_saved >= MIN_SAVED_FRACTION * len(group.prefix) and fits([joined]):
                groups[-1] = joined
                continue
        groups.append(group)

    # Groups without a suffix need a single forward pass, and get batches of their own.
    batches: list[list[Group]] = []
    groups.sort(
        key=lambda group: (group.suffix_len > 0, len(group.prefix), group.suffix_len),
        reverse=True,
    )
    for group in groups:
        has_suffix = group.suffix_len > 0
        if (
            batches
            and (batches[-1][0].suffix_len > 0) == has_suffix
            and fits([*batches[-1], group])
        ):
            batches[-1].append(group)
        else:
            batches.append([group])
    return batches


def list_scored_tokens(batch: list[Group]) -> list[ScoredTokens]:
    """Return what the requests of a batch score, in the order of the batch.

    The hidden states of the batch are those of its prefixes, with padding on the left if there are
    suffixes, and then those of the suffixes, with padding on the right.
    """
    prefix_len = max(len(group.prefix) for group in batch)
    suffix_len = max(group.suffix_len for group in batch)
    suffix_start = len(batch) * prefix_len
    scored_tokens = []
    for row, group in enumerate(batch):
        prefix_start = row * prefix_len
        if suffix_len > 0:
            prefix_start += prefix_len - len(group.prefix)
        for request in group.requests:
            places = [*range(prefix_start, prefix_start + len(group.prefix))]
            suffix = group.get_suffix(request)
            if suffix:
                places += range(suffix_start, suffix_start + len(suffix))
                suffix_start += suffix_len
            scored_tokens.append(
                ScoredTokens(
                    index=request.index,
                    targets=request.tokens[-request.num_scored :],
                    places=places[-request.num_scored :],
                )
            )
    return scored_tokens


def read_sampling(settings: dict[str, Any]) -> Sampling:
    """Return how the task with these settings of generation samples.

    Raises:
        ValueError: a setting is unknown or out of range
    """
    settings = dict(settings)
    if not settings.pop("do_sample"):
        settings["temperature"] = 0.0
    if settings.get("num_beams") == 1:  # no beam search
        del settings["num_beams"]
    unknown = sorted(set(settings) - {field.name for field in fields(Sampling)})
    if unknown:
        raise ValueError(
            f"the task generates with {unknown[0]}={settings[unknown[0]]}, which is not supported; "
            "change generation_kwargs in the task file"
        )
    return Sampling(**settings)


class LanguageModel(TemplateLM):
    """lm-eval's interface to a model.

    Args:
        model: in evaluation mode, on the device of `world`
        batch_size: maximum number of requests per forward pass
        autocast: context of the forward passes
        add_bos_token: begin every text with the token that precedes documents in training
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

    @property
    def prefix_token_id(self) -> int:
        # what precedes every document in training
        return self.encoding.bos_token

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: object
    ) -> list[int]:
        """Return the tokens of a text, in which `<|endoftext|>` is one token."""
        tokens = self.encoding.encode(string, allowed_special="all")
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token and tokens[:1] != [self.prefix_token_id]
        return [self.prefix_token_id, *tokens] if add_special_tokens else tokens

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

    def show_progress(self, batches: list, disable_tqdm: bool) -> tqdm:
        """Return the batches of this rank with a progress bar."""
        batches_of_rank = batches[self.world.rank :: self.world.world_size]
        return tqdm(batches_of_rank, desc="batches", disable=disable_tqdm or self.hide_progress)

    # ---- log-likelihoods ----

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
        """
        batches = make_batches(self.truncate(requests), self.batch_size, self.max_length)
        # for each request: log-likelihood, and number of tokens that are not the most likely ones
        sums = torch.zeros(len(requests), 2, dtype=torch.float64, device=self.world.device)
        for batch in self.show_progress(batches, disable_tqdm):
            with self.autocast:
                hidden, cache = self.read_prefixes(batch)
                if cache is not None:
                    hidden = torch.cat([hidden, self.read_suffixes(batch, cache)])
                self.add_scores(sums, hidden, list_scored_tokens(batch))
        # each request was scored on one rank, and has zeros on the others
        if self.world.world_size > 1:
            torch.distributed.all_reduce(sums)
        return [(nats, num_missed == 0) for nats, num_missed in sums.tolist()]

    def read_prefixes(self, batch: list[Group]) -> tuple[torch.Tensor, Cache | None]:
        """Read what the requests of each group have in common.

        Returns:
            The hidden states (number of tokens with padding, d), and a cache from which the suffixes
            continue; None if there are no suffixes.
        """
        prefixes = [group.prefix for group in batch]
        suffix_len = max(group.suffix_len for group in batch)
        if suffix_len == 0:
            return self.model.hidden(self.pad_right(prefixes)).flatten(0, 1), None
        # with padding on the left, all prefixes end where the suffixes begin
        ids = pad_left(prefixes, self.world.device)
        cache = self.model.new_cache(ids.shape[1] + suffix_len)
        return self.model.hidden(ids, cache, cache.reserve(ids)).flatten(0, 1), cache

    def read_suffixes(self, batch: list[Group], cache: Cache) -> torch.Tensor:
        """Return the hidden states of all suffixes, (number of tokens with padding, d)."""
        prefix_rows = []
        suffixes = []
        for row, group in enumerate(batch):
            for request in group.requests:
                suffix = group.get_suffix(request)
                if suffix:
                    prefix_rows.append(row)
                    suffixes.append(suffix)
        # each request that has a suffix continues from a copy of the cache of its prefix
        cache = cache.select(torch.tensor(prefix_rows, device=self.world.device))
        ids = self.pad_right(suffixes)
        return self.model.hidden(ids, cache, cache.reserve(ids)).flatten(0, 1)

    def add_scores(
        self, sums: torch.Tensor, hidden: torch.Tensor, scored_tokens: list[ScoredTokens]
    ) -> None:
        """Add what hidden states (N, d) predict of scored tokens to `sums`, a row for each request."""
        scored = torch.tensor(
            [
                [place for request in scored_tokens for place in request.places],
                [target for request in scored_tokens for target in request.targets],
                [request.index for request in scored_tokens for _ in request.targets],
            ],
            device=self.world.device,
        )
        # in chunks, because the logits of a batch may not fit into memory
        chunk_size = max(MAX_LOGITS // self.model.config.vocab_size, 1)
        for place, target, index in scored.split(chunk_size, dim=1):
            # choices that begin alike need the same logits
            place, rows = place.unique(return_inverse=True)
            logits = self.model.logits(hidden[place])
            nats = logits[rows, target] - logits.logsumexp(-1)[rows]
            missed = logits.argmax(-1)[rows] != target
            sums.index_add_(0, index, torch.stack((nats, missed), dim=1).double())

    def pad_right(self, sequences: list[list[int]]) -> torch.Tensor:
        """Return token ids int64 (B, T); no scored token attends to the padding on the right."""
        longest = max(map(len, sequences))
        rows = [tokens + [0] * (longest - len(tokens)) for tokens in sequences]
        return torch.tensor(rows, device=self.world.device)

    def truncate(self, requests: list[tuple[Any, list[int], list[int]]]) -> list[Request]:
        """Return the requests that have tokens to score, without those on the left that do not fit.

        A continuation that is longer than block_size becomes several requests, as a text of
        `loglikelihood_rolling` does.
        """
        truncated = []
        for index, (texts, context, continuation) in enumerate(requests):
            # lm-eval moves blanks to the continuation, which may leave no token in the context
            context = context or [self.prefix_token_id]
            # a token may reach over the end of the context: "low" + "er" can be one token
            if not continuation:
                self.swallowed.append(texts)
                continuation = self.tok_encode(texts[1], add_special_tokens=False)
            tokens = [*context, *continuation]
            # the model predicts the last token without reading it
            if len(tokens) > self.max_length + 1:
                self.num_truncated += 1
            # the likelihood of an empty text is 1, and has no request
            for start in range(len(context), len(tokens), self.max_length):
                end = min(start + self.max_length, len(tokens))
                first = max(end - self.max_length - 1, 0)
                truncated.append(Request(index, tokens[first:end], end - start))
        self.num_requests += len(requests)
        return truncated

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
            ValueError: a setting is out of range, or leaves no room for a context
        """
        batches: list[list[int]] = []
        for index, request in enumerate(requests):
            is_full = not batches or len(batches[-1]) == self.batch_size
            # texts of a batch have the same settings
            if is_full or requests[batches[-1][0]].args[1] != request.args[1]:
                batches.append([])
            batches[-1].append(index)
        texts = [""] * len(requests)
        for indices in self.show_progress(batches, disable_tqdm):
            settings = normalize_gen_kwargs(requests[indices[0]].args[1])
            stop = [text for text in settings.pop("until") if text]
            max_new_tokens = settings.pop("max_gen_toks")
            max_context = self.max_length - max_new_tokens
            if max_context < 1:
                raise ValueError(
                    f"the task generates up to {max_new_tokens} tokens, but the model's block_size "
                    f"is {self.max_length}; set max_gen_toks below it in the task file"
                )
            prompts = [self.tok_encode(requests[index].args[0]) for index in indices]
            prompts = [tokens[-max_context:] or [self.prefix_token_id] for tokens in prompts]
            decoder = Decoder(self.model, len(prompts), max(map(len, prompts)) + max_new_tokens)
            with self.autocast:
                for row, piece, _ in generate_text(
                    decoder,
                    self.encoding,
                    prompts=prompts,
                    max_new_tokens=max_new_tokens,
                    sampling=read_sampling(settings),
                    seeds=indices,
                    stop=stop,
                ):
                    texts[indices[row]] += piece or ""
        if self.world.world_size > 1:
            texts_by_rank: list = [None] * self.world.world_size
            torch.distributed.all_gather_object(texts_by_rank, texts)
            texts = ["".join(parts) for parts in zip(*texts_by_rank, strict=True)]
        return texts
