"""The loss of a trained model with the write of one site, or of all, forced to something else.

An edit is not a retrained model: parameters stay as they are, and another function is in the place of
the write. A site of DDL has its gate fixed at 0, 1 or 2, or its erase left out; a site of another
stream is run without its sublayer, h = 0.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from data.loader import IGNORED_TARGET
from model.block import Site, State, Stream
from model.ddl import DeltaRewrite
from model.gpt import GPT
from research import compare
from research.analysis import common

SiteKey = tuple[int, str]  # layer and name of a site
Write = Callable[..., State]
ALL_SITES: tuple[None, str] = (None, "all")  # layer and site of an edit at all sites at once


def list_edits(site: Site) -> dict[str, Write]:
    """Return the edits of a site by name: functions in the place of its write."""
    if isinstance(site.write, DeltaRewrite):
        return make_delta_rewrite_edits(site.write)

    def write_without_sublayer(state: State, h: torch.Tensor, *args: object) -> State:
        return site.write(state, torch.zeros_like(h), *args)

    return {"h=0": write_without_sublayer}


def make_delta_rewrite_edits(write: DeltaRewrite) -> dict[str, Write]:
    """Return writes whose gate is 0, 1 or 2, and one that does not erase."""
    edits = {}
    for number in range(3):
        edits[f"beta={number}"] = make_edit(write, gate=make_constant_gate(write, number))
    if write.config.ddl_update == "delta":
        config = copy.copy(write.config)
        config.ddl_update = "write_only"
        edits["no erase"] = make_edit(write, config=config)
    return edits


def make_constant_gate(write: DeltaRewrite, number: float) -> Callable[..., torch.Tensor]:
    """Return a gate that is a number for all tokens."""
    return lambda *args: torch.full_like(write.gate(*args), number)


def make_edit(write: DeltaRewrite, **attributes: object) -> Write:
    """Return the forward of a write with other attributes: a method, or its config.

    The write itself stays as it is, because the forward is that of a shallow copy.
    """
    edited = copy.copy(write)
    # before `nn.Module.__getattr__`, which finds parameters, Python looks here
    vars(edited).update(attributes)
    return edited.forward


class EditedStream(Stream):
    """Run the stream with other writes at some sites."""

    def __init__(self, writes: dict[SiteKey, Write]):
        self.writes = writes

    def write(self, site: Site, state: State, *args: object) -> State:
        edited = replace(site, write=self.writes.get((site.layer, site.name), site.write))
        return super().write(edited, state, *args)


def collect_edits(model: GPT) -> dict[str, dict[SiteKey, Write]]:
    """Return, for each edit by name, the edited write of each site that has it."""
    writes_by_edit: dict[str, dict[SiteKey, Write]] = {}
    for block in model.transformer.h:
        for site in block.sites:
            for name, write in list_edits(site).items():
                writes_by_edit.setdefault(name, {})[site.layer, site.name] = write
    return writes_by_edit


# ---- losses ----


@torch.no_grad()
def measure_losses(
    model: GPT, ids: torch.Tensor, targets: torch.Tensor, writes: dict[SiteKey, Write]
) -> torch.Tensor:
    """Return the loss of each sequence with edited writes.

    Args:
        ids, targets: (B, T)

    Returns:
        Nats per target (B,), in float64; 0 for a sequence without targets.
    """
    with model.through(EditedStream(writes)):
        hidden = model.hidden(ids)
    losses = []
    # one sequence at a time, because logits are large
    for sequence_hidden, sequence_targets in zip(hidden, targets):
        logits = model.logits(sequence_hidden)
        # a task scores only the tokens of answers
        is_scored = sequence_targets != IGNORED_TARGET
        token_losses = F.cross_entropy(
            logits[is_scored], sequence_targets[is_scored], reduction="none"
        )
        losses.append(token_losses.double().sum() / max(len(token_losses), 1))
    return torch.stack(losses)


def measure_effects(run: common.LoadedRun, batch_size: int) -> list[dict]:
    """Return how much each edit changes the mean loss of a sequence, at each site and at all at once.

    The interval is over sequences. Those without targets do not count.
    """
    writes_by_key: dict[tuple, dict[SiteKey, Write]] = {}
    for name, writes in collect_edits(run.model).items():
        if len(writes) > 1:
            writes_by_key[*ALL_SITES, name] = writes
        for site_key, write in writes.items():
            writes_by_key[*site_key, name] = {site_key: write}
    differences: dict[tuple, list[float]] = {key: [] for key in writes_by_key}
    for ids, targets in run.iterate_batches(batch_size):
        # a task scores only the tokens of answers
        has_targets = (targets != IGNORED_TARGET).any(1)
        unedited = measure_losses(run.model, ids, targets, writes={})
        for key, writes in writes_by_key.items():
            edited = measure_losses(run.model, ids, targets, writes)
            differences[key] += (edited - unedited)[has_targets].tolist()
    effects = []
    for (layer, site_name, name), values in differences.items():
        difference = compare.estimate_mean(values)
        effects.append(
            {
                "layer": layer,
                "site": site_name,
                "edit": name,
                "difference": difference.mean,
                "ci95": difference.half_width,
                "p_value": difference.p_value,
                "windows": difference.n,
            }
        )
    return effects
