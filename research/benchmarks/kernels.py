"""`bench.py kernels`: measure the bandwidth of every fused kernel against that of a copy.

A kernel must read each of its inputs once and write each of its results once. Its bandwidth is the number
of those bytes over its time, and is compared with the bandwidth of a large copy (bytes read and written
over time) that is measured between the kernels. Partial sums and their reduction are part of the time of a
kernel and not of its bytes.
"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch

from configurator import option
from research.benchmarks.timing import Clock, compute_speed_ratios, format_spread
from research.storage import Figures
from utils import processes, tables
from utils.units import format_bytes

HEAD_DIM = 128  # of the paper's sizes


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


def list_operations(spec: InputSpec, d: int) -> Iterator[dict[str, KernelCall]]:
    """Yield the forward and the backward call of each operation at hidden size d."""
    yield make_rope_norm_calls(spec, d)
    for value_channels, kernel_size, stored in itertools.product(
        (1, 2, 4, 8), (1, 4), (False, True)
    ):
        yield make_step_calls(spec, d, value_channels, kernel_size, stored)


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


def measure_kernels(spec: InputSpec, widths: list[int], meter: Meter, figures: Figures) -> None:
    """Store a row for every kernel at every hidden size."""
    for d in widths:
        for calls in list_operations(spec, d):
            for kernel, speeds in meter.measure(calls).items():
                num_bytes = count_bytes(calls[kernel].tensors)
                figures.add({"kernel": kernel, "d": d, "bytes": num_bytes, **speeds})
                print(f"{kernel} d={d}", flush=True)


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
    micro_batch_size: int = option(16, "number of sequences per call", low=1)
    block_size: int = option(1024, "number of tokens per sequence", low=1)
    dtype: Literal["bfloat16", "float16", "float32"] = option("bfloat16", "dtype of the state")
    rounds: int = option(20, "number of measured calls of each kernel", low=1)
    copied: int = option(2**30, "size in bytes of the copy that kernels are compared with", low=1)


def run(args: SimpleNamespace) -> None:
    """Print and store the figures of `bench.py kernels`."""
    device = processes.pick_device(args.device)
    from model import kernels

    reason = kernels.reason_unavailable(device)
    if reason is not None:
        raise ValueError(f"no kernels to measure: {reason}")
    spec = InputSpec(args.micro_batch_size, args.block_size, device, getattr(torch, args.dtype))
    widths = [int(word) for word in args.widths.split(",")]
    settings = {
        "micro_batch_size": args.micro_batch_size,
        "block_size": args.block_size,
        "dtype": args.dtype,
        "rounds": args.rounds,
        "copied": args.copied,
    }
    figures = Figures(args.json, settings)
    measure_kernels(spec, widths, Meter(args, device), figures)
    print(f"on {figures.origin['machine']}")
    print(format_table(figures.rows))
