"""Checkpoints: safetensors and JSON, without pickle, in a folder that is complete or absent.

`<run>/checkpoints/step_00001000/` holds

    model.safetensors       the weights
    optimizer.safetensors   the optimizer's state by parameter name
    ema.safetensors         the averaged weights of a run with ema_half_life
    state.json              step, counters, all settings, the identity of the corpus
    tokenizer.json          the tokenizer, so that sampling does not need the corpus
    SHA256SUMS              checksums of these files, as `sha256sum -c` reads them

Only resuming needs the optimizer's state and the checksums; --weights=ema also reads the averaged weights.
The main process writes it. Every tensor is stored whole, whatever the number of ranks and the engine
that trained it.

The folder is written under a temporary name and then renamed. If a step is saved again, the older
folder stays as `step_00001000.old` until the new one is in its place.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

from model.parameters import find_aliases
from training.config import TrainConfig
from training.stopping import Stop
from utils import errors, files, machine

CHECKSUMS = "SHA256SUMS"
# The order is part of the format, because `verify` compares with it.
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json")
# after these, in a run with ema_half_life
EMA_FILE = "ema.safetensors"
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
    def load(
        cls, saved_state: dict, resume_checkpoint: Path | None, config: TrainConfig
    ) -> "TrainState":
        """Return the counters in state.json of a checkpoint; fresh ones without a checkpoint."""
        if resume_checkpoint is None:
            return cls()
        # a checkpoint may lack counters that were added later
        names = [field.name for field in dataclasses.fields(cls)]
        state = cls(**{name: saved_state[name] for name in names if name in saved_state})
        if not evaluates_same_sequences(saved_state, config):
            state.best_val_loss = None
        if not belongs_to(resume_checkpoint, config.out_dir):
            state.wandb_id = None  # a run that branches off is a new run of the tracker
        saved_tracker = saved_state["run_config"].get("tracker")
        if config.tracker is not None and saved_tracker not in (None, config.tracker):
            state.wandb_id = None  # it is the name of another tracker's run
        return state

    def is_complete(self, max_steps: int) -> bool:
        """Return whether all steps are done, and the last one is evaluated."""
        return self.step > max_steps or (self.step == max_steps and self.evaluated)


def evaluates_same_sequences(saved_state: dict, config: TrainConfig) -> bool:
    """Return whether a run evaluates as its checkpoint did, so that losses can be compared."""
    saved_config = saved_state["run_config"]
    return all(saved_config[key] == getattr(config, key) for key in ("eval_part", "eval_batches"))


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
            save_tensors(temporary / name, tensors)
        texts = {
            "state.json": json.dumps(state, indent=1),
            "tokenizer.json": json.dumps(tokenizer_json),
        }
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        names = (*FILES, EMA_FILE) if EMA_FILE in tensors_by_file else FILES
        sums = "".join(compute_checksum_line(temporary / name) for name in names)
        (temporary / CHECKSUMS).write_text(sums, encoding="utf-8")
        # flushed before the folder is renamed, so that a power cut cannot leave partial files
        for name in (*names, CHECKSUMS):
            fsync(temporary / name)
        fsync(temporary)
        replace_folder(path, temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return path


def replace_folder(path: Path, temporary: Path) -> None:
    """Give a complete folder its name. An older checkpoint of the same step exists until then."""
    # a rename cannot replace a folder that is not empty
    previous = path.with_name(f"{path.name}.old")
    if path.exists():
        shutil.rmtree(previous, ignore_errors=True)
        path.replace(previous)
    temporary.replace(path)
    # after a power cut the new name must not exist without the data
    fsync(path.parent)
    shutil.rmtree(previous, ignore_errors=True)


def save_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file with the default file permissions.

    Raises:
        OSError: it cannot be written
    """
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # The library makes files that only their owner can read; an empty file shows the default.
    # Setting os.umask to read it would change it for the other threads as well.
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


def fsync(path: Path) -> None:
    """Wait until the disk has a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- checksums ----


def compute_checksum_line(file: Path) -> str:
    """Return the line of SHA256SUMS for a file."""
    # in pieces, so that a checkpoint larger than the memory can be verified
    with open(file, "rb") as opened_file:
        digest = hashlib.file_digest(opened_file, "sha256").hexdigest()
    return f"{digest}  {file.name}\n"


def verify(checkpoint: Path, to_resume: bool = False, names: tuple[str, ...] = MODEL_FILES) -> None:
    """Raise ValueError if a file is missing, or not byte for byte what was saved.

    Args:
        to_resume: whether all files are needed, and the checksums. Otherwise only the files `names`
            are compared, and not even these if SHA256SUMS has been deleted.
    """
    if to_resume and not (checkpoint / "optimizer.safetensors").exists():
        raise ValueError(
            f"{checkpoint} cannot be resumed, because it has no optimizer.safetensors; start a new "
            f"run from its weights with --init_from={checkpoint}"
        )
    stored_lines = None
    try:
        if to_resume or (checkpoint / CHECKSUMS).exists():
            stored_lines = (checkpoint / CHECKSUMS).read_bytes().decode(errors="replace")
        if to_resume:
            has_average = EMA_FILE in stored_lines or (checkpoint / EMA_FILE).exists()
            names = (*FILES, EMA_FILE) if has_average else FILES
        lines = [compute_checksum_line(checkpoint / name) for name in names]
    except OSError as error:
        name = Path(error.filename or "a file").name
        raise ValueError(
            f"{checkpoint} is damaged: {name} is missing or unreadable ({error.strerror})"
        ) from error
    if stored_lines is None:
        return
    damaged = [name for name, line in zip(names, lines) if line not in stored_lines]
    if damaged or (to_resume and stored_lines != "".join(lines)):
        # without a damaged file, lines have been added
        name = damaged[0] if damaged else CHECKSUMS
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


def belongs_to(checkpoint: Path, run_folder: str | Path) -> bool:
    """Return whether a checkpoint is one of a run's: <run>/checkpoints/step_00001000."""
    # not resolved before: checkpoints/ may be a link to other storage
    return checkpoint.absolute().parent.parent.resolve() == Path(run_folder).resolve()


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


