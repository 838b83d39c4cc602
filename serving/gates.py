"""The gate beta of every token at every site that has one, as passes are made.

That of a delta rewrite: the page's colours are its regimes, 0 keeps, 1 overwrites and 2 reflects.
"""

import contextlib

import torch
from torch import nn

from model.residual import DeltaRewrite
from training.residual_statistics import Watched


class Gates:
    """What `recorded` has seen and `take` has not yet handed out."""

    def __init__(self):
        self.seen: dict[str, list[torch.Tensor]] = {}  # site -> a (B, T) tensor for each pass

    def see(self, site, quantities: dict) -> None:
        if isinstance(site.write, DeltaRewrite):
            self.seen.setdefault(f"{site.layer} {site.name}", []).append(quantities["statistics"]["beta"])

    def take(self, tokens: int) -> list[list[float]] | None:
        """Gates of the first sequence's newest `tokens` tokens, a list of all sites' for each; None: no gated sites.

        A pass that read older tokens anew is known by its length: what was handed out before is left out.
        """
        if not self.seen:
            return None
        gates = torch.stack([torch.cat(passes, dim=1)[0, -tokens:] for passes in self.seen.values()], dim=1)
        for passes in self.seen.values():
            passes.clear()
        return gates.tolist()


@contextlib.contextmanager
def recorded(model: nn.Module):
    """A `Gates` that fills with the passes made inside, which must be of a decoder that is not compiled."""
    gates = Gates()
    with model.through(Watched(gates.see)):
        yield gates


@torch.no_grad()
def gated_sites(model: nn.Module) -> list[str]:
    """The sites whose write has a gate, in the order of a pass: `0 attn`, `0 mlp`, `1 attn`, ..."""
    with recorded(model) as gates:
        model(torch.zeros(1, 1, dtype=torch.int64, device=model.rope_cos.device))
    return list(gates.seen)
