"""What a run needs, computed before it starts: parameters, memory, tokens, FLOPs and time.

`least_memory` is a lower bound on the memory of a run on a CPU; `estimate_memory` is the expected
peak of one process, on a CPU or a GPU. No tensor has data while they are computed.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import build, errors_as_value_errors, kernels
from model.gpt import GPT, GPTConfig
from model.loss import default_chunk_size
from model.parameters import collect_rules
from training.config import TrainConfig
from training.distributed import computes_in_bfloat16
from training.metrics import compute_nominal_flops_per_token, get_peak_flops
from utils import machine
from utils.units import format_bytes, format_duration

# Python and torch on a CPU.
PROCESS_BYTES = 420 * 2**20

# The fraction of an eager step's saved activations that a compiled step keeps at least.
LEAST_COMPILED_FRACTION = 0.28

# A compiled step saves the operands and results of products, and recomputes most other tensors in
# the backward pass. It saves this fraction of the others, as AOTAutograd's partitions of the
# graphs of five models show: from 0.08 (mHC) to 0.32 (additive).
COMPILED_FRACTION = 0.22

# Gradients of activations, and other temporary tensors of a block's backward pass, as a multiple of
# what the block saves in an eager step; counted with the operators of four models.
WORKING_FRACTION = 0.25

# Memory that the C library does not return to the system on a CPU, as a multiple of what one block
# saves in an eager step. Forward and backward pass run in two threads, each with its own heap.
# Fitted to runs with 6 blocks of width 256.
EAGER_HEAP_BLOCKS = 2.75
COMPILED_HEAP_BLOCKS = 1.0

# Blocks that FSDP holds in full at its peak, as counted with two processes: the parameters of the
# block in use, of the next one, and the buffer that receives them; and one block's gradients.
FSDP_GATHERED_BLOCKS = 4

# The largest number of blocks that are built, without memory, to count their parameters.
MAX_COUNTED_BLOCKS = 256

# The largest number of blocks that are run, without data, to count what they save.
MAX_PASSED_BLOCKS = 24

# Operators whose operands and results a compiled step saves: those of torch.ops.ddl are kernels.
PRODUCTS = ("aten.mm", "aten.addmm", "aten.convolution", "aten._scaled_dot_product", "ddl.")


# ---- parameters ----


def build_without_memory(name: str, model_config: GPTConfig, num_layers: int) -> GPT:
    """Return a model of so many blocks on torch's meta device."""
    sized_config = dataclasses.replace(model_config, num_hidden_layers=num_layers)
    with torch.device("meta"):
        return build(name, sized_config)


def count_parameters(name: str, model_config: GPTConfig, muon_only: bool = False) -> int:
    """Return the number of parameters of a model, or of those that Muon may train.

    Above MAX_COUNTED_BLOCKS blocks it is extrapolated, assuming that the number of parameters of a
    block is linear in its index.
    """

    def count(num_layers: int) -> int:
        model = build_without_memory(name, model_config, num_layers)
        if not muon_only:
            return model.num_parameters()
        rules = collect_rules(model)
        return sum(p.numel() for key, p in model.named_parameters() if rules[key].muon)

    num_layers = model_config.num_hidden_layers
    if num_layers <= MAX_COUNTED_BLOCKS:
        return count(num_layers)
    return int(extrapolate([count(1), count(2), count(3)], num_layers - 1))


def extrapolate(sizes: Sequence[float], num_steps: float) -> float:
    """Extrapolate three sizes at equal distances quadratically, to some steps after the first.

    Streams that read all earlier blocks grow in this way with depth.
    """
    first, second, third = sizes
    growth = third - 2 * second + first
    return first + num_steps * (second - first) + num_steps * (num_steps - 1) / 2 * growth


# ---- activations ----


class SavedBytes(NamedTuple):
    """What a forward pass up to the output layer keeps for the backward pass, in bytes."""

    weight_copies: float  # in the compute dtype, made by autocast
    products: float  # operands and results of matrix products, attention and fused kernels
    others: float

    def count_activations(self, is_compiled: bool) -> float:
        """Return the bytes of activations that a step saves."""
        return self.products + self.others * (COMPILED_FRACTION if is_compiled else 1.0)


