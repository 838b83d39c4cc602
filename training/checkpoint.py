"""Checkpoints: safetensors and JSON, without pickle, in a folder that is complete or absent.

`<run>/checkpoints/step_00001000/` holds

    model.safetensors       the weights
    optimizer.safetensors   the optimizer's state by parameter name
    state.json              step, counters, all settings, the identity of the corpus
    tokenizer.json          the tokenizer, so that sampling does not need the corpus
    SHA256SUMS              checksums of these files, as `sha256sum -c` reads them

Several writers divide the weights and the state into a file each, and an index says what is where
(training/sharded_checkpoint.py). Every tensor is stored whole, whatever the number of ranks and the
engine that trained it.

The folder is written under a temporary name and then renamed. If a step is saved again, the older
folder stays as `step_00001000.old` until the new one is in its place.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from data import tokenizer
from huggingface import released
from model import weights as weight_files
from model.gpt import GPT
from model.parameters import find_aliases
from training import sharded_checkpoint
from training.peers import Peers
from training.sharded_checkpoint import CheckpointShard
from utils import errors, files

T = TypeVar("T")

ALONE = Peers()  # one process that writes or verifies a checkpoint by itself
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
    """Write the checkpoint of `state["step"]` from one process and return its path; see `write`."""
    shards = [
        sharded_checkpoint.gather_shard(kind, tensors, writers=[0], rank=0, copy=False)
        for kind, tensors in (("model", model_tensors), ("optimizer", optimizer_tensors))
    ]
    path = name_folder(run_folder, state["step"])
    write(path, shards, state, tokenizer_json)
    return path


def name_folder(run_folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return run_folder / "checkpoints" / f"step_{step:08d}"


def write(
    path: Path,
    shards: list[CheckpointShard],
    state: dict,
    tokenizer_json: dict,
    writers: Peers = ALONE,
) -> None:
    """Write a checkpoint. Every writer must call it; it is complete when the first one returns.

    Args:
        path: folder of the checkpoint
        shards: what this writer holds of the weights and of the optimizer's state
        state: for state.json; that of the first writer is used
        tokenizer_json: for tokenizer.json
        writers: this process among those that write

    Raises:
        OSError: this writer or another one failed, for example because the disk is full. Partially
            written files are removed, and earlier checkpoints stay.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        # no writer begins before the folder exists
        run_on_all(writers, lambda: create_folder(temporary, writers))
        # no writer is at work when the folder is renamed or removed
        checksums = run_on_all(writers, lambda: write_shards(temporary, shards, writers))
        if writers.rank == 0:
            write_other_files(temporary, shards, state, tokenizer_json, checksums)
            replace_folder(path, temporary)
    except BaseException:
        if writers.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def run_on_all(writers: Peers, task: Callable[[], T]) -> list[T]:
    """Run a part of the work on every writer and return the results of all, ordered by rank.

    Raises:
        OSError: that of this writer, or of the first one on which the task raised one
    """
    result = None
    failure = None
    try:
        result = task()
    except OSError as error:
        failure = error
    message = None if failure is None else str(failure)
    outcomes = writers.all_gather((result, message))
    if failure is not None:
        raise failure
    # a writer whose own part has succeeded must not go on without the others
    for rank, (_, other_message) in enumerate(outcomes):
        if other_message is not None:
            raise OSError(f"writer {rank}: {other_message}")
    return [result for result, _ in outcomes]


