"""What analyses look at of a residual stream, as the contract of tests/contract.py holds the rest of it."""

import torch
from contract import EXACT, sites_of, tiny, tokens

from model.block import Stream
from research.analysis import edits, gates, parts


def check_details(cls) -> None:
    """Details and directions are of each token, shares of statistics, and none changes what the model computes."""
    model, ids, found = tiny(cls), tokens(2, 8), {}
    wanted = model(ids)[0]
    with model.through(gates.Audit(found, model.transformer.wte(ids))), torch.no_grad():
        assert torch.equal(model(ids)[0], wanted), "a detail changes what the model computes"
    for site in sites_of(model):
        intervals = parts.get_intervals(site.write)
        assert set(intervals) <= found[site.layer, site.name].numbers.keys(), (
            f"shares of no statistic: {intervals}"
        )
        assert all(low < high for each in intervals.values() for low, high in each.values()), (
            f"empty: {intervals}"
        )
    with model.through(Shapes()), torch.no_grad():
        model(ids)


class Shapes(Stream):
    """Every step by itself; what details and directions are of each site has a number, vector or matrix a token."""

    def write(self, site, state, h, c, x_in, cache):
        written, loss = super().write(site, state, h, c, x_in, cache)
        for name, value in gates.collect_from_parts(site, state, h, x_in, c, written).items():
            assert value.shape[:2] == h.shape[:2], (
                f"{name} is not of each token: {tuple(value.shape)}"
            )
            assert value.isfinite().all(), f"{name} is not finite"
        shape = gates.get_direction(site, state, h, x_in, c).shape
        assert shape == h.shape, f"along() is no direction for each token: {tuple(shape)}"
        return written, loss


def check_edits(cls) -> None:
    """Every edit changes the loss at its own site; parameters and the unedited loss stay as they are."""
    model, ids = tiny(cls), tokens(2, 8)
    before, parameters = model(ids, ids)[1], [p.clone() for p in model.parameters()]
    states = edits.record_block_inputs(model, ids)
    base = edits.measure_losses_from(model, states[0], 0, ids, {})
    assert abs(base.mean() - before) < 1e-9, "from the first block on it computes another loss"
    for site in sites_of(model):
        named = edits.list_edits(site)
        assert len({edit.name for edit in named}) == len(named), f"two edits of one name: {named}"
        for edit in named:
            chosen = {(site.layer, site.name): edit}
            found = edits.measure_losses_from(model, states[site.layer], site.layer, ids, chosen)
            assert found.isfinite().all(), f"{edit.name} gives a loss that is not finite"
            # An exact mix does nothing to the first site's streams, all alike, nor to the last sum.
            exact = getattr(site.read, "kind", "sinkhorn") != "sinkhorn" and edit.name == "mix=I"
            if exact and site in (sites_of(model)[0], sites_of(model)[-1]):
                continue
            assert (found - base).abs().max() > 1e-12, (
                f"{edit.name} of block {site.layer} {site.name} changes nothing"
            )
    assert torch.equal(model(ids, ids)[1], before), "after its edits the model has another loss"
    assert all(map(torch.equal, parameters, model.parameters())), "an edit changes a parameter"


class Shortcuts(Stream):
    """Keeps, of every write that says it, the shortcut as a matrix, and how the write answers to changes of the state
    with all else that it is given fixed."""

    def __init__(self):
        self.found = []

    def write(self, site, state, h, c, x_in, cache):
        if (shortcut := parts.find_entry(parts.SHORTCUTS, site.write)) and site.post_write is None:
            assert torch.is_tensor(state), "a tuple of tensors has no shortcut"
            change = torch.randn(
                state.shape, generator=torch.Generator().manual_seed(3), dtype=state.dtype
            )
            written = [site.write(state + times * change, h, x_in, c) for times in range(3)]
            found = shortcut(site.write, state, h, x_in, c)
            self.found.append(
                (
                    found.axis,
                    found.dense(),
                    change,
                    written[1] - written[0],
                    written[2] - written[1],
                )
            )
        return super().write(site, state, h, c, x_in, cache)


def check_shortcut(cls) -> None:
    """What a write says to do to the state is what it does, where its gates do not look at the state."""
    model, ids, stream = tiny(cls), tokens(2, 8), Shortcuts()
    wanted = model(ids)[0]
    with torch.no_grad(), model.through(stream):
        assert torch.equal(model(ids)[0], wanted), "a shortcut changes what the model computes"
    for axis, matrix, change, first, second in stream.found:
        assert matrix.isfinite().all(), "a shortcut is not finite"
        if torch.allclose(first, second, **EXACT):  # the write is affine in the state
            columns = (
                change.movedim(axis, -1).flatten(2, -2) if change.ndim > 3 else change.unsqueeze(2)
            )
            expected = first.movedim(axis, -1).reshape(columns.shape)
            message = "its shortcut is not what the write does to the state"
            assert torch.allclose(columns @ matrix.mT, expected, **EXACT), message


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}
