"""Call train.py, and read what a run has written."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from helpers import one_line_error, write_checksums
from in_process import call

from data import tokenizer
from training import checkpoint, metrics

TIMINGS = ("seconds", "tokens_per_second", "memory")


def run_train(*arguments, exit_code: int = 0) -> str:
    """Run train.py in this process, expect an exit code, and return what it prints."""
    result = call("train.py", *arguments)
    assert result.returncode == exit_code, result.stderr.decode()
    return result.stdout.decode() + result.stderr.decode()


def training_error(*arguments) -> str:
    """Run train.py in this process, and return the one line of its error."""
    return one_line_error(call("train.py", *arguments))


def read_weights(
    run: Path, step: int | None = None, file: str = "model.safetensors"
) -> dict[str, torch.Tensor]:
    """Read a file of the checkpoint of a step, by default of the newest one."""
    folder = checkpoint.find(run)
    if step is not None:
        folder = folder.with_name(f"step_{step:08d}")
    return checkpoint.load_tensors(folder / file)


def read_state(run: Path) -> dict:
    """Read state.json of the newest checkpoint."""
    return checkpoint.read_state(checkpoint.find(run))


def read_records(run: Path) -> list[dict]:
    """Read a run's metrics, without those that depend on the clock."""
    return [
        {key: value for key, value in record.items() if key not in TIMINGS}
        for record in metrics.read(run / "metrics.jsonl")
    ]


def read_final_tensors(run: Path) -> dict[str, bytes]:
    """Read the bytes of every tensor of the newest checkpoint."""
    folder = checkpoint.find(run)
    return {
        f"{file.relative_to(folder)} {name}": tensor.numpy().tobytes()
        for file in folder.rglob("*.safetensors")
        for name, tensor in checkpoint.load_tensors(file).items()
    }


def write_checkpoint(
    run: Path, step: int, tensors_by_file: dict[str, dict[str, torch.Tensor]], model: str, **keys
) -> Path:
    """Write the checkpoint of a step of a model with these keys, as of a run with byte tokens."""
    state = {
        "step": step,
        "seconds": 1.0,
        "model": model,
        "model_config": keys,
        "run_config": {},
        "corpus": {},
    }
    return checkpoint.save(run, tensors_by_file, state, tokenizer.byte_tokenizer().to_json())


# a learning rate that does not depend on max_steps, so that a run may end in several parts
CONSTANT_RATE = {"schedule": "wsd", "decay_steps": 0, "eval_full": False, "resume": "auto"}


def completed_steps(run: Path) -> list[int]:
    """Return the steps that a run has logged so far."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [record["step"] for record in metrics.read(path) if "loss" in record]


def change_saved_state(run: Path, change: Callable[[dict], object]) -> None:
    """Apply change to the state.json of the latest checkpoint, and sign the checkpoint again."""
    folder = checkpoint.find(run)
    state = json.loads((folder / "state.json").read_text())
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    write_checksums(folder)
