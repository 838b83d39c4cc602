"""The loss of a trained model with a piece of one site forced to a value, or removed. An edit is not a retrained model.

A read, a write or a `post_write` may have edits in parts.py; a site without any is run without its
sublayer, h = 0. Parameters stay as they are: an edit is another function in the place of a part.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from data.loader import IGNORED_TARGET, ValidationBatches
from model.block import Site, State, Stream
from model.gpt import GPT
from model.layers import Positions
from research import compare
from research.analysis import common
from research.analysis.parts import EDITS, find_entry
from research.benchmarks.figures import Figures

PARTS = ("read", "write", "post_write")  # the parts of a site that may have edits
UNEDITED = "unedited"

SiteKey = tuple[int, str]  # layer and name of a site


class Edit(NamedTuple):
    """A function in the place of one part of a site."""

    name: str

    # the part that is replaced; "h" if the sublayer's output is zero instead
    part: str

    # None if `part` is "h"
    function: Callable | None


def list_edits(site: Site) -> list[Edit]:
    """Return the edits of the site's parts; h = 0 if none of them has an entry in EDITS."""
    edits = []
    has_entry = False
    for part in PARTS:
        module = getattr(site, part)
        make_edits = find_entry(EDITS, module)
        if make_edits is not None:
            has_entry = True
            edits += [Edit(name, part, function) for name, function in make_edits(module).items()]
    if not has_entry:
        return [Edit("h=0", "h", None)]
    return edits


class EditedStream(Stream):
    """Run the stream with some sites edited."""

    def __init__(self, edits: dict[SiteKey, Edit]):
        self.edits = edits

    def edit_site(self, site: Site) -> Site:
        """Return the site with its edited part."""
        edit = self.edits.get((site.layer, site.name))
        if edit is None or edit.part == "h":
            return site
        return replace(site, **{edit.part: edit.function})

    def read(
        self, site: Site, state: State, cache: dict | None
    ) -> tuple[State, torch.Tensor | tuple, torch.Tensor]:
        return super().read(self.edit_site(site), state, cache)

    def write(
        self,
        site: Site,
        state: State,
        h: torch.Tensor,
        x_in: torch.Tensor | tuple,
        c: torch.Tensor,
        cache: dict | None,
    ) -> State:
        edit = self.edits.get((site.layer, site.name))
        if edit is not None and edit.part == "h":
            h = torch.zeros_like(h)
        return super().write(self.edit_site(site), state, h, x_in, c, cache)


# ---- losses ----


class BlockInput(NamedTuple):
    """The arguments of a block."""

    state: State
    positions: Positions


@torch.no_grad()
def record_block_inputs(model: GPT, ids: torch.Tensor) -> list[BlockInput]:
    """Return what each block gets when the model runs on ids (B, T)."""
    block_inputs = []

    def record(block: torch.nn.Module, arguments: tuple) -> None:
        state, positions, *_ = arguments
        block_inputs.append(BlockInput(state, positions))

    # a set, because a model may have the same block several times
    hooks = [block.register_forward_pre_hook(record) for block in set(model.transformer.h)]
    with model.through(Stream()):
        model.hidden(ids)
    for hook in hooks:
        hook.remove()
    return block_inputs


@torch.no_grad()
def measure_losses_from(
    model: GPT,
    block_input: BlockInput,
    first_layer: int,
    targets: torch.Tensor,
    edits: dict[SiteKey, Edit],
) -> torch.Tensor:
    """Run the blocks from `first_layer` on, and return the loss of each sequence.

    Args:
        block_input: what block `first_layer` gets
        targets: (B, T)

    Returns:
        Nats per target (B,), in float64; 0 for a sequence without targets.
    """
    state = block_input.state
    with model.through(EditedStream(edits)):
        for block in model.transformer.h[first_layer:]:
            state = block(state, block_input.positions)
        hidden = model.stream.finish(model, state, None)
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


