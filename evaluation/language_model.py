"""A model as lm-evaluation-harness sees it: log-likelihoods of texts, and generated texts.

Tokenization, truncation and windows are those of lm-eval's own `hf` model, so the results are the
same. It is faster, because the choices of a question read the question once.
"""

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from data.tokenizer import Tokenizer
from model.cache import pad_left
from model.generation import Sampling, generate_text
from model.gpt import GPT

MAX_LOGITS = 2**26  # computed at a time: 256 MiB in float32
MAX_BATCH_TOKENS = 2**16  # of a forward pass, with padding


class Request(NamedTuple):
    """A continuation of a context, which is scored."""

    index: int  # among the requests of one call
    context: tuple[int, ...]  # token ids
    continuation: list[int]


def make_batches(requests: list[Request], batch_size: int, max_length: int) -> list[list[Request]]:
    """Put requests of similar lengths into batches, the longest first and equal contexts together.

    Requests whose contexts occur once are in batches of their own.

    Args:
        batch_size: maximum number of requests in a batch
        max_length: number of tokens that the model can read
    """

    def fits(batch: list[Request]) -> bool:
        context_len = max(len(request.context) for request in batch)
        # the last token of a continuation is predicted, but not read
        continuation_len = max(len(request.continuation) for request in batch) - 1
        length = context_len + continuation_len
        has_room = len(batch) * length <= MAX_BATCH_TOKENS
        return has_room and len(batch) <= batch_size and length <= max_length

    counts = Counter(request.context for request in requests)
    shared = [request for request in requests if counts[request.context] > 1]
    alone = [request for request in requests if counts[request.context] == 1]
    shared.sort(key=lambda request: (-len(request.context), request.context))
    alone.sort(key=lambda request: -len(request.context) - len(request.continuation))
    batches: list[list[Request]] = []
    for group in (shared, alone):
        batches.append([])
        for request in group:
            if batches[-1] and not fits([*batches[-1], request]):
                batches.append([])
            batches[-1].append(request)
    return [batch for batch in batches if batch]


