"""The loss scale of float16, by the rule of torch.amp.GradScaler.

Float16 rounds a gradient below 6e-8 to 0, so the loss is multiplied by a scale before the backward
pass, and the gradients are divided by it afterwards. If they overflow, the step is skipped and the
scale halved; after GROWTH_INTERVAL steps without an overflow it is doubled.

GradScaler decides for each optimizer whether it steps. Here the norm of all gradients decides, which
every rank knows, so that all optimizers of all ranks step or none does.
"""

import torch
from torch import nn

from training.checkpoint import TrainState

GROWTH_INTERVAL = 2000
# a run ends at this many skipped steps in a row, in which the scale falls to a millionth
MAX_OVERFLOWS = 20


@torch.no_grad()
def unscale_gradients(model: nn.Module, loss_scale: float) -> None:
    """Divide the gradients by the loss scale, a power of 2, in place."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    torch._foreach_mul_(gradients, 1 / loss_scale)


def update_loss_scale(state: TrainState, has_overflow: bool) -> None:
    """Set the loss scale of the next step, after a step that was taken or overflowed."""
    if has_overflow:
        state.loss_scale /= 2
        state.steps_at_loss_scale = 0
        state.overflows += 1
        return
    state.overflows = 0
    state.steps_at_loss_scale += 1
    if state.steps_at_loss_scale == GROWTH_INTERVAL:
        state.loss_scale *= 2
        state.steps_at_loss_scale = 0
