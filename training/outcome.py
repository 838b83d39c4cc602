"""What a training step came to, on its way from the device to the program.

On a GPU the program asks once a step, and only waits for what precedes the optimizer: the optimizer's own work is
queued behind the question, so the GPU has something to do while the program reads the answer and begins the next step.
Whether the weights may change is therefore decided on the device (`optimizer.step_where`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Outcome:
    """`finite`: a bool on the device. `read()` waits, and returns (loss, gradient norm, whether to stop)."""

    finite: torch.Tensor
    read: Callable[[], tuple[float, float, bool]]


def decided_on(device: torch.device, config) -> bool:
    """Whether the device itself leaves out a step that is not finite: fused AdamW can, on whole tensors."""
    return device.type == "cuda" and config.optimizer == "adamw" and config.engine == "ddp"


def outcome(loss_sum: torch.Tensor, accumulation: int, norm: torch.Tensor, stop: bool, world) -> Outcome:
    """Of a step whose `accumulation` losses (nats per token) sum to `loss_sum` on this process.

    `norm` is the same on every process. The mean loss is over all of them, and one that wants to stop stops all.
    """
    device = norm.device
    wish = torch.tensor([float(stop)], dtype=torch.float64, pin_memory=device.type == "cuda")
    numbers = torch.cat((loss_sum.double().reshape(1), wish.to(device, non_blocking=True)))
    if world.world_size > 1:
        dist.all_reduce(numbers)
    numbers = torch.cat((numbers, norm.double().reshape(1)))
    arrived = later(numbers)

    def read():
        loss, stopping, grad_norm = arrived()
        return loss / accumulation / world.world_size, grad_norm, bool(stopping)

    return Outcome(numbers.isfinite().all(), read)


def later(numbers: torch.Tensor) -> Callable[[], list[float]]:
    """A function that returns the numbers, and on a GPU waits for them, but for nothing that is queued after them."""
    if numbers.device.type != "cuda":
        return numbers.tolist
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read():
        arrived.synchronize()
        return host.tolist()

    return read
