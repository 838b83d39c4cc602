"""What a run will need, before it starts: parameters, memory, tokens, FLOPs and time.

The memory of a training step is found without doing it: the model runs on fake tensors, which have no data, and every
tensor that is made is counted until it is gone. A compiled step is taken to need a constant share of that.
"""

import dataclasses
import os
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import build, cost, faults_of, kernels, model_class
from training.distributed import KEPT_BLOCK, computes_in_bfloat16, rank, world_size
from training.metrics import duration, nominal_flops_per_token, peak_flops, size

# Measured on a CPU (results/memory_cpu.json). Freed memory does not fit later tensors exactly, least where blocks are
# computed again: a process takes so much more than its tensors do.
WASTE, WASTE_AGAIN = 1.25, 1.8
# Fused operations do not store what lies between them: compiled steps took 0.28 to 0.51 of the eager activations.
COMPILED = 0.4
# Bytes that Python and torch take, and that compiling takes, with those for every block.
PROCESS, COMPILER, COMPILER_PER_BLOCK = 420 * 2**20, 80 * 2**20, 15 * 2**20
# A process can take a quarter more than the estimate. A full machine kills it without a word. A full GPU says so in one
# line, and on GPUs nothing was measured: there only what clearly does not fit is refused.
MARGIN = {"cpu": 1.25, "cuda": 1 / 1.2}


class Unknown(Exception):  # noqa: N818 (says what it is)
    """The model cannot be run on tensors without data; the message says why."""


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


def size_of_run(config, model, windows: int, device: torch.device) -> str:
    """Parameters, memory, tokens and FLOPs of a whole run, and its time at 45% utilisation where the peak is known."""
    tokens = config.max_steps * config.global_batch_size * model.config.block_size
    bf16 = computes_in_bfloat16(config.dtype, device)
    flops, dtype = tokens * model.flops_per_token(), model.config.state_dtype if bf16 else "float32"
    lines = [
        f"{config.model}: {model.num_parameters():,} parameters",
        memory_line(config, model.config, device),
        f"{config.max_steps:,} steps x {config.global_batch_size} sequences x {model.config.block_size} tokens = "
        f"{tokens:,} tokens, {config.max_steps * config.global_batch_size / windows:.2f} epochs",
        f"{flops:.3g} FLOPs, {model.state_bytes_per_token(getattr(torch, dtype))} bytes of {dtype} state per token",
    ]
    if peak := peak_flops(device):
        # MFU counts nominal FLOPs, so the time at a given utilisation follows from them.
        seconds = tokens * nominal_flops_per_token(model) / (0.45 * peak * world_size())
        lines.append(f"about {duration(seconds)} on {world_size()} GPUs at 45% utilisation")
    return "\n".join(lines)


def memory_line(config, model_config, device: torch.device) -> str:
    try:
        needed = memory_needed(config, model_config, device)
    except Unknown as error:
        return f"its memory is not known ({error})"
    process = f", {size(needed.process)} for the process" if needed.process else ""
    return (
        f"about {size(needed.total)} of {size(memory_of(device))} on {device}: {size(needed.weights)} for weights and "
        f"optimizer, {size(needed.activations)} for activations and gradients{process}"
    )


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


def least_memory(config, model_config) -> int:
    """Bytes that one process cannot do without: weights, gradients, AdamW's moments, one micro-batch's states."""
    c = model_config
    try:
        with faults_of(config.model):  # the first time that a model of a user's is made and runs
            parameters = parameters_of(config.model, c)
            shallow = dataclasses.replace(c, num_hidden_layers=min(2, c.num_hidden_layers))
            state = cost.state_size(model_class(config.model), shallow)
    except ValueError as error:
        if "overflow" in str(error.__cause__):
            return 2**63
        raise
    states = config.rows * c.block_size * state * c.num_hidden_layers * 2
    per_weight = 12 if config.optimizer == "muon" else 16  # Muon has one moment
    return per_weight * parameters // (world_size() if config.engine == "fsdp" else 1) + states


def memory_needed(config, model_config, device: torch.device) -> Memory:
    """An estimate for one process. Unknown: there is none."""
    on_cpu, world = device.type == "cpu", world_size()
    parameters = parameters_of(config.model, model_config)
    accumulates = config.global_batch_size > config.rows * world
    # Muon has one moment where AdamW, which it leaves the embedding, has two.
    moments = parameters + model_config.vocab_size * model_config.hidden_size
    weights = 4 * parameters + 4 * (moments if config.optimizer == "muon" else 2 * parameters)
    activations = activations_needed(config, model_config, device)  # with the gradients of one micro-batch
    if config.compile:
        activations = int(COMPILED * activations)
    if config.engine == "fsdp":
        weights //= world
        if not accumulates:
            activations -= 4 * parameters * (world - 1) // world
    else:  # gradients outlast a micro-batch where another one follows; DDP has them once more in its buckets
        weights += 4 * parameters * (accumulates + (world > 1))
    compiler = COMPILER + COMPILER_PER_BLOCK * model_config.num_hidden_layers if config.compile else 0
    return Memory(weights, activations, PROCESS + compiler if on_cpu else 0)


