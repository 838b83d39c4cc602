"""Bandwidth of every fused kernel against what this device copies: `bench.py kernels`.

A kernel must read each of its inputs once and write each of its results once: those bytes over its time, as a share of
the bandwidth of a large copy (bytes read and written over time) measured between the kernels. Sums over programs and
the reduction of them are part of its time and not of its bytes. `--tune` times some kernels under other launches.
"""

import dataclasses
import itertools
import re
import statistics
import time
from functools import partial

import torch

from research.benchmarks.figures import Figures, launches_used
from research.benchmarks.timing import Clock, compared, spread
from training import distributed
from training.provenance import compute_digest
from utils import tables
from utils.units import format_bytes, format_duration

WAYS = ("forward", "backward")
# What --tune tries beside the table's launches and their runners-up: warps of a program, how loads run ahead (stages,
# prefetch), warps of a multiprocessor.
HEAD = 128  # features of a head at the paper's sizes
WARPS, AHEAD, RESIDENT = (1, 2, 4, 8, 16), ((2, 0), (3, 0), (1, 2)), (8, 16)


def random(device, dtype, *shape):
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def step_calls(sizes, d: int, columns: int, kernel_size: int, stored: bool):
    """{name: (function, tensors that it must read or write)} of the residual step, forward and backward.

    stored: the step after which the state is stored, with one write to replay; else the one before it.
    """
    from model.kernels import residual_step as kernel

    B, T, device, dtype = sizes
    direction, earlier, grad_context = (random(device, dtype, B, T, d) for _ in range(3))
    stored_state = random(device, dtype, B, T, columns, d)
    grad_new_state = random(device, dtype, B, T, columns, d)
    gate_logit = random(device, torch.float32, B, T)
    value_logit = random(device, torch.float32, B, T, columns)
    directions = [earlier] if stored else []
    updates = [0.1 * value_logit] if stored else []
    write = {"direction": direction, "gate_logit": gate_logit, "value_logit": value_logit}
    parameters = {
        "read_weights": random(device, torch.float32, kernel_size, columns, d) / columns,
        "norm_weight": torch.ones(d, device=device),
        "gate_weight": random(device, torch.float32, d),
        "value_weight": random(device, torch.float32, columns, d),
    }
    options = {
        "value_form": "sigmoid",
        "value_scale": 4.0,
        "value_constant": 2.0,
        "value_input": "residual",
        "erase": True,
    }

    forward = partial(
        kernel.residual_step,
        state=stored_state,
        stored_state=stored_state,
        directions=directions,
        updates=updates,
        **write,
        **parameters,
        gate_bias=random(device, torch.float32, 1),
        value_bias=random(device, torch.float32, columns),
        **options,
        k_eps=1e-5,
        norm_eps=1e-5,
        store_state=stored,
        return_x_in=False,
        carry=None,
        context_dtype=dtype,
    )
    output = kernel.StepOutput(*forward())
    # the state after the write, which the backward pass needs
    after = {"stored_state": stored_state, "directions": [direction], "updates": [output.update]}
    if stored:
        after = {"stored_state": output.new_state, "directions": [], "updates": []}
    backward = partial(
        kernel.residual_step_backward,
        grad_new_state=grad_new_state,
        grad_context=grad_context,
        grad_x_in=None,
        grad_next_gate_logit=output.next_gate_logit,
        grad_next_value_logit=output.next_value_logit,
        **after,
        **write,
        inverse_norm=output.inverse_norm,
        delta=output.delta,
        x_in=output.x_in,
        inverse_rms=output.inverse_rms,
        **parameters,
        **options,
    )

    logits = [output.next_gate_logit, output.next_value_logit]
    for_backward = [output.inverse_norm, output.delta, output.x_in, output.inverse_rms]
    moved = [stored_state, *directions, *updates, *write.values()]
    moved += [output.context, *logits, *for_backward, output.update]
    if stored:
        moved.append(output.new_state)
    moved_back = [grad_new_state, grad_context, *logits, *write.values(), *for_backward]
    moved_back += [after["stored_state"], *after["updates"]]
    # the gradients of the state, of the direction and of both logits
    moved_back += [stored_state, *write.values()]
    suffix = f"K={kernel_size} v={columns} {'stored' if stored else 'not stored'}"
    return {
        f"step forward {suffix}": (forward, moved),
        f"step backward {suffix}": (backward, moved_back),
    }


