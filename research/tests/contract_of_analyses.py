"""What the analyses look at in a residual stream; tests/contract.py has the rest of its contract."""

from dataclasses import dataclass

import torch
from contract import EXACT, sites_of, tiny, tokens

from model.block import Site, State, Stream
from model.gpt import GPT
from research.analysis import edits, gates, parts

# ---- details, directions and intervals ----


class ShapeCheck(Stream):
    """Run the stream as it is, and check that details and directions are of each token."""

    def write(
        self,
        site: Site,
        state: State,
        h: torch.Tensor,
        c: torch.Tensor,
        x_in: torch.Tensor | tuple,
        cache: dict | None,
    ) -> tuple[State, torch.Tensor | None]:
        written, extra_loss = super().write(site, state, h, c, x_in, cache)
        values_by_name = gates.collect_from_parts(site, state, h, x_in, c, written)
        for name, values in values_by_name.items():
            shape = tuple(values.shape)
            assert shape[:2] == h.shape[:2], f"{name} is not of each token: {shape}"
            assert values.isfinite().all(), f"{name} is not finite"
        shape = tuple(gates.get_direction(site, state, h, x_in, c).shape)
        assert shape == h.shape, f"the direction is not of each token: {shape}"
        return written, extra_loss


def check_details(cls: type[GPT]) -> None:
    """Check that details and directions are of each token, and intervals of statistics.

    None of them may change what the model computes.
    """
    model = tiny(cls)
    ids = tokens(2, 8)
    expected, _ = model(ids)
    records = {}
    audit = gates.Audit(records, model.transformer.wte(ids))
    with torch.no_grad(), model.through(audit):
        logits, _ = model(ids)
    assert torch.equal(logits, expected), "a detail changes what the model computes"
    for site in sites_of(model):
        intervals = parts.get_intervals(site.write)
        statistics = records[site.layer, site.name].numbers
        assert intervals.keys() <= statistics.keys(), f"intervals of no statistic: {intervals}"
        for labeled_intervals in intervals.values():
            for low, high in labeled_intervals.values():
                assert low < high, f"an interval is empty: {intervals}"
    with torch.no_grad(), model.through(ShapeCheck()):
        model(ids)


# ---- edits ----


def may_change_nothing(model: GPT, site: Site, edit: edits.Edit) -> bool:
    """Return whether an edit has no effect because of where its site is.

    An exact mix does nothing to the streams of the first site, which are equal, nor to the sum of
    the streams after the last one.
    """
    is_exact = getattr(site.read, "kind", "sinkhorn") != "sinkhorn"
    is_at_end = site in (sites_of(model)[0], sites_of(model)[-1])
    return edit.name == "mix=I" and is_exact and is_at_end


def check_edits(cls: type[GPT]) -> None:
    """Check that every edit changes the loss at its own site, and nothing after it is undone."""
    model = tiny(cls)
    ids = tokens(2, 8)
    _, expected_loss = model(ids, ids)
    parameters = [parameter.clone() for parameter in model.parameters()]
    block_inputs = edits.record_block_inputs(model, ids)
    losses = edits.measure_losses_from(model, block_inputs[0], 0, ids, {})
    assert abs(losses.mean() - expected_loss) < 1e-9, (
        "from the first block on it computes another loss"
    )
    for site in sites_of(model):
        site_edits = edits.list_edits(site)
        names = {edit.name for edit in site_edits}
        assert len(names) == len(site_edits), f"two edits have the same name: {site_edits}"
        for edit in site_edits:
            edited_losses = edits.measure_losses_from(
                model,
                block_inputs[site.layer],
                site.layer,
                ids,
                {(site.layer, site.name): edit},
            )
            assert edited_losses.isfinite().all(), f"{edit.name} gives a loss that is not finite"
            if may_change_nothing(model, site, edit):
                continue
            assert (edited_losses - losses).abs().max() > 1e-12, (
                f"{edit.name} of block {site.layer} {site.name} changes nothing"
            )
    _, loss_after_edits = model(ids, ids)
    assert torch.equal(loss_after_edits, expected_loss), (
        "after its edits the model has another loss"
    )
    assert all(map(torch.equal, parameters, model.parameters())), "an edit changes a parameter"


# ---- shortcuts ----


@dataclass
class ShortcutResponse:
    """The shortcut of a write as a matrix, and how the write responds to a change of its state."""

    # dimension of the state on which the matrix acts
    axis: int
    matrix: torch.Tensor

    # of the state, and what the write adds for it, the first and the second time that it is made;
    # all else that the write gets is fixed
    change: torch.Tensor
    first_response: torch.Tensor
    second_response: torch.Tensor


class ShortcutRecorder(Stream):
    """Run the stream as it is, and record the response of every write that has a shortcut."""

    def __init__(self):
        self.responses: list[ShortcutResponse] = []

    def write(
        self,
        site: Site,
        state: State,
        h: torch.Tensor,
        c: torch.Tensor,
        x_in: torch.Tensor | tuple,
        cache: dict | None,
    ) -> tuple[State, torch.Tensor | None]:
        get_shortcut = parts.find_entry(parts.SHORTCUTS, site.write)
        if get_shortcut is not None and site.post_write is None:
            assert torch.is_tensor(state), "a tuple of tensors has no shortcut"
            generator = torch.Generator().manual_seed(3)
            change = torch.randn(state.shape, generator=generator, dtype=state.dtype)
            written = site.write(state, h, x_in, c)
            written_once = site.write(state + change, h, x_in, c)
            written_twice = site.write(state + 2 * change, h, x_in, c)
            shortcut = get_shortcut(site.write, state, h, x_in, c)
            self.responses.append(
                ShortcutResponse(
                    axis=shortcut.axis,
                    matrix=shortcut.dense(),
                    change=change,
                    first_response=written_once - written,
                    second_response=written_twice - written_once,
                )
            )
        return super().write(site, state, h, c, x_in, cache)


def check_shortcut(cls: type[GPT]) -> None:
    """Check that a write does to the state what its shortcut says, if its gates do not depend on it."""
    model = tiny(cls)
    ids = tokens(2, 8)
    expected, _ = model(ids)
    recorder = ShortcutRecorder()
    with torch.no_grad(), model.through(recorder):
        logits, _ = model(ids)
    assert torch.equal(logits, expected), "a shortcut changes what the model computes"
    for response in recorder.responses:
        assert response.matrix.isfinite().all(), "a shortcut is not finite"
        is_affine = torch.allclose(response.first_response, response.second_response, **EXACT)
        if not is_affine:
            continue
        if response.change.ndim > 3:
            vectors = response.change.movedim(response.axis, -1).flatten(2, -2)
        else:
            vectors = response.change.unsqueeze(2)
        moved_response = response.first_response.movedim(response.axis, -1)
        assert torch.allclose(
            vectors @ response.matrix.mT, moved_response.reshape(vectors.shape), **EXACT
        ), "its shortcut is not what the write does to the state"


CHECKS = {
    "details": check_details,
    "edits": check_edits,
    "shortcut": check_shortcut,
}
