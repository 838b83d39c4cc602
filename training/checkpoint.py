"""Checkpoints: safetensors and JSON, without pickle, in a folder that is complete or absent.

`<run>/checkpoints/step_00001000/` holds

    model.safetensors       the weights
    optimizer.safetensors   the optimizer's state by parameter name
    ema/                    with ema_half_life: model.safetensors of the averaged weights, and copies
                            of state.json and tokenizer.json, so that it reads like a checkpoint
    state.json              step, counters, all settings, the identity of the corpus
    tokenizer.json          the tokenizer, so that sampling does not need the corpus
    SHA256SUMS              checksums of these files, as `sha256sum -c` reads them

Only resuming needs the optimizer's state and the checksums. The main process writes the folder under
a temporary name, and then renames it. Every tensor is stored whole, whatever the number of ranks and
the engine that trained it.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from model.parameters import find_aliases
from utils import errors, files, machine

CHECKSUMS = "SHA256SUMS"
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json")
EMA_FILE = "ema/model.safetensors"
# what every use but resuming needs, so that the others may be deleted to save disk space
MODEL_FILES = ("model.safetensors", "state.json", "tokenizer.json")
STATE_TYPES = {"corpus": dict, "model": str, "model_config": dict, "run_config": dict, "step": int}


@dataclass
class TrainState:
    """What a run carries from step to step besides tensors; state.json stores it."""

    step: int = 0  # steps done, skipped ones included
    # of training steps and, at each start, of the step that warms up DDP; over all restarts, without
    # evaluation and saving
    seconds: float = 0.0
    evaluated: bool = True  # False: the evaluation of `step` is still to come
    best_val_loss: float | None = None
    skipped: int = 0  # steps skipped because a loss or gradient was not finite
    # with dtype=float16 (training/loss_scale.py)
    loss_scale: float = 2.0**16  # of the next step
    steps_at_loss_scale: int = 0  # steps taken since it last changed
    overflows: int = 0  # since the last step that was taken
    wandb_id: str | None = None  # of the tracker's run that a resumed run continues

    @classmethod
    def load(cls, saved_state: dict) -> "TrainState":
        """Return the counters of state.json, which may lack some that were added later."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: saved_state[name] for name in names & saved_state.keys()})

    def is_complete(self, max_steps: int) -> bool:
        """Return whether all steps are done, and the last one is evaluated."""
        return self.step > max_steps or (self.step == max_steps and self.evaluated)


# ---- writing ----


