"""`bench.py kernels`: measure the bandwidth of every fused kernel against that of a copy.

A kernel must read each of its inputs once and write each of its results once. Its bandwidth is the number
of those bytes over its time, and is compared with the bandwidth of a large copy (bytes read and written
over time) that is measured between the kernels. Partial sums and their reduction are part of the time of a
kernel and not of its bytes. `--tune` times some kernels with other launches.
"""

import dataclasses
import itertools
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from configurator import option
from research.benchmarks.timing import (
    Clock,
    compute_speed_ratios,
    format_spread,
    pop_used_launches,
)
from research.storage import Figures
from utils import processes, tables
from utils.units import format_bytes

if TYPE_CHECKING:
    from model.kernels.launch import Launch

HEAD_DIM = 128  # of the paper's sizes
# The launches that --tune tries beside the table's: warps of a program, stages and prefetch (which make
# loads run ahead), and warps of a multiprocessor.
WARPS = (1, 2, 4, 8, 16)
STAGES_AND_PREFETCH = ((2, 0), (3, 0), (4, 0), (1, 2))
RESIDENT_WARPS = (8, 16)


class InputSpec(NamedTuple):
    """The batch size B, the sequence length T, and the device and dtype of inputs."""

    batch_size: int
    sequence_length: int
    device: torch.device
    dtype: torch.dtype


class KernelCall(NamedTuple):
    """A call of a kernel, and the tensors that it must read or write, each as often as it is moved."""

    function: Callable[[], object]
    tensors: list[torch.Tensor]


class KernelFamily(NamedTuple):
    """The forward and the backward kernel of an operation at hidden size d.

    make_calls: makes their inputs and returns their calls by name.
    """

    name: str
    d: int
    make_calls: Callable[[], dict[str, KernelCall]]


