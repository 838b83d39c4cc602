"""Bandwidth of every fused kernel against what this device copies: `bench.py kernels`.

A kernel must read each of its inputs once and write each of its results once: those bytes over its time, as a share of
the bandwidth of a large copy (bytes read and written over time) measured between the kernels. Sums over programs and
the reduction of them are part of its time and not of its bytes.
"""

import dataclasses
import itertools
import json
import re
import statistics
import time
from functools import partial

import torch

from benchmarks.timing import compared
from training import distributed
from training.metrics import duration, size
from training.provenance import provenance

COPIED = 2**30  # bytes of the copy that a kernel's bandwidth is compared with: beyond every cache
TUNED = {"num_warps": (4, 8, 16), "stages": (1, 2, 3), "programs": (1, 2, 4, 8)}


def random(device, dtype, *shape):
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def step_calls(sizes, d: int, columns: int, kernel_size: int, stored: bool):
    """{name: (function, tensors that it must read or write)} of the residual step, forward and backward.

    stored: the step after which the state is stored, with one write to replay; else the one before it.
    """
    from model.kernels import residual_step as kernel

    B, T, device, dtype = sizes
    vectors = [random(device, dtype, B, T, d) for _ in range(4)]
    h, before, grad_context, _ = vectors
    base, grad_state = (random(device, dtype, B, T, columns, d) for _ in range(2))
    y, z = random(device, torch.float32, B, T), random(device, torch.float32, B, T, columns)
    hs, us = ([before], [0.1 * z]) if stored else ([], [])
    read = random(device, torch.float32, kernel_size, columns, d) / columns
    heads = [random(device, torch.float32, *shape) for shape in ((d,), (1,), (columns, d), (columns,))]
    norm, options = torch.ones(d, device=device), ("sigmoid", 4.0, 2.0, "residual", True)

    def forward():
        return kernel.residual_step(
            base, base, hs, us, h, y, z, read, norm, *heads, 1e-5, 1e-5, *options, stored, False, None
        )

    state, context, x_in, gate_logit, value_logit, n, delta, u, rho, _ = made = forward()
    after, writes = (state, ([], [])) if stored else (base, ([h], [u]))

    def backward():
        return kernel.residual_step_backward(
            grad_state, grad_context, None, gate_logit, value_logit, after, *writes, h, y, z, n, delta, x_in, rho,
            read, norm, heads[0], heads[2], *options,
        )  # fmt: skip

    moved = [base, *hs, *us, h, y, z, context, x_in, *made[3:9], *([state] if stored else [])]
    moved_back = [grad_state, grad_context, gate_logit, value_logit, after, *writes[1], h, y, z, n, delta, x_in, rho]
    moved_back += [base, h, y, z]  # the gradients of the state, h and both logits
    suffix = f"K={kernel_size} v={columns} {'stored' if stored else 'not stored'}"
    return {f"step forward {suffix}": (forward, moved), f"step backward {suffix}": (backward, moved_back)}


def add_norm_calls(sizes, d: int):
    from model.kernels import add_norm as kernel

    B, T, device, dtype = sizes
    x, h, grad_x, grad_context = (random(device, dtype, B, T, d) for _ in range(4))
    norm = torch.ones(d, device=device)
    new_x, context, rho = kernel.add_norm(x, h, norm, 1e-5)

    def forward():
        return kernel.add_norm(x, h, norm, 1e-5)

    def backward():
        return kernel.add_norm_backward(grad_x, grad_context, new_x, rho, norm)

    return {
        "add_norm forward": (forward, [x, h, new_x, context, rho]),
        "add_norm backward": (backward, [grad_x, grad_context, new_x, rho, x]),
    }


def expand_calls(sizes, d: int, columns: int, kernel_size: int):
    from model.kernels import expand as kernel

    B, T, device, dtype = sizes
    x, grad_state = random(device, dtype, B, T, d), random(device, dtype, B, T, columns, d)
    weights = random(device, torch.float32, kernel_size, columns, d)
    return {
        f"expand forward K={kernel_size} v={columns}": (lambda: kernel.expand(x, weights), [x, grad_state]),
        f"expand backward K={kernel_size} v={columns}": (
            lambda: kernel.expand_backward(grad_state, x, weights),
            [grad_state, x, x],
        ),
    }


def families(sizes, widths: list[int]):
    """(name, width, a function that makes the calls of its forward and backward kernels)."""
    for d in widths:
        yield "add_norm", d, partial(add_norm_calls, sizes, d)
        yield "expand K=4 v=4", d, partial(expand_calls, sizes, d, 4, 4)
        for columns, kernel_size, stored in itertools.product((1, 2, 4, 8), (1, 4), (False, True)):
            name = f"step K={kernel_size} v={columns} {'stored' if stored else 'not stored'}"
            yield name, d, partial(step_calls, sizes, d, columns, kernel_size, stored)


