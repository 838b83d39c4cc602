"""Statistics of the residual stream of a model over the tokens of one forward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import nn

from model.block import Site, State, Stream, get_past


class SiteWrite(NamedTuple):
    """What a site wrote to the residual state in a forward pass."""

    h: torch.Tensor  # the sublayer's output, (B, T, d)
    c: torch.Tensor  # the sublayer's normalized input, (B, T, d)
    state: State  # the new state, a tensor or a tuple of tensors (B, T, ...)
    statistics: dict[str, torch.Tensor]  # what the write reports of each token, (B, T)


class ObservedStream(Stream):
    """A residual stream that reports every write, to be used in `GPT.through`.

    Operations run one at a time, without the fused kernels, which do not store every state.
    """

    def __init__(self, on_write: Callable[[Site, SiteWrite], None]):
        """on_write: called after every write, in the order of the forward pass"""
        self.on_write = on_write

    def write(
        self,
        site: Site,
        state: State,
        h: torch.Tensor,
        x_in: torch.Tensor | tuple,
        c: torch.Tensor,
        cache: dict | None,
    ) -> State:
        """Write as `Stream.write` does, and report it."""
        written = site.write(state, h, x_in, c, get_past(cache, f"{site.name}.write"))
        # most streams have nothing to report (model/block.py, Site)
        statistics = {}
        if hasattr(site.write, "statistics"):
            statistics = site.write.statistics(state, h, x_in, c, written)
        new_state = written if site.post_write is None else site.post_write(written)
        self.on_write(site, SiteWrite(h, c, new_state, statistics))
        return new_state


@torch.no_grad()
def compute_residual_statistics(
    model: nn.Module,
    ids: torch.Tensor,
    autocast: AbstractContextManager,
    num_tokens: int | None = None,
) -> dict[str, list[float]]:
    """Compute the statistics of every write over tokens of ids (B, T).

    Args:
        num_tokens: how many come before padding, with which the last sequence ends (default: all)

    Returns:
        {"<site>.<statistic>": [one number per block, first block first]}. `state_rms` is the root
        mean square of the state after the write; each statistic that the write reports has a `_mean`
        and a `_std` over tokens.
    """
    statistics: dict[str, list[float]] = {}

    # The numbers are computed within the pass, because the states of all sites together may not fit
    # in memory.
    def on_write(site: Site, write: SiteWrite) -> None:
        values = {"state_rms": root_mean_square(write.state, num_tokens)}
        for name, by_token in write.statistics.items():
            numbers = by_token.float().flatten()[:num_tokens]
            values[f"{name}_mean"] = numbers.mean()
            values[f"{name}_std"] = numbers.std()
        # blocks come in order, so each list has one number per block
        for name, value in values.items():
            statistics.setdefault(f"{site.name}.{name}", []).append(float(value))

    # With FSDP the blocks are compiled in place. Tracing one with `on_write` fails, after which
    # torch.compile would never compile whole blocks again.
    stance = torch.compiler.set_stance("force_eager")
    with stance, autocast, model.through(ObservedStream(on_write)):
        model(ids)
    return statistics


def root_mean_square(state: State, num_tokens: int | None) -> torch.Tensor:
    """Return the root mean square of a state, a tensor or a tuple of tensors, of the first tokens."""
    tensors = state if isinstance(state, tuple) else (state,)
    # float32, because the squares of a bfloat16 state would be rounded
    numbers = torch.cat([tensor.float().flatten(0, 1)[:num_tokens].flatten() for tensor in tensors])
    return numbers.square().mean().sqrt()