class EditPlan:
    """The edits whose losses are measured.

    Attributes:
        names: of the edits, in order of appearance
        at_site: site -> its edits
        at_all_sites: name of an edit -> site -> its edit of that name, for edits that several
            sites have; they are made at all these sites at once

    Raises:
        ValueError: no site has one of the given names
    """

    def __init__(self, model: GPT, names: list[str] | None = None):
        """names: only these edits; None for all"""
        edits_by_site = {
            (site.layer, site.name): list_edits(site)
            for block in model.transformer.h
            for site in block.sites
        }
        known_names = list(
            dict.fromkeys(edit.name for edits in edits_by_site.values() for edit in edits)
        )
        unknown_names = sorted(set(names or []) - set(known_names))
        if unknown_names:
            raise ValueError(
                f"--edits={','.join(unknown_names)}: the edits of this model are "
                f"{', '.join(known_names)}"
            )
        self.names = [name for name in known_names if names is None or name in names]
        self.at_site = {
            key: [edit for edit in edits if edit.name in self.names]
            for key, edits in edits_by_site.items()
        }
        self.at_all_sites: dict[str, dict[SiteKey, Edit]] = {}
        for name in self.names:
            sites_with_edit = {
                key: edit
                for key, edits in self.at_site.items()
                for edit in edits
                if edit.name == name
            }
            if len(sites_with_edit) > 1:
                self.at_all_sites[name] = sites_with_edit

    def list_edits_of_layer(self, layer: int | None) -> dict[str, dict[str, dict[SiteKey, Edit]]]:
        """Return {name of a site: {name of an edit: what `EditedStream` takes}}.

        layer: None for the edits at all sites at once, and no edit, under the name "all"
        """
        if layer is None:
            return {"all": {UNEDITED: {}, **self.at_all_sites}}
        edits_of_layer = {}
        for (site_layer, site_name), edits in self.at_site.items():
            if site_layer == layer:
                edits_of_layer[site_name] = {
                    edit.name: {(layer, site_name): edit} for edit in edits
                }
        return edits_of_layer


def measure_losses(
    model: GPT,
    batches: ValidationBatches,
    sequences: list[int],
    batch_size: int,
    plan: EditPlan,
    figures: Figures,
    key: dict,
    label: str,
) -> None:
    """Measure the losses of all edits, and add a row to `figures` for each batch and layer.

    A row has "losses", {site: {edit: nats per target of each sequence}}, and "targets", their
    numbers. Its "layer" is None for edits at all sites at once. Rows that `figures` has under
    `key` are not measured again.

    Args:
        key: what tells the rows of this model from others
        label: of the model, for lines of progress
    """
    device = common.get_device(model)
    layers = [None, *range(len(model.transformer.h))]
    missing_layers: dict[int, list[int | None]] = {}  # by the index of a batch's first sequence
    for first in range(0, len(sequences), batch_size):
        for layer in layers:
            if figures.find(**{**key, "first": first, "layer": layer}) is None:
                missing_layers.setdefault(first, []).append(layer)
    num_missing = sum(len(batch_layers) for batch_layers in missing_layers.values())
    progress = common.Progress(label, num_missing, "parts of the edits")
    num_finished = 0
    for first, batch_layers in missing_layers.items():
        batch_sequences = sequences[first : first + batch_size]
        [(ids, targets)] = common.iterate_batches(batches, batch_sequences, batch_size, device)
        num_targets = common.count_targets(batches, batch_sequences)
        block_inputs = record_block_inputs(model, ids)
        for layer in batch_layers:
            first_layer = 0 if layer is None else layer
            losses: dict[str, dict[str, list[float]]] = {}
            for site_name, edits_by_name in plan.list_edits_of_layer(layer).items():
                losses[site_name] = {}
                for name, edits in edits_by_name.items():
                    values = measure_losses_from(
                        model, block_inputs[first_layer], first_layer, targets, edits
                    )
                    losses[site_name][name] = values.tolist()
            figures.add(
                {
                    **key,
                    "first": first,
                    "layer": layer,
                    "losses": losses,
                    "targets": num_targets.tolist(),
                }
            )
            num_finished += 1
            progress(num_finished)


def compute_effects(rows: list[dict]) -> list[dict]:
    """Return how much each edit changes the mean loss per target, in nats, with its 95% interval.

    The interval is over sequences that have targets. If these have different numbers of them, the
    mean is a ratio of two sums, and the interval is that of the linearized ratio.

    rows: those of one model, as `measure_losses` stores them
    """
    losses: dict[tuple[int | None, str, str], list[float]] = {}
    num_targets: list[int] = []
    for row in sorted(rows, key=lambda row: row["first"]):
        if row["layer"] is None:
            num_targets += row["targets"]
        for site_name, edits in row["losses"].items():
            for edit_name, values in edits.items():
                losses.setdefault((row["layer"], site_name, edit_name), []).extend(values)
    has_targets = np.array(num_targets) > 0
    weights = np.array(num_targets)[has_targets] / np.mean(num_targets, where=has_targets)
    unedited_losses = np.array(losses.pop((None, "all", UNEDITED)))[has_targets]
    effects = []
    for (layer, site_name, edit_name), values in losses.items():
        edited_losses = np.array(values)[has_targets]
        differences = edited_losses - unedited_losses
        mean_difference = np.mean(weights * differences)
        difference = compare.estimate_mean(
            mean_difference + weights * (differences - mean_difference)
        )
        has_interval = difference.n > 1
        effects.append(
            {
                "layer": layer,
                "site": site_name,
                "edit": edit_name,
                "loss": float(np.mean(weights * edited_losses)),
                "difference": difference.mean,
                "ci95": difference.half_width if has_interval else None,
                "standard_error": difference.standard_error if has_interval else None,
                "windows": difference.n,
            }
        )
    return effects
