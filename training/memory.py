"""What a run needs, computed before it starts: parameters, memory, tokens, FLOPs and time.

Weights, gradients, optimizer state and averaged weights are counted exactly. The rest of the memory
is an estimate: the logits follow from a formula, and activations are what an eager pass would save,
with fused kernels on a GPU, counted on tensors without data. torch.compile saves less; the
allocator's fragmentation and the temporary tensors of the backward pass are not counted.
"""

import dataclasses
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model import build, cost, kernels, model_class
from model.gpt import GPT, GPTConfig, without_initialization
from model.loss import default_chunk_size
from model.parameters import collect_rules
from training.config import TrainConfig
from training.metrics import compute_nominal_flops_per_token, get_peak_flops
from utils import machine
from utils.processes import get_compute_dtype
from utils.units import format_bytes, format_dtype, format_duration

# The loss holds log-probabilities and two gradients of each logit, in float32; compiled, it holds one
# of them and a gradient in the compute dtype.
BYTES_PER_LOGIT = 12
BYTES_PER_COMPILED_LOGIT = 8
# FSDP2 holds the block in use and the next one, which is already being gathered.
NUM_GATHERED_BLOCKS = 2


# ---- models of another depth ----


def resize(model_config: GPTConfig, num_layers: int) -> GPTConfig:
    """Return the configuration of a model of so many blocks, with the same factor on their updates."""
    return dataclasses.replace(
        model_config, num_hidden_layers=num_layers, residual_branch_mult=model_config.branch_mult
    )


def build_without_memory(name: str, model_config: GPTConfig, num_layers: int) -> GPT:
    """Return a model of so many blocks on torch's meta device."""
    with torch.device("meta"):
        return build(name, resize(model_config, num_layers))


# ---- the memory of one process ----


@dataclass(frozen=True)
class MemoryEstimate:
    """The peak memory of one process in bytes; the first four terms are exact."""

    weights: int  # float32, of this process's shard
    gradients: int
    optimizer_state: int  # two moments of AdamW, one of Muon
    averaged_weights: int  # of ema_half_life, in float32
    gathered: int  # what FSDP holds in full
    logits: int  # of the tokens whose loss is computed at a time
    activations: int | None  # of an eager step; None if they cannot be counted

    @property
    def total(self) -> int:
        return sum(size or 0 for size in dataclasses.astuple(self))


def estimate_memory(
    config: TrainConfig, model: GPT, device_type: str, world_size: int | None = None
) -> MemoryEstimate:
    """Estimate the peak memory of one process.

    Args:
        model: may be on torch's meta device
        device_type: "cpu" or "cuda"
        world_size: over how many processes engine=fsdp shards; by default those of this job
    """
    num_shards = count_shards(config, world_size or machine.world_size())
    num_parameters = model.num_parameters()
    model_config = model.config
    return MemoryEstimate(
        weights=4 * num_parameters // num_shards,
        gradients=4 * num_parameters // num_shards,
        optimizer_state=count_optimizer_state(config, model) // num_shards,
        averaged_weights=count_averages(config, num_parameters) // num_shards,
        gathered=estimate_gathered(config, model_config) if num_shards > 1 else 0,
        logits=estimate_logits(config, model_config, device_type),
        activations=estimate_activations(config, model_config, device_type),
    )


def count_shards(config: TrainConfig, world_size: int) -> int:
    """Return over how many processes the parameters are sharded."""
    if config.engine == "ddp":
        return 1
    return min(config.shard_size or world_size, world_size)


def count_optimizer_state(config: TrainConfig, model: GPT) -> int:
    """Return the bytes of the moments: two of AdamW, one of Muon, in float32."""
    num_moments = 2 * model.num_parameters()
    if config.optimizer == "muon":
        rules = collect_rules(model)
        num_moments -= sum(p.numel() for name, p in model.named_parameters() if rules[name].muon)
    return 4 * num_moments


