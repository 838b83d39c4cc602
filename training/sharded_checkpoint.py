"""Divide the tensors of a checkpoint over the ranks that write it, and read parts of them again.

Every tensor is stored whole, so that any engine, any number of ranks and any other tool can read
it. With several writers, each writes a file of its own, named as Hugging Face names the files of a
large model, and an index says which file holds which tensor:

    model-00001-of-00002.safetensors   model-00002-of-00002.safetensors   model.safetensors.index.json

A tensor that is sharded over ranks travels once, to the rank that writes it.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType

import safetensors
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from model import weights as weight_files
from training.muon import count_rows, get_own_rows, local_tensor

# Sharded tensors are brought together in batches of about this many bytes, or one at a time if they
# are larger. On a GPU a batch takes this much of its memory.
BATCH_BYTES = 2**26


# ---- who writes what ----


@dataclass(frozen=True)
class CheckpointShard:
    """The tensors of one kind that one writer holds, and the files that the kind is divided into."""

    kind: str  # "model" or "optimizer"
    num_files: int
    file_index: dict[str, int]  # number of the file, from 0, of every tensor of the kind
    tensors: dict[str, torch.Tensor]  # those that this writer writes, on the CPU

    def name_file(self, index: int) -> str:
        """Return the name of a file of this kind."""
        if self.num_files == 1:
            return f"{self.kind}.safetensors"
        return f"{self.kind}-{index + 1:05d}-of-{self.num_files:05d}.safetensors"

    def build_index(self) -> dict:
        """Return the content of the index, as Hugging Face has it."""
        weight_map = {
            name: self.name_file(self.file_index[name]) for name in sorted(self.file_index)
        }
        return {"metadata": {}, "weight_map": weight_map}


def choose_writers(num_writers: int, world_size: int, shard_size: int | None) -> list[int]:
    """Return the ranks that write checkpoints, evenly spaced over one sharded copy of the model.

    Args:
        num_writers: how many to choose, at most
        shard_size: number of ranks that shard one copy of the model (HSDP). Only those of the first
            copy write. None if there is no more than one sharded copy; more than world_size if a
            run resumes on one process.
    """
    num_candidates = min(shard_size or world_size, world_size)
    num_writers = min(num_writers, num_candidates)
    return [index * num_candidates // num_writers for index in range(num_writers)]


def balance(sizes: dict[str, int], num_parts: int) -> dict[str, int]:
    """Assign tensors to parts of about equal size, the largest first, each to the smallest part so far.

    The result is the same on all ranks.

    Args:
        sizes: bytes of each tensor by name

    Returns:
        the number of the part of each tensor
    """
    # a heap of (bytes so far, number of the part)
    parts = [(0, index) for index in range(num_parts)]
    part_of = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        total, index = heapq.heappop(parts)
        part_of[name] = index
        heapq.heappush(parts, (total + sizes[name], index))
    return part_of


def gather_shard(
    kind: str, tensors: dict[str, torch.Tensor], writers: list[int], rank: int, copy: bool
) -> CheckpointShard:
    """Bring each tensor to the rank that writes it. Every rank must call it.

    Args:
        kind: "model" or "optimizer"
        tensors: the same names on all ranks; replicated tensors, or DTensors sharded by rows
        writers: ranks that write; each gets one of the files, if there are enough tensors
        copy: whether the result must not share memory with `tensors`, because training goes on
            while it is written

    Returns:
        The shard of this rank, without tensors if it writes none.
    """
    # An optimizer whose steps were all skipped has no tensors, and still gets its file.
    num_files = max(min(len(writers), len(tensors)), 1)
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    file_index = balance(sizes, num_files)
    writer_of = {name: writers[index] for name, index in file_index.items()}
    return CheckpointShard(kind, num_files, file_index, collect(tensors, writer_of, rank, copy))


# ---- bringing tensors together ----


@torch.no_grad()
def collect(
    tensors: dict[str, torch.Tensor], writer_of: dict[str, int], rank: int, copy: bool
) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank writes, complete and on the CPU. Every rank must call it.

    Args:
        writer_of: the rank that writes each tensor
        copy: see `gather_shard`
    """
    complete = {}
    sharded = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            sharded[name] = tensor
        # every rank has the same replicated tensors, so that nothing need be sent
        elif writer_of[name] == rank:
            complete[name] = tensor.detach().to("cpu", copy=copy)
    for batch in split_into_batches(sharded, writer_of):
        complete.update(collect_batch(batch, writer_of, rank))
    return complete


