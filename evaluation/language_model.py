"""A model as lm-evaluation-harness wants it: log-likelihoods and text, with the tokens of its own
`hf` model.

Tokens, truncation and windows are those of `lm_eval.models.huggingface.HFLM` with a GPT-2-like
tokenizer, so that the numbers are the same. What differs is how they are read: see
`evaluation/batches.py`. With several processes, each reads its share of the batches, which are the
same whatever their number. lm-eval itself is told of one process: it would deal out documents, and
draw other few-shot examples for another number of processes.
"""

import dataclasses
import json
from contextlib import nullcontext

import numpy as np
import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from evaluation.batches import Group, Request, batched, grouped, truncated
from model.decoding import Decoder, padded
from model.generation import Sampling, generate_text
from training.distributed import World

MAX_GEN_TOKS = 256  # lm-eval's default
LOGITS_AT_ONCE = 2**26  # numbers: 256 MiB in float32


class LanguageModel(TemplateLM):
    """model: in evaluation mode, on world's device; encoding: a tiktoken encoding that fits it.

    batch_size: requests read at once. add_bos_token: begin every text with end-of-text, as
    documents in training do.
    """

    def __init__(
        self,
        model,
        encoding,
        world: World,
        batch_size: int,
        autocast=None,
        add_bos_token: bool = False,
    ):
        super().__init__()
        self.model, self.encoding, self.world = model, encoding, world
        self.batch_size, self.add_bos_token = batch_size, add_bos_token
        self.autocast = autocast or nullcontext()
        self.silent = None if world.is_main else True  # None: progress where a person looks at it
        self.max_length = model.config.block_size

    @property
    def eot_token_id(self) -> int:
        return self.encoding.eot_token

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs
    ) -> list[int]:
        """The text's tokens, `<|endoftext|>` in it being one."""
        wanted = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(
            self.encoding.decode([self.eot_token_id])
        ):
            wanted = False
        return [self.eot_token_id] * wanted + self.encoding.encode(string, allowed_special="all")

    def loglikelihood(self, requests, disable_tqdm: bool = False):
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.silent)

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, **kwargs
    ) -> list[tuple[float, bool]]:
        """For each ((context, continuation), its tokens, its tokens): log-likelihood, and whether
        it is the greedy one.

        ValueError: a continuation without tokens, or longer than block_size.
        """
        wanted = [truncated(i, c, t, self.max_length) for i, (_, c, t) in enumerate(requests)]
        # Nats, and tokens that are not the likeliest; by request.
        sums = torch.zeros(2, len(wanted), dtype=torch.float64, device=self.world.device)
        batches = batched(grouped(wanted, self.batch_size), self.batch_size, self.max_length)
        done = tqdm(total=len(wanted), desc="requests", disable=disable_tqdm or self.silent)
        with self.autocast:
            for turn in range(0, len(batches), self.world.world_size):
                for batch in batches[turn:][self.world.rank :][:1]:
                    self.read(batch, sums)
                done.update(
                    sum(len(g.members) for b in batches[turn:][: self.world.world_size] for g in b)
                )
        done.close()
        if self.world.world_size > 1:
            torch.distributed.all_reduce(sums)
        answers = [(nats, missed == 0) for nats, missed in zip(*sums.tolist())]
        for (key, _, _), answer in zip(requests, answers):
            if key is not None:  # a window of a longer text has none
                self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def read(self, batch: list[Group], sums) -> None:
        """Add each request's nats, and its tokens that are not the likeliest, to sums (2,
        requests).
        """
        if batch[0].rest == 0:
            ids = self.filled([g.members[0].tokens[:-1] for g in batch])
            self.score(
                self.model.hidden(ids),
                [(row, 0, m) for row, g in enumerate(batch) for m in g.members],
                sums,
            )
            return
        prefixes = [g.members[0].tokens[: g.prefix] for g in batch]
        length = max(map(len, prefixes))
        ids = padded(prefixes, self.world.device)
        cache = self.model.new_cache(length + max(g.rest for g in batch))
        hidden = self.model.hidden(ids, cache, cache.reserve(ids))
        pairs = [(row, g.prefix - length, m) for row, g in enumerate(batch) for m in g.members]
        self.score(hidden, pairs, sums)
        pairs = [
            (row, g.prefix, m)
            for row, g in enumerate(batch)
            for m in g.members
            if m.read > g.prefix
        ]
        cache = cache.select(torch.tensor([row for row, _, _ in pairs], device=self.world.device))
        ids = self.filled([m.tokens[shared:-1] for _, shared, m in pairs])
        hidden = self.model.hidden(ids, cache, cache.reserve(ids))
        self.score(hidden, [(row, shared, m) for row, (_, shared, m) in enumerate(pairs)], sums)

    def filled(self, rows: list[list[int]]):
        """Token ids as int64 (rows, longest), 0 on the right of shorter ones: nothing that counts
        attends to it.
        """
        width = max(map(len, rows))
        return torch.tensor(
            [row + [0] * (width - len(row)) for row in rows], device=self.world.device
        )

    def score(self, hidden, pairs: list[tuple[int, int, Request]], sums) -> None:
        """Add to sums what the normed readouts hidden (B, T, d) say of the requests' scored tokens.

        pairs: (row, first, request); column 0 of the row has read the request's token number
        `first`.
        """
        T, positions, targets, numbers = hidden.shape[1], [], [], []
        for row, first, request in pairs:
            begin = max(request.read - request.scored, first)
            end = min(request.read, first + T)
            positions.append(np.arange(begin, end) + (row * T - first))
            targets += request.tokens[begin + 1 : end + 1]
            numbers.append(np.full(max(end - begin, 0), request.number))
        if not targets:
            return
        # Choices that begin alike, or that are one token each, are read from the same logits.
        positions, at = np.unique(np.concatenate(positions), return_inverse=True)
        order = np.argsort(at, kind="stable")
        at, targets, numbers = at[order], np.array(targets)[order], np.concatenate(numbers)[order]
        positions = torch.from_numpy(positions).to(self.world.device)
        chunk = max(LOGITS_AT_ONCE // self.model.config.vocab_size, 1)
        for start in range(0, len(positions), chunk):
            part = slice(*np.searchsorted(at, (start, start + chunk)))
            row, target, number = (
                torch.from_numpy(a[part]).to(self.world.device)
                for a in (at - start, targets, numbers)
            )
            logits = self.model.logits(hidden.flatten(0, 1)[positions[start : start + chunk]])
            nats = logits[row, target] - logits.logsumexp(-1)[row]
            missed = logits.argmax(-1)[row] != target
            sums.index_add_(1, number, torch.stack((nats, missed)).to(sums.dtype))

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, read in windows of block_size that do not overlap."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in utils.get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, 1
            ):
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm)):
            totals[owner] += nats
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to the first of its `until` strings; the likeliest
        tokens by default.

        ValueError: settings that this generation does not have, or no room for a context.
        """
        batches = []
        for settings, numbers in alike([request.args[1] for request in requests]):
            sampling, stop, new = generation_settings(settings)
            if new >= self.max_length:
                raise ValueError(
                    f"max_gen_toks={new} leaves no room for a context in "
                    f"block_size={self.max_length}"
                )
            texts = [
                self.tok_encode(requests[n].args[0])[new - self.max_length :] or [self.eot_token_id]
                for n in numbers
            ]
            order = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)
            for start in range(0, len(order), self.batch_size):
                part = order[start : start + self.batch_size]
                batches.append(
                    ([numbers[i] for i in part], [texts[i] for i in part], sampling, stop, new)
                )
        found: dict[int, str] = {}
        done = tqdm(total=len(requests), desc="texts", disable=disable_tqdm or self.silent)
        for turn, batch in enumerate(batches):
            if turn % self.world.world_size == self.world.rank:
                found |= self.generated(*batch)
            done.update(len(batch[0]))
        done.close()
        if self.world.world_size > 1:
            everyone = [{}] * self.world.world_size
            torch.distributed.all_gather_object(everyone, found)
            found = {number: text for part in everyone for number, text in part.items()}
        for number, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, found[number])
        return [found[number] for number in range(len(requests))]

    def generated(
        self, numbers, prompts, sampling: Sampling, stop: list[str], new: int
    ) -> dict[int, str]:
        """{number: text} of the prompts; a number is its text's seed."""
        texts = dict.fromkeys(numbers, "")
        with self.autocast:
            decoder = Decoder(self.model, len(prompts), max(map(len, prompts)) + new)
            pieces = generate_text(decoder, self.encoding, prompts, new, sampling, numbers, stop)
            for row, piece, *_ in pieces:
                texts[numbers[row]] += piece or ""
        return texts


def alike(settings: list[dict]) -> list[tuple[dict, list[int]]]:
    """Each different setting with the numbers of those that have it."""
    found: dict[str, tuple[dict, list[int]]] = {}
    for number, each in enumerate(settings):
        found.setdefault(json.dumps(each, sort_keys=True), (each, []))[1].append(number)
    return list(found.values())


def generation_settings(settings: dict) -> tuple[Sampling, list[str], int]:
    """(how to draw, stop strings, most new tokens) of a task's generation_kwargs.

    ValueError: one that is unknown.
    """
    left = dict(normalize_gen_kwargs(settings, MAX_GEN_TOKS))
    stop, new, do_sample = left.pop("until"), left.pop("max_gen_toks"), left.pop("do_sample")
    # lm-eval's other backends take these for "all"
    if not left.get("top_k", 1) or left.get("top_k") == -1:
        left["top_k"] = None
    known = {field.name for field in dataclasses.fields(Sampling)}
    if unknown := sorted(left.keys() - known):
        raise ValueError(
            f"generation_kwargs: {unknown[0]} is not supported; there are "
            f"{', '.join(sorted(known))}"
        )
    if not do_sample:
        left = {**left, "temperature": 0.0}
    return Sampling(**left), [each for each in stop if each], new
