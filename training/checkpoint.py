"""Checkpoints: safetensors and JSON, without pickle, in a folder that is complete or absent.

`<run>/checkpoints/step_00001000/` holds

    model.safetensors       the weights
    optimizer.safetensors   the optimizer's state by parameter name
    state.json              step, counters, all settings, the identity of the corpus
    tokenizer.json          the tokenizer, so that sampling does not need the corpus
    SHA256SUMS              checksums of these files, as `sha256sum -c` reads them

The folder is written under a temporary name and then renamed. If a step is saved again, the older
folder stays as `step_00001000.old` until the new one is in its place. Tensors are stored in full,
whatever the number of ranks and the engine that trained them.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from data import tokenizer
from huggingface import released
from model import MODEL_NAMES, model_class
from model import weights as weight_files
from model.gpt import GPT
from model.options import collect_options, legacy_defaults, rename_aliases
from model.parameters import aliases
from utils import files

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json")
CHECKSUMS = "SHA256SUMS"
STATE_TYPES = {"corpus": dict, "model": str, "model_config": dict, "run_config": dict, "step": int}


# ---- writing ----


def save(
    run_folder: Path,
    model_tensors: dict[str, torch.Tensor],
    optimizer_tensors: dict[str, torch.Tensor],
    state: dict,
    tokenizer_json: dict,
) -> Path:
    """Write the checkpoint of `state["step"]` below the run folder and return its path.

    Raises:
        OSError: it cannot be written, for example because the disk is full. Partially written files are
            removed, and earlier checkpoints stay.
    """
    final = run_folder / "checkpoints" / f"step_{state['step']:08d}"
    # a save that was killed is of no use to anybody
    for leftover in run_folder.glob("checkpoints/*.tmp"):  # of a save that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = final.with_name(f"{final.name}.tmp")
    previous = final.with_name(f"{final.name}.old")
    try:
        # everything is flushed to disk before the folder is renamed
        temporary.mkdir(parents=True)
        save_tensors(temporary / "model.safetensors", model_tensors)
        save_tensors(temporary / "optimizer.safetensors", optimizer_tensors)
        (temporary / "tokenizer.json").write_text(json.dumps(tokenizer_json), encoding="utf-8")
        (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        (temporary / CHECKSUMS).write_text(compute_checksums(temporary), encoding="utf-8")
        for file in temporary.iterdir():
            fsync(file)
        # a rename cannot replace a folder that is not empty
        fsync(temporary)
        if final.exists():
            shutil.rmtree(previous, ignore_errors=True)
            final.replace(previous)
        temporary.replace(final)
        # after a power cut the new name must not exist without the data
        fsync(final.parent)
        shutil.rmtree(previous, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def save_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file with the default file permissions.

    Raises:
        OSError: it cannot be written
    """
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, file, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:  # how the library reports an OSError
        raise OSError(str(error)) from error
    # the library makes files that only their owner can read; os.umask can only be read by setting
    # it
    umask = os.umask(0)
    os.umask(umask)
    file.chmod(0o666 & ~umask)


def get_model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model by name; tied ones once, under their first name."""
    # safetensors refuses tensors that share memory
    tied_names = aliases(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied_names}


def fsync(path: Path) -> None:
    """Wait until the disk has a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- checksums ----


