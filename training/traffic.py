"""What the processes of a run send each other per optimizer step, computed before it starts.

The figures follow from the collectives that the engines call. They are estimates: nothing here has
been measured on GPUs, and a network library may send more, such as headers and padding.

A collective over P processes is counted as a ring sends it. To all-gather, or to reduce-scatter, n
bytes in total, each process sends (P - 1) / P n bytes. To all-reduce them it sends twice as many.
"""

import dataclasses
from dataclasses import dataclass

import torch

from model.gpt import GPTConfig
from model.parameters import collect_rules
from training.config import TrainConfig
from training.distributed import computes_in_bfloat16
from training.memory import build_without_memory, count_shards
from utils import machine
from utils.units import format_bytes

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class TrafficEstimate:
    """The bytes that one process sends per optimizer step; it receives as many."""

    parameters: int  # all-gathers of FSDP2
    gradients: int  # all-reduce of DDP, or reduce-scatter of FSDP2
    gradients_between_copies: int  # all-reduce of HSDP
    muon: int  # matrices and updates that ranks exchange

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


# The names of the terms for users.
TERMS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "gradients_between_copies": "gradients between copies",
    "muon": "Muon's updates",
}


@dataclass(frozen=True)
class ParameterCounts:
    """The numbers of parameters that are sent in different ways."""

    blocks: int  # in blocks, rounded to the compute dtype where they are used
    outside: int  # embedding, output layer and final norm
    unrounded: int  # norms and gates in blocks
    muon: int  # of those above, the ones that Muon may train

    @property
    def total(self) -> int:
        return self.blocks + self.outside + self.unrounded


def count_parameters_by_use(name: str, model_config: GPTConfig) -> ParameterCounts:
    """Count the parameters of a model without allocating them."""
    model = build_without_memory(name, model_config, model_config.num_hidden_layers)
    rules = collect_rules(model)
    blocks = 0
    outside = 0
    unrounded = 0
    muon = 0
    for key, parameter in model.named_parameters():
        size = parameter.numel()
        if rules[key].muon:
            muon += size
        if not rules[key].rounded:
            unrounded += size
        elif key.startswith("transformer.h."):
            blocks += size
        else:
            outside += size
    return ParameterCounts(blocks, outside, unrounded, muon)


def estimate_traffic(
    config: TrainConfig,
    model_config: GPTConfig,
    device_type: str,
    world_size: int | None = None,
) -> TrafficEstimate:
    """Estimate the bytes that each process sends per optimizer step.

    Args:
        device_type: "cpu" or "cuda"
        world_size: number of processes; by default that of this job
    """
    if world_size is None:
        world_size = machine.world_size()
    is_bfloat16 = computes_in_bfloat16(config.dtype, torch.device(device_type))
    compute_bytes = 2 if is_bfloat16 else FLOAT32_BYTES
    counts = count_parameters_by_use(config.model, model_config)
    muon_bytes = estimate_muon_bytes(config, counts, compute_bytes)

    if config.engine == "ddp":
        ring = ring_fraction(world_size)
        return TrafficEstimate(
            parameters=0,
            gradients=int(2 * ring * FLOAT32_BYTES * counts.total),
            gradients_between_copies=0,
            # the owners' updates, all-gathered
            muon=int(ring * muon_bytes),
        )

    num_shards = count_shards(config, world_size)
    num_copies = world_size // num_shards
    ring = ring_fraction(num_shards)
    micro_batch_size = min(config.micro_batch_size, config.global_batch_size // world_size)
    num_micro_batches = config.global_batch_size // world_size // micro_batch_size
    # In float32 all parameters are sharded. In bfloat16 those that are not rounded are replicated,
    # and their gradients are averaged over all processes once per step.
    num_replicated = counts.unrounded if is_bfloat16 else 0
    num_sharded = counts.total - num_replicated
    num_block_parameters = num_sharded - counts.outside

    # A block is gathered in the forward pass, and once more in the backward pass, where activation
    # checkpointing uses the same copy. What is outside the blocks stays gathered in between.
    gathered_bytes = 2 * compute_bytes * num_block_parameters + FLOAT32_BYTES * counts.outside
    num_reductions = 1 if config.gradient_reduction == "step" else num_micro_batches
    replicated_bytes = 2 * ring_fraction(world_size) * FLOAT32_BYTES * num_replicated
    return TrafficEstimate(
        parameters=int(num_micro_batches * ring * gathered_bytes),
        gradients=int(num_reductions * ring * FLOAT32_BYTES * num_sharded + replicated_bytes),
        gradients_between_copies=int(
            2 * ring_fraction(num_copies) * FLOAT32_BYTES * num_sharded / num_shards
        ),
        # rows of the matrices to their owners, and rows of the updates back
        muon=int(2 * ring * muon_bytes / num_shards),
    )


def estimate_muon_bytes(config: TrainConfig, counts: ParameterCounts, compute_bytes: int) -> int:
    """Return the bytes of all matrices that Muon trains, in the dtype in which it exchanges them."""
    if config.optimizer != "muon":
        return 0
    itemsize = compute_bytes
    if config.muon_dtype is not None:
        itemsize = getattr(torch, config.muon_dtype).itemsize
    return itemsize * counts.muon


def ring_fraction(num_processes: int) -> float:
    """Return which fraction of the bytes each process sends in a ring."""
    return (num_processes - 1) / num_processes


# ---- the text of --dry_run ----


def describe_traffic(
    config: TrainConfig, model_config: GPTConfig, device_type: str, world_size: int
) -> list[str]:
    """Return a table of what each process sends per step, term by term; [] for one process."""
    if world_size == 1:
        return []
    estimate = estimate_traffic(config, model_config, device_type, world_size)
    name = "GPUs" if device_type == "cuda" else "processes"
    lines = [
        f"estimated traffic ({describe_engine(config, world_size)}); each of {world_size} {name} "
        "sends per step:"
    ]
    for term, size in dataclasses.asdict(estimate).items():
        if size > 0:
            lines.append(f"  {TERMS[term]:24s} {format_bytes(size):>10s}")
    lines.append(f"  {'total':24s} {format_bytes(estimate.total):>10s}")
    return lines


def describe_engine(config: TrainConfig, world_size: int) -> str:
    """Name the engine, and over how many processes it shards."""
    num_shards = count_shards(config, world_size)
    if config.engine == "ddp":
        return "ddp"
    if num_shards == world_size:
        return "fsdp"
    return f"fsdp, {world_size // num_shards} copies on {num_shards} processes each"
