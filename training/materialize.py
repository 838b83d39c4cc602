"""Weights of a sharded model that was built on torch's meta device.

A model that FSDP2 shards may be larger than the memory of a rank. Each rank therefore initializes
only some of the parameters, and all ranks keep their rows of each; or it reads its rows from a
checkpoint. The weights have the same bits as those of one process.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from model import weights
from model.gpt import GPT
from model.parameters import aliases, rules_of, start_by_name
from training.distributed import World


def allocate(model: GPT, device: torch.device) -> None:
    """Allocate the memory of a model on the meta device; its parameters are not initialized."""
    first_names = aliases(model)
    model.to_empty(device=device)
    # to_empty gives tied parameters a memory each
    for name, first_name in first_names.items():
        owner_name, _, last_name = name.rpartition(".")
        if name in dict(model.named_parameters(remove_duplicate=False)):
            setattr(model.get_submodule(owner_name), last_name, model.get_parameter(first_name))
    model.reset_rope()


@torch.no_grad()
def initialize(model: GPT, world: World, seed: int) -> None:
    """Initialize the parameters as their rules say. Every rank must call it.

    A parameter depends on the seed and its name alone (init_order=named), so that each rank can
    initialize some of them. It then broadcasts them, one at a time.
    """
    rules = rules_of(model)
    # The ranks work at the same time on parameters of about the same size.
    named_parameters = sorted(model.named_parameters(), key=lambda item: -item[1].numel())
    for first in range(0, len(named_parameters), world.world_size):
        batch = named_parameters[first : first + world.world_size]
        own_parameter = None
        if world.rank < len(batch):
            name, parameter = batch[world.rank]
            # on the CPU, whose random numbers are those of a model that is not sharded
            own_parameter = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            start_by_name(name, own_parameter, rules[name], seed)
        for owner, (_, parameter) in enumerate(batch):
            if owner == world.rank:
                full_parameter = own_parameter.to(world.device)
            else:
                full_parameter = torch.empty(
                    parameter.shape, dtype=parameter.dtype, device=world.device
                )
            dist.broadcast(full_parameter, src=owner)
            if isinstance(parameter, DTensor):
                rows = get_own_rows(parameter)
                parameter.to_local().copy_(full_parameter[rows])
            else:
                parameter.copy_(full_parameter)


@torch.no_grad()
def load(model: GPT, folder: Path) -> None:
    """Read this rank's rows of all parameters from a checkpoint, whose tensors are stored in full."""
    parameters = dict(model.named_parameters())
    for file in weights.list_weight_files(folder):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is not a mapping)
                parameter = parameters[name]
                if isinstance(parameter, DTensor) and parameter.ndim:
                    rows = get_own_rows(parameter)
                    parameter.to_local().copy_(opened.get_slice(name)[rows])
                else:
                    parameter.copy_(opened.get_tensor(name))


def get_own_rows(parameter: DTensor) -> slice:
    """Return which rows of a parameter this rank has; FSDP2 cuts the first dimension."""
    num_shards = parameter.device_mesh.size(-1)
    shard_index = parameter.device_mesh.get_local_rank(-1)
    rows_per_shard = -(-parameter.shape[0] // num_shards)
    first_row = min(shard_index * rows_per_shard, parameter.shape[0])
    return slice(first_row, min(first_row + rows_per_shard, parameter.shape[0]))