def save(
    run_folder: Path,
    tensors_by_file: dict[str, dict[str, torch.Tensor]],
    state: dict,
    tokenizer_json: dict,
) -> Path:
    """Write the checkpoint of `state["step"]` from one process and return its path.

    Args:
        tensors_by_file: complete tensors by name, for each .safetensors file

    Raises:
        OSError: it cannot be written, for example because the disk is full. Partially written files
            are removed, and earlier checkpoints stay.
    """
    path = run_folder / "checkpoints" / f"step_{state['step']:08d}"
    temporary = path.with_name(f"{path.name}.tmp")
    for leftover in path.parent.glob("*.tmp"):  # of a save that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        for name, tensors in tensors_by_file.items():
            folder = (temporary / name).parent
            folder.mkdir(exist_ok=True)
            save_tensors(temporary / name, tensors)
            (folder / "state.json").write_text(json.dumps(state, indent=1))
            (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json))
        paths = sorted(temporary.rglob("*"))
        sums = [compute_checksum_line(path, temporary) for path in paths if path.is_file()]
        (temporary / CHECKSUMS).write_text("".join(sums))
        # flushed before the folder is renamed, so that a power cut cannot leave partial files
        for path_to_flush in (*paths, temporary / CHECKSUMS, temporary):
            fsync(path_to_flush)
        # A rename cannot replace a folder with files. The older checkpoint of this step exists until
        # the new one is complete.
        previous = path.with_name(f"{path.name}.old")
        if path.exists():
            shutil.rmtree(previous, ignore_errors=True)
            path.replace(previous)
        temporary.replace(path)
        fsync(path.parent)
        shutil.rmtree(previous, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def save_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file with the default file permissions.

    Raises:
        OSError: it cannot be written
    """
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # the library makes files that only their owner can read; an empty file shows the default
    file.touch()
    permissions = file.stat().st_mode
    try:
        save_file(contiguous, file, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:  # how the library reports an OSError
        raise OSError(str(error)) from error
    file.chmod(permissions)


def get_model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model by name; tied ones once, under their first name."""
    # safetensors refuses tensors that share memory
    tied_names = find_aliases(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied_names}


@torch.no_grad()
def gather_tensors(tensors: dict[str, torch.Tensor], copy: bool = False) -> dict[str, torch.Tensor]:
    """Return the complete tensors on the CPU of the main process, nothing on the other ranks.

    Every rank must call it, because sharded tensors are gathered, one at a time.

    copy: the result must not share memory with `tensors`, which will change before it is written
    """
    complete = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if machine.rank() == 0:
            complete[name] = tensor.detach().to("cpu", copy=copy)
    return complete


def fsync(path: Path) -> None:
    """Wait until the disk has a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def compute_checksum_line(file: Path, folder: Path | None = None) -> str:
    """Return the line of SHA256SUMS for a file in a folder, by default its own."""
    # in pieces, so that a checkpoint larger than the memory can be verified
    with open(file, "rb") as opened_file:
        digest = hashlib.file_digest(opened_file, "sha256").hexdigest()
    return f"{digest}  {file.relative_to(folder or file.parent).as_posix()}\n"


# ---- the checkpoints of a run ----


def verify(checkpoint: Path, to_resume: bool = False, names: tuple[str, ...] = MODEL_FILES) -> None:
    """Raise ValueError if a file is missing, or not byte for byte what was saved.

    Args:
        to_resume: whether all files are needed, and the checksums. Otherwise only the files `names`
            are compared, and not even these if SHA256SUMS has been deleted.
    """
    sums = None
    try:
        if to_resume or (checkpoint / CHECKSUMS).exists():
            sums = (checkpoint / CHECKSUMS).read_text(errors="replace")
        if to_resume:
            names = (*FILES, EMA_FILE) if EMA_FILE in sums else FILES
        lines = {name: compute_checksum_line(checkpoint / name, checkpoint) for name in names}
    except OSError as error:
        name = Path(error.filename or "a file").name
        raise ValueError(
            f"{checkpoint} is damaged: {name} is missing or unreadable ({error.strerror})"
        ) from error
    for name, line in lines.items():
        if sums is not None and line not in sums:
            raise ValueError(f"{checkpoint} is damaged: the checksum of {name} does not match")


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first, without verifying them."""
    by_step = {}
    for path in run_folder.glob("checkpoints/step_*"):
        match = re.fullmatch(r"step_(\d+)(\.old)?", path.name)
        # step_1.old counts only if step_1, which was to replace it, is missing
        if match and path.is_dir() and (match[2] is None or int(match[1]) not in by_step):
            by_step[int(match[1])] = path
    return [by_step[step] for step in sorted(by_step)]


def get_step(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(re.match(r"step_(\d+)", checkpoint.name)[1])


def find_latest(run_folder: Path, to_resume: bool = False) -> Path | None:
    """Return the latest valid checkpoint (see `verify`), None without any; report the others."""
    for path in reversed(list_checkpoints(run_folder)):
        try:
            verify(path, to_resume)
            return path
        except ValueError as error:
            if machine.rank() == 0:
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
            errors.say(f"warning: {path} cannot be removed ({error})", file=sys.stderr)


def rename_damaged(run_folder: Path, resumed: Path) -> None:
    """Rename the checkpoints after the one that is resumed, which are damaged, to damaged_*.

    Otherwise they would count among those to keep.
    """
    for path in reversed(list_checkpoints(run_folder)):
        if path == resumed:
            return
        target = path.with_name(f"damaged_{path.name}")
        shutil.rmtree(target, ignore_errors=True)  # the same step, damaged once before
        path.replace(target)


# ---- reading ----


def find(path: str | Path, also_accepted: str = "") -> Path:
    """Return the checkpoint that a run folder (its latest valid one) or a checkpoint folder names.

    also_accepted: what else the caller accepts, for the message of an error

    Raises:
        ValueError: there is none, or it is damaged
    """
    path = Path(path)
    if (path / "state.json").is_file() or (path / "model.safetensors").is_file():
        verify(path)
        return path
    latest = find_latest(path)
    if latest is not None:
        return latest
    problem = f"{path} holds no valid checkpoint;" if list_checkpoints(path) else ""
    problem = problem or f"{path} holds no checkpoint;"
    if not path.exists():
        suggestion = errors.suggest(path.name, [other.name for other in path.parent.glob("*")])
        problem = f"{path} does not exist{suggestion or ';'}"
    raise ValueError(
        f"{problem} give a run folder made by train.py, one of its checkpoints/step_*{also_accepted}"
    )


def read_state(checkpoint: Path) -> dict:
    """Return state.json.

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
