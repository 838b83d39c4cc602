"""Checkpoints without pickle: safetensors and JSON in a folder that is complete or absent.

`<run>/checkpoints/step_00001000/` holds model.safetensors, optimizer.safetensors, state.json (step, configuration,
counters) and tokenizer.json. It is written under another name and renamed.
"""

import json
import os
import shutil
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file, save_file

from data import tokenizer
from model import build

TIED = "lm_head.weight"  # the same tensor as the embedding; stored once


def save(run: Path, model, optimizer_state: dict, state: dict, tokenizer_json: dict) -> Path:
    """Write the checkpoint of `state["step"]` below the run folder and return its path."""
    final = run / "checkpoints" / f"step_{state['step']:08d}"
    temporary = final.with_name(final.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    weights = {name: value.contiguous() for name, value in model.state_dict().items() if name != TIED}
    save_file(weights, temporary / "model.safetensors")
    save_file(
        {name: value.contiguous() for name, value in optimizer_state.items()},
        temporary / "optimizer.safetensors",
    )
    (temporary / "tokenizer.json").write_text(json.dumps(tokenizer_json), encoding="utf-8")
    (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    for file in temporary.iterdir():
        sync(file)
    shutil.rmtree(final, ignore_errors=True)
    temporary.replace(final)
    sync(final.parent)
    return final


def sync(path: Path) -> None:
    """fsync a file or folder: after a power cut the rename must not outlive the data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def all_of(run: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted(path for path in run.glob("checkpoints/step_*") if path.suffix != ".tmp")


def remove_old(run: Path, keep_last: int) -> None:
    for path in all_of(run)[:-keep_last]:
        shutil.rmtree(path)


def find(path: str | Path) -> Path:
    """The checkpoint that a run folder (its newest) or a checkpoint folder names. ValueError: none there."""
    path = Path(path)
    if (path / "state.json").is_file():
        return path
    if found := all_of(path):
        return found[-1]
    raise ValueError(
        f"{path} holds no checkpoint: give a run folder made by train.py, or one of its checkpoints/step_*"
    )


def read_state(checkpoint: Path) -> dict:
    """state.json. ValueError: missing or damaged."""
    try:
        state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{checkpoint}: state.json is missing or damaged; take another checkpoint") from error
    missing = {"step", "seconds", "model", "model_config", "run_config", "corpus"} - set(state)
    if missing:
        raise ValueError(f"{checkpoint}: state.json is damaged, {min(missing)} is gone; take another checkpoint")
    return state


def load_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, on the CPU. ValueError: missing or damaged."""
    try:
        return load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{file} is missing or damaged; take another checkpoint ({error})") from error


def load_weights(model, checkpoint: Path) -> None:
    """Fill the model from model.safetensors. ValueError: damaged, or of another model."""
    weights = load_tensors(checkpoint / "model.safetensors")
    expected = {name: value.shape for name, value in model.state_dict().items() if name != TIED}
    found = {name: value.shape for name, value in weights.items()}
    if found != expected:
        name = min(dict(found.items() ^ expected.items()))
        raise ValueError(
            f"{checkpoint} does not fit the model: {name} is {found.get(name)}, needed {expected.get(name)}"
        )
    model.load_state_dict(weights, strict=False)  # only the tied copy is missing


def load_model(path: str | Path, device: torch.device | str):
    """(model in evaluation mode, tokenizer, state.json) of a run or checkpoint folder, for sampling and evaluation."""
    checkpoint = find(path)
    state = read_state(checkpoint)
    model = build(state["model"], **state["model_config"])
    load_weights(model, checkpoint)
    encoding = tokenizer.from_json(tokenizer.describe(checkpoint))
    return model.to(device).eval(), encoding, state
