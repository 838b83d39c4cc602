"""What a trained model loses where a piece of one site is forced, or taken away. An edit is not a retrained model.

A read, a write or a `post_write` may have edits in parts.py; a site without any is tried without its
sublayer, h = 0. Parameters stay as they are: an edit is another function in the place of a part.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from model.block import Site, Stream
from research import compare
from research.analysis import common
from research.analysis.parts import EDITS, entry

PARTS = "read", "write", "post_write"  # of a site, those that may name edits
UNEDITED = "unedited"


class Edit(NamedTuple):
    """Its name, the part of the site that the function replaces; "h": the sublayer's output is zero."""

    name: str
    part: str
    function: Callable | None


def edits_of(site: Site) -> list[Edit]:
    """Those that the site's parts name; where no part can name any, h = 0."""
    parts = [(part, getattr(site, part)) for part in PARTS]
    named = [(part, entry(EDITS, module)(module)) for part, module in parts if entry(EDITS, module)]
    if not named:
        return [Edit("h=0", "h", None)]
    return [Edit(name, part, function) for part, edits in named for name, function in edits.items()]


class Edited(Stream):
    """Every step by itself; a site (layer, name) that is in `edits` is met as its edit has it, without extra losses."""

    def __init__(self, edits: dict[tuple[int, str], Edit]):
        self.edits = edits

    def edited(self, site: Site) -> Site:
        edit = self.edits.get((site.layer, site.name))
        if edit is None or edit.part == "h":
            return site
        return replace(site, **{edit.part: edit.function})

    def read(self, site, state, cache, positions):
        return super().read(self.edited(site), state, cache, positions)

    def write(self, site, state, h, c, x_in, cache):
        edit = self.edits.get((site.layer, site.name))
        if edit is not None and edit.part == "h":
            h = torch.zeros_like(h)
        return super().write(self.edited(site), state, h, c, x_in, cache)


@torch.no_grad()
def states_before(model, ids) -> list:
    """What each block is handed, ids (B, T): a state and the positions."""
    handed = []
    hooks = [
        block.register_forward_pre_hook(lambda _, given: handed.append(given[:2]))
        for block in set(model.transformer.h)
    ]
    with model.through(Stream()):
        model.hidden(ids)
    for hook in hooks:
        hook.remove()
    return handed


@torch.no_grad()
def losses_from(
    model, handed, first: int, targets, edits: dict[tuple[int, str], Edit]
) -> torch.Tensor:
    """Nats per token of each sequence (B,), in float64, from what block `first` is handed on; targets (B, T)."""
    state, positions = handed
    with model.through(Edited(edits)):
        for block in model.transformer.h[first:]:
            state, _ = block(state, positions)
        hidden = model.stream.finish(model, state, None)
    rows = zip(hidden, targets)  # one after the other: logits are large
    return torch.stack(
        [F.cross_entropy(model.logits(h), t, reduction="none").double().mean() for h, t in rows]
    )


class Plan:
    """The edits that are tried: `sites` {(layer, name): edits}; `everywhere` {edit's name: {site: its edit}}, at all
    sites at once, of the names that several sites have."""

    def __init__(self, model, names: list[str] | None = None):
        """names: only these. ValueError: no site has one of them."""
        found = {
            (site.layer, site.name): edits_of(site)
            for block in model.transformer.h
            for site in block.sites
        }
        known = list(dict.fromkeys(edit.name for edits in found.values() for edit in edits))
        if unknown := set(names or []) - set(known):
            raise ValueError(
                f"--edits={','.join(sorted(unknown))}: this model has {', '.join(known)}"
            )
        self.names = [name for name in known if names is None or name in names]
        self.sites = {
            key: [edit for edit in edits if edit.name in self.names] for key, edits in found.items()
        }
        self.everywhere = {}
        for name in self.names:
            at = {
                key: edit
                for key, edits in self.sites.items()
                for edit in edits
                if edit.name == name
            }
            if len(at) > 1:
                self.everywhere[name] = at

    def of_layer(self, layer: int | None) -> dict[str, dict[str, dict]]:
        """{site's name: {edit's name: what `Edited` takes}}; layer None: under "all", of all sites, and no edit."""
        if layer is None:
            return {"all": {UNEDITED: {}, **self.everywhere}}
        here = {name: edits for (of, name), edits in self.sites.items() if of == layer}
        return {
            name: {edit.name: {(layer, name): edit} for edit in edits}
            for name, edits in here.items()
        }


def measure(
    model, batches, windows: list[int], rows: int, plan: Plan, figures, key: dict, label: str
) -> None:
    """A row in `figures` for each batch of windows and each layer (None: all at once) that has none under `key` yet:
    "losses" {site: {edit: nats per token of each window}}."""
    device, layers = common.device_of(model), [None, *range(len(model.transformer.h))]
    wanted = [(first, layer) for first in range(0, len(windows), rows) for layer in layers]
    missing = [each for each in wanted if figures.find(**key, first=each[0], layer=each[1]) is None]
    progress, done = common.Progress(label, len(missing), "parts of the edits"), 0
    for first in sorted({first for first, _ in missing}):
        [(ids, targets)] = common.in_batches(batches, windows[first : first + rows], rows, device)
        states = states_before(model, ids)
        for layer in [layer for start, layer in missing if start == first]:
            begin, losses = layer or 0, {}
            for site, edits in plan.of_layer(layer).items():
                found = {
                    name: losses_from(model, states[begin], begin, targets, edit)
                    for name, edit in edits.items()
                }
                losses[site] = {name: values.tolist() for name, values in found.items()}
            figures.add({**key, "first": first, "layer": layer, "losses": losses})
            done += 1
            progress(done)


def effects(rows: list[dict]) -> list[dict]:
    """What each edit changes, in nats per token, with its 95% interval over windows: the rows of one model."""
    losses = {}
    for row in sorted(rows, key=lambda row: row["first"]):
        for site, edits in row["losses"].items():
            for name, values in edits.items():
                losses.setdefault((row["layer"], site, name), []).extend(values)
    base = losses.pop((None, "all", UNEDITED))
    result = []
    for (layer, site, name), values in losses.items():
        difference = compare.estimate_paired_difference(values, base)
        half, error = (
            (difference.half_width, difference.standard_error) if difference.n > 1 else (None, None)
        )
        about = {"layer": layer, "site": site, "edit": name, "loss": sum(values) / len(values)}
        spread = {"ci95": half, "standard_error": error, "windows": difference.n}
        result.append({**about, "difference": difference.mean, **spread})
    return result