def make_random(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return normally distributed numbers."""
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def make_step_calls(
    spec: InputSpec, d: int, value_channels: int, kernel_size: int, stored: bool
) -> dict[str, KernelCall]:
    """Return the calls of the residual step.

    stored: the step after which the state is stored, with one write to replay; otherwise the step before
    it, which stores no state.
    """
    from model.kernels import residual_step as kernel

    B, T, device, dtype = spec
    direction = make_random(device, dtype, B, T, d)
    earlier_direction = make_random(device, dtype, B, T, d)
    grad_context = make_random(device, dtype, B, T, d)
    stored_state = make_random(device, dtype, B, T, value_channels, d)
    grad_new_state = make_random(device, dtype, B, T, value_channels, d)
    gate_logit = make_random(device, torch.float32, B, T)
    value_logit = make_random(device, torch.float32, B, T, value_channels)
    directions = [earlier_direction] if stored else []
    updates = [0.1 * value_logit] if stored else []
    read_weights = make_random(device, torch.float32, kernel_size, value_channels, d)
    read_weights = read_weights / value_channels
    # arguments of both passes
    shared = {
        "direction": direction,
        "gate_logit": gate_logit,
        "value_logit": value_logit,
        "read_weights": read_weights,
        "norm_weight": torch.ones(d, device=device),
        "gate_weight": make_random(device, torch.float32, d),
        "value_weight": make_random(device, torch.float32, value_channels, d),
        "value_form": "sigmoid",
        "value_scale": 4.0,
        "value_constant": 2.0,
        "value_input": "residual",
        "erase": True,
    }
    forward = partial(
        kernel.residual_step,
        **shared,
        state=stored_state,
        stored_state=stored_state,
        directions=directions,
        updates=updates,
        gate_bias=make_random(device, torch.float32, 1),
        value_bias=make_random(device, torch.float32, value_channels),
        k_eps=1e-5,
        norm_eps=1e-5,
        store_state=stored,
        return_x_in=False,
        carry=None,
        context_dtype=dtype,
    )
    output = kernel.StepOutput(*forward())
    # The backward pass needs the state after the write: stored, or as the stored state and the write.
    state_after = output.new_state if stored else stored_state
    directions_after = [] if stored else [direction]
    updates_after = [] if stored else [output.update]
    backward = partial(
        kernel.residual_step_backward,
        **shared,
        grad_new_state=grad_new_state,
        grad_context=grad_context,
        grad_x_in=None,
        grad_next_gate_logit=output.next_gate_logit,
        grad_next_value_logit=output.next_value_logit,
        stored_state=state_after,
        directions=directions_after,
        updates=updates_after,
        inverse_norm=output.inverse_norm,
        delta=output.delta,
        x_in=output.x_in,
        inverse_rms=output.inverse_rms,
    )

    logits = [output.next_gate_logit, output.next_value_logit]
    saved = [output.inverse_norm, output.delta, output.x_in, output.inverse_rms]
    forward_tensors = [
        stored_state,
        *directions,
        *updates,
        direction,
        gate_logit,
        value_logit,
        output.context,
        *logits,
        *saved,
        output.update,
    ]
    if stored:
        forward_tensors.append(output.new_state)
    backward_tensors = [
        grad_new_state,
        grad_context,
        *logits,
        direction,
        gate_logit,
        value_logit,
        *saved,
        state_after,
        *updates_after,
        # the gradients of the state, of the direction and of both logits
        stored_state,
        direction,
        gate_logit,
        value_logit,
    ]
    suffix = f"K={kernel_size} v={value_channels} {'stored' if stored else 'not stored'}"
    return {
        f"step forward {suffix}": KernelCall(forward, forward_tensors),
        f"step backward {suffix}": KernelCall(backward, backward_tensors),
    }


def make_rope_norm_calls(spec: InputSpec, d: int) -> dict[str, KernelCall]:
    """Return the calls of the rotation and norm of queries and keys."""
    from model.kernels import rope as kernel

    B, T, device, dtype = spec
    head_dim = min(d // 2 * 2, HEAD_DIM)
    qkv = make_random(device, dtype, B, T, 3, d // head_dim, head_dim)
    gradients = [make_random(device, dtype, B, T, d // head_dim, head_dim) for _ in range(3)]
    angle = make_random(device, torch.float32, T, head_dim // 2)
    cos = angle.cos()
    sin = angle.sin()
    queries_and_keys = qkv[:, :, :2]  # the values are a view of the product and are not moved
    grad_q, grad_k, grad_v = gradients
    shared = {
        "qkv": qkv,
        "cos": cos,
        "sin": sin,
        "q_norm": torch.ones(head_dim, device=device),
        "k_norm": torch.ones(head_dim, device=device),
        "eps": 1e-5,
    }
    forward = partial(kernel.rope_norm, **shared)
    backward = partial(
        kernel.rope_norm_backward, **shared, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v
    )
    return {
        "rope_norm forward": KernelCall(forward, [queries_and_keys, queries_and_keys, cos, sin]),
        "rope_norm backward": KernelCall(backward, [*gradients, queries_and_keys, cos, sin, qkv]),
    }


def list_families(spec: InputSpec, widths: list[int]) -> Iterator[KernelFamily]:
    """Yield all kernels at each hidden size."""
    for d in widths:
        yield KernelFamily("rope_norm", d, partial(make_rope_norm_calls, spec, d))
        for value_channels, kernel_size, stored in itertools.product(
            (1, 2, 4, 8), (1, 4), (False, True)
        ):
            stored_text = "stored" if stored else "not stored"
            yield KernelFamily(
                f"step K={kernel_size} v={value_channels} {stored_text}",
                d,
                partial(make_step_calls, spec, d, value_channels, kernel_size, stored),
            )


class Meter:
    """Measures kernels in turns with a large copy."""

    def __init__(self, args: SimpleNamespace, device: torch.device):
        self.rounds = args.rounds
        self.copied_bytes = args.copied
        self.clock = Clock(device)
        self.source = torch.ones(args.copied // 2, dtype=torch.uint8, device=device)
        self.target = torch.empty_like(self.source)

    def copy(self) -> None:
        self.target.copy_(self.source)

    def measure(self, calls: dict[str, KernelCall]) -> dict[str, dict[str, float]]:
        """Return the median time of each call, its bandwidth, and its ratio to the copy's bandwidth."""
        functions = {"copy": self.copy}
        for name, call in calls.items():
            functions[name] = call.function
        if self.clock.device.type == "cuda":
            for _ in range(3):  # the first calls compile
                for function in functions.values():
                    function()
        rounds = [self.clock.measure(functions) for _ in range(self.rounds)]
        copies = [seconds["copy"] for seconds in rounds]
        figures = {}
        for name, call in calls.items():
            num_bytes = count_bytes(call.tensors)
            seconds = [seconds[name] for seconds in rounds]
            # the time in which the copy moves as many bytes as the kernel
            copy_seconds = [copy * num_bytes / self.copied_bytes for copy in copies]
            figures[name] = {
                "microseconds": statistics.median(seconds) * 1e6,
                "gb_per_s": num_bytes / statistics.median(seconds) / 1e9,
                "copy_gb_per_s": self.copied_bytes / statistics.median(copies) / 1e9,
                **compute_speed_ratios("share", copy_seconds, seconds),
            }
        return figures


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measure_kernels(families: list[KernelFamily], meter: Meter, figures: Figures) -> None:
    """Store a row for every kernel."""
    for number, family in enumerate(families, 1):
        calls = family.make_calls()
        pop_used_launches()  # forget those of earlier kernels
        speeds = meter.measure(calls)
        launches = pop_used_launches()
        for kernel, call in calls.items():
            num_bytes = count_bytes(call.tensors)
            row = {"kernel": kernel, "d": family.d, "bytes": num_bytes}
            figures.add({**row, **speeds[kernel], **launches})
        print(f"{number}/{len(families)} {family.name} d={family.d}", flush=True)


def list_launches_to_try(args: SimpleNamespace, d: int, kernel: str) -> tuple[str, list["Launch"]]:
    """Return the kernel's key in the table of launches, and the launches that --tune tries.

    The first is the table's own.
    """
    from model.kernels.launch import Launch, get_table_launch, launch_key

    sizes = {key: int(value) for key, value in re.findall(r"([Kv])=(\d)", kernel)}
    value_channels = sizes.get("v", 1)
    kernel_size = sizes.get("K", 1)
    name = " ".join(kernel.split()[:2])
    key = launch_key(name, value_channels, kernel_size)
    launches = [get_table_launch(f"{key} d={d}")]
    for warps, (stages, prefetch), resident in itertools.product(
        WARPS, STAGES_AND_PREFETCH, RESIDENT_WARPS
    ):
        if resident >= warps:
            launches.append(Launch(warps, stages, resident // warps, prefetch, launches[0].reload))
    distinct_launches = list(dict.fromkeys(launches))
    return key, distinct_launches[: args.launches]


def tune_kernels(
    families: list[KernelFamily], args: SimpleNamespace, meter: Meter, figures: Figures
) -> None:
    """Measure each kernel with every launch worth trying, and store a row, the fastest launch first."""
    from model.kernels.launch import FORCED

    for family in families:
        for kernel, call in family.make_calls().items():
            key, launches = list_launches_to_try(args, family.d, kernel)
            measured = []
            for launch in launches:
                FORCED[key] = launch
                try:
                    speed = meter.measure({kernel: call})[kernel]
                except Exception as error:  # it may need more registers or shared memory than exist
                    first_line = str(error).partition("\n")[0]
                    speed = {"error": f"{type(error).__name__}: {first_line}"}
                finally:
                    del FORCED[key]
                measured.append({**dataclasses.asdict(launch), **speed})
            measured.sort(key=lambda row: row.get("microseconds", float("inf")))
            num_bytes = count_bytes(call.tensors)
            figures.add({"kernel": kernel, "d": family.d, "bytes": num_bytes, "launches": measured})
            print(f"{kernel} d={family.d}: fastest {measured[0]}", flush=True)


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    header = ["kernel", "d", "memory", "microseconds", "GB/s", "of copy (10th to 90th percentile)"]
    cells = []
    for row in rows:
        cells.append(
            [
                row["kernel"],
                row["d"],
                format_bytes(row["bytes"]),
                f"{row['microseconds']:,.0f}",
                f"{row['gb_per_s']:,.0f}",
                format_spread(row, "share", ".2f"),
            ]
        )
    return tables.format_markdown(header, cells)


@dataclass(frozen=True)
class Options:
    """Kernels, and what they are called with."""

    device: Literal["auto", "cuda", "cpu"] = option(
        "auto",
        "device to measure on; auto uses the GPU if there is one",
    )
    json: str | None = option(None, "file to store the results in, after each of them")
    widths: str = option("768,1024", "hidden sizes d, separated by commas")
    match: str = option("", "only kernels with this in their name, as in --match='step K=1 v=4'")
    micro_batch_size: int = option(16, "number of sequences per call", low=1)
    block_size: int = option(1024, "number of tokens per sequence", low=1)
    dtype: Literal["bfloat16", "float16", "float32"] = option("bfloat16", "dtype of the state")
    rounds: int = option(20, "number of measured calls of each kernel", low=1)
    copied: int = option(2**30, "size in bytes of the copy that kernels are compared with", low=1)
    tune: bool = option(
        False,
        "instead, time other launches (model/kernels/launch.py) of the kernels that --match selects",
    )
    launches: int | None = option(None, "largest number of launches to try per kernel", low=1)


def choose_families(args: SimpleNamespace, spec: InputSpec) -> list[KernelFamily]:
    """Return the kernels that `--match` selects.

    Raises:
        ValueError: there is none
    """
    try:
        widths = [int(word) for word in args.widths.split(",")]
    except ValueError:
        raise ValueError(f"--widths={args.widths}: give numbers with commas between") from None
    families = [family for family in list_families(spec, widths) if args.match in family.name]
    if args.tune:
        # rope_norm has a single launch, which is in no table
        families = [family for family in families if family.name != "rope_norm"]
    if not families:
        kernels = "step" if args.tune else "step or rope_norm"
        raise ValueError(f"--match={args.match}: no such kernel; try {kernels}")
    return families


def run(args: SimpleNamespace) -> None:
    """Print and store the figures of `bench.py kernels`."""
    device = processes.pick_device(args.device)
    from model import kernels

    reason = kernels.reason_unavailable(device)
    if reason is not None:
        raise ValueError(f"no kernels to measure: {reason}")
    if args.tune and not args.match:
        raise ValueError(
            "--tune takes minutes per kernel: select kernels with --match, as in --match='K=1 v=4'"
        )
    spec = InputSpec(args.micro_batch_size, args.block_size, device, getattr(torch, args.dtype))
    families = choose_families(args, spec)
    settings = {
        "micro_batch_size": args.micro_batch_size,
        "block_size": args.block_size,
        "dtype": args.dtype,
        "rounds": args.rounds,
        "copied": args.copied,
    }
    figures = Figures(args.json, settings)
    meter = Meter(args, device)
    if args.tune:
        tune_kernels(families, args, meter, figures)
    else:
        measure_kernels(families, meter, figures)
    print(f"on {figures.origin['machine']}")
    if not args.tune:
        print(format_table(figures.rows))
