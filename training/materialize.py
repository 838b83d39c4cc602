"""Weights of a sharded model that was built on torch's meta device.

A model that FSDP2 shards may be larger than the memory of a rank. Each rank therefore initializes
only some of the parameters, and all ranks keep their rows of each. The weights have the same bits as
those of one process. `sharded_checkpoint.load_model_tensors` reads the rows of a checkpoint.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from model import build
from model.gpt import GPT, GPTConfig
from model.parameters import collect_rules, find_aliases, start_by_name
from training.distributed import World
from training.muon import get_own_rows


def build_on_meta(name: str, model_config: GPTConfig) -> GPT:
    """Build a model on the meta device; on the CPU if it holds more than its parameters.

    The values of a buffer, or of a tensor that is an attribute of a module, cannot be recovered from
    the meta device. The RoPE tables are computed anew.
    """
    try:
        with torch.device("meta"):
            model = build(name, model_config)
    except Exception:  # the code of a user-defined variant may look at values of tensors
        return build(name, model_config)
    if holds_other_tensors(model):
        return build(name, model_config)
    return model


def holds_other_tensors(model: GPT) -> bool:
    """Return whether a model has tensors besides its parameters and its RoPE tables."""
    for module_name, module in model.named_modules():
        buffer_names = {name for name, _ in module.named_buffers(recurse=False)}
        if module_name == "":
            buffer_names -= {"rope_cos", "rope_sin"}
        if buffer_names:
            return True
        attributes = [
            value
            for name, value in vars(module).items()
            if name not in ("_parameters", "_buffers", "_modules")
        ]
        if any(torch.is_tensor(leaf) for leaf in tree_leaves(attributes)):
            return True
    return False


def allocate(model: GPT, device: torch.device) -> None:
    """Allocate the memory of a model on the meta device; its parameters are not initialized."""
    first_names = find_aliases(model)
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
    rules = collect_rules(model)
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