def compute_checksums(checkpoint: Path) -> str:
    """Return the contents of SHA256SUMS: a line with hash and name for every other file."""
    lines = []
    for name in FILES:
        # in pieces, so that a checkpoint larger than the memory can be verified
        with open(checkpoint / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines.append(f"{digest}  {name}\n")
    return "".join(lines)


def verify(checkpoint: Path) -> None:
    """Raise ValueError if a file is missing, or not byte for byte what was saved."""
    try:
        stored = (checkpoint / CHECKSUMS).read_bytes().decode(errors="replace")
        computed = compute_checksums(checkpoint)
    except OSError as error:
        name = Path(error.filename or "a file").name
        raise ValueError(
            f"{checkpoint} is damaged: {name} is missing or unreadable ({error.strerror})"
        ) from error
    if stored == computed:
        return
    damaged_files = [
        name for name, line in zip(FILES, computed.splitlines()) if line not in stored.splitlines()
    ]
    name = damaged_files[0] if damaged_files else CHECKSUMS
    raise ValueError(f"{checkpoint} is damaged: the checksum of {name} does not match")


# ---- the checkpoints of a run ----


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, without verifying them."""
    by_step = {}
    for path in run_folder.glob("checkpoints/step_*"):
        match = re.fullmatch(r"step_(\d+)(\.old)?", path.name)
        if match is None or not path.is_dir():
            continue
        step = int(match[1])
        # step_1.old counts only if step_1, which was to replace it, is missing
        if step not in by_step or not path.name.endswith(".old"):
            by_step[step] = path
    return [by_step[step] for step in sorted(by_step)]


def get_step(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(re.match(r"step_(\d+)", checkpoint.name)[1])


def find_latest(run_folder: Path) -> Path | None:
    """Return the latest valid checkpoint, None without any; damaged ones are reported."""
    # latest first
    for path in reversed(list_checkpoints(run_folder)):
        try:
            verify(path)
            return path
        except ValueError as error:
            print(f"warning: {error}; using the checkpoint before it", file=sys.stderr)
    return None


def remove_old(run_folder: Path, keep_last: int, keep_every: int = 0) -> None:
    """Remove old checkpoints, except the keep_last latest ones and multiples of keep_every."""
    for path in list_checkpoints(run_folder)[:-keep_last]:
        if keep_every and get_step(path) % keep_every == 0:
            continue
        # renamed first, so that nobody ever finds a checkpoint with some files missing
        doomed = path.with_name(f"{path.name}.gone.tmp")
        try:
            path.replace(doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            print(f"warning: {path} cannot be removed ({error})", file=sys.stderr)


def rename_damaged(run_folder: Path, resume_checkpoint: Path | None) -> None:
    """Rename the checkpoints after the one that is resumed, which are damaged, to damaged_*.

    Otherwise they would count among those to keep.
    """
    for path in reversed(list_checkpoints(run_folder)):
        if resume_checkpoint is None or path.resolve() == resume_checkpoint.resolve():
            return
        target = path.with_name(f"damaged_{path.name}")
        shutil.rmtree(target, ignore_errors=True)  # the same step, damaged once before
        path.replace(target)


def find(path: str | Path) -> Path:
    """Return the checkpoint that a run folder (its latest valid one) or a checkpoint folder names.

    Raises:
        ValueError: there is none, or it is damaged
    """
    path = Path(path)
    if (path / "state.json").is_file() or (path / CHECKSUMS).is_file():
        verify(path)
        return path
    if not path.exists():
        raise ValueError(f"{path} does not exist; give a run folder made by train.py")
    latest = find_latest(path)
    if latest is not None:
        return latest
    kind = "valid checkpoint" if list_checkpoints(path) else "checkpoint"
    raise ValueError(
        f"{path} holds no {kind}; give a run folder made by train.py, one of its "
        "checkpoints/step_*, or an exported folder"
    )


# ---- reading ----


def read_state(checkpoint: Path) -> dict:
    """Return state.json.

    Keys of the model that were added after the checkpoint was saved get the value that reproduces
    its behavior.

    Raises:
        ValueError: the file is missing or damaged
    """
    state = files.read_json(checkpoint / "state.json")
    for key, expected_type in STATE_TYPES.items():
        if not isinstance(state.get(key), expected_type):
            raise ValueError(
                f"{checkpoint}: state.json is damaged: {key} is not {expected_type.__name__}; "
                "use another checkpoint"
            )
    # a variant whose file is gone can still be reported on
    if state["model"] in MODEL_NAMES:
        config_class = model_class(state["model"]).Config
        state["model_config"] = {
            **legacy_defaults(config_class),
            **rename_aliases(state["model_config"], collect_options(config_class)),
        }
    return state


def load_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file, on the CPU.

    Raises:
        ValueError: the file is missing or damaged
    """
    try:
        return load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(
            f"{file} is missing or damaged ({error}); use another checkpoint"
        ) from error


class ModelFolder(NamedTuple):
    """A folder that weights can be read from, and what it says of its model."""

    path: Path
    model: str  # name of the variant
    config: dict  # keys of the model
    state: dict  # state.json; {} for an exported or released folder


def is_exported(path: Path) -> bool:
    """Return whether a folder is an exported or released model, not a run or checkpoint of ours."""
    return (path / "config.json").is_file() and not (path / "state.json").is_file()


def describe(path: Path) -> ModelFolder:
    """Describe a run, a checkpoint, an exported folder, or a folder of the paper's released code.

    Raises:
        ValueError: it is none of these, or damaged
    """
    if is_exported(path):
        model, config = released.describe(path)
        return ModelFolder(path, model, config, state={})
    checkpoint = find(path)
    state = read_state(checkpoint)
    return ModelFolder(checkpoint, state["model"], state["model_config"], state)


def load_model(
    path: str | Path, device: torch.device | str
) -> tuple[GPT, tokenizer.Tokenizer, dict]:
    """Load the model of any folder that `describe` takes.

    Returns:
        The model in evaluation mode, its tokenizer, and state.json (without one, a dict with
        "model" and "model_config").

    Raises:
        ValueError: the folder is damaged, hostile, or its files do not fit together
    """
    folder = describe(Path(path))
    tokenizer_json = tokenizer.describe(folder.path)
    model = weight_files.read_model(
        folder.path, folder.model, folder.config, released.convert_weights
    )
    tokenizer_size = tokenizer.get_vocab_size(tokenizer_json)
    if tokenizer_size > model.config.vocab_size:
        raise ValueError(
            f"{folder.path}: the tokenizer has {tokenizer_size} tokens, but the model has only "
            f"vocab_size={model.config.vocab_size}"
        )
    state = {"model": folder.model, "model_config": folder.config, **folder.state}
    return model.to(device), tokenizer.from_json(tokenizer_json), state
