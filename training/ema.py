"""Averaged weights (`ema_half_life`): an exponential moving average of the trained weights.

After each step that was taken,

    average <- average + (1 - 2^(-1 / half_life)) (weight - average)

so that the weights of a step count half as much half_life steps later. Averages start as a copy of the
weights, as those of timm and diffusers do, and without a correction of that start: after n half-lives,
the initial weights count 2^-n.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from training import checkpoint
from training.config import TrainConfig
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
        self.parameters = dict(model.named_parameters())
        self.averages = {}
        for name, parameter in self.parameters.items():
            if saved is None:
                self.averages[name] = parameter.detach().clone()
            else:
                self.averages[name] = copy_like(saved[name], parameter)

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the weights, after a step that was taken."""
        torch._foreach_lerp_(
            get_local_tensors(self.averages),
            get_local_tensors(self.parameters),
            weight=self.new_fraction,
        )

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
        weights = get_local_tensors(self.parameters)
        # one at a time, because the device may not have room for another copy of the model
        for weight, average in zip(weights, get_local_tensors(self.averages)):
            trained_weight = weight.clone()
            weight.copy_(average)
            average.copy_(trained_weight)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return what a checkpoint stores: the averages, and the model's buffers if it has any."""
        return {**checkpoint.get_model_tensors(self.model), **self.averages}


def get_local_tensors(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors, or this rank's shards of them."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]


def start_averages(
    model: nn.Module, config: TrainConfig, resume_checkpoint: Path | None
) -> AveragedWeights | None:
    """Return the averages of a run, None without ema_half_life.

    They continue those of the checkpoint that is resumed. If it has none, because the key was set later,
    they start from its weights.
    """
    if config.ema_half_life is None:
        return None
    saved = None
    if resume_checkpoint is not None and (resume_checkpoint / checkpoint.EMA_FILE).exists():
        saved = checkpoint.load_tensors(resume_checkpoint / checkpoint.EMA_FILE)
    return AveragedWeights(model, config.ema_half_life, saved)
