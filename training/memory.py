"""What a run needs, computed before it starts: parameters, memory, tokens, FLOPs and time.

`least_memory` is a lower bound, which a run on a CPU cannot do without; `estimate_memory` is the
expected peak of one process, on a CPU or a GPU. No tensor has data while they are computed.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model import build, cost, errors_as_value_errors, kernels, model_class
from model.gpt import GPT, GPTConfig
from model.loss import chunk_of
from model.parameters import rules_of
from training.config import TrainConfig
from training.distributed import computes_in_bfloat16
from training.metrics import compute_nominal_flops_per_token, get_peak_flops
from utils import machine
from utils.units import format_bytes, format_duration

# Python and torch on a CPU.
PROCESS_BYTES = 420 * 2**20

# The share of an eager step's saved activations that a compiled step keeps at least.
LEAST_COMPILED_FRACTION = 0.28

# What a step takes at its peak beyond weights and logits, as a multiple of what autograd saves in
# an eager pass: gradients of activations and other temporaries come to it, and torch.compile saves
# less. Fitted to runs on a CPU with 6 blocks of width 256 (docs/runs.md).
EAGER_FACTOR = 1.55
COMPILED_FACTOR = 0.5

# The largest number of blocks that are built, without memory, to count their parameters.
MAX_COUNTED_BLOCKS = 256

# The bytes of a logit while its chunk is worked on: the logit and its exponential in float32, and
# its gradient in bfloat16 (model/loss.py).
BYTES_PER_LOGIT = 10


# ---- parameters ----


def build_without_memory(name: str, model_config: GPTConfig, num_layers: int) -> GPT:
    """Return a model of so many blocks on torch's meta device."""
    sized_config = dataclasses.replace(model_config, num_hidden_layers=num_layers)
    with torch.device("meta"):
        return build(name, sized_config)


def count_parameters(name: str, model_config: GPTConfig, muon_only: bool = False) -> int:
    """Return the number of parameters of a model, or of those that Muon may train.

    From MAX_COUNTED_BLOCKS blocks on it is extrapolated: each block then has as many parameters
    more than the block before it as the third block has more than the second.
    """

    def count(num_layers: int) -> int:
        model = build_without_memory(name, model_config, num_layers)
        if not muon_only:
            return model.num_parameters()
        rules = rules_of(model)
        return sum(p.numel() for key, p in model.named_parameters() if rules[key].muon)

    num_layers = model_config.num_hidden_layers
    if num_layers <= MAX_COUNTED_BLOCKS:
        return count(num_layers)
    one = count(1)
    second_block = count(2) - one
    growth = count(3) - one - 2 * second_block
    num_more = num_layers - 1
    return one + num_more * second_block + num_more * (num_more - 1) // 2 * growth


# ---- activations ----


def bytes_saved_for_backward(config: TrainConfig, model_config: GPTConfig, num_layers: int) -> int:
    """Return the bytes that autograd saves of one sequence in an eager pass on a CPU.

    0 for a model that looks at the values of its tensors.
    """
    is_bfloat16 = computes_in_bfloat16(config.dtype, torch.device("cpu"))
    sized_config = dataclasses.replace(model_config, num_hidden_layers=num_layers)
    try:
        with FakeTensorMode():
            model = build(config.model, sized_config)
            ids = torch.zeros(1, model_config.block_size, dtype=torch.int64)
            with record_saved_tensors(model) as saved, autocast(is_bfloat16):
                model(ids, ids)
    except Exception:  # torch raises many kinds; such a model can be trained all the same
        return 0
    return sum(storage.nbytes() for storage in saved.values())


