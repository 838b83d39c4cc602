"""What the residual stream of a model does, token by token, as its sites say it in a pass."""

import torch
from torch import nn

from model.block import Stream


class Watched(Stream):
    """Every step by itself; `seen(site, quantities)` is told of each write.

    quantities: h and c (B, T, d), `state` as written, `extra_loss` where the site has one, and
    under `statistics` what the write says of every token, by name (B, T).
    """

    def __init__(self, seen):
        self.seen = seen

    def write(self, site, state, h, c, x_in, cache):
        written, loss = super().write(site, state, h, c, x_in, cache)
        quantities = {"h": h, "c": c, "state": written, "extra_loss": loss, "statistics": {}}
        if hasattr(site.write, "statistics"):
            quantities["statistics"] = site.write.statistics(state, h, x_in, c, written)
        self.seen(site, quantities)
        return written, loss


@torch.no_grad()
def residual_statistics(model: nn.Module, ids: torch.Tensor, autocast) -> dict[str, list[float]]:
    """{`<site>.<statistic>`: a number per block, first block first}, over all tokens of ids (B, T).

    `state_rms` is the root mean square of the state after the site's write, `extra_loss` the site's
    own; each of the write's statistics has a `_mean` and a `_std` over tokens.
    """
    result: dict[str, list[float]] = {}

    def seen(site, quantities):
        values = {"state_rms": root_mean_square(quantities["state"])}
        for name, each in quantities["statistics"].items():
            values |= {f"{name}_mean": each.float().mean(), f"{name}_std": each.float().std()}
        if quantities["extra_loss"] is not None:
            values["extra_loss"] = quantities["extra_loss"]
        for name, value in values.items():
            result.setdefault(f"{site.name}.{name}", []).append(float(value))

    with autocast, model.through(Watched(seen)):
        model(ids)
    return result


def root_mean_square(state) -> torch.Tensor:
    """Of all numbers of a state, a tensor or a tuple of tensors."""
    parts = state if isinstance(state, tuple) else (state,)
    return torch.cat([part.float().flatten() for part in parts]).square().mean().sqrt()
