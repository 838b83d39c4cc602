"""What a compiled training step spends its time on, kernel by kernel, by torch.profiler: `bench.py profile`."""

import re
import subprocess
import time

import torch

from research.benchmarks import suites
from research.benchmarks.contender import Contender
from research.benchmarks.figures import Figures, launches_used
from training import distributed
from utils import tables

MOST = 30  # kernels that are kept of a model, those that take longest


def version_of(command: list[str], pattern: str) -> str | None:
    """What a program says of its version; None where there is no such program."""
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    found = re.search(pattern, said)
    return found[0] if found else None


def versions() -> dict:
    """Of what lies below torch; torch's and Triton's own are stored with every figure."""
    driver = version_of(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], r"[\d.]+"
    )
    known = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": driver}
    return known | {"gcc": version_of(["gcc", "--version"], r"\d+\.\d+\.\d+")}


def profiled(contender: Contender, steps: int, device: torch.device) -> dict:
    """Of one step: microseconds, the kernels that take longest, and which operators attention became."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []

    def wait():
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):  # compiles, and lets the allocator grow
        contender.train()
    wait()
    with torch.profiler.profile(activities=activities) as profile:
        began = time.perf_counter()
        for _ in range(steps):
            contender.train()
        wait()
        seconds = time.perf_counter() - began
    events = profile.key_averages()
    on_gpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    # On a CPU, operators: there are no kernels to tell.
    time_of = (
        (lambda event: event.self_device_time_total)
        if on_gpu
        else (lambda event: event.self_cpu_time_total)
    )
    timed = sorted(on_gpu or events, key=time_of, reverse=True)
    total = sum(map(time_of, timed))
    rows = [
        {"kernel": event.key[:200], "calls": event.count / steps, "microseconds": time_of(event) / steps,
         "share": time_of(event) / total}
        for event in timed[:MOST]
    ]  # fmt: skip
    attention = {
        event.key: event.count / steps for event in events if "scaled_dot_product" in event.key
    }
    # Between these two lies what the GPU waits: profiling itself slows the host down a little.
    busy = {"step_microseconds": seconds / steps * 1e6, "kernel_microseconds": total / steps}
    return {**busy, "attention": attention, "kernels": rows}


def run(args) -> None:
    """Print and store the figures of `bench.py profile`."""
    device = distributed.pick_device(args.device)
    sizes = suites.complete(args, device)
    if len(sizes) > 1:
        raise ValueError(f"--sizes: give one of {', '.join(sizes)}")
    [size] = sizes.values()
    torch.set_float32_matmul_precision("high")  # as in training
    settings = {
        "size": size,
        "micro_batch_size": args.micro_batch_size,
        "steps": args.steps,
        "dtype": args.dtype,
    }
    figures = Figures(args.json, device, settings | versions(), args.resume)
    ids = torch.randint(0, size["vocab_size"], (2, args.micro_batch_size, size["block_size"])).to(
        device
    )
    for text in args.models:
        if figures.find(model=suites.row_name(text)):
            continue
        model = suites.built(text, size, args, device)
        compiled = args.compile == "True"
        contender = Contender(
            text, model, lambda: ids, device, getattr(torch, args.dtype), compiled
        )
        launches_used()
        found = profiled(contender, args.steps, device)
        figures.add({"model": suites.row_name(text), **found, **launches_used()}, "model")
        del model, contender
        torch.compiler.reset()
    for row in figures.rows:
        lines = [[k["kernel"][:70], f"{k['calls']:g}", f"{k['microseconds']:,.0f}", f"{k['share']:.1%}"]
                 for k in row["kernels"]]  # fmt: skip
        step, busy = f"{row['step_microseconds']:,.0f}", f"{row['kernel_microseconds']:,.0f}"
        print(
            f"\n{row['model']}: {step} microseconds a step, kernels {busy}, on {figures.on_what()}"
        )
        print(f"attention: {row['attention']}\n")
        print(tables.format_markdown(["kernel", "calls a step", "microseconds", "share"], lines))
