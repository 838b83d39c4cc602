"""Averaged weights (`ema_half_life`): an exponential moving average of the trained weights.

After each step that was taken,

    average <- average + (1 - 2^(-1 / half_life)) (weight - average)

so that the weights of a step count half as much half_life steps later. Averages start as a copy of the
weights, without a correction of that start: after n half-lives, the initial weights count 2^-n.
A checkpoint holds them as a folder of its own, `step_00001000/ema/`, which sample.py, eval.py,
export.py and `--init_from` read like any other checkpoint.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from training.optimizer import copy_like


class AveragedWeights:
    """The averages of a model's parameters, in float32, sharded as these are.

    Args:
        model: on its device; a tied parameter is averaged once
        half_life: in steps
        saved: complete averages by parameter name; None to start from the weights of the model
    """

    def __init__(
        self, model: nn.Module, half_life: int, saved: dict[str, torch.Tensor] | None = None
    ):
        self.model = model
        self.new_fraction = 1 - 2 ** (-1 / half_life)
        parameters = dict(model.named_parameters())
        self.weights = [get_local(parameter) for parameter in parameters.values()]
        self.averages = [weight.detach().clone() for weight in self.weights]
        for average, (name, parameter) in zip(self.averages, parameters.items()):
            if saved is not None:
                average.copy_(get_local(copy_like(saved[name], parameter)))

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights, after a step that was taken."""
        torch._foreach_lerp_(self.averages, self.weights, weight=self.new_fraction)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Give the model the averages within the context, and afterwards its own weights again."""
        self.swap()
        try:
            yield
        finally:
            self.swap()

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages in place, so that CUDA graphs find them where they were."""
        # FSDP does not gather again what it still has from the last forward pass
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        # one at a time, because the device may not have room for another copy of the model
        for weight, average in zip(self.weights, self.averages):
            trained_weight = weight.clone()
            weight.copy_(average)
            average.copy_(trained_weight)


def get_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or this rank's shard of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