def bytes_saved_below_the_head(
    config: TrainConfig,
    model_config: GPTConfig,
    num_layers: int,
    batch_size: int,
    is_bfloat16: bool,
    is_fused: bool,
) -> int:
    """Return the bytes that autograd saves of a batch in an eager pass up to the output layer.

    Copies of the weights in bfloat16 are among them. 0 for a model that looks at the values of its
    tensors.
    """
    sized_config = dataclasses.replace(model_config, num_hidden_layers=num_layers)
    try:
        with FakeTensorMode():
            model = build(config.model, sized_config)
            if is_fused:
                kernels.use(model, "auto", torch.device("cuda"), config.state_checkpoint_interval)
            ids = torch.zeros(batch_size, model_config.block_size, dtype=torch.int64)
            with record_saved_tensors(model) as saved, autocast(is_bfloat16):
                model.hidden(ids)
    except Exception:  # as in bytes_saved_for_backward
        return 0
    return sum(storage.nbytes() for storage in saved.values())


def autocast(is_bfloat16: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16)


@contextlib.contextmanager
def record_saved_tensors(model: GPT) -> Iterator[dict[int, torch.UntypedStorage]]:
    """Record the storages that autograd saves inside, each once, without the model's own tensors."""
    own_tensors = [*model.parameters(), *model.buffers()]
    own_storages = {tensor.untyped_storage()._cdata for tensor in own_tensors}
    saved = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own_storages:
            saved[storage._cdata] = storage  # kept alive, so that no other one gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


# ---- the lower bound of a run on a CPU ----


def least_memory(config: TrainConfig, model_config: GPTConfig) -> int:
    """Return the bytes that one process on a CPU cannot do without in a training step.

    These are weights, gradients, the optimizer's state, and what autograd saves.

    Raises:
        ValueError: the model cannot be built
    """
    try:
        # code of a user-defined variant runs here for the first time
        with errors_as_value_errors(config.model):
            num_parameters = count_parameters(config.model, model_config)
    except ValueError as error:
        if "overflow" in str(error.__cause__):  # a tensor larger than any memory
            return 2**63
        raise
    # weight, gradient and one moment (Muon) or two (AdamW), in float32
    bytes_per_parameter = 12 if config.optimizer == "muon" else 16
    num_shards = machine.world_size() if config.engine == "fsdp" else 1
    weights = bytes_per_parameter * num_parameters // num_shards

    saved_per_sequence = 0
    if not config.activation_checkpointing:
        one_block = bytes_saved_for_backward(config, model_config, 1)
        two_blocks = bytes_saved_for_backward(config, model_config, 2)
        num_more = model_config.num_hidden_layers - 1
        saved_per_sequence = one_block + num_more * (two_blocks - one_block)
    fraction = LEAST_COMPILED_FRACTION if config.compile else 1.0
    activations = int(config.local_micro_batch_size * saved_per_sequence * fraction)
    return PROCESS_BYTES + weights + activations


def check_fits(config: TrainConfig, model_config: GPTConfig, device: torch.device) -> None:
    """Raise ValueError if a run on a CPU needs more memory than there is.

    Without this check the system kills the process without a message. A GPU reports it itself.
    """
    available = machine.available_memory()
    if device.type != "cpu" or available is None:
        return
    needed = least_memory(config, model_config)
    if needed <= available:
        return
    micro_batch_size = find_micro_batch_size(config, model_config, available, needed)
    raise ValueError(
        f"micro_batch_size={config.local_micro_batch_size} needs more than "
        f"{format_bytes(needed)}, and {device} has {format_bytes(available)}: "
        f"{suggest_smaller(config, micro_batch_size)}"
    )


def suggest_smaller(config: TrainConfig, micro_batch_size: int) -> str:
    """Return what to give in place of a run that does not fit.

    micro_batch_size: the largest that may fit; 0 if none does
    """
    remedies = ["a smaller model"]
    if micro_batch_size > 0:
        remedies = [f"--micro_batch_size={micro_batch_size} or less"]
    if not config.activation_checkpointing:
        remedies.append("or --activation_checkpointing=True")
    return f"give {', '.join(remedies)}"


