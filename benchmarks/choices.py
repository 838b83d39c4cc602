"""What a training step is made of, each part against its alternatives: `bench.py choices`.

Every alternative takes turns with the step as `train.py` runs it and differs from it in one thing. A ratio above 1 is
faster. Those that lose stay in the list: the table is the reason for what the code does.
"""

import contextlib
import dataclasses
from dataclasses import dataclass, field

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import suites
from benchmarks.contender import Contender, memory, waiting
from benchmarks.figures import Figures
from benchmarks.results import markdown
from benchmarks.step import first_line, release
from benchmarks.timing import compared, measure
from model import build, kernels, loss
from training import distributed, optimizer

BOTH = ("cpu", "cuda")


@contextlib.contextmanager
def logits_at_once(numbers: int):
    before, loss.LOGITS_AT_ONCE = loss.LOGITS_AT_ONCE, dict.fromkeys(loss.LOGITS_AT_ONCE, numbers)
    try:
        yield
    finally:
        loss.LOGITS_AT_ONCE = before


@dataclass(frozen=True)
class Choice:
    """One thing done differently: a context for the forward pass, or other arguments of what train.py calls."""

    name: str
    devices: tuple[str, ...] = BOTH
    context: object = contextlib.nullcontext  # makes a context manager
    compiled: dict | None = field(default_factory=dict)  # of torch.compile; None: eager
    adamw: dict = field(default_factory=lambda: {"fused": True})
    kernels: dict = field(default_factory=dict)  # of model.kernels.use
    delta_only: bool = False


def attention(backend: SDPBackend):
    return lambda: sdpa_kernel(backend)


AS_TRAINED = Choice("as trained")
CHOICES = (
    Choice("attention: flash", context=attention(SDPBackend.FLASH_ATTENTION)),
    Choice("attention: cuDNN", ("cuda",), context=attention(SDPBackend.CUDNN_ATTENTION)),
    Choice("attention: memory-efficient", ("cuda",), context=attention(SDPBackend.EFFICIENT_ATTENTION)),
    Choice("attention: plain products", context=attention(SDPBackend.MATH)),
    Choice("loss: 2^18 logits at once", ("cpu",), context=lambda: logits_at_once(2**18)),
    Choice("loss: 2^25 logits at once", ("cuda",), context=lambda: logits_at_once(2**25)),
    Choice("loss: all logits at once", ("cuda",), context=lambda: logits_at_once(2**62)),
    Choice("loss: 2^27 logits at once", ("cuda",), context=lambda: logits_at_once(2**27)),
    Choice("compile: none", compiled=None),
    Choice("compile: max-autotune, no CUDA graphs", ("cuda",), compiled={"mode": "max-autotune-no-cudagraphs"}),
    Choice("compile: reduce-overhead (CUDA graphs)", ("cuda",), compiled={"mode": "reduce-overhead"}),
    Choice("optimizer: AdamW, foreach", adamw={"foreach": True}),
    Choice("optimizer: AdamW, a loop", adamw={"foreach": False, "fused": False}),
    Choice("kernels: off", ("cuda",), kernels={"setting": "off"}),
    Choice("kernels: state kept every sublayer", ("cuda",), kernels={"state_interval": 1}, delta_only=True),
    Choice("kernels: state kept every 4 sublayers", ("cuda",), kernels={"state_interval": 4}, delta_only=True),
)


class Choosing(Contender):
    """A contender that makes one choice."""

    def __init__(self, choice: Choice, model, batch, device, dtype):
        super().__init__(choice.name, model, batch, device, dtype, compiled=choice.compiled is not None)
        self.choice = choice
        if choice.compiled:
            self.call = torch.compile(self.model, fullgraph=True, **choice.compiled)
        if choice.adamw != AS_TRAINED.adamw:
            groups = optimizer.parameter_groups(self.model, 0.1)
            self.adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), **choice.adamw)

    def loss(self):
        with self.choice.context():
            return super().loss()