class LanguageModel(TemplateLM):
    """lm-eval's interface to a model.

    Args:
        model: in evaluation mode
        batch_size: maximum number of continuations per forward pass
        autocast: context of the forward passes
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        batch_size: int = 64,
        autocast: AbstractContextManager | None = None,
    ):
        super().__init__()
        self.model = model
        self.encoding = tokenizer
        self.batch_size = batch_size
        self.autocast = autocast or nullcontext()
        self._device = model.rope_cos.device  # `device` of the base class
        self.max_length = model.config.block_size
        self.num_cut = 0  # contexts that lost tokens on the left so far

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
        return [self.prefix_token_id, *tokens] if add_special_tokens else tokens

    def progress(self, batches: list, disable_tqdm: bool) -> Iterable[list]:
        """Return the batches with a progress bar, which is shown on a terminal."""
        return tqdm(batches, desc="batches", disable=disable_tqdm or None)

    # ---- log-likelihoods ----

    @torch.no_grad()
    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
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
        to_score = []
        for index, (texts, context, continuation) in enumerate(requests):
            # A continuation has no token if it ends within a token of the context: "low" + "er".
            tokens = continuation or self.tok_encode(texts[1], add_special_tokens=False)
            if len(tokens) > self.max_length:
                raise ValueError(
                    f"a continuation has {len(tokens)} tokens, but the model's block_size is "
                    f"{self.max_length}"
                )
            if tokens:
                context = self.cut(context or [self.prefix_token_id], len(tokens) - 1)
                to_score.append(Request(index, context, tokens))
        scores = [(0.0, True)] * len(requests)  # of an empty text
        batches = make_batches(to_score, self.batch_size, self.max_length)
        for batch in self.progress(batches, disable_tqdm):
            with self.autocast:
                batch_scores = self.score(batch)
            for request, score in zip(batch, batch_scores, strict=True):
                scores[request.index] = score
        return scores

    def cut(self, context: list[int], num_new: int) -> tuple[int, ...]:
        """Return the end of a context that leaves room for the model to read `num_new` tokens."""
        room = self.max_length - num_new
        self.num_cut += len(context) > room
        return tuple(context[-room:])

    def score(self, batch: list[Request]) -> list[tuple[float, bool]]:
        """Return (nats, is greedy) for each request."""
        longest = max(len(request.continuation) for request in batch)
        padded = [
            request.continuation + [-1] * (longest - len(request.continuation)) for request in batch
        ]
        targets = torch.tensor(padded, device=self.device)  # (requests, longest)
        if len({request.context for request in batch}) == len(batch):
            hidden = self.read_texts(batch, longest)
        else:
            hidden = self.read_contexts_once(batch, targets)
        is_scored = targets >= 0
        nats = torch.zeros(targets.shape, dtype=torch.float64, device=self.device)
        is_greedy = torch.ones(targets.shape, dtype=torch.bool, device=self.device)
        nats[is_scored], is_greedy[is_scored] = self.score_tokens(
            hidden[is_scored], targets[is_scored]
        )
        return list(zip(nats.sum(1).tolist(), is_greedy.all(1).tolist(), strict=True))

    def read_texts(self, batch: list[Request], longest: int) -> torch.Tensor:
        """Return what predicts the continuations (requests, longest, d), by one pass over all texts.

        longest: number of tokens of the longest continuation
        """
        texts = [[*request.context, *request.continuation[:-1]] for request in batch]
        length = max(map(len, texts))
        # no token attends to the padding, which is on the right
        padded = [text + [self.prefix_token_id] * (length - len(text)) for text in texts]
        hidden = self.model.hidden(torch.tensor(padded, device=self.device))
        starts = torch.tensor([[len(request.context) - 1] for request in batch], device=self.device)
        places = starts + torch.arange(longest, device=self.device)  # (requests, longest)
        return hidden.take_along_dim(places.clamp_max(length - 1).unsqueeze(-1), 1)

    def read_contexts_once(self, batch: list[Request], targets: torch.Tensor) -> torch.Tensor:
        """Return what predicts the targets (requests, longest), as (requests, longest, d).

        A context that several requests have is read once.
        """
        distinct = dict.fromkeys(request.context for request in batch)
        row_of = {context: row for row, context in enumerate(distinct)}
        rows = torch.tensor([row_of[request.context] for request in batch], device=self.device)
        # with padding on the left, all contexts end where the continuations begin
        contexts = pad_left(list(row_of), self.device)
        longest = targets.shape[1]
        cache = self.model.new_cache(contexts.shape[1] + longest - 1)
        hidden = self.model.hidden(contexts, cache, cache.reserve(contexts))
        hidden = hidden[rows, -1:]  # (requests, 1, d), which predicts the first tokens
        if longest == 1:
            return hidden
        # each continuation goes on from a copy of the cache of its context
        cache = cache.select(rows)
        ids = targets[:, :-1].clamp_min(0)
        later = self.model.hidden(ids, cache, cache.reserve(ids))
        return torch.cat((hidden, later), dim=1)

    def score_tokens(
        self, hidden: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-likelihood float64 (N,) of targets (N,), and whether each is most likely.

        hidden: (N, d), which predict the targets
        """
        # in chunks, because the logits of a batch may not fit into memory
        chunk_size = max(MAX_LOGITS // self.model.config.vocab_size, 1)
        nats = []
        is_greedy = []
        for rows, target in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True):
            logits = self.model.logits(rows)
            chosen = logits.gather(1, target[:, None]).squeeze(1)
            nats.append((chosen - logits.logsumexp(1)).double())
            is_greedy.append(logits.argmax(1) == target)
        return torch.cat(nats), torch.cat(is_greedy)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, read in windows of block_size without overlap."""
        windows = []
        owners = []  # the request of each window
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, 1
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm)
        for owner, (nats, _) in zip(owners, scores, strict=True):
            totals[owner] += nats
        return totals

    # ---- generated text ----

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue texts up to the first of their `until` strings; by default with greedy decoding.

        Raises:
            ValueError: a setting is unknown or out of range, or leaves no room for a context
        """
        # batches of one setting each, the longest texts first
        collator = Collator(
            [request.args for request in requests],
            sort_fn=lambda args: -len(args[0]),
            group_fn=lambda args: args[1],
            group_by="gen_kwargs",
        )
        batches = list(collator.get_batched(n=self.batch_size))
        texts = []
        for batch in self.progress(batches, disable_tqdm):
            texts += self.generate([text for text, _ in batch], dict(batch[0][1]))
        return collator.get_original(texts)

    def generate(self, texts: list[str], settings: dict[str, Any]) -> list[str]:
        """Return the continuation of each text.

        settings: generation_kwargs of a task
        """
        settings = normalize_gen_kwargs(settings)
        stop = [text for text in settings.pop("until") if text]
        max_new_tokens = settings.pop("max_gen_toks")
        if max_new_tokens >= self.max_length:
            raise ValueError(
                f"the task generates up to {max_new_tokens} tokens, but the model's block_size is "
                f"{self.max_length}; set max_gen_toks below it in the task file"
            )
        if not settings.pop("do_sample"):
            settings["temperature"] = 0.0
        if settings.get("num_beams") == 1:  # no beam search
            del settings["num_beams"]
        unknown = settings.keys() - {field.name for field in fields(Sampling)}
        if unknown:
            raise ValueError(
                f"the task generates with {', '.join(sorted(unknown))}, which is not supported; "
                "change generation_kwargs in the task file"
            )
        prompts = [
            list(self.cut(self.tok_encode(text) or [self.prefix_token_id], max_new_tokens))
            for text in texts
        ]
        continuations = [""] * len(texts)
        with self.autocast:
            for row, piece, _ in generate_text(
                self.model,
                self.encoding,
                prompts,
                max_new_tokens,
                Sampling(**settings),
                seeds=list(range(len(prompts))),
                stop=stop,
            ):
                continuations[row] += piece
        return continuations