def find_micro_batch_size(
    config: TrainConfig, model_config: GPTConfig, available: int, needed: int
) -> int:
    """Return the largest micro-batch size that divides the batch and may fit; 0 if none does.

    needed: `least_memory` of the configured size
    """
    single = dataclasses.replace(config, micro_batch_size=1)
    needed_by_one = least_memory(single, model_config)
    if needed_by_one > available:
        return 0
    # the memory grows by the same amount with every sequence
    num_more = config.local_micro_batch_size - 1
    bytes_per_sequence = max(needed - needed_by_one, 1) / max(num_more, 1)
    largest = int((available - needed_by_one) / bytes_per_sequence) + 1
    for size in range(min(largest, config.local_micro_batch_size), 0, -1):
        if config.local_batch_size % size == 0:
            return size
    return 0


# ---- the estimate of the peak of one process ----


@dataclass(frozen=True)
class MemoryEstimate:
    """The expected peak memory of one process, in bytes."""

    weights: int
    gradients: int
    optimizer: int  # its moments
    weight_copies: int  # in bfloat16, which autocast keeps from forward to backward
    activations: int  # saved for the backward pass
    logits: int  # of the tokens whose loss is computed at a time
    process: int  # Python and torch; 0 on a GPU

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def estimate_memory(
    config: TrainConfig,
    model_config: GPTConfig,
    device_type: str,
    world_size: int | None = None,
) -> MemoryEstimate:
    """Estimate the peak memory of one process.

    Args:
        device_type: "cpu" or "cuda"
        world_size: over how many processes engine=fsdp shards; by default those of this job
    """
    if world_size is None:
        world_size = machine.world_size()
    num_shards = world_size if config.engine == "fsdp" else 1
    num_parameters = count_parameters(config.model, model_config)
    device = torch.device(device_type)
    is_bfloat16 = computes_in_bfloat16(config.dtype, device)
    # Weights, gradients and moments are in float32, whatever the compute dtype. DDP's buckets add
    # nothing, because gradients are views of them.
    return MemoryEstimate(
        weights=4 * num_parameters // num_shards,
        gradients=estimate_gradients(config, num_parameters, num_shards),
        optimizer=estimate_optimizer_state(config, model_config, num_parameters) // num_shards,
        # autocast casts every weight once in a forward pass; FSDP gathers one block at a time, but
        # its casts stay as well
        weight_copies=2 * num_parameters if is_bfloat16 else 0,
        activations=estimate_activations(config, model_config, device_type, is_bfloat16),
        logits=estimate_logits(config, model_config, device_type),
        process=PROCESS_BYTES if device_type == "cpu" else 0,
    )


def estimate_gradients(config: TrainConfig, num_parameters: int, num_shards: int) -> int:
    """Return the bytes of gradients, in float32."""
    if config.grad_accum_steps > 1:
        # FSDP2 shards them with the last micro-batch, and holds them in full until then
        return 4 * num_parameters
    return 4 * num_parameters // num_shards


def estimate_optimizer_state(
    config: TrainConfig, model_config: GPTConfig, num_parameters: int
) -> int:
    """Return the bytes of the moments: two of AdamW, one of Muon, in float32."""
    num_muon_parameters = 0
    if config.optimizer == "muon":
        num_muon_parameters = count_parameters(config.model, model_config, muon_only=True)
    return 8 * num_parameters - 4 * num_muon_parameters


def estimate_activations(
    config: TrainConfig, model_config: GPTConfig, device_type: str, is_bfloat16: bool
) -> int:
    """Return the bytes that are saved for the backward pass of one micro-batch."""
    # counted on the operators of the kernels themselves, which say what they save
    is_fused = config.kernels != "off" and device_type == "cuda"

    def bytes_per_sequence(num_layers: int) -> int:
        # the difference of two batch sizes leaves out the copies of weights
        one, two = (
            bytes_saved_below_the_head(
                config, model_config, num_layers, batch_size, is_bfloat16, is_fused
            )
            for batch_size in (1, 2)
        )
        return two - one

    # Blocks are alike after the first, which also counts the embedding and the readout.
    first_block = bytes_per_sequence(1)
    next_block = bytes_per_sequence(2) - first_block
    num_layers = model_config.num_hidden_layers
    factor = COMPILED_FACTOR if config.compile else EAGER_FACTOR
    if config.activation_checkpointing:
        # the state before every block, and what one block saves while it is recomputed
        saved = factor * first_block + num_layers * state_bytes(config, model_config, is_bfloat16)
    else:
        saved = factor * (first_block + (num_layers - 1) * next_block)
    return int(config.local_micro_batch_size * saved)


