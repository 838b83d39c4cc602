"""A model as lm-evaluation-harness wants it: log-likelihoods of texts, and generated text.

Tokens, truncation and windows are those of lm-eval's own `hf` model with GPT-2's tokenizer, so the
numbers are the same. What differs is how they are read (batches.py). Several processes read the
same batches that one would, each its share. lm-eval itself is told of one process: with more it
would deal out documents, and draw other few-shot examples.
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
    """model: in evaluation mode, on world's device; encoding: its tiktoken encoding.

    batch_size: requests read at once. add_bos_token: begin every text with end-of-text, as
    documents in training do.
    """

    def __init__(
        self, model, encoding, world: World, batch_size: int, autocast=None, add_bos_token=False
    ):
        super().__init__()
        self.model, self.encoding, self.world = model, encoding, world
        self.batch_size, self.add_bos_token = batch_size, add_bos_token
        self.autocast = autocast or nullcontext()
        self.silent = None if world.is_main else True  # None: progress, on a terminal
        self.max_length = model.config.block_size

    @property
    def eot_token_id(self) -> int:
        return self.encoding.eot_token

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """The text's tokens, `<|endoftext|>` in it being one."""
        tokens = self.encoding.encode(string, allowed_special="all")
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token and tokens[:1] != [self.eot_token_id]
        return [self.eot_token_id] * add_special_tokens + tokens

    def mine(self, batches: list, size, what: str, disable_tqdm: bool):
        """This process's share of the batches, under a progress bar; size(batch): its requests."""
        total, turns = sum(map(size, batches)), self.world.world_size
        with tqdm(total=total, desc=what, disable=disable_tqdm or self.silent) as bar:
            for number, batch in enumerate(batches):
                if number % turns == self.world.rank:
                    yield batch
                bar.update(size(batch))

    # ---- log-likelihoods ----

    def loglikelihood(self, requests, disable_tqdm: bool = False):
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.silent)

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, **_
    ) -> list[tuple[float, bool]]:
        """For each (texts, tokens of the context, tokens of the continuation): the continuation's
        log-likelihood in nats, and whether it is what greedy decoding gives.

        ValueError: a continuation without tokens, or longer than block_size.
        """
        cut = [truncated(i, c, t, self.max_length) for i, (_, c, t) in enumerate(requests)]
        batches = batched(grouped(cut, self.batch_size), self.batch_size, self.max_length)
        # By request: nats, and the number of tokens that are not the likeliest.
        sums = torch.zeros(2, len(cut), dtype=torch.float64, device=self.world.device)

        def size(batch):
            return sum(len(group.members) for group in batch)

        with self.autocast:
            for batch in self.mine(batches, size, "requests", disable_tqdm):
                self.read(batch, sums)
        if self.world.world_size > 1:
            torch.distributed.all_reduce(sums)
        return [(nats, missed == 0) for nats, missed in zip(*sums.tolist())]

    def read(self, batch: list[Group], sums) -> None:
        """Add what a batch says of its requests to sums (2, requests)."""
        members = [(row, group, m) for row, group in enumerate(batch) for m in group.members]
        prefixes = [group.members[0].tokens[: group.prefix] for group in batch]
        if batch[0].rest == 0:
            hidden = self.model.hidden(self.filled(prefixes))
            self.score(hidden, [(row, 0, m) for row, _, m in members], sums)
            return
        # Padded on the left, so that the prefixes end at one place and the rests begin there.
        length = max(map(len, prefixes))
        ids = padded(prefixes, self.world.device)
        cache = self.model.new_cache(length + max(group.rest for group in batch))
        hidden = self.model.hidden(ids, cache, cache.reserve(ids))
        self.score(hidden, [(row, group.prefix - length, m) for row, group, m in members], sums)
        longer = [each for each in members if each[2].read > each[1].prefix]
        rows = torch.tensor([row for row, _, _ in longer], device=self.world.device)
        cache = cache.select(rows)
        ids = self.filled([m.tokens[group.prefix : -1] for _, group, m in longer])
        hidden = self.model.hidden(ids, cache, cache.reserve(ids))
        places = [(row, group.prefix, m) for row, (_, group, m) in enumerate(longer)]
        self.score(hidden, places, sums)

    def filled(self, rows: list[list[int]]) -> torch.Tensor:
        """Token ids (rows, longest), int64, 0 to the right of shorter ones, where nothing that
        counts looks.
        """
        width = max(map(len, rows))
        ids = [row + [0] * (width - len(row)) for row in rows]
        return torch.tensor(ids, device=self.world.device)

    def score(self, hidden, places: list[tuple[int, int, Request]], sums) -> None:
        """Add to sums what the normed readouts hidden (B, T, d) say of the requests' scored tokens.

        places: (row, first, request): column 0 of the row has read the request's token number
        `first`.
        """
        T, positions, targets, numbers = hidden.shape[1], [], [], []
        for row, first, request in places:
            begin = max(request.read - request.scored, first)
            end = max(min(request.read, first + T), begin)
            positions += range(row * T + begin - first, row * T + end - first)
            targets += request.tokens[begin + 1 : end + 1]
            numbers += [request.number] * (end - begin)
        if not targets:
            return
        # Choices that begin alike, or that are one token each, are read from the same logits.
        positions, at = np.unique(positions, return_inverse=True)
        order = np.argsort(at, kind="stable")
        at, targets, numbers = at[order], np.array(targets)[order], np.array(numbers)[order]
        chunk = max(LOGITS_AT_ONCE // self.model.config.vocab_size, 1)
        for start in range(0, len(positions), chunk):
            part = slice(*np.searchsorted(at, (start, start + chunk)))
            arrays = at[part] - start, targets[part], numbers[part], positions[start:][:chunk]
            row, target, number, position = (
                torch.from_numpy(array).to(self.world.device) for array in arrays
            )
            logits = self.model.logits(hidden.flatten(0, 1)[position])
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
        answers = self._loglikelihood_tokens(windows, disable_tqdm)
        totals = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, answers):
            totals[owner] += nats
        return totals

    # ---- generated text ----

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to the first of its `until` strings; by default the
        likeliest tokens.

        ValueError: settings that this generation does not have, or no room for a context.
        """
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        batches = []
        for numbers in alike.values():
            sampling, stop, new = generation_settings(requests[numbers[0]].args[1])
            if (room := self.max_length - new) < 1:
                raise ValueError(
                    f"max_gen_toks={new} leaves no room for a context in "
                    f"block_size={self.max_length}"
                )
            texts = {n: self.tok_encode(requests[n].args[0])[-room:] for n in numbers}
            numbers = sorted(numbers, key=lambda n: max(len(texts[n]), 1), reverse=True)
            for start in range(0, len(numbers), self.batch_size):
                part = numbers[start : start + self.batch_size]
                prompts = [texts[n] or [self.eot_token_id] for n in part]
                batches.append((part, prompts, sampling, stop, new))
        answers: dict[int, str] = {}
        with self.autocast:
            for batch in self.mine(batches, lambda batch: len(batch[0]), "texts", disable_tqdm):
                answers |= self.generated(*batch)
        if self.world.world_size > 1:
            everyone = [{}] * self.world.world_size
            torch.distributed.all_gather_object(everyone, answers)
            answers = {number: text for part in everyone for number, text in part.items()}
        return [answers[number] for number in range(len(requests))]

    def generated(self, numbers, prompts, sampling, stop: list[str], new: int) -> dict[int, str]:
        """{number: text} of the prompts; a number is its text's seed."""
        texts = dict.fromkeys(numbers, "")
        decoder = Decoder(self.model, len(prompts), max(map(len, prompts)) + new)
        pieces = generate_text(decoder, self.encoding, prompts, new, sampling, numbers, stop)
        for row, piece, *_ in pieces:
            texts[numbers[row]] += piece or ""
        return texts


def generation_settings(settings: dict) -> tuple[Sampling, list[str], int]:
    """(how to draw, stop strings, most new tokens) of a task's generation_kwargs.

    ValueError: one that is unknown.
    """
    left = dict(normalize_gen_kwargs(settings, MAX_GEN_TOKS))
    stop, new, do_sample = left.pop("until"), left.pop("max_gen_toks"), left.pop("do_sample")
    if left.get("top_k", 1) in (0, None, -1):  # lm-eval's other backends take these for "all"
        left["top_k"] = None
    known = sorted(field.name for field in dataclasses.fields(Sampling))
    if unknown := sorted(left.keys() - set(known)):
        raise ValueError(
            f"generation_kwargs: {unknown[0]} is not supported; there are {', '.join(known)}"
        )
    if not do_sample:
        left["temperature"] = 0.0
    return Sampling(**left), [each for each in stop if each], new