class SavedTensorRecorder(TorchDispatchMode):
    """Record the storages that autograd saves inside, and what made them."""

    def __init__(self, model: GPT, compute_dtype: torch.dtype):
        super().__init__()
        self.compute_dtype = compute_dtype
        own_tensors = [*model.parameters(), *model.buffers()]
        self.own_storages = {tensor.untyped_storage()._cdata for tensor in own_tensors}
        # by address; storages are kept alive, so that no other one gets the same address
        self.saved: dict[int, torch.UntypedStorage] = {}
        self.products: dict[int, torch.UntypedStorage] = {}
        self.weight_copies: dict[int, torch.UntypedStorage] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.save, lambda tensor: tensor)

    def __enter__(self):
        self.hooks.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any):
        self.hooks.__exit__(*error)
        return super().__exit__(*error)

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        result = operator(*arguments, **(keywords or {}))
        name = str(operator)
        if name.startswith("aten._to_copy") and is_stored_in(arguments[0], self.own_storages):
            add_storage(self.weight_copies, result)
        if name.startswith(PRODUCTS):
            for tensor in tree_leaves((arguments, result)):
                if torch.is_tensor(tensor) and self.is_kept(name, tensor):
                    add_storage(self.products, tensor)
        return result

    def is_kept(self, name: str, tensor: torch.Tensor) -> bool:
        """Return whether a compiled step keeps an operand or result of a product."""
        # A matrix product in float32, next to autocast, is one of gates and values. Its operands
        # are casts, which are recomputed.
        is_matrix_product = name.startswith(("aten.mm", "aten.addmm"))
        return tensor.dtype == self.compute_dtype or not is_matrix_product

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_stored_in(tensor, self.own_storages):
            add_storage(self.saved, tensor)
        return tensor

    def save_block_input(self, block: torch.nn.Module, arguments: tuple) -> None:
        """Record the residual state that enters a block, which checkpointing saves."""
        for tensor in tree_leaves(arguments[0]):
            if torch.is_tensor(tensor):
                self.save(tensor)
                add_storage(self.products, tensor)

    def count(self) -> SavedBytes:
        """Return the bytes of what was saved."""
        weight_copies = 0
        products = 0
        others = 0
        for address, storage in self.saved.items():
            if address in self.weight_copies:
                weight_copies += storage.nbytes()
            elif address in self.products:
                products += storage.nbytes()
            else:
                others += storage.nbytes()
        return SavedBytes(weight_copies, products, others)


def is_stored_in(tensor: torch.Tensor, addresses: set[int]) -> bool:
    return tensor.untyped_storage()._cdata in addresses


