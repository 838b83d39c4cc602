"""What a run will need, before it starts: parameters, memory, tokens, FLOPs and time."""

import dataclasses
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from model import build
from training import memory
from training.distributed import rank, world_size
from training.metrics import duration, nominal_flops_per_token, peak_flops, size

# On a CPU: what Python and torch take, what compiling takes, and that for every node of the compiled graphs
# (results/memory_cpu.json).
PROCESS, COMPILER, PER_NODE = 420 * 2**20, 80 * 2**20, 20 * 2**10
MOST_COMPILER = 2**30
# A process can take a quarter more than the estimate. A full machine kills it without a word; a full GPU
# says so in one line, and on GPUs nothing was measured: there only what clearly does not fit is refused.
MARGIN = {"cpu": 1.25, "cuda": 1 / 1.2}


@dataclass(frozen=True)
class Memory:
    """Bytes at the peak of one process: weights, gradients that outlast a micro-batch and the optimizer's state;
    activations, with gradients while they are made; and, on a CPU, the process itself."""

    weights: int
    activations: int
    process: int

    @property
    def total(self) -> int:
        return self.weights + self.activations + self.process


def size_of_run(config, model, windows: int, rows: int, device: torch.device) -> str:
    """Parameters, memory, tokens and FLOPs of a whole run, and its time at 45% utilisation where the peak is known."""
    tokens = config.max_steps * config.global_batch_size * model.config.block_size
    flops = tokens * model.flops_per_token()
    lines = [
        f"{config.model}: {model.num_parameters():,} parameters",
        memory_line(config, model.config, rows, device),
        f"{config.max_steps:,} steps x {config.global_batch_size} sequences x {model.config.block_size} tokens = "
        f"{tokens:,} tokens, {config.max_steps * config.global_batch_size / windows:.2f} epochs",
        f"{flops:.3g} FLOPs, {model.state_bytes_per_token()} bytes of bfloat16 state per token",
    ]
    if peak := peak_flops(device):
        # MFU counts nominal FLOPs, so the time at a given utilisation follows from them.
        seconds = tokens * nominal_flops_per_token(model) / (0.45 * peak * world_size())
        lines.append(f"about {duration(seconds)} on {world_size()} GPUs at 45% utilisation")
    return "\n".join(lines)


def memory_line(config, model_config, rows: int, device: torch.device) -> str:
    try:
        needed = memory_needed(config, model_config, rows, device)
    except memory.Unknown as error:
        return f"its memory is not known ({error})"
    process = f", {size(needed.process)} for the process" if needed.process else ""
    return (
        f"about {size(needed.total)} of {size(memory_of(device))} on {device}: {size(needed.weights)} for weights and "
        f"optimizer, {size(needed.activations)} for activations and gradients{process}"
    )


def parameters_of(stem: str, model_config) -> int:
    """Parameters of a model that is not made: counted with one and two blocks on torch's meta device."""
    counts = []
    for layers in (1, 2):
        with torch.device("meta"):
            model = build(stem, **{**dataclasses.asdict(model_config), "num_hidden_layers": layers})
        counts.append(model.num_parameters())
    return counts[0] + (model_config.num_hidden_layers - 1) * (counts[1] - counts[0])


def least_memory(config, model_config, rows: int) -> int:
    """Bytes that one process cannot do without: weights, gradients, AdamW's state, one micro-batch's states.

    What is counted first is plain arithmetic, so that absurd sizes are refused before any loop over them.
    """
    c = model_config
    state = c.hidden_size * getattr(c, "ddl_value_channels", 1) * (c.num_hidden_layers + 1) * 2
    matrices = 4 * c.num_attention_heads * c.head_dim * c.hidden_size + 8 * c.hidden_size**2
    weights = c.vocab_size * c.hidden_size + c.num_hidden_layers * matrices
    share = world_size() if config.engine == "fsdp" else 1
    activations = rows * c.block_size * state
    if per_weight(config) * weights // share + activations < 2**43:
        try:
            weights = parameters_of(config.model, model_config)
        except RuntimeError:  # a size that overflows
            return 2**63
    return per_weight(config) * weights // share + activations


def per_weight(config) -> int:
    """Bytes of a weight, its gradient, and one (Muon) or two moments, in float32."""
    return 12 if config.optimizer == "muon" else 16