def split_into_batches(
    tensors: dict[str, DTensor], writer_of: dict[str, int]
) -> Iterator[dict[str, DTensor]]:
    """Yield all tensors in batches of at most BATCH_BYTES, or of one tensor.

    A batch has tensors of all writers, so that they receive at the same time.
    """
    names_of_writer: dict[int, list[str]] = {}
    for name in tensors:
        names_of_writer.setdefault(writer_of[name], []).append(name)
    batch: dict[str, DTensor] = {}
    batch_bytes = 0
    for names in itertools.zip_longest(*names_of_writer.values()):
        for name in names:
            if name is None:  # this writer has fewer tensors than another
                continue
            size = tensors[name].numel() * tensors[name].element_size()
            if batch and batch_bytes + size > BATCH_BYTES:
                yield batch
                batch = {}
                batch_bytes = 0
            batch[name] = tensors[name]
            batch_bytes += size
    if batch:
        yield batch


def collect_batch(
    tensors: dict[str, DTensor], writer_of: dict[str, int], rank: int
) -> dict[str, torch.Tensor]:
    """Send the rows of this rank to the writers; return the tensors that this rank writes."""
    # FSDP2 shards all parameters over one mesh
    mesh = next(iter(tensors.values())).device_mesh
    # with HSDP the other copies of the model hold the same rows, and need not send them
    if mesh.ndim > 1 and mesh.get_local_rank(0) > 0:
        return {}
    group = mesh.get_group(mesh_dim=-1)
    ranks = dist.get_process_group_ranks(group)

    complete = {}
    operations = []
    for name, tensor in tensors.items():
        own_rows = tensor.to_local().contiguous()
        if writer_of[name] != rank:
            if own_rows.numel():
                operations.append(dist.P2POp(dist.isend, own_rows, writer_of[name], group))
            continue
        # rows are received in their final place, so that no other buffer is needed
        complete[name] = own_rows.new_empty(tensor.shape)
        rows_of_rank = complete[name].split(count_rows(tensor.shape[0], len(ranks)))
        for source, rows in zip(ranks, rows_of_rank):
            if source == rank:
                rows.copy_(own_rows)
            elif rows.numel():
                operations.append(dist.P2POp(dist.irecv, rows, source, group))
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
    return {name: tensor.cpu() for name, tensor in complete.items()}


# ---- reading ----


class SavedTensor:
    """A tensor of a safetensors file. Indexing it reads the rows, and `saved[...]` all of them."""

    def __init__(self, opened_file: safetensors.safe_open, name: str):
        self.slice = opened_file.get_slice(name)
        self.shape = tuple(self.slice.get_shape())

    def __getitem__(self, rows: slice | EllipsisType) -> torch.Tensor:
        return self.slice[rows]


def open_tensors(folder: Path, kind: str) -> dict[str, SavedTensor]:
    """Return the tensors of a checkpoint, without reading them.

    kind: "model" or "optimizer"

    Raises:
        ValueError: a file is missing or damaged
    """
    tensors = {}
    for file in weight_files.list_weight_files(folder, kind):
        try:
            opened_file = safetensors.safe_open(file, "pt")
            for name in opened_file.keys():  # noqa: SIM118 (it is not a mapping)
                tensors[name] = SavedTensor(opened_file, name)
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(
                f"{file} is missing or damaged ({error}); use another checkpoint"
            ) from error
    return tensors


def read_like(saved: SavedTensor | torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a saved tensor of the shape of a parameter, on its device and sharded as it is.

    Of a sharded tensor only the rows of this rank are read. Step counters, which are scalars, stay
    on the CPU unless the parameter is on a GPU, as fused AdamW keeps them.
    """
    device = parameter.device
    if not saved.shape and not parameter.is_cuda:
        device = torch.device("cpu")
    # always a copy, because what is read may be a view of the file
    if not saved.shape or not isinstance(parameter, DTensor):
        return saved[...].to(device, copy=True)
    rows = saved[get_own_rows(parameter)]
    return DTensor.from_local(
        rows.to(device, copy=True),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


@torch.no_grad()
def load_model_tensors(model: nn.Module, folder: Path) -> None:
    """Give a model, sharded or not, the weights of a checkpoint of the same model.

    Of a sharded parameter only the rows of this rank are read.

    Raises:
        ValueError: a file is missing or damaged, or a number is not finite
    """
    saved_tensors = open_tensors(folder, "model")
    for name, tensor in model.state_dict().items():
        if name not in saved_tensors:  # tied weights are saved once, under their first name
            continue
        own_rows = local_tensor(read_like(saved_tensors[name], tensor))
        if not own_rows.isfinite().all():
            raise ValueError(
                f"{folder}: {name} holds NaN or infinite numbers; resume from an earlier checkpoint "
                "with --resume=CHECKPOINT and another --out_dir"
            )
        local_tensor(tensor).copy_(own_rows)
