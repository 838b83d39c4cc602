"""The loss scale of float16, by the rule of torch.amp.GradScaler.

Float16 rounds a gradient below 6e-8 to 0, so the loss is multiplied by a scale before the backward
pass, and the gradients are divided by it afterwards. If they overflow, the step is skipped and the
scale halved; after GROWTH_INTERVAL steps without an overflow it is doubled.

GradScaler decides for each optimizer, and on each rank, whether it steps. Here the norm of all
gradients decides, so that all optimizers of all ranks step or none does.
"""

import torch
from torch import nn

from training.checkpoint import TrainState
from training.distributed import StepStats

GROWTH_INTERVAL = 2000
# a run ends at this many overflows with no step taken in between
MAX_OVERFLOWS = 20


class LossScaler:
    """Scales the loss of a run in float16; its state is that of the run."""

    def __init__(self, state: TrainState):
        self.state = state

    @property
    def scale(self) -> float:
        """The factor on the loss of the next step."""
        return self.state.loss_scale

    @torch.no_grad()
    def unscale_(self, model: nn.Module) -> None:
        """Divide the gradients by the scale, a power of 2, in place."""
        gradients = [
            parameter.grad for parameter in model.parameters() if parameter.grad is not None
        ]
        torch._foreach_mul_(gradients, 1 / self.scale)

    def update(self, stats: StepStats) -> None:
        """Set the scale of the next step; a step whose loss is not finite leaves it as it is."""
        state = self.state
        if stats.has_overflow():
            state.overflows += 1
            state.steps_at_loss_scale = 0
            state.loss_scale /= 2
        elif stats.is_finite():
            state.overflows = 0
            state.steps_at_loss_scale += 1
            if state.steps_at_loss_scale == GROWTH_INTERVAL:
                state.loss_scale *= 2
                state.steps_at_loss_scale = 0
