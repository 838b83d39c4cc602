"""`bench.py profile`: find what a compiled training step spends its time on, with torch.profiler."""

import re
import subprocess
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from configurator import option
from research.benchmarks import suites
from research.benchmarks.contender import Contender
from research.benchmarks.figures import Figures, pop_used_launches
from research.benchmarks.options import MeasurementOptions, SuiteOptions
from utils import processes, tables

MAX_KERNELS = 30  # that are stored for a model, the longest first


def find_version(command: list[str], pattern: str) -> str | None:
    """Return the version that a program prints, or None if it is not installed or prints none."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return None
    match = re.search(pattern, output)
    return match[0] if match else None


def find_versions() -> dict[str, Any]:
    """Return the versions of what torch uses; those of torch and Triton are stored in all files."""
    return {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": find_version(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], r"[\d.]+"
        ),
        "gcc": find_version(["gcc", "--version"], r"\d+\.\d+\.\d+"),
    }


def synchronize(device: torch.device) -> None:
    """Wait until a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profile_steps(contender: Contender, steps: int, device: torch.device) -> dict[str, Any]:
    """Return the microseconds of a step, its longest kernels, and the operators of attention."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(3):  # compiles, and lets the allocator grow
        contender.train()
    synchronize(device)
    with torch.profiler.profile(activities=activities) as profile:
        start = time.perf_counter()
        for _ in range(steps):
            contender.train()
        synchronize(device)
        seconds = time.perf_counter() - start
    events = profile.key_averages()
    # the optimizer annotates the time of its kernels, which would count twice
    gpu_events = [
        event
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    if gpu_events:
        timed_events = [(event.self_device_time_total, event) for event in gpu_events]
    else:
        # on a CPU there are no kernels, so these are operators
        timed_events = [(event.self_cpu_time_total, event) for event in events]
    timed_events.sort(key=lambda timed: timed[0], reverse=True)
    total_microseconds = sum(microseconds for microseconds, _ in timed_events)
    kernels = []
    for microseconds, event in timed_events[:MAX_KERNELS]:
        kernels.append(
            {
                "kernel": event.key[:200],
                "calls": event.count / steps,
                "microseconds": microseconds / steps,
                "share": microseconds / total_microseconds,
            }
        )
    return {
        # The difference of these two is the time that the GPU waits. Profiling slows the host a little.
        "step_microseconds": seconds / steps * 1e6,
        "kernel_microseconds": total_microseconds / steps,
        "attention": {
            event.key: event.count / steps for event in events if "scaled_dot_product" in event.key
        },
        "kernels": kernels,
    }


def print_row(row: dict[str, Any], figures: Figures) -> None:
    """Print the kernels of a model."""
    print(
        f"\n{row['model']}: {row['step_microseconds']:,.0f} microseconds a step, kernels "
        f"{row['kernel_microseconds']:,.0f}, on {figures.format_chip()}"
    )
    print(f"attention: {row['attention']}\n")
    cells = []
    for kernel in row["kernels"]:
        cells.append(
            [
                kernel["kernel"][:70],
                f"{kernel['calls']:g}",
                f"{kernel['microseconds']:,.0f}",
                f"{kernel['share']:.1%}",
            ]
        )
    print(tables.format_markdown(["kernel", "calls a step", "microseconds", "share"], cells))


@dataclass(frozen=True)
class Options(SuiteOptions, MeasurementOptions):
    """Steps."""

    steps: int = option(10, "number of steps to profile", low=1)


def run(args: SimpleNamespace) -> None:
    """Print and store the figures of `bench.py profile`."""
    device = processes.pick_device(args.device)
    sizes = suites.complete_arguments(args, device)
    if len(sizes) > 1:
        raise ValueError(f"--sizes: give one of {', '.join(sizes)}")
    [size] = sizes.values()
    settings = {
        "size": size,
        "micro_batch_size": args.micro_batch_size,
        "steps": args.steps,
        "dtype": args.dtype,
        "compile": args.compile,
        "kernels": args.kernels,
        "state_checkpoint_interval": args.state_checkpoint_interval,
        **find_versions(),
    }
    figures = Figures(args.json, device, settings, args.resume)
    shape = (2, args.micro_batch_size, size["block_size"])
    ids_and_targets = torch.randint(0, size["vocab_size"], shape).to(device)
    for text in args.models:
        name = suites.make_row_name(text)
        if figures.find(model=name):
            continue
        model = suites.build_model(text, size, args, device)
        contender = Contender(
            text,
            model,
            make_batch=lambda: ids_and_targets,
            device=device,
            dtype=getattr(torch, args.dtype),
            compiled=args.compile,
        )
        pop_used_launches()  # forget those of another model
        profile = profile_steps(contender, args.steps, device)
        figures.add({"model": name, **profile, **pop_used_launches()}, "model")
        del model, contender
        torch.compiler.reset()
    for row in figures.rows:
        print_row(row, figures)