def add_storage(storages: dict[int, torch.UntypedStorage], tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    storages[storage._cdata] = storage


def bytes_saved_for_backward(
    config: TrainConfig,
    model_config: GPTConfig,
    num_layers: int,
    device_type: str = "cpu",
    activation_checkpointing: bool = False,
) -> SavedBytes:
    """Return what autograd saves of one micro-batch in an eager pass up to the output layer.

    The pass computes as on the device, and with fused kernels on a GPU, but on tensors without
    data. Zeros for a model that looks at the values of its tensors.
    """
    is_bfloat16 = computes_in_bfloat16(config.dtype, torch.device(device_type))
    compute_dtype = torch.bfloat16 if is_bfloat16 else torch.float32
    sized_config = dataclasses.replace(model_config, num_hidden_layers=num_layers)
    try:
        with FakeTensorMode():
            model = build(config.model, sized_config)
            model.activation_checkpointing = activation_checkpointing
            if config.kernels != "off" and device_type == "cuda":
                # the operators of the kernels say themselves what they save
                kernels.use(model, "auto", device_type, config.state_checkpoint_interval)
            recorder = SavedTensorRecorder(model, compute_dtype)
            if activation_checkpointing:
                for block in model.transformer.h:
                    block.register_forward_pre_hook(recorder.save_block_input)
            batch_shape = (config.local_micro_batch_size, model_config.block_size)
            ids = torch.zeros(batch_shape, dtype=torch.int64)
            with recorder, torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
                model.hidden(ids)
    except Exception:  # torch raises many kinds; such a model can be trained all the same
        return SavedBytes(0, 0, 0)
    return recorder.count()


def estimate_saved(config: TrainConfig, model_config: GPTConfig, device_type: str) -> SavedBytes:
    """Return what all blocks save of one micro-batch, extrapolated if there are many."""

    def measure(num_layers: int) -> SavedBytes:
        return bytes_saved_for_backward(
            config,
            model_config,
            num_layers,
            device_type,
            activation_checkpointing=config.activation_checkpointing,
        )

    num_layers = model_config.num_hidden_layers
    if num_layers <= MAX_PASSED_BLOCKS:
        return measure(num_layers)
    # With a usual state_checkpoint_interval, such as 2 or 4, each depth ends alike: the number of
    # its sublayers is a multiple of the interval.
    step = MAX_PASSED_BLOCKS // 3
    sizes_by_depth = zip(measure(step), measure(2 * step), measure(3 * step))
    num_steps = num_layers / step - 1
    return SavedBytes(*(extrapolate(sizes, num_steps) for sizes in sizes_by_depth))


def count_one_block(config: TrainConfig, model_config: GPTConfig, device_type: str) -> SavedBytes:
    """Return what one block saves of one micro-batch, without activation checkpointing."""
    one_block = bytes_saved_for_backward(config, model_config, 1, device_type)
    two_blocks = bytes_saved_for_backward(config, model_config, 2, device_type)
    return SavedBytes(*(max(two - one, 0) for one, two in zip(one_block, two_blocks)))


# ---- the lower bound of a run on a CPU ----


@dataclass(frozen=True)
class LowerBound:
    """The least memory of a process on a CPU in a training step, as a function of its batch."""

    fixed: int  # the process, weights, gradients and the optimizer's state, in bytes
    bytes_per_sequence: int  # saved activations
    block_size: int
    vocab_size: int
    bytes_per_logit: int

    def compute(self, num_sequences: int) -> int:
        """Return the bytes that a micro-batch needs."""
        num_tokens = num_sequences * self.block_size
        tokens_at_once = count_tokens_at_once(num_tokens, self.vocab_size, "cpu")
        logits = tokens_at_once * self.vocab_size * self.bytes_per_logit
        return self.fixed + num_sequences * self.bytes_per_sequence + logits


def compute_lower_bound(config: TrainConfig, model_config: GPTConfig) -> LowerBound:
    """Return the lower bound of a run's memory on a CPU.

    Raises:
        ValueError: the model cannot be built
    """
    # code of a user-defined variant runs here for the first time
    with errors_as_value_errors(config.model):
        num_parameters = count_parameters(config.model, model_config)
    # weight, gradient and one moment (Muon) or two (AdamW), in float32
    bytes_per_parameter = 12 if config.optimizer == "muon" else 16
    num_shards = count_shards(config, machine.world_size())

    saved_per_sequence = 0.0
    if not config.activation_checkpointing:
        single = dataclasses.replace(config, micro_batch_size=1)
        one_block = bytes_saved_for_backward(single, model_config, 1)
        two_blocks = bytes_saved_for_backward(single, model_config, 2)
        first_bytes = one_block.count_activations(is_compiled=False)
        block_bytes = two_blocks.count_activations(is_compiled=False) - first_bytes
        saved_per_sequence = first_bytes + (model_config.num_hidden_layers - 1) * block_bytes
    # A logit and its exponential, in float32; compiled, both may be recomputed from the product.
    bytes_per_logit = 8
    if config.compile:
        saved_per_sequence *= LEAST_COMPILED_FRACTION
        bytes_per_logit = 2
    return LowerBound(
        fixed=PROCESS_BYTES + bytes_per_parameter * num_parameters // num_shards,
        bytes_per_sequence=int(saved_per_sequence),
        block_size=model_config.block_size,
        vocab_size=model_config.vocab_size,
        bytes_per_logit=bytes_per_logit,
    )


def least_memory(config: TrainConfig, model_config: GPTConfig) -> int:
    """Return the least memory, in bytes, of one process on a CPU in a training step.

    Raises:
        ValueError: the model cannot be built
    """
    try:
        lower_bound = compute_lower_bound(config, model_config)
    except ValueError as error:
        if "overflow" in str(error.__cause__):  # a tensor larger than any memory
            return 2**63
        raise
    return lower_bound.compute(config.local_micro_batch_size)


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
    raise ValueError(
        f"micro_batch_size={config.local_micro_batch_size} needs more than "
        f"{format_bytes(needed)}, and {device} has {format_bytes(available)}: "
        f"{suggest_smaller(config, model_config, available)}"
    )


def suggest_smaller(config: TrainConfig, model_config: GPTConfig, available: int) -> str:
    """Return what to give in place of a run that does not fit into the available bytes."""
    micro_batch_size = find_micro_batch_size(config, model_config, available)
    if micro_batch_size is None:
        remedy = "give a smaller model"
    else:
        remedy = f"give --micro_batch_size={micro_batch_size} or less"
    if config.activation_checkpointing:
        return remedy
    return f"{remedy}, or --activation_checkpointing=True"


def find_micro_batch_size(
    config: TrainConfig, model_config: GPTConfig, available: int
) -> int | None:
    """Return the largest micro-batch size that divides the batch and may fit; None if none does."""
    try:
        lower_bound = compute_lower_bound(config, model_config)
    except ValueError:  # larger than any memory
        return None
    for size in range(config.local_micro_batch_size, 0, -1):
        if config.local_batch_size % size == 0 and lower_bound.compute(size) <= available:
            return size
    return None


# ---- the estimate of the peak of one process ----


@dataclass(frozen=True)
class MemoryEstimate:
    """The expected peak memory of one process, in bytes."""

    weights: int  # float32, of this process's shard
    gradients: int
    optimizer: int  # its moments
    gathered: int  # parameters and gradients of the blocks that FSDP holds in full
    weight_copies: int  # in bfloat16, which autocast makes
    activations: int  # saved for the backward pass, and temporary ones of a block
    logits: int  # of the tokens whose loss is computed at a time
    process: int  # Python, torch and memory that the C library does not return; 0 on a GPU

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


# The names of the terms for users.
TERMS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "gathered": "gathered by fsdp",
    "weight_copies": "bfloat16 weights",
    "activations": "activations",
    "logits": "logits",
    "process": "Python, PyTorch",
}


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
    num_shards = count_shards(config, world_size)
    is_sharded = num_shards > 1
    is_bfloat16 = computes_in_bfloat16(config.dtype, torch.device(device_type))
    num_parameters = count_parameters(config.model, model_config)
    saved = estimate_saved(config, model_config, device_type)
    block = count_one_block(config, model_config, device_type)

    # The peak is in the loss, next to the logits, or in the backward pass of the last block, next
    # to the gradients of its activations. Gradients of weights count in full in both. DDP's buckets
    # add nothing, because the gradients are views of them.
    in_loss = MemoryEstimate(
        weights=4 * num_parameters // num_shards,
        gradients=estimate_gradients(config, num_parameters, num_shards),
        optimizer=estimate_optimizer_state(config, model_config, num_parameters) // num_shards,
        gathered=estimate_gathered(config, model_config, 0, is_bfloat16) if is_sharded else 0,
        weight_copies=(
            estimate_weight_copies(config, model_config, saved, block, is_sharded)
            if is_bfloat16
            else 0
        ),
        activations=int(saved.count_activations(config.compile)),
        logits=estimate_logits(config, model_config, device_type),
        process=estimate_process(config, block) if device_type == "cpu" else 0,
    )
    gathered_in_backward = 0
    if is_sharded:
        gathered_in_backward = estimate_gathered(
            config, model_config, FSDP_GATHERED_BLOCKS, is_bfloat16
        )
    in_backward = dataclasses.replace(
        in_loss,
        gathered=gathered_in_backward,
        activations=in_loss.activations + estimate_working_memory(config, block),
        logits=0,
    )
    return max(in_loss, in_backward, key=lambda estimate: estimate.total)