def seconds_of(function, device: torch.device) -> float:
    """One call, on a GPU by its own clock."""
    if device.type != "cuda":
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def in_turns(calls: dict, copy, rounds: int, device) -> dict[str, list[float]]:
    """Seconds of each function and of `copy`, call by call in turns."""
    seconds = {"copy": [], **{name: [] for name in calls}}
    for done in range(rounds + 3):
        for name, function in (("copy", copy), *((name, call) for name, (call, _) in calls.items())):
            taken = seconds_of(function, device)
            if done >= 3:  # the first calls compile
                seconds[name].append(taken)
    return seconds


def rows_of(d: int, calls: dict, seconds: dict, copied: int) -> list[dict]:
    """One row a kernel: bytes, median time, bandwidth, and its share of the copy's with percentiles."""
    rows = []
    for name, (_, tensors) in calls.items():
        moved = sum(t.numel() * t.element_size() for t in tensors)
        middle = statistics.median(seconds[name])
        row = {"kernel": name, "d": d, "bytes": moved, "microseconds": middle * 1e6, "gb_per_s": moved / middle / 1e9}
        row["copy_gb_per_s"] = copied / statistics.median(seconds["copy"]) / 1e9
        # The copy's time for as many bytes, over the kernel's own.
        rows.append(row | compared("share", [t * moved / copied for t in seconds["copy"]], seconds[name]))
    return rows


def tune(d: int, name: str, call, device, rounds: int) -> list[dict]:
    """Median microseconds of one kernel under every launch, the fastest first."""
    from model.kernels.launch import KERNELS, name_of

    sizes = dict(re.findall(r"([Kv])=(\d)", name))
    kernel = name_of(" ".join(name.split()[:2]), int(sizes.get("v", 1)), int(sizes.get("K", 1)))
    kept, found = KERNELS[kernel], []
    try:
        for values in itertools.product(*TUNED.values()):
            launch = dict(zip(TUNED, values))
            KERNELS[kernel] = dataclasses.replace(kept, **launch)
            try:
                times = [seconds_of(call, device) for _ in range(rounds + 2)][2:]
            except Exception as error:  # more registers or shared memory than there are
                found.append({**launch, "error": str(error).partition("\n")[0]})
                continue
            found.append({**launch, "microseconds": statistics.median(times) * 1e6})
    finally:
        KERNELS[kernel] = kept
    found.sort(key=lambda row: row.get("microseconds", float("inf")))
    print(f"  {name} d={d}: {found[0]}", flush=True)
    return found


def markdown(rows: list[dict]) -> str:
    lines = [
        "| kernel | d | memory | microseconds | GB/s | of copy (10th to 90th percentile) |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        share = f"{r['share']:.2f} ({r['share_p10']:.2f} to {r['share_p90']:.2f})"
        lines.append(
            f"| {r['kernel']} | {r['d']} | {size(r['bytes'])} | {r['microseconds']:,.0f} | "
            f"{r['gb_per_s']:,.0f} | {share} |"
        )
    return "\n".join(lines)


def run(args) -> None:
    """Print and store the figures of `bench.py kernels`."""
    device = distributed.pick_device(args.device)
    from model import kernels

    if why := kernels.unavailable(device):
        raise ValueError(f"no kernels to measure: {why}")
    widths = [int(width) for width in args.widths.split(",")]
    sizes = (args.micro_batch_size, args.block_size, device, getattr(torch, args.dtype))
    source = torch.empty(args.copied // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rows, started = [], time.perf_counter()
    settings = {"micro_batch_size": args.micro_batch_size, "block_size": args.block_size, "dtype": args.dtype}
    chosen = [family for family in families(sizes, widths) if args.match in family[0]]
    if not chosen:
        raise ValueError(f"--match={args.match}: no kernel has that in its name; try step, add_norm or expand")
    for number, (name, d, make) in enumerate(chosen, 1):
        calls = make()
        seconds = in_turns(calls, lambda: target.copy_(source), args.rounds, device)
        found = rows_of(d, calls, seconds, args.copied)
        if args.tune:
            for row, (name, (call, _)) in zip(found, calls.items()):
                row["launches"] = tune(d, name, call, device, args.rounds)
        rows += found
        left = duration((time.perf_counter() - started) / number * (len(chosen) - number))
        print(f"{number}/{len(chosen)} {name} d={d}, {left} left", flush=True)
        if args.json:
            stored = {**provenance(), **settings, "rounds": args.rounds, "rows": rows}
            args.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    print(markdown(rows))
