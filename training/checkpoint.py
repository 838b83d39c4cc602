"""Checkpoints without pickle: safetensors and JSON in a folder that is complete or absent.

`<run>/checkpoints/step_00001000/` holds model.safetensors, optimizer.safetensors, state.json (step,
configuration, counters), tokenizer.json, and SHA256SUMS of these, as `sha256sum -c` reads it. It is
written under another name and renamed. Where a step is saved again, the older one stays as
`step_00001000.old` until the new one is in its place. Tensors are whole, whatever the number of
processes and the engine that made them.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file, save_file

import configurator
from data import tokenizer
from model import STEMS, model_class, released
from model import weights as weight_files
from model.keys import values_before
from model.parameters import aliases

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json")
SUMS = "SHA256SUMS"


def save(run: Path, weights: dict, moments: dict, state: dict, tokenizer_json: dict) -> Path:
    """Write the checkpoint of `state["step"]` below the run folder and return its path.

    OSError: the disk is full, for example; then nothing of it is left, and what was there stays.
    """
    final = run / "checkpoints" / f"step_{state['step']:08d}"
    for left in run.glob("checkpoints/*.tmp"):  # of a save that was killed
        shutil.rmtree(left, ignore_errors=True)
    temporary, old = (final.with_name(final.name + end) for end in (".tmp", ".old"))
    try:
        temporary.mkdir(parents=True)
        write_tensors(temporary / "model.safetensors", weights)
        write_tensors(temporary / "optimizer.safetensors", moments)
        (temporary / "tokenizer.json").write_text(json.dumps(tokenizer_json), encoding="utf-8")
        (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        (temporary / SUMS).write_text(sums_of(temporary), encoding="utf-8")
        for file in temporary.iterdir():
            sync(file)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.replace(old)
        temporary.replace(final)
        sync(final.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def write_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file. OSError: it cannot be written."""
    contiguous = {key: value.contiguous() for key, value in tensors.items()}
    try:
        save_file(contiguous, file, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:  # its name for what the system says of a write
        raise OSError(str(error)) from error
    mask = os.umask(0)  # it can be read by setting it alone
    os.umask(mask)
    file.chmod(0o666 & ~mask)  # the library keeps it from others' eyes


def weights_of(model) -> dict[str, torch.Tensor]:
    """The model's tensors by name, each once."""
    again = aliases(model)
    return {name: value for name, value in model.state_dict().items() if name not in again}


def sums_of(checkpoint: Path) -> str:
    """What SHA256SUMS must hold: hash and name of every other file."""
    lines = []
    for name in FILES:
        with open(checkpoint / name, "rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return "".join(lines)


def verify(checkpoint: Path) -> None:
    """ValueError: a file is missing, or not byte for byte what was saved."""
    try:
        stored, sums = (checkpoint / SUMS).read_bytes(), sums_of(checkpoint).encode()
    except OSError as error:
        name = Path(error.filename or "a file").name
        what = f"{name} is missing or unreadable ({error.strerror})"
        raise ValueError(f"{checkpoint} is damaged: {what}") from error
    if stored != sums:
        lines = stored.split(b"\n")
        name = next((n for n, line in zip(FILES, sums.split(b"\n")) if line not in lines), SUMS)
        raise ValueError(f"{checkpoint} is damaged: {name} is not as it was saved")


def sync(path: Path) -> None:
    """fsync a file or folder: after a power cut the rename must not outlive the data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def all_of(run: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    by_step = {}
    # step_1.old comes before step_1, and counts where that, which should replace it, is missing.
    for path in sorted(run.glob("checkpoints/step_*"), reverse=True):
        if (match := re.fullmatch(r"step_(\d+)(\.old)?", path.name)) and path.is_dir():
            by_step[int(match[1])] = path
    return [by_step[step] for step in sorted(by_step)]


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(re.match(r"step_(\d+)", checkpoint.name)[1])


def newest(run: Path) -> Path | None:
    """The newest checkpoint that is whole, None without any; damaged ones are reported."""
    for path in reversed(all_of(run)):
        try:
            verify(path)
            return path
        except ValueError as error:
            print(f"warning: {error}: taking the one before", file=sys.stderr)
    return None


def remove_old(run: Path, keep_last: int, keep_every: int = 0) -> None:
    """Keep the last checkpoints, and those whose step is a multiple of keep_every."""
    for path in all_of(run)[:-keep_last]:
        if not keep_every or step_of(path) % keep_every:
            hidden = path.with_name(path.name + ".gone.tmp")  # none is ever seen in part
            try:
                path.replace(hidden)
                shutil.rmtree(hidden)
            except OSError as error:
                print(f"warning: {path} cannot be removed ({error})", file=sys.stderr)


def set_aside(run: Path, begin: Path | None) -> None:
    """Rename damaged checkpoints past `begin`, so that they do not count among those to keep."""
    for path in reversed(all_of(run)):
        if begin is None or path.resolve() == begin.resolve():
            return
        path.replace(path.with_name(f"damaged_{path.name}"))


def find(path: str | Path) -> Path:
    """The checkpoint that a run folder (its newest whole one) or a checkpoint folder names.

    ValueError: there is none.
    """
    path = Path(path)
    if (path / "state.json").is_file() or (path / SUMS).is_file():
        verify(path)
        return path
    if whole := newest(path):
        return whole
    whole = "whole " if all_of(path) else ""
    fix = "give a run folder made by train.py, one of its checkpoints/step_*, or an exported folder"
    raise ValueError(f"{path} holds no {whole}checkpoint: {fix}")


def read_state(checkpoint: Path) -> dict:
    """state.json; a model key that is newer than it has the value that it then had.

    ValueError: missing or damaged.
    """
    state = configurator.read_json(checkpoint / "state.json")
    kinds = {"corpus": dict, "model": str, "model_config": dict, "run_config": dict, "step": int}
    for key, kind in kinds.items():
        if not isinstance(state.get(key), kind):
            what = f"state.json is damaged: {key} is not {kind.__name__}"
            raise ValueError(f"{checkpoint}: {what}; take another checkpoint")
    if (stem := state["model"]) in STEMS:
        before = values_before(model_class(stem).Config)
        state["model_config"] = {**before, **state["model_config"]}
    return state


def load_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, on the CPU. ValueError: missing or damaged."""
    try:
        return load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        fix = "take another checkpoint"
        raise ValueError(f"{file} is missing or damaged; {fix} ({error})") from error


def is_folder_of_weights(path: Path) -> bool:
    """Whether it is an exported or released folder, not a run or checkpoint of ours."""
    return (path / "config.json").is_file() and not (path / "state.json").is_file()


def described(path: Path) -> tuple[Path, str, dict, dict]:
    """(folder of the weights, stem, model keys, state.json or {}).

    path: a run, checkpoint, exported or released folder. ValueError: it is none, or damaged.
    """
    if is_folder_of_weights(path):
        return path, *released.describe(path), {}
    folder = find(path)
    state = read_state(folder)
    return folder, state["model"], state["model_config"], state


def load_model(path: str | Path, device: torch.device | str):
    """(model in evaluation mode, tokenizer, state) of any folder that `described` takes.

    state: state.json; without one its `model` and `model_config` alone. ValueError: damaged,
    hostile, or not fitting.
    """
    folder, stem, config, state = described(Path(path))
    description = tokenizer.describe(folder)
    model = weight_files.read_model(folder, stem, config, released.fold)
    if (size := tokenizer.size_of(description)) > model.config.vocab_size:
        vocab_size = f"its model vocab_size={model.config.vocab_size}"
        raise ValueError(f"{folder}: its tokenizer has {size} tokens, {vocab_size}")
    state = {"model": stem, "model_config": config, **state}
    return model.to(device), tokenizer.from_json(description), state