def count_averages(config: TrainConfig, num_parameters: int) -> int:
    """Return the bytes of the averaged weights."""
    return 0 if config.ema_half_life is None else 4 * num_parameters


def estimate_gathered(config: TrainConfig, model_config: GPTConfig) -> int:
    """Return the bytes of what FSDP holds in full: what is outside the blocks, and some blocks."""
    one_block = build_without_memory(config.model, model_config, 1).num_parameters()
    two_blocks = build_without_memory(config.model, model_config, 2).num_parameters()
    return 4 * (one_block + (NUM_GATHERED_BLOCKS - 1) * (two_blocks - one_block))


def estimate_logits(config: TrainConfig, model_config: GPTConfig, device_type: str) -> int:
    """Return the bytes of the logits that are in memory at a time (model/loss.py)."""
    num_tokens = config.local_micro_batch_size * model_config.block_size
    # default_chunk_size asks for a weight, of which it uses the device and the vocabulary size
    with FakeTensorMode():
        weight = torch.empty(model_config.vocab_size, 1, device=device_type)
    num_tokens = min(num_tokens, default_chunk_size(num_tokens, weight))
    bytes_per_logit = BYTES_PER_COMPILED_LOGIT if config.compile is True else BYTES_PER_LOGIT
    return num_tokens * model_config.vocab_size * bytes_per_logit


def estimate_activations(
    config: TrainConfig, model_config: GPTConfig, device_type: str
) -> int | None:
    """Return the bytes that an eager step saves for the backward pass; None if it cannot be run."""
    try:
        if not config.activation_checkpointing:
            return count_saved_bytes(
                config, model_config, model_config.num_hidden_layers, device_type
            )
        # the state that enters each block, and all activations of the block that is recomputed
        one_block = count_saved_bytes(config, model_config, 1, device_type)
    except Exception:  # code of a variant may look at values, for which torch raises many kinds
        return None
    model = build_without_memory(config.model, model_config, 1)
    state_dtype = get_state_dtype(config, model_config, torch.device(device_type))
    num_tokens = config.local_micro_batch_size * model_config.block_size
    states = (
        model_config.num_hidden_layers * num_tokens * cost.state_bytes_per_token(model, state_dtype)
    )
    return one_block + states


def get_state_dtype(
    config: TrainConfig, model_config: GPTConfig, device: torch.device
) -> torch.dtype:
    """Return the dtype of the residual state of a run on a device."""
    if model_config.state_dtype == "float32":
        return torch.float32
    return get_compute_dtype(config.dtype, device)


def count_saved_bytes(
    config: TrainConfig, model_config: GPTConfig, num_layers: int, device_type: str
) -> int:
    """Count what autograd saves of one micro-batch up to the output layer, without data.

    Copies of weights that autocast makes count as well.
    """
    # by address; storages are kept alive, so that no other one gets the same address
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    dtype = get_compute_dtype(config.dtype, torch.device(device_type))
    with FakeTensorMode():
        variant = without_initialization(model_class(config.model))
        model = variant(resize(model_config, num_layers))
        if config.kernels != "off" and device_type == "cuda":
            # the operators of the kernels say themselves what they save
            kernels.use(model, config.kernels, device_type, config.state_checkpoint_interval)
        ids = torch.zeros(config.local_micro_batch_size, model_config.block_size, dtype=torch.int64)
        hooks = torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            model.hidden(ids)
        for tensor in [*model.parameters(), *model.buffers()]:
            saved.pop(tensor.untyped_storage()._cdata, None)
    return sum(storage.nbytes() for storage in saved.values())


# ---- the text of --dry_run ----