def chosen(args, device: torch.device) -> list[Choice]:
    found = [choice for choice in CHOICES if device.type in choice.devices and args.match in choice.name]
    if args.compile == "False":
        found = [dataclasses.replace(choice, compiled=None) for choice in found if choice.compiled == {}]
    if not found:
        raise ValueError(f"--match={args.match}: none of {', '.join(choice.name for choice in CHOICES)}")
    return found


class Comparison:
    """One model at one size: the step as trained, and each alternative beside it."""

    def __init__(self, args, stem: str, size: dict, device: torch.device):
        self.args, self.stem, self.size, self.device = args, stem, size, device
        shape = (2, args.micro_batch_size, size["block_size"])
        ids = torch.randint(0, size["vocab_size"], shape, generator=torch.Generator().manual_seed(0)).to(device)
        self.batch, self.tokens = (lambda: ids), shape[1] * shape[2]
        as_trained = AS_TRAINED if args.compile == "True" else dataclasses.replace(AS_TRAINED, compiled=None)
        self.base = self.contender(as_trained)

    def contender(self, choice: Choice) -> Choosing:
        torch.manual_seed(0)
        model = build(self.stem, **self.size)
        kernels.use(model, device=self.device, **choice.kernels)
        return Choosing(choice, model, self.batch, self.device, getattr(torch, self.args.dtype))

    def row(self, choice: Choice) -> dict:
        """Tokens/s, ratio to the step as trained and memory; or why the choice cannot be made here."""
        row = {"model": f"{self.stem}: {choice.name}"}
        try:
            other = self.contender(choice)
            turns = {c.name: waiting(c.train, self.args.steps, self.device) for c in (self.base, other)}
            seconds = measure(turns, self.args.warmup, self.args.rounds, choice.name)
        except Exception as error:  # a finding about the choice: a backend that this device or size does not have
            return row | {"error": said(error)}
        base, own = seconds[self.base.name], seconds[other.name]
        row["tokens_per_second"] = self.tokens * self.args.steps / sorted(own)[len(own) // 2]
        row |= compared("ratio", base, own)
        try:
            return row | memory(other, self.tokens)
        except Exception as error:  # the time is a finding of its own
            return row | {"memory_error": said(error)}


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def run(args) -> None:
    """Print and store the figures of `bench.py choices`."""
    device, suite = distributed.pick_device(args.device), suites.SUITES[args.suite]
    if args.suite not in suites.ON_CPU and device.type == "cpu":
        raise ValueError(f"--suite={args.suite} holds sizes for a GPU: give --suite=quick, or --device=cuda")
    [(size_name, size), *_] = suite.sizes.items()
    args.micro_batch_size = args.micro_batch_size or suite.micro_batch_size
    args.steps = 4 if device.type == "cuda" else 1
    torch.set_float32_matmul_precision("high")  # as in training
    if device.type == "cpu":
        distributed.keep_freed_memory()  # likewise
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    alternatives = chosen(args, device)
    settings = {"size": {size_name: size}, "micro_batch_size": args.micro_batch_size, "dtype": args.dtype}
    settings |= {"threads": torch.get_num_threads(), "rounds": args.rounds, "compile": args.compile}
    figures = Figures(args.json, device, settings, args.resume)
    for stem in args.models.split(","):
        wanted = [choice for choice in alternatives if not (choice.delta_only and stem == suites.BASELINE)]
        wanted = [choice for choice in wanted if not figures.find(model=f"{stem}: {choice.name}")]
        comparison = Comparison(args, stem, size, device) if wanted else None
        for number, choice in enumerate(wanted, 1):
            figures.add(row := comparison.row(choice), "model")
            print(f"{stem} {number}/{len(wanted)}: {choice.name}: {row.get('ratio', 'failed')}", flush=True)
            release(device)
        torch.compiler.reset()
    rows, failed = figures.rows, [row for row in figures.rows if "error" in row]
    table = markdown([row for row in rows if row not in failed])
    print(f"on {figures.on_what()}\n\n{table.replace('relative to additive', 'relative to as trained')}")
    for row in failed:
        print(f"{row['model']}: {row['error']}")