def count_shards(config: TrainConfig, world_size: int) -> int:
    """Return over how many processes the parameters are sharded."""
    if config.engine == "ddp":
        return 1
    return min(config.shard_size or world_size, world_size)


def estimate_gradients(config: TrainConfig, num_parameters: int, num_shards: int) -> int:
    """Return the bytes of gradients, in float32."""
    if config.gradient_reduction == "step" and config.grad_accum_steps > 1:
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


def estimate_gathered(
    config: TrainConfig, model_config: GPTConfig, num_blocks: int, is_bfloat16: bool
) -> int:
    """Return the bytes of some blocks, and of what is outside the blocks, which stays gathered.

    is_bfloat16: blocks are gathered in bfloat16; what is outside them is gathered in float32
    """
    one_block = build_without_memory(config.model, model_config, 1).num_parameters()
    two_blocks = build_without_memory(config.model, model_config, 2).num_parameters()
    num_block_parameters = two_blocks - one_block
    num_other_parameters = one_block - num_block_parameters
    num_blocks = min(num_blocks, model_config.num_hidden_layers)
    bytes_per_block_parameter = 2 if is_bfloat16 else 4
    return 4 * num_other_parameters + bytes_per_block_parameter * num_blocks * num_block_parameters


def estimate_weight_copies(
    config: TrainConfig,
    model_config: GPTConfig,
    saved: SavedBytes,
    block: SavedBytes,
    is_sharded: bool,
) -> int:
    """Return the bytes of the copies of weights that autocast makes in bfloat16."""
    output_layer = 2 * model_config.vocab_size * model_config.hidden_size
    if is_sharded:  # the weights of blocks are gathered in bfloat16
        return output_layer
    if not config.activation_checkpointing:
        return int(saved.weight_copies) + output_layer
    # Eager, autocast keeps its copies until the end of the forward pass, whatever is recomputed.
    num_blocks = 1 if config.compile else model_config.num_hidden_layers
    return int(num_blocks * block.weight_copies) + output_layer