def describe_run(
    config: TrainConfig, model: GPT, sequences_per_epoch: int | None, device: torch.device
) -> str:
    """Return lines on the parameters, memory, tokens, FLOPs, and the time on a known GPU.

    sequences_per_epoch: None if the data have not been prepared
    """
    model_config = model.config
    num_sequences = config.max_steps * config.global_batch_size
    num_tokens = num_sequences * model_config.block_size
    # a dry run on a machine without the GPU of the run describes the run on a GPU
    run_device = torch.device("cuda") if config.device == "auto" else device
    state_dtype = get_state_dtype(config, model_config, run_device)
    tokens = (
        f"{config.max_steps:,} steps x {config.global_batch_size} sequences x "
        f"{model_config.block_size} tokens = {num_tokens:,} tokens"
    )
    if sequences_per_epoch is not None:
        tokens = f"{tokens}, {num_sequences / sequences_per_epoch:.2f} epochs"
    num_parameters = model.num_parameters()
    checkpoint_bytes = (
        4 * num_parameters
        + count_optimizer_state(config, model)
        + count_averages(config, num_parameters)
    )
    lines = [
        f"{config.model}: {num_parameters:,} parameters",
        describe_embedding(model),
        describe_memory(config, model, run_device),
        tokens,
        f"{num_tokens * cost.flops_per_token(model):.3g} FLOPs, "
        f"{cost.state_bytes_per_token(model, state_dtype)} bytes of "
        f"{format_dtype(state_dtype)} state per token",
        f"{format_bytes(checkpoint_bytes)} per checkpoint; the disk needs room for "
        f"{config.keep_last + 1} of them",
    ]
    peak = get_peak_flops(device)
    if peak is not None:
        # MFU counts nominal FLOPs, so the time at a given utilization follows from them
        nominal_flops = num_tokens * compute_nominal_flops_per_token(model)
        seconds = nominal_flops / (0.45 * peak * machine.world_size())
        lines.append(f"about {format_duration(seconds)} on {machine.world_size()} GPUs at 45% MFU")
    return "\n".join(lines)


def describe_embedding(model: GPT) -> str:
    """Return a line on what the vocabulary costs: the embedding and the output layer."""
    vocab_size = model.config.vocab_size
    hidden_size = model.config.hidden_size
    name = "token embedding, tied to the output layer"
    num_layers = 1
    if not model.config.tie_embeddings:
        name = "token embedding and output layer"
        num_layers = 2
    num_parameters = num_layers * vocab_size * hidden_size
    # weight, gradient and two moments of AdamW, in float32
    num_bytes = 16 * num_parameters
    # of the matrix products of a token; a multiply-add is two operations
    flops = 3 * 2 * vocab_size * hidden_size
    return (
        f"{name}: {num_parameters:,} parameters "
        f"({num_parameters / model.num_parameters():.0%} of the model), "
        f"{format_bytes(num_bytes)} to train it, "
        f"{flops / cost.flops_per_token(model):.0%} of the FLOPs"
    )


def describe_memory(config: TrainConfig, model: GPT, device: torch.device) -> str:
    """Return a line on the memory of one process on a device, term by term."""
    estimate = estimate_memory(config, model, device.type)
    terms = [
        f"{name.replace('_', ' ')} {format_bytes(size)}"
        for name, size in dataclasses.asdict(estimate).items()
        if size
    ]
    dtype = format_dtype(get_compute_dtype(config.dtype, device))
    name = "GPU" if device.type == "cuda" else "CPU"
    limit = ""
    if device.type == "cuda" and torch.cuda.is_available():
        limit = f" of {format_bytes(torch.cuda.get_device_properties(device).total_memory)}"
    comparison = ""
    if device.type == "cuda":
        # gpt_small and ddl_dv4_cc_ec_small, micro-batches of 16: results/gpu
        comparison = (
            "; on an H200, compiled steps of the additive model needed 0.70 of it, of DDL 0.83"
        )
    return (
        f"estimated memory of one process on a {name} in {dtype}: {format_bytes(estimate.total)}"
        f"{limit} ({', '.join(terms)}); activations are those of an eager step{comparison}"
    )
