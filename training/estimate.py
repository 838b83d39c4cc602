"""What a run will need, before it starts: parameters, memory, tokens, FLOPs and time."""

import dataclasses
from pathlib import Path

import torch

from model import build
from training.distributed import world_size
from training.metrics import duration, nominal_flops_per_token, peak_flops


def size_of_run(config, model, windows: int, device: torch.device) -> str:
    """Parameters, memory, tokens and FLOPs of a whole run, and its time at 45% utilisation where the peak is known."""
    tokens = config.max_steps * config.global_batch_size * model.config.block_size
    flops = tokens * model.flops_per_token()
    lines = [
        f"{config.model}: {model.num_parameters():,} parameters",
        f"{16 * model.num_parameters() / 2**30:.2f} GiB for weights, gradients and AdamW's state, before activations",
        f"{config.max_steps:,} steps x {config.global_batch_size} sequences x {model.config.block_size} tokens = "
        f"{tokens:,} tokens, {config.max_steps * config.global_batch_size / windows:.2f} epochs",
        f"{flops:.3g} FLOPs, {model.state_bytes_per_token()} bytes of bfloat16 state per token",
    ]
    if peak := peak_flops(device):
        # MFU counts nominal FLOPs, so the time at a given utilisation follows from them.
        seconds = tokens * nominal_flops_per_token(model) / (0.45 * peak * world_size())
        lines.append(f"about {duration(seconds)} on {world_size()} GPUs at 45% utilisation")
    return "\n".join(lines)


def parameters_of(stem: str, model_config) -> int:
    """Parameters of a model that is not made: counted with one and two blocks on torch's meta device."""
    counts = []
    for layers in (1, 2):
        with torch.device("meta"):
            model = build(stem, **{**dataclasses.asdict(model_config), "num_hidden_layers": layers})
        counts.append(model.num_parameters())
    return counts[0] + (model_config.num_hidden_layers - 1) * (counts[1] - counts[0])


def least_memory(config, model_config, rows: int) -> int:
    """Bytes that one process cannot do without: weights, gradients, AdamW's state, one micro-batch's states and logits.

    What is counted first is plain arithmetic, so that absurd sizes are refused before any loop over them.
    """
    c = model_config
    tokens = rows * c.block_size
    state = c.hidden_size * getattr(c, "ddl_value_channels", 1) * (c.num_hidden_layers + 1) * 2
    activations = tokens * (state + 4 * c.vocab_size)
    matrices = 4 * c.num_attention_heads * c.head_dim * c.hidden_size + 8 * c.hidden_size**2
    weights = c.vocab_size * c.hidden_size + c.num_hidden_layers * matrices
    share = world_size() if config.engine == "fsdp" else 1
    per_weight = 12 if config.optimizer == "muon" else 16  # weight, gradient, one or two moments
    if per_weight * weights // share + activations < 2**43:
        try:
            weights = parameters_of(config.model, model_config)
        except RuntimeError:  # a size that overflows
            return 2**63
    return per_weight * weights // share + activations


def memory_of(device: torch.device) -> int:
    """Bytes that this process may use: the GPU's, or the machine's within the limits of its control group."""
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
    return min(limits)


def check_memory(config, model_config, rows: int, device: torch.device) -> None:
    """ValueError: the run needs more memory than there is, whatever else it needs."""
    needed, there = least_memory(config, model_config, rows), memory_of(device)
    if needed > there:
        raise ValueError(
            f"this model needs at least {needed / 2**30:.4g} GiB, {device} has {there / 2**30:.4g} GiB: give a smaller "
            f"micro_batch_size={rows} or model (hidden_size={model_config.hidden_size}, "
            f"num_hidden_layers={model_config.num_hidden_layers}, vocab_size={model_config.vocab_size}, "
            f"block_size={model_config.block_size}), or engine=fsdp on more GPUs"
        )
