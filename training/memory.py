"""What a run needs, said before it starts: parameters, a lower bound of its memory, tokens, FLOPs and time."""

import dataclasses
import os
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model import build, cost, faults_of, model_class
from training.distributed import computes_in_bfloat16, world_size
from training.metrics import duration, nominal_flops_per_token, peak_flops, size

PROCESS = 420 * 2**20  # bytes that Python and torch take on a CPU
COMPILED = 0.28  # a compiled step keeps at least this share of what an eager one keeps, measured on a CPU


def size_of_run(config, model, windows: int, device: torch.device) -> str:
    """Lines for `--dry_run`: parameters, memory, tokens, FLOPs, and the time at 45% utilisation on a known GPU."""
    tokens = config.max_steps * config.global_batch_size * model.config.block_size
    bf16 = computes_in_bfloat16(config.dtype, device)
    flops, dtype = tokens * model.flops_per_token(), model.config.state_dtype if bf16 else "float32"
    least = size(least_memory(config, model.config, device))
    lines = [
        f"{config.model}: {model.num_parameters():,} parameters",
        f"at least {least} of {size(memory_of(device))} on {device}",
        f"{config.max_steps:,} steps x {config.global_batch_size} sequences x {model.config.block_size} tokens = "
        f"{tokens:,} tokens, {config.max_steps * config.global_batch_size / windows:.2f} epochs",
        f"{flops:.3g} FLOPs, {model.state_bytes_per_token(getattr(torch, dtype))} bytes of {dtype} state per token",
    ]
    if peak := peak_flops(device):
        # MFU counts nominal FLOPs, so the time at a given utilisation follows from them.
        seconds = tokens * nominal_flops_per_token(model) / (0.45 * peak * world_size())
        lines.append(f"about {duration(seconds)} on {world_size()} GPUs at 45% utilisation")
    return "\n".join(lines)


def parameters_of(stem: str, model_config) -> int:
    """Parameters of a model that is not made: counted with one to three blocks on torch's meta device.

    A block may have some more than the one before, the same number every time.
    """
    counts = []
    for layers in (1, 2, 3):
        with torch.device("meta"):
            model = build(stem, **{**dataclasses.asdict(model_config), "num_hidden_layers": layers})
        counts.append(model.num_parameters())
    one, two, three = counts
    more = model_config.num_hidden_layers - 1
    return one + more * (two - one) + more * (more - 1) // 2 * (three - 2 * two + one)


def least_memory(config, model_config, device: torch.device) -> int:
    """Bytes that one process cannot do without in a training step.

    Weights, gradients and the optimizer's moments; and for every block what is kept for the backward pass of one
    micro-batch: on a CPU all that autograd saves, of a GPU, whose kernels compute much of it again, a state of 2 bytes
    a number. ValueError: the model cannot be made.
    """
    c = model_config
    try:
        with faults_of(config.model):  # the first time that a model of a user's is made and runs
            parameters = parameters_of(config.model, c)
            shallow = dataclasses.replace(c, num_hidden_layers=min(2, c.num_hidden_layers))
            state = 2 * c.block_size * cost.state_size(model_class(config.model), shallow)
    except ValueError as error:
        if "overflow" in str(error.__cause__):
            return 2**63
        raise
    kept, process = c.num_hidden_layers * state, 0
    if device.type == "cpu":
        process = PROCESS
        if not config.activation_checkpointing:
            one, two = (saved_bytes(config, c, layers) for layers in (1, 2))
            share = COMPILED if config.compile else 1.0
            kept = max(kept, int(share * (one + (c.num_hidden_layers - 1) * (two - one))))
    per_weight = 12 if config.optimizer == "muon" else 16  # Muon has one moment
    weights = per_weight * parameters // (world_size() if config.engine == "fsdp" else 1)
    return weights + config.rows * kept + process


def saved_bytes(config, model_config, layers: int) -> int:
    """Bytes that autograd saves of one sequence in an eager forward pass through so many blocks, without data.

    0 of a model that looks at the values of its tensors.
    """
    bf16, saved = computes_in_bfloat16(config.dtype, torch.device("cpu")), {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage  # held, so that no other gets its address
        return tensor

    try:
        with FakeTensorMode():
            model = build(config.model, **{**dataclasses.asdict(model_config), "num_hidden_layers": layers})
            ids = torch.zeros(1, model_config.block_size, dtype=torch.int64)
            hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
            with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                model(ids, ids)
    except Exception:  # torch raises many kinds; such a model can be trained all the same
        return 0
    weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    return sum(storage.nbytes() for key, storage in saved.items() if key not in weights)


def memory_of(device: torch.device) -> int:
    """Bytes that this process may use: the GPU's, or its share of the machine's within its control group's limits."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    lines = Path("/proc/meminfo").read_text().splitlines()
    limits = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(file).exists() and (text := Path(file).read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def check_memory(config, model_config, device: torch.device) -> None:
    """ValueError: the run needs more memory than there is; the message names the keys that help.

    A full machine kills a process without a word; a full GPU says so in one line.
    """
    there, least = memory_of(device), least_memory(config, model_config, device)
    if least <= there:
        return
    one = least_memory(dataclasses.replace(config, micro_batch_size=1), model_config, device)
    share, fits = config.global_batch_size // world_size(), 0
    if config.rows > 1 and one <= there:
        fits = 1 + int((there - one) * (config.rows - 1) / (least - one))
    smaller = next((n for n in range(fits, 0, -1) if share % n == 0), 0)
    advice = f"give --micro_batch_size={smaller} or less" if smaller else "give a smaller model"
    if not config.activation_checkpointing:
        advice += ", or --activation_checkpointing=True"
    raise ValueError(
        f"micro_batch_size={config.rows} needs more than {size(least)}, and {device} has {size(there)}: {advice}"
    )