def create_folder(temporary: Path, writers: Peers) -> None:
    """Create the folder of a checkpoint, and remove those of saves that were killed."""
    if writers.rank > 0:
        return
    for leftover in temporary.parent.glob("*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)


def write_shards(folder: Path, shards: list[CheckpointShard], writers: Peers) -> dict[str, str]:
    """Write the files of this writer and flush them; return their lines of SHA256SUMS by name."""
    lines = {}
    for shard in shards:
        if writers.rank >= shard.num_files:  # there are fewer tensors than writers
            continue
        file = folder / shard.name_file(writers.rank)
        save_tensors(file, shard.tensors)
        # flushed before the folder is renamed, so that a power cut cannot leave partial files
        fsync(file)
        lines[file.name] = compute_checksum_line(file)
    return lines


def write_other_files(
    folder: Path,
    shards: list[CheckpointShard],
    state: dict,
    tokenizer_json: dict,
    checksums: list[dict[str, str]],
) -> None:
    """Complete a folder in which all tensors have been written, and flush it.

    checksums: what `write_shards` returned on each writer
    """
    contents = {
        "state.json": json.dumps(state, indent=1),
        "tokenizer.json": json.dumps(tokenizer_json),
    }
    for shard in shards:
        if shard.num_files > 1:
            contents[f"{shard.kind}.safetensors.index.json"] = json.dumps(shard.build_index())
    lines: dict[str, str] = {}
    for lines_of_writer in checksums:
        lines.update(lines_of_writer)
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8")
        fsync(folder / name)
        lines[name] = compute_checksum_line(folder / name)
    # the order of `list_files` is part of the format, because `verify` compares with it
    sums = "".join(lines[name] for name in list_files(folder))
    (folder / CHECKSUMS).write_text(sums, encoding="utf-8")
    fsync(folder / CHECKSUMS)
    fsync(folder)


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


def list_files(checkpoint: Path) -> list[str]:
    """Return the names of the files of a checkpoint, in the order of SHA256SUMS.

    Raises:
        ValueError: an index is damaged
    """
    names = []
    for kind in ("model", "optimizer"):
        index = f"{kind}.safetensors.index.json"
        if not (checkpoint / index).is_file():
            names.append(f"{kind}.safetensors")
            continue
        names.extend(file.name for file in weight_files.list_weight_files(checkpoint, kind))
        names.append(index)
    return [*names, "state.json", "tokenizer.json"]


def compute_checksum_line(file: Path) -> str:
    """Return the line of SHA256SUMS for a file."""
    # in pieces, so that a checkpoint larger than the memory can be verified
    with open(file, "rb") as opened_file:
        digest = hashlib.file_digest(opened_file, "sha256").hexdigest()
    return f"{digest}  {file.name}\n"


def verify(checkpoint: Path, peers: Peers = ALONE) -> None:
    """Raise ValueError if a file is missing, or not byte for byte what was saved.

    peers: processes that divide the files; all of them must call it, and all get the same answer
    """
    problems = peers.all_gather(find_damage(checkpoint, peers.rank, peers.size))
    for problem in problems:
        if problem is not None:
            raise ValueError(f"{checkpoint} is damaged: {problem}")


def find_damage(checkpoint: Path, rank: int, num_ranks: int) -> str | None:
    """Hash one of `num_ranks` parts of a checkpoint; return what is damaged, or None."""
    try:
        stored = (checkpoint / CHECKSUMS).read_bytes().decode(errors="replace")
        stored_lines = stored.splitlines(keepends=True)
        names = list_files(checkpoint)
        sizes = {name: (checkpoint / name).stat().st_size for name in names}
        rank_of = sharded_checkpoint.balance(sizes, num_ranks)
        for name in [name for name in names if rank_of[name] == rank]:
            if compute_checksum_line(checkpoint / name) not in stored_lines:
                return f"the checksum of {name} does not match"
    except OSError as error:
        name = Path(error.filename or "a file").name
        return f"{name} is missing or unreadable ({error.strerror})"
    except ValueError as error:  # an index
        return str(error)
    # lines that are missing, added or cut, which no rank has looked for
    if [line.partition("  ")[2] for line in stored_lines] != [f"{name}\n" for name in names]:
        return f"the checksum of {CHECKSUMS} does not match"
    return None


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


def find_latest(run_folder: Path, peers: Peers = ALONE) -> Path | None:
    """Return the latest valid checkpoint, None without any; damaged ones are reported.

    peers: see `verify`

    Raises:
        ValueError: the processes see different checkpoints, as on machines without a shared folder
    """
    paths = list_checkpoints(run_folder)
    # `verify` expects all processes, so they must try the same checkpoints
    names_by_rank = peers.all_gather([path.name for path in paths])
    for rank, names in enumerate(names_by_rank):
        if names != names_by_rank[0]:
            raise ValueError(
                f"rank {rank} finds {len(names)} checkpoints in {run_folder}, but rank 0 finds "
                f"{len(names_by_rank[0])}, or different ones; give an --out_dir that all machines share"
            )
    # latest first
    for path in reversed(paths):
        try:
            verify(path, peers)
            return path
        except ValueError as error:
            if peers.rank == 0:
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


def find(path: str | Path, peers: Peers = ALONE, also_accepted: str = "") -> Path:
    """Return the checkpoint that a run folder (its latest valid one) or a checkpoint folder names.

    Args:
        peers: see `verify`
        also_accepted: what else the caller accepts, for the message of an error

    Raises:
        ValueError: there is none, or it is damaged
    """
    path = Path(path)
    if (path / "state.json").is_file() or (path / CHECKSUMS).is_file():
        verify(path, peers)
        return path
    if not path.exists():
        suggestion = errors.suggest(path.name, [other.name for other in path.parent.glob("*")])
        raise ValueError(
            f"{path} does not exist{suggestion or ';'} give a run folder made by train.py, one of "
            f"its checkpoints/step_*{also_accepted}"
        )
    latest = find_latest(path, peers)
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
    checkpoint = find(path, also_accepted=", or a folder of exported or released weights")
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
    encoding = tokenizer.read(folder.path)
    model = weight_files.read_model(
        folder.path, folder.model, folder.config, released.convert_weights
    )
    if encoding.n_vocab > model.config.vocab_size:
        raise ValueError(
            f"{folder.path}: the tokenizer has {encoding.n_vocab} tokens, but the model has only "
            f"vocab_size={model.config.vocab_size}"
        )
    state = {"model": folder.model, "model_config": folder.config, **folder.state}
    return model.to(device), encoding, state