def add_norm_calls(sizes, d: int):
    from model.kernels import add_norm as kernel

    B, T, device, dtype = sizes
    x, h, grad_new_x, grad_context = (random(device, dtype, B, T, d) for _ in range(4))
    norm_weight = torch.ones(d, device=device)
    forward = partial(
        kernel.add_norm, x=x, h=h, norm_weight=norm_weight, eps=1e-5, context_dtype=dtype
    )
    output = kernel.AddNormOutput(*forward())
    backward = partial(
        kernel.add_norm_backward,
        grad_new_x=grad_new_x,
        grad_context=grad_context,
        x=output.new_x,
        inverse_rms=output.inverse_rms,
        norm_weight=norm_weight,
    )
    return {
        "add_norm forward": (forward, [x, h, *output]),
        "add_norm backward": (
            backward,
            [grad_new_x, grad_context, output.new_x, output.inverse_rms, x],
        ),
    }


def expand_calls(sizes, d: int, columns: int, kernel_size: int):
    from model.kernels import expand as kernel

    B, T, device, dtype = sizes
    x, grad_state = random(device, dtype, B, T, d), random(device, dtype, B, T, columns, d)
    weights = random(device, torch.float32, kernel_size, columns, d)
    forward = partial(kernel.expand, x, weights), [x, grad_state]
    backward = partial(kernel.expand_backward, grad_state=grad_state, x=x, weights=weights)
    suffix = f"K={kernel_size} v={columns}"
    return {
        f"expand forward {suffix}": forward,
        f"expand backward {suffix}": (backward, [grad_state, x, x]),
    }