def find(path: str | Path, also_accepted: str = "", to_resume: bool = False) -> Path:
    """Return the checkpoint that a run folder (its latest valid one) or a checkpoint folder names.

    Args:
        also_accepted: what else the caller accepts, for the message of an error
        to_resume: see `verify`

    Raises:
        ValueError: there is none, or it is damaged
    """
    path = Path(path)
    if (path / "state.json").is_file() or (path / "model.safetensors").is_file():
        verify(path, to_resume)
        return path
    if not path.exists():
        suggestion = errors.suggest(path.name, [other.name for other in path.parent.glob("*")])
        raise ValueError(
            f"{path} does not exist{suggestion or ';'} give a run folder made by train.py, one of "
            f"its checkpoints/step_*{also_accepted}"
        )
    latest = find_latest(path, to_resume)
    if latest is not None:
        return latest
    kind = "valid checkpoint" if list_checkpoints(path) else "checkpoint"
    raise ValueError(
        f"{path} holds no {kind}; give a run folder made by train.py, one of its "
        f"checkpoints/step_*{also_accepted}"
    )


# ---- reading ----


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


# ---- saving a run ----


@torch.no_grad()
def gather_tensors(
    tensors: dict[str, torch.Tensor], is_main: bool, copy: bool
) -> dict[str, torch.Tensor]:
    """Return the complete tensors on the CPU of the main process, nothing on the other ranks.

    Every rank must call it, because sharded tensors are gathered, one at a time.

    Args:
        copy: whether the result must not share memory with `tensors`, because training goes on
            while it is written
    """
    complete = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if is_main:
            complete[name] = tensor.detach().to("cpu", copy=copy)
    return complete


class CheckpointSaver:
    """Save the checkpoints of a run, one at a time. All ranks must call its methods together.

    With save_in_background, training stands still only while the tensors are copied to the host's
    memory. A thread of the main process then writes, flushes and hashes the files. A kill before it
    has finished leaves a temporary folder, which the next save removes, and the earlier checkpoints.
    """

    def __init__(self, config: TrainConfig, tokenizer_json: dict, device: torch.device, stop: Stop):
        self.config = config
        self.tokenizer_json = tokenizer_json
        self.stop = stop
        self.in_background = config.save_in_background
        if self.in_background is None:
            self.in_background = device.type == "cuda"
        self.is_main = machine.rank() == 0
        # its thread is no daemon: the process does not exit before the checkpoint is complete
        self.executor = ThreadPoolExecutor(max_workers=1)
        self.pending: Future | None = None  # the save in the background
        self.last_save_succeeded = True  # only the main process knows

    def save(
        self,
        run_folder: Path,
        tensors_by_file: dict[str, dict[str, torch.Tensor]],
        state: dict,
    ) -> None:
        """Save a checkpoint, or start to. `wait` returns whether it was saved.

        Args:
            tensors_by_file: the tensors of this rank by name, as DTensors if they are sharded, for
                each .safetensors file
            state: for state.json; only that of the main process is used
        """
        # the copies of two checkpoints might not fit into memory
        self.wait()
        start_time = time.perf_counter()
        complete_by_file = {
            name: gather_tensors(tensors, self.is_main, copy=self.in_background)
            for name, tensors in tensors_by_file.items()
        }
        if not self.is_main:
            return
        if not self.in_background:
            self.write(run_folder, complete_by_file, state, start_time)
            return
        # a stop would first have to wait for this save, and then save again
        self.stop.save_seconds *= 2
        self.pending = self.executor.submit(
            self.write, run_folder, complete_by_file, state, start_time
        )

    def wait(self) -> bool:
        """Wait for the save in the background.

        Returns:
            On the main process, whether the last checkpoint was saved; True on the other ranks.
        """
        if self.pending is not None:
            self.pending.result()  # raises an error of the thread, which is a bug
            self.pending = None
        return self.last_save_succeeded

    def write(
        self,
        run_folder: Path,
        tensors_by_file: dict[str, dict[str, torch.Tensor]],
        state: dict,
        start_time: float,
    ) -> None:
        """Write a checkpoint, report it, and remove old ones."""
        failure = None
        try:
            path = save(run_folder, tensors_by_file, state, self.tokenizer_json)
        except OSError as error:
            failure = error
        # how early a run with max_seconds must stop
        self.stop.save_seconds = time.perf_counter() - start_time
        self.last_save_succeeded = failure is None
        # each line is written at once, because the training loop may print at the same time
        if failure is not None:
            print(
                f"warning: could not save the checkpoint of step {state['step']} ({failure}); the "
                "previous one is kept\n",
                end="",
                file=sys.stderr,
            )
            return
        print(f"saved {path}\n", end="", flush=True)
        remove_old(run_folder, self.config.keep_last, self.config.keep_every)