def state_bytes(config: TrainConfig, model_config: GPTConfig, is_bfloat16: bool) -> int:
    """Return the bytes of one sequence's residual state."""
    dtype = getattr(torch, model_config.state_dtype) if is_bfloat16 else torch.float32
    state_size = cost.state_size(model_class(config.model), model_config)
    return state_size * dtype.itemsize * model_config.block_size


def estimate_logits(config: TrainConfig, model_config: GPTConfig, device_type: str) -> int:
    """Return the bytes of the logits of the tokens whose loss is computed at a time."""
    num_tokens = config.local_micro_batch_size * model_config.block_size
    # chunk_of asks for a weight, of which it uses the device and the vocabulary size
    with FakeTensorMode():
        weight = torch.empty(model_config.vocab_size, 1, device="cpu")
    tokens_at_once = chunk_of(num_tokens, weight)
    if device_type == "cuda":
        # a GPU gets four times as many, for fewer and larger products
        tokens_at_once *= 4
    return min(num_tokens, tokens_at_once) * model_config.vocab_size * BYTES_PER_LOGIT


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
    is_bfloat16 = computes_in_bfloat16(config.dtype, device)
    dtype = model_config.state_dtype if is_bfloat16 else "float32"

    lines = [f"{config.model}: {model.num_parameters():,} parameters"]
    lines.extend(describe_memory(config, model_config, device))
    tokens = (
        f"{config.max_steps:,} steps x {config.global_batch_size} sequences x "
        f"{model_config.block_size} tokens = {num_tokens:,} tokens"
    )
    if sequences_per_epoch is not None:
        tokens = f"{tokens}, {num_sequences / sequences_per_epoch:.2f} epochs"
    lines.append(tokens)
    lines.append(
        f"{num_tokens * model.flops_per_token():.3g} FLOPs, "
        f"{model.state_bytes_per_token(getattr(torch, dtype))} bytes of {dtype} state per token"
    )
    peak = get_peak_flops(device)
    if peak is not None:
        # MFU counts nominal FLOPs, so the time at a given utilization follows from them
        nominal_flops = num_tokens * compute_nominal_flops_per_token(model)
        seconds = nominal_flops / (0.45 * peak * machine.world_size())
        lines.append(f"about {format_duration(seconds)} on {machine.world_size()} GPUs at 45% MFU")
    return "\n".join(lines)


def describe_memory(
    config: TrainConfig, model_config: GPTConfig, device: torch.device
) -> list[str]:
    """Return lines on the memory of one process, on the device and, if it is open, on a GPU."""
    device_types = [device.type]
    if device.type == "cpu" and config.device == "auto":
        device_types.append("cuda")  # a dry run on a machine without the GPU of the run
    lines = []
    # term by term, so that a user sees what a smaller setting would save
    for device_type in device_types:
        estimate = estimate_memory(config, model_config, device_type)
        names = {"cpu": "on the CPU", "cuda": "on a GPU"}
        lines.append(
            f"estimated peak memory of a process {names.get(device_type, device_type)}: "
            f"{format_bytes(estimate.total)}"
        )
        for name, size in dataclasses.asdict(estimate).items():
            if size:
                lines.append(f"  {name.replace('_', ' '):14s} {format_bytes(size)}")
    available = machine.available_memory()
    if device.type == "cpu" and available is not None:
        needed = least_memory(config, model_config)
        lines.append(
            f"at least {format_bytes(needed)} are needed, {format_bytes(available)} are available"
        )
    return lines