def rope_norm_calls(sizes, d: int):
    from model.kernels import rope as kernel

    B, T, device, dtype = sizes
    size = min(d // 2 * 2, HEAD)
    qkv = random(device, dtype, B, T, 3, d // size, size)
    gradients = [random(device, dtype, B, T, d // size, size) for _ in range(3)]
    angle = random(device, torch.float32, T, size // 2)
    inputs = {
        "qkv": qkv,
        "cos": angle.cos(),
        "sin": angle.sin(),
        "q_norm": torch.ones(size, device=device),
        "k_norm": torch.ones(size, device=device),
        "eps": 1e-5,
    }
    tables = [inputs["cos"], inputs["sin"]]
    queries_and_keys = qkv[:, :, :2]  # the values are a view of the product and are not moved
    grad_q, grad_k, grad_v = gradients
    forward = partial(kernel.rope_norm, **inputs)
    backward = partial(
        kernel.rope_norm_backward, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v, **inputs
    )
    return {
        "rope_norm forward": (forward, [queries_and_keys, queries_and_keys, *tables]),
        "rope_norm backward": (backward, [*gradients, queries_and_keys, *tables, qkv]),
    }


def families(sizes, widths: list[int]):
    """(name, width, a function that makes the calls of its forward and backward kernels)."""
    for d in widths:
        yield "add_norm", d, partial(add_norm_calls, sizes, d)
        yield "expand K=4 v=4", d, partial(expand_calls, sizes, d, 4, 4)
        yield "rope_norm", d, partial(rope_norm_calls, sizes, d)
        for columns, kernel_size, stored in itertools.product((1, 2, 4, 8), (1, 4), (False, True)):
            name = f"step K={kernel_size} v={columns} {'stored' if stored else 'not stored'}"
            yield name, d, partial(step_calls, sizes, d, columns, kernel_size, stored)


def in_turns(calls: dict, copy, rounds: int, clock: Clock) -> dict[str, list[float]]:
    """Seconds of each function and of `copy`, call by call in turns."""
    functions = {"copy": copy, **{name: call for name, (call, _) in calls.items()}}
    for _ in range(3 if clock.device.type == "cuda" else 0):  # the first calls compile
        for function in functions.values():
            function()
    found = [clock.seconds(functions) for _ in range(rounds)]
    return {name: [turn[name] for turn in found] for name in functions}


def bytes_of(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def row_of(d: int, name: str, tensors, seconds: dict, copied: int) -> dict:
    """Bytes, median time, bandwidth and its share of the copy's with percentiles."""
    moved, middle = bytes_of(tensors), statistics.median(seconds[name])
    row = {"kernel": name, "d": d, "bytes": moved, "microseconds": middle * 1e6}
    row["gb_per_s"] = moved / middle / 1e9
    row["copy_gb_per_s"] = copied / statistics.median(seconds["copy"]) / 1e9
    # The copy's time for as many bytes, over the kernel's own.
    return row | compared("share", [t * moved / copied for t in seconds["copy"]], seconds[name])


def measure(chosen: list, args, clock: Clock, copy, figures: Figures) -> None:
    """A row for every kernel that has none yet."""
    started = time.perf_counter()
    for number, (name, d, make) in enumerate(chosen, 1):
        first, space, rest = name.partition(" ")
        wanted = [f"{first} {way}{space}{rest}" for way in WAYS]
        if not all(figures.find(kernel=each, d=d) for each in wanted):
            calls = make()
            assert list(calls) == wanted
            launches_used()
            seconds, launched = in_turns(calls, copy, args.rounds, clock), launches_used()
            for each, (_, tensors) in calls.items():
                row = row_of(d, each, tensors, seconds, args.copied)
                figures.add(row | launched, "kernel", "d")
        left = format_duration((time.perf_counter() - started) / number * (len(chosen) - number))
        print(f"{number}/{len(chosen)} {name} d={d}, {left} left", flush=True)


def launches(args, d: int, name: str) -> tuple[str, list]:
    """(the kernel's key in the table of launches, those to try: the table's own, its runners-up, then the others)."""
    from model.kernels.launch import Launch, launch_key, list_launches

    sizes = {key: int(value) for key, value in re.findall(r"([Kv])=(\d)", name)}
    kernel, columns, tokens = " ".join(name.split()[:2]), sizes.get("v", 1), sizes.get("K", 1)
    tried = list_launches(kernel, d, columns, tokens)
    for warps, (stages, prefetch), resident in itertools.product(WARPS, AHEAD, RESIDENT):
        if resident >= warps:
            tried.append(Launch(warps, stages, resident // warps, prefetch, tried[0].reload))
    return launch_key(kernel, columns, tokens), list(dict.fromkeys(tried))[: args.launches]


def tune(chosen: list, args, clock: Clock, copy, figures: Figures) -> None:
    """Time each kernel under every launch worth trying; stored after each."""
    from model.kernels.launch import FORCED, Launch

    for _, d, make in chosen:
        for each, (call, tensors) in make().items():
            key, tried = launches(args, d, each)
            moved = bytes_of(tensors)
            new = {"kernel": each, "d": d, "bytes": moved, "launches": []}
            row = figures.find(kernel=each, d=d) or new
            for launch in map(dataclasses.asdict, tried):
                if any(launch.items() <= old.items() for old in row["launches"]):
                    continue
                FORCED[key] = Launch(**launch)
                try:
                    row["launches"].append({**launch, **timed(call, moved, copy, args, clock)})
                finally:
                    del FORCED[key]
                row["launches"].sort(key=lambda found: found.get("microseconds", float("inf")))
                figures.add(row, "kernel", "d")
            print(f"{each} d={d}: fastest {row['launches'][0]}", flush=True)


def timed(call, moved: int, copy, args, clock: Clock) -> dict:
    """Median time, bandwidth and share of the copy's bandwidth; or why the kernel does not run so."""
    try:
        seconds = in_turns({"kernel": (call, [])}, copy, args.rounds, clock)
    except Exception as error:  # more registers or shared memory than there are
        return {"error": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"}
    middle, of_copy = (statistics.median(seconds[name]) for name in ("kernel", "copy"))
    speed = {"microseconds": middle * 1e6, "gb_per_s": moved / middle / 1e9}
    return speed | {"share": of_copy * moved / args.copied / middle}


def markdown(rows: list[dict]) -> str:
    header = ["kernel", "d", "memory", "microseconds", "GB/s", "of copy (10th to 90th percentile)"]
    lines = []
    for row in rows:
        speed = [f"{row[key]:,.0f}" for key in ("microseconds", "gb_per_s")]
        about = [row["kernel"], row["d"], format_bytes(row["bytes"])]
        lines.append([*about, *speed, spread(row, "share", ".2f")])
    return tables.format_markdown(header, lines)


def run(args) -> None:
    """Print and store the figures of `bench.py kernels`."""
    device = distributed.pick_device(args.device)
    from model import kernels

    reason = kernels.reason_unavailable(device)
    if reason is not None:
        raise ValueError(f"no kernels to measure: {reason}")
    if args.tune and not args.match:
        raise ValueError("--tune takes minutes a kernel: give --match, as in --match='K=1 v=4'")
    sizes = (args.micro_batch_size, args.block_size, device, getattr(torch, args.dtype))
    chosen = [family for family in families(sizes, args.widths) if args.match in family[0]]
    if args.tune:  # it is launched in one way, without a table
        chosen = [family for family in chosen if family[0] != "rope_norm"]
    if not chosen:
        which = "no kernel with launches to tune" if args.tune else "no kernel"
        names = "step, add_norm or expand" if args.tune else "step, add_norm, expand or rope_norm"
        raise ValueError(f"--match={args.match}: {which} has that in its name; try {names}")
    source = torch.ones(args.copied // 2, dtype=torch.uint8, device=device)
    target, clock = torch.empty_like(source), Clock(device)
    names = "micro_batch_size", "block_size", "dtype", "rounds", "copied"
    settings = {name: getattr(args, name) for name in names}
    # Another table changes no launch that was timed; other kernels do.
    code = (
        compute_digest("model/kernels/*.py", exclude=("launch_table.py",))[:12] if args.tune else ""
    )
    figures = Figures(args.json, device, settings, args.resume, code)
    (tune if args.tune else measure)(chosen, args, clock, lambda: target.copy_(source), figures)
    print(f"on {figures.on_what()}")
    if not args.tune:
        print(markdown(figures.rows))
