"""What the analyses look at in a residual stream; tests/contract.py has the rest of its contract."""

import torch
from contract import sites_of, tiny, tokens

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
        x_in: torch.Tensor | tuple,
        c: torch.Tensor,
        cache: dict | None,
    ) -> State:
        written = super().write(site, state, h, x_in, c, cache)
        values_by_name = gates.collect_from_parts(site, state, h, x_in, c, written)
        for name, values in values_by_name.items():
            shape = tuple(values.shape)
            assert shape[:2] == h.shape[:2], f"{name} is not of each token: {shape}"
            assert values.isfinite().all(), f"{name} is not finite"
        shape = tuple(gates.get_direction(site, state, h, x_in, c).shape)
        assert shape == h.shape, f"the direction is not of each token: {shape}"
        return written


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


CHECKS = {
    "details": check_details,
    "edits": check_edits,
}