def estimate_working_memory(config: TrainConfig, block: SavedBytes) -> int:
    """Return the bytes that the backward pass of a block takes beyond what the forward pass saved."""
    working = WORKING_FRACTION * block.count_activations(is_compiled=False)
    if config.activation_checkpointing:
        working += block.count_activations(config.compile)  # the block is recomputed
    return int(working)


def estimate_process(config: TrainConfig, block: SavedBytes) -> int:
    """Return the bytes that a process on a CPU takes beyond its tensors."""
    num_blocks = COMPILED_HEAP_BLOCKS if config.compile else EAGER_HEAP_BLOCKS
    return PROCESS_BYTES + int(num_blocks * block.count_activations(is_compiled=False))


def estimate_logits(config: TrainConfig, model_config: GPTConfig, device_type: str) -> int:
    """Return the bytes that the loss takes (model/loss.py)."""
    num_tokens = config.local_micro_batch_size * model_config.block_size
    vocab_size = model_config.vocab_size
    tokens_at_once = num_tokens
    if build_without_memory(config.model, model_config, 1).has_linear_head():
        tokens_at_once = count_tokens_at_once(num_tokens, vocab_size, device_type)
    is_bfloat16 = computes_in_bfloat16(config.dtype, torch.device(device_type))
    itemsize = 2 if is_bfloat16 else 4

    if config.compile:
        # in float32, and their gradient in the compute dtype
        bytes_per_logit = 4 + itemsize
    elif tokens_at_once < num_tokens:
        # Python still holds tensors of the chunk before while it computes one
        bytes_per_logit = 14 + itemsize
    else:
        # the log-probabilities and two gradients, in float32
        bytes_per_logit = 12
    logits = tokens_at_once * vocab_size * bytes_per_logit
    if tokens_at_once == num_tokens:
        return logits
    # a chunked loss computes the gradients of its inputs in the forward pass
    weight_gradient = 4 * vocab_size * model_config.hidden_size
    hidden_gradient = itemsize * num_tokens * model_config.hidden_size
    return logits + weight_gradient + hidden_gradient


