"""Measure training steps of one model in a process of its own, in turns with other processes.

    python -m research.benchmarks.turns MODEL [--size=medium] [--cuda_graphs] [--device=cpu]

The process compiles the model and prints a line of JSON. For each line of standard input it then measures a
turn, and prints its figures as another line. So several models compile side by side, and none is measured
while another one runs (research/gpu.py).
"""

import json
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal

import torch

from configurator import argument, option, read_command_line
from research.benchmarks import peers, suites
from research.benchmarks.contender import Contender
from research.benchmarks.profile_step import profile_steps, synchronize

# The host waits for the GPU once a turn, and takes about 3 ms to fill its queue again.
STEPS_PER_TURN = 32
PROFILED_STEPS = 3
SIZES = {**suites.PAPER, "tiny": suites.TINY}


@dataclass(frozen=True)
class Options:
    """What is measured."""

    model: str = argument("a model as in bench.py --models, or one of its peers")
    size: Literal["small", "medium", "tiny"] = option("small", "size of the model")
    cuda_graphs: bool = option(False, "replay CUDA graphs")
    device: str = option("cuda", "device to measure on")


def build_contender(args: SimpleNamespace) -> Contender:
    """Build a model of `bench.py --models`, the plain GPT, or transformers' GPT-2."""
    device = torch.device(args.device)
    size = SIZES[args.size]
    torch.manual_seed(0)
    if args.model == peers.PLAIN:
        model = peers.PlainGPT(size)
    elif args.model == peers.TRANSFORMERS:
        model = peers.TransformersGPT2(size)
    else:
        kernel_options = SimpleNamespace(kernels="auto", state_checkpoint_interval=2)
        model = suites.build_model(args.model, size, kernel_options, device)
    micro_batch_size = 1 if args.size == "tiny" else 16
    shape = (2, micro_batch_size, size["block_size"])
    ids_and_targets = torch.randint(size["vocab_size"], shape, device=device)
    return Contender(
        args.model,
        model,
        make_batch=lambda: ids_and_targets,
        device=device,
        dtype=torch.bfloat16,
        compiled=device.type == "cuda",
        cuda_graphs=args.cuda_graphs,
    )


def measure_turn(contender: Contender) -> dict[str, float]:
    """Return the milliseconds of a step, and of launching a step that waits for none."""
    start = time.perf_counter()
    for _ in range(STEPS_PER_TURN):
        contender.train()
    synchronize(contender.device)
    step_ms = (time.perf_counter() - start) / STEPS_PER_TURN * 1e3
    start = time.perf_counter()
    contender.train()
    launch_ms = (time.perf_counter() - start) * 1e3
    synchronize(contender.device)
    return {"step_ms": step_ms, "launch_ms": launch_ms}


def main() -> None:
    args = read_command_line(__doc__, Options)
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever else is printed is not JSON

    def answer(figures: dict) -> None:
        print(json.dumps(figures), file=answers, flush=True)

    start = time.perf_counter()
    contender = build_contender(args)
    for _ in range(3):
        contender.train()
    synchronize(contender.device)
    is_gpu = contender.device.type == "cuda"
    if is_gpu:
        # several models wait at the same time; the memory of CUDA graphs stays
        torch.cuda.empty_cache()
    answer({"seconds_to_compile": time.perf_counter() - start})

    is_profiled = False
    for _ in sys.stdin:
        contender.train()  # the allocator grows again
        synchronize(contender.device)
        figures = measure_turn(contender)
        num_tokens = contender.make_batch()[0].numel()
        figures["tokens_per_second"] = num_tokens / figures["step_ms"] * 1e3
        if is_gpu:
            figures["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        if not is_profiled:
            figures.update(profile_steps(contender, PROFILED_STEPS, contender.device))
            is_profiled = True
        if is_gpu:
            torch.cuda.empty_cache()
        answer(figures)


if __name__ == "__main__":
    main()