def memory_needed(config, model_config, rows: int, device: torch.device) -> Memory:
    """An estimate for micro-batches of `rows` sequences. On two CPU cores within a fifth of what was measured.

    memory.Unknown: there is none.
    """
    compiled, on_cpu = config.compile, device.type == "cpu"
    bf16 = config.dtype == "bfloat16" or (config.dtype == "auto" and not on_cpu)
    how = (bf16, compiled, config.activation_checkpointing, config.kernels, config.state_interval)
    setting = memory.Setting(config.model, model_config, rows, device, *how)
    parameters = parameters_of(config.model, model_config)
    world, accumulates = world_size(), config.global_batch_size > rows * world_size()
    # Muon has one moment where AdamW, which it leaves the embedding, has two.
    moments = parameters + model_config.vocab_size * model_config.hidden_size
    weights = 4 * parameters + 4 * (moments if config.optimizer == "muon" else 2 * parameters)
    activations, nodes = memory.needs(setting)  # with the gradients of one micro-batch
    if config.engine == "fsdp":
        weights //= world
        if not accumulates:
            activations -= 4 * parameters * (world - 1) // world
    else:  # gradients outlast a micro-batch where another one follows; DDP has them once more in its buckets
        weights += 4 * parameters * (accumulates + (world > 1))
    compiler = COMPILER + PER_NODE * nodes if compiled else 0
    return Memory(weights, activations, PROCESS + compiler if on_cpu else 0)


def memory_of(device: torch.device) -> int:
    """Bytes that this process may use: the GPU's, or its share of the machine's within its control group's limits."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limits = [
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    ]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(file).exists() and (text := Path(file).read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def check_memory(config, model_config, rows: int, device: torch.device) -> None:
    """ValueError: the run needs more memory than there is; the message names the key that helps."""
    there = memory_of(device)
    least = least_memory(config, model_config, rows)
    if 50 * (least + rows * model_config.block_size * 4 * model_config.vocab_size) < there:
        return  # far from any doubt: nothing more is made than a few dozen tensors of the state's size a block
    if least > there:
        raise ValueError(
            f"this model needs at least {size(least)}, {device} has {size(there)}: give a smaller "
            f"micro_batch_size={rows} or model (hidden_size={model_config.hidden_size}, "
            f"num_hidden_layers={model_config.num_hidden_layers}, vocab_size={model_config.vocab_size}, "
            f"block_size={model_config.block_size})"
        )
    try:
        # To trace a compiled model takes seconds, which are saved where even the eager one fits.
        eager = memory_needed(dataclasses.replace(config, compile=False), model_config, rows, device)
        if MARGIN["cpu"] * eager.total + MOST_COMPILER * config.compile < there:
            return
        needed = memory_needed(config, model_config, rows, device).total if config.compile else eager.total
        if MARGIN[device.type] * needed > there:
            fix = what_fits(config, model_config, rows, device, needed, there)
            raise ValueError(
                f"micro_batch_size={rows} needs about {size(needed)}, perhaps a quarter more, and {device} has "
                f"{size(there)}: {fix}"
            )
    except memory.Unknown as error:
        if rank() == 0:
            print(f"note: whether the memory suffices is not known ({error})", file=sys.stderr)


def what_fits(config, model_config, rows: int, device: torch.device, needed: int, there: int) -> str:
    """The largest micro-batch that fits, as it is or with activation checkpointing; else that the model must change."""
    share = config.global_batch_size // world_size()
    for keys in ({},) if config.activation_checkpointing else ({}, {"activation_checkpointing": True}):
        changed = dataclasses.replace(config, **keys)
        some = memory_needed(changed, model_config, rows, device).total if keys else needed
        one = memory_needed(changed, model_config, 1, device).total if rows > 1 else some
        for fewer in (n for n in range(rows, 0, -1) if share % n == 0):
            about = one + (some - one) * (fewer - 1) // max(rows - 1, 1)
            if MARGIN["cpu"] * about < there:
                options = [f"--micro_batch_size={fewer}"] if fewer < rows else []
                options += [f"--{key}={value}" for key, value in keys.items()]
                return f"give {' '.join(options)} (about {size(about)})"
    sharded = ", or engine=fsdp on more GPUs" if device.type == "cuda" else ""
    return f"give a smaller model{sharded}"
