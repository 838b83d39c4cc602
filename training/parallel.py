"""One model on several devices: DistributedDataParallel, or FSDP2 for models that outgrow a device."""

import contextlib
import inspect

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

# The buffers, RoPE's tables, are the same on every process. torch 2.13 gave the key that says so another name.
BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


def parallelise(model, engine: str, compiled: bool, world):
    """(model for training, model for evaluation) on the device, compiled where asked for, gradients averaged.

    With the engine `fsdp` each process keeps a part of every parameter, as a DTensor in `model` itself, which goes to
    the device a block at a time.
    """
    if engine == "fsdp" and world.world_size > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(world.device.type, (world.world_size,))
        for block in model.transformer.h:
            if compiled:  # a block at a time: gathering its parameters breaks the graph anyway
                block.compile()
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, model
    model.to(world.device)
    run = torch.compile(model) if compiled else model
    if world.world_size == 1:
        return run, run
    # Inside of its forward pass torch.compile knows the buckets and cuts the graph between them, so that a bucket is
    # summed over the processes while the backward pass goes on (tests/test_overlap.py, docs/runs.md).
    return DistributedDataParallel(run, gradient_as_bucket_view=True, **{BUFFERS: False}), run


@contextlib.contextmanager
def synchronising(model, wanted: bool):
    """Average gradients over the processes in the backward passes inside, or leave it to a later one."""
    if isinstance(model, DistributedDataParallel) and not wanted:
        with model.no_sync():
            yield
        return
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(wanted)
    yield


def clip_gradients(model, largest: float) -> torch.Tensor:
    """Scale the whole gradient down to norm `largest` (0: leave it) and return its norm before, without waiting for it.

    A gradient that is not finite stays as it is: scaled, it would be NaN everywhere, and hide where that began.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if largest:
        # A norm of 0 is within the limit, and leaves the gradient: no need to ask the device which it is.
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, torch.where(norm.isfinite(), norm, 0.0))
    return norm


def gathered(tensors: dict[str, torch.Tensor], world) -> dict[str, torch.Tensor]:
    """Whole tensors on the main process's CPU, one after the other; {} on the others. All must call it."""
    whole = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if world.is_main:
            whole[name] = full.detach().cpu()
    return whole


def placed_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor where the parameter is, sharded as it is; scalars (step counters) stay whole."""
    # Step counters stay where the optimizer keeps them, moments go with their parameter.
    tensor = tensor.to(parameter.device) if tensor.ndim or parameter.is_cuda else tensor
    if isinstance(parameter, DTensor) and tensor.ndim:
        return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return tensor


def non_finite_gradients(model, world) -> list[str]:
    """Names of the parameters whose gradient, on any process, holds an inf or NaN."""
    parameters = {name: p for name, p in model.named_parameters() if p.grad is not None}
    locals_ = (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters.values())
    bad = world.sum(*(float((~gradient.isfinite()).any()) for gradient in locals_))
    return [name.removeprefix("module.").removeprefix("_orig_mod.") for name, count in zip(parameters, bad) if count]
