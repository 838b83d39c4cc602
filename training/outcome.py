"""What a training step came to, on its way from the device to the program, and the diagnosis of one not finite.

On a GPU the program asks once a step, and only waits for what precedes the optimizer: the optimizer's own work is
queued behind the question, so the GPU has something to do while the program reads the answer and begins the next step.
Whether the weights may change is therefore decided on the device (`optimizer.step_where`).
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from training import distributed


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


def diagnose(step: int, loss: float, grad_norm: float, model, optimizers, batches, world) -> dict:
    """Step, loss, gradient norm, the parameters with non-finite gradients by optimizer group, and the batch.

    `sequences` are the numbers of the batch's first and last sequence in the run, `starts` the positions of the
    sequences' first tokens in the training split.
    """
    bad = set(distributed.non_finite_gradients(model, world))
    groups = [group for each in optimizers for group in each.param_groups]
    numbers = np.arange((step - 1) * batches.global_batch_size, step * batches.global_batch_size)
    return {
        "step": step,
        "loss": str(loss),
        "grad_norm": str(grad_norm),
        "groups": [
            {
                "weight_decay": group["weight_decay"],
                "lr": group["lr"],
                "parameters": [name for name in group["names"] if name in bad],
                "of": len(group["names"]),
            }
            for group in groups
        ],
        "sequences": [int(numbers[0]), int(numbers[-1])],
        "starts": batches.starts(numbers).tolist(),
    }


def message(diagnosis: dict, folder: Path, saved: bool) -> str:
    """One line; the whole diagnosis goes to diagnosis.json, beside the state before the step where that is saved."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "diagnosis.json").write_text(json.dumps(diagnosis, indent=1) + "\n", encoding="utf-8")
        kept = f"{folder} has {'the state before the step and ' if saved else ''}diagnosis.json"
    except OSError as error:
        kept = f"{folder} cannot be written ({error})"
    names = [name for group in diagnosis["groups"] for name in group["parameters"]]
    where = (
        f"the gradients of {len(names)} parameters are not finite, first {names[0]}"
        if names
        else "gradients are finite"
    )
    first, last = diagnosis["sequences"]
    return (
        f"step {diagnosis['step']}: loss {diagnosis['loss']}, gradient norm {diagnosis['grad_norm']}: "
        f"stopped before the optimizer step; {where}; batch: sequences {first} to {last} of the run; {kept}; "
        "try a lower learning_rate or a longer warmup_steps"
    )
