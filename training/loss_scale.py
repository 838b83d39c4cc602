"""Which steps are taken, and the loss scale of float16, by the rule of torch.amp.GradScaler.

Float16 rounds a gradient below 6e-8 to 0, so the loss is multiplied by a scale before the backward
pass, and the gradients are divided by it afterwards. If they overflow, the step is skipped and the
scale halved; after GROWTH_INTERVAL steps without an overflow it is doubled.

GradScaler decides for each optimizer whether it steps. Here the norm of all gradients decides, which
every rank knows, so that all optimizers of all ranks step or none does.
"""

import enum

import torch
from torch import nn

from training.checkpoint import TrainState
from training.config import TrainConfig
from training.distributed import StepStats

GROWTH_INTERVAL = 2000
# a run ends at this many overflows with no step taken in between
MAX_OVERFLOWS = 20


class Outcome(enum.Enum):
    """What became of a step."""

    TAKEN = "taken"
    SKIPPED = "skipped"  # its loss or gradient is not finite
    OVERFLOWED = "overflowed"  # its gradient is too large for float16, so it is skipped, too
    FAILED = "failed"  # it is not finite, and skip_nonfinite is used up
    TOO_MANY_OVERFLOWS = "too many overflows"

    @property
    def ends_run(self) -> bool:
        return self in (Outcome.FAILED, Outcome.TOO_MANY_OVERFLOWS)


class LossScaler:
    """Decides which steps are taken, and scales the loss of float16.

    In other dtypes the scale is 1, and never changes.
    """

    def __init__(self, state: TrainState, config: TrainConfig, compute_dtype: torch.dtype):
        self.state = state
        self.skip_nonfinite = config.skip_nonfinite
        self.is_float16 = compute_dtype == torch.float16

    @property
    def scale(self) -> float:
        """The factor on the loss of the next step."""
        return self.state.loss_scale if self.is_float16 else 1.0

    @torch.no_grad()
    def unscale_(self, model: nn.Module) -> None:
        """Divide the gradients by the scale, a power of 2, in place."""
        if not self.is_float16:
            return
        gradients = [
            parameter.grad for parameter in model.parameters() if parameter.grad is not None
        ]
        torch._foreach_mul_(gradients, 1 / self.scale)

    def judge(self, stats: StepStats) -> Outcome:
        """Return what becomes of a step, without counting it."""
        if self.is_float16 and stats.has_overflow():
            # float16 skips steps until the scale is small enough
            is_last = self.state.overflows + 1 == MAX_OVERFLOWS
            return Outcome.TOO_MANY_OVERFLOWS if is_last else Outcome.OVERFLOWED
        if stats.is_finite():
            return Outcome.TAKEN
        may_skip = self.state.skipped < self.skip_nonfinite
        return Outcome.SKIPPED if may_skip else Outcome.FAILED

    def update(self, outcome: Outcome) -> None:
        """Count a step that was taken or skipped, and set the scale of the next one."""
        state = self.state
        if outcome is Outcome.SKIPPED:
            state.skipped += 1
        elif outcome is Outcome.OVERFLOWED:
            state.loss_scale /= 2
            state.steps_at_loss_scale = 0
            state.overflows += 1
        elif self.is_float16:
            state.overflows = 0
            state.steps_at_loss_scale += 1
            if state.steps_at_loss_scale == GROWTH_INTERVAL:
                state.loss_scale *= 2
                state.steps_at_loss_scale = 0