def activations_needed(config, model_config, device: torch.device) -> int:
    """Most bytes at once that an eager forward and backward pass needs beyond weights, its gradients among them.

    Exact for up to four blocks, and where the state grows with depth; for more, along the line through two and four,
    as blocks are taken to be alike.
    Unknown: a model that looks at the values of its tensors, for example. ValueError: one that cannot be made.
    """
    layers = model_config.num_hidden_layers
    try:
        if layers <= 4 or state_grows(config.model, model_config):
            return eager_peak(config, model_config, layers, device)
        two, four = (eager_peak(config, model_config, n, device) for n in (2, 4))
        return two + (layers - 2) * (four - two) // 2
    except ValueError:
        raise
    except Exception as error:  # torch raises many kinds; such a model can be trained all the same
        raise Unknown(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}") from error


def state_grows(stem: str, model_config) -> bool:
    """Whether a token's state has more numbers in a deeper model."""
    sizes = (dataclasses.replace(model_config, num_hidden_layers=layers) for layers in (2, 4))
    return len({cost.state_size(model_class(stem), each) for each in sizes}) > 1


def eager_peak(config, model_config, layers: int, device: torch.device) -> int:
    """Most bytes alive during a forward and backward pass of a model of so many blocks."""
    bf16 = computes_in_bfloat16(config.dtype, device)
    with FakeTensorMode():
        with torch.device(device):
            model = build(config.model, **{**dataclasses.asdict(model_config), "num_hidden_layers": layers})
        kernels.use(model, config.kernels, device, config.state_interval)
        model.activation_checkpointing = config.activation_checkpointing
        ids = torch.zeros(config.rows, model_config.block_size, dtype=torch.int64, device=device)
        waste = WASTE_AGAIN if config.activation_checkpointing else WASTE
        living = Living(device, waste, known=(*model.parameters(), *model.buffers(), ids))
        with living:
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                _, loss = model(ids, ids)
            loss.backward()
    return living.peak


class Living(TorchDispatchMode):
    """Measures the storages that operations make, from then until nobody holds them.

    On a CPU the C library keeps freed blocks up to a size (`distributed.keep_freed_memory`) for later ones, but larger
    ones do not use them: there, the most of each kind add up.
    """

    def __init__(self, device: torch.device, waste: float, known):
        super().__init__()
        self.border, self.waste = (KEPT_BLOCK, waste) if device.type == "cpu" else (0, 1.0)
        self.now, self.most = [0, 0], [0, 0]  # bytes in blocks up to the border, and in larger ones
        # Storages by address; views of weights are no new bytes.
        self.storages: dict[int, weakref.ref | None] = dict.fromkeys(t.untyped_storage()._cdata for t in known)

    @property
    def peak(self) -> int:
        return int(self.waste * self.most[0]) + self.most[1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return result

    def count(self, storage) -> None:
        key, bytes_ = storage._cdata, storage.nbytes()
        if key in self.storages:
            return
        kind = int(bytes_ > self.border)

        def gone(_):
            self.now[kind] -= bytes_
            del self.storages[key]

        self.storages[key] = weakref.ref(storage, gone)
        self.now[kind] += bytes_
        self.most[kind] = max(self.most[kind], self.now[kind])


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
    """ValueError: the run needs more memory than there is; the message names the key that helps."""
    there, least = memory_of(device), least_memory(config, model_config)
    if least > there:  # said at once: to run such a model, even without data, can take minutes
        raise ValueError(
            f"the weights and states alone need {size(least)}, and {device} has {size(there)}: give a smaller "
            "micro_batch_size, block_size or model"
        )
    if 50 * (least + config.rows * model_config.block_size * 4 * model_config.vocab_size) < there:
        return  # far from any doubt: nothing more is made than a few dozen tensors of the state's size a block
    try:
        needed = memory_needed(config, model_config, device).total
        if MARGIN[device.type] * needed > there:
            raise ValueError(
                f"micro_batch_size={config.rows} needs about {size(needed)}, perhaps a quarter more, and {device} has "
                f"{size(there)}: {what_fits(config, model_config, device, needed, there)}"
            )
    except Unknown as error:
        if rank() == 0:
            print(f"note: whether the memory suffices is not known ({error})", file=sys.stderr)


def what_fits(config, model_config, device: torch.device, needed: int, there: int) -> str:
    """The largest micro-batch that fits, as it is or with activation checkpointing; else that the model must change."""
    rows, share = config.rows, config.global_batch_size // world_size()
    for keys in ({},) if config.activation_checkpointing else ({}, {"activation_checkpointing": True}):
        changed, single = (dataclasses.replace(config, micro_batch_size=n, **keys) for n in (rows, 1))
        some = memory_needed(changed, model_config, device).total if keys else needed
        one = memory_needed(single, model_config, device).total if rows > 1 else some
        for fewer in (n for n in range(rows, 0, -1) if share % n == 0):
            about = one + (some - one) * (fewer - 1) // max(rows - 1, 1)
            if MARGIN["cpu"] * about < there:
                options = [f"--micro_batch_size={fewer}"] if fewer < rows else []
                options += [f"--{key}={value}" for key, value in keys.items()]
                return f"give {' '.join(options)} (about {size(about)})"
    sharded = ", or engine=fsdp on more GPUs" if device.type == "cuda" else ""
    return f"give a smaller model{sharded}"