def count_tokens_at_once(num_tokens: int, vocab_size: int, device_type: str) -> int:
    """Return the number of tokens whose logits are in memory at a time."""
    # default_chunk_size asks for a weight, of which it uses the device and the vocabulary size
    with FakeTensorMode():
        weight = torch.empty(vocab_size, 1, device=device_type)
    return min(num_tokens, default_chunk_size(num_tokens, weight))


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
    is_bfloat16 = computes_in_bfloat16(config.dtype, run_device)
    dtype = model_config.state_dtype if is_bfloat16 else "float32"

    lines = [f"{config.model}: {model.num_parameters():,} parameters", describe_embedding(model)]
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
    num_parameters = model.num_parameters()
    checkpoint_bytes = 4 * num_parameters + estimate_optimizer_state(
        config, model_config, num_parameters
    )
    lines.append(
        f"{format_bytes(checkpoint_bytes)} per checkpoint; the disk needs room for "
        f"{config.keep_last + 1} of them"
    )
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
    num_layers = 1 if model.config.tie_embeddings else 2
    num_parameters = num_layers * vocab_size * hidden_size
    # weight, gradient and two moments of AdamW, in float32
    num_bytes = 16 * num_parameters
    # of the matrix products of a token; a multiply-add is two operations
    flops = 3 * 2 * vocab_size * hidden_size
    name = (
        "token embedding, tied to the output layer"
        if num_layers == 1
        else ("token embedding and output layer")
    )
    return (
        f"{name}: {num_parameters:,} parameters "
        f"({num_parameters / model.num_parameters():.0%} of the model), "
        f"{format_bytes(num_bytes)} to train it, "
        f"{flops / model.flops_per_token():.0%} of the FLOPs"
    )


def describe_memory(
    config: TrainConfig, model_config: GPTConfig, device: torch.device
) -> list[str]:
    """Return lines on the memory of one process, on the device and, if none was chosen, on a GPU.

    There is no estimate for an Apple GPU.
    """
    lines = []
    if device.type == "cuda":
        available = torch.cuda.get_device_properties(device).total_memory
        lines.extend(describe_estimate(config, model_config, "cuda", available))
    if device.type == "cpu":
        available = machine.available_memory()
        lines.extend(describe_estimate(config, model_config, "cpu", available))
        needed = format_bytes(least_memory(config, model_config))
        lines.append(f"a step needs at least {needed}")
    if device.type == "cpu" and config.device == "auto":
        # a dry run on a machine without the GPU of the run
        lines.extend(describe_estimate(config, model_config, "cuda", available=None))
    return lines


def describe_estimate(
    config: TrainConfig, model_config: GPTConfig, device_type: str, available: int | None
) -> list[str]:
    """Return a table of the estimate of one process, term by term.

    available: bytes of the device; None if they are not known
    """
    is_bfloat16 = computes_in_bfloat16(config.dtype, torch.device(device_type))
    properties = [
        "bfloat16" if is_bfloat16 else "float32",
        "compiled" if config.compile else "eager",
    ]
    if device_type == "cuda":
        properties.append(describe_kernels(config, model_config))
    name = "GPU" if device_type == "cuda" else "CPU"
    estimate = estimate_memory(config, model_config, device_type)
    lines = [f"estimated peak memory of one process on a {name} ({', '.join(properties)}):"]
    for term, size in dataclasses.asdict(estimate).items():
        if size > 0:
            lines.append(f"  {TERMS[term]:18s} {format_bytes(size):>10s}")
    total = f"  {'total':18s} {format_bytes(estimate.total):>10s}"
    if available is not None:
        total = f"{total} of {format_bytes(available)} available"
    lines.append(total)
    return lines


def describe_kernels(config: TrainConfig, model_config: GPTConfig) -> str:
    """Return whether the run would use fused kernels on a GPU."""
    if config.kernels == "off":
        return "without fused kernels"
    model = build_without_memory(config.model, model_config, 1)
    reason = kernels.use(model, "auto", "cuda", config.state_checkpoint_interval)
    return "fused kernels" if reason is None else f"without fused kernels: {reason}"
