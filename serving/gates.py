"""The gate beta of every token at every site of a delta-rewrite model, as its passes are made."""

import contextlib

import torch
from torch import nn

from model.residual import DeltaRewrite


def gated_sites(model: nn.Module) -> dict[str, DeltaRewrite]:
    """The writes that have a gate, in the order of a pass, by name: `0 attn`, `0 mlp`, `1 attn`, ..."""
    return {
        f"{index} {name.removeprefix('ddl_')}": module
        for index, block in enumerate(model.transformer.h)
        for name, module in block.named_modules()
        if isinstance(module, DeltaRewrite)
    }


class Gates:
    """What `recorded` has seen and `take` has not yet handed out."""

    def __init__(self, sites: int):
        self.seen: list[list[torch.Tensor]] = [[] for _ in range(sites)]  # per site, a (B, T) tensor for each pass

    def take(self, tokens: int) -> list[list[float]] | None:
        """Gates of the first sequence's newest `tokens` tokens, a list of all sites' for each; None: no gated sites.

        A pass that read older tokens anew is known by its length: what was handed out before is left out.
        """
        if not self.seen:
            return None
        gates = torch.stack([torch.cat(passes, dim=1)[0, -tokens:] for passes in self.seen], dim=1)
        for passes in self.seen:
            passes.clear()
        return gates.tolist()


@contextlib.contextmanager
def recorded(model: nn.Module):
    """A `Gates` that fills with the passes made inside, which must be of a decoder that is not compiled.

    Streams take their steps one by one meanwhile (`plain_stream`): where they are fused there is no write to look at.
    """
    sites = gated_sites(model)
    gates = Gates(len(sites))

    def after_write(passes):
        def hook(module, inputs, _state):
            passes.append(module.gate(inputs[3]).squeeze(-1))  # of the normed input c, as the write had it

        return hook

    with contextlib.ExitStack() as stack:
        stack.enter_context(model.plain_stream())
        for module, passes in zip(sites.values(), gates.seen):
            stack.callback(module.register_forward_hook(after_write(passes)).remove)
        yield gates
