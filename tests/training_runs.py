"""What a run has written."""

import json
from collections.abc import Callable
from pathlib import Path

from helpers import write_checksums

from training import checkpoint, metrics

TIMINGS = ("seconds", "tokens_per_second", "memory")


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
