"""What to say of a step whose loss or gradient is no number."""

import json
from pathlib import Path

import numpy as np

from training import parallel


def diagnose(step: int, loss: float, grad_norm: float, model, optimizers, batches, world) -> dict:
    """Step, loss, gradient norm, the parameters with non-finite gradients by optimizer group, and the batch's place.

    `sequences` are the numbers of the batch's sequences in the run, `starts` their first tokens in the training split.
    """
    bad = set(parallel.non_finite_gradients(model, world))
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


def message(found: dict, folder: Path, saved: bool) -> str:
    """One line; the whole diagnosis goes to diagnosis.json, beside the state before the step where that is saved."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "diagnosis.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        kept = f"{folder} has {'the state before the step and ' if saved else ''}diagnosis.json"
    except OSError as error:
        kept = f"{folder} cannot be written ({error})"
    names = [name for group in found["groups"] for name in group["parameters"]]
    where = (
        f"the gradients of {len(names)} parameters are no numbers, first {names[0]}"
        if names
        else "gradients are finite"
    )
    return (
        f"step {found['step']}: loss {found['loss']}, gradient norm {found['grad_norm']}: stopped before the optimizer "
        f"step; {where}; batch: sequences {found['sequences'][0]} to {found['sequences'][1]} of the run; {kept}; "
        "try a lower learning_rate or a longer warmup_steps"
    )
