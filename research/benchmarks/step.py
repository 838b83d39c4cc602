"""Measure the speed and memory of training steps relative to the baseline.

Each model takes turns with the baseline, so that other load on the machine affects both alike, and each
comparison comes from rounds in which both models ran. A ratio is the baseline's time over
the model's in the same round: the median over rounds, with the 10th and 90th percentile.
"""

import gc
import statistics
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch

from configurator import option
from model import MODEL_NAMES
from research.benchmarks import models
from research.benchmarks.models import BASELINE, Contender, make_row_name
from research.benchmarks.timing import (
    compute_percentiles,
    compute_speed_ratios,
    format_spread,
    measure,
    repeat_and_synchronize,
)
from research.storage import Figures
from training.metrics import compute_nominal_flops_per_token, get_peak_flops
from utils import machine, processes, tables


@dataclass(frozen=True)
class Options:
    """What is measured."""

    size: Literal["quick", "small", "medium", "tiny"] = option(
        "quick",
        "size of the models: one for two CPU cores, one of the paper's, or one for a test",
    )
    models: str | None = option(
        None,
        "models separated by commas, each optionally followed by +kernels=off, "
        "+state_checkpoint_interval=4 or +KEY=VALUE (default: all)",
    )
    micro_batch_size: int | None = option(
        None,
        "number of sequences per step (default: 8 of the quick size, 16 of the paper's)",
        low=1,
    )
    dtype: Literal["float32", "bfloat16"] = option("bfloat16", "dtype of autocast")
    compile: bool = option(True, "compile the models")
    device: Literal["auto", "cuda", "cpu"] = option(
        "auto",
        "device to measure on; auto uses the GPU if there is one",
    )
    warmup: int = option(3, "number of warmup turns of each model", low=1)
    rounds: int = option(20, "number of measured turns of each model", low=1)
    steps: int | None = option(
        None,
        "number of steps per turn (default: 1 on a CPU, 4 on a GPU)",
        low=1,
    )
    json: str | None = option(None, "file to store the results in, after each of them")


class Bench:
    """The measurement of a size: its baseline, which stays, and one model after the other."""

    def __init__(self, args: SimpleNamespace, device: torch.device):
        self.args = args
        self.device = device
        self.size = models.SIZES[args.size]
        self.num_tokens = args.micro_batch_size * self.size["block_size"]
        shape = (2, args.micro_batch_size, self.size["block_size"])
        generator = torch.Generator().manual_seed(0)
        batch = torch.randint(self.size["vocab_size"], shape, generator=generator)
        self.batch = batch.to(device).unbind()
        self.baseline = self.make_contender(BASELINE)

    def make_contender(self, model: str) -> Contender:
        """Return a contender that is trained on the batch of this measurement."""
        return Contender(
            make_row_name(model),
            models.build_model(model, self.size, self.device),
            batch=self.batch,
            device=self.device,
            dtype=getattr(torch, self.args.dtype),
            compiled=self.args.compile,
        )

    def measure(self, model: str) -> dict[str, Any]:
        """Measure a model beside the baseline, and return its row."""
        contender = self.baseline if model == BASELINE else self.make_contender(model)
        row = {
            "model": contender.name,
            "parameters": contender.model.num_parameters(),
            **self.measure_speed(contender),
        }
        activations = models.measure_activations(contender, self.num_tokens)
        baseline_activations = models.measure_activations(self.baseline, self.num_tokens)
        row["activation_bytes_per_token"] = activations
        row["activation_ratio"] = activations / baseline_activations
        peak_flops = get_peak_flops(self.device)
        if peak_flops:
            flops_per_token = compute_nominal_flops_per_token(contender.model)
            row["mfu"] = flops_per_token * row["tokens_per_second"] / peak_flops
        return row

    def measure_speed(self, contender: Contender) -> dict[str, float]:
        """Return the speed of training steps beside the baseline."""
        args = self.args
        turns = {
            member.name: repeat_and_synchronize(member.train, args.steps, self.device)
            for member in (self.baseline, contender)  # once if it is the baseline itself
        }
        seconds = {}
        for name, turn_seconds in measure(turns, args.warmup, args.rounds).items():
            seconds[name] = [turn / args.steps for turn in turn_seconds]
        return compute_speed_figures(
            seconds[contender.name], seconds[self.baseline.name], self.num_tokens
        )


def compute_speed_figures(
    seconds: list[float], baseline_seconds: list[float], num_tokens: int
) -> dict[str, float]:
    """Return tokens per second of a model and of the baseline in the same rounds, and their ratio."""
    tokens_per_second = [num_tokens / round_seconds for round_seconds in seconds]
    return {
        **compute_percentiles("tokens_per_second", tokens_per_second),
        "baseline_tokens_per_second": num_tokens / statistics.median(baseline_seconds),
        **compute_speed_ratios("ratio", baseline_seconds, seconds),
    }


COLUMNS = {
    "model": lambda row: f"`{row['model']}`",
    "parameters": lambda row: f"{row['parameters']:,}",
    "training tokens/s": lambda row: format_spread(row, "tokens_per_second", ",.0f"),
    "additive in the same rounds": lambda row: f"{row['baseline_tokens_per_second']:,.0f}",
    "relative to additive (10th to 90th percentile)": lambda row: format_spread(
        row, "ratio", ".3f"
    ),
    "MFU": lambda row: f"{row['mfu']:.1%}" if "mfu" in row else None,
    "activations per token, KiB": lambda row: f"{row['activation_bytes_per_token'] / 2**10:,.0f}",
    "activations relative to additive": lambda row: f"{row['activation_ratio']:.2f}",
}


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, without columns that are empty in all rows."""
    cells = {}
    for title, format_cell in COLUMNS.items():
        column = [format_cell(row) for row in rows]
        if any(column):
            cells[title] = column
    return tables.format_markdown(list(cells), zip(*cells.values()))


def complete_arguments(args: SimpleNamespace, device: torch.device) -> None:
    """Fill in the arguments that depend on the size and the device.

    Raises:
        ValueError: something cannot be measured
    """
    names = args.models.split(",") if args.models else MODEL_NAMES
    args.models = list(dict.fromkeys([BASELINE, *names]))  # each once, the baseline first
    args.micro_batch_size = args.micro_batch_size or models.MICRO_BATCH_SIZES[args.size]
    args.steps = args.steps or (4 if device.type == "cuda" else 1)
    if args.compile and not machine.can_compile(device.type):
        raise ValueError(
            "--compile=True needs a C++ compiler and Python's headers: install them, or "
            "--compile=False"
        )
    for model in args.models:
        with torch.device("meta"):
            models.build_model(model, models.SIZES[args.size], device)


def run(args: SimpleNamespace) -> None:
    """Print and store the figures of `bench.py step`."""
    device = processes.pick_device(args.device)
    complete_arguments(args, device)
    if device.type == "cpu":
        processes.keep_freed_memory()
    # All models share the code that is compiled. With the default limit the ninth would silently run
    # eagerly.
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 1000
    settings = {
        "size": args.size,
        "device": device.type,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "micro_batch_size": args.micro_batch_size,
        "compile": args.compile,
        "rounds": args.rounds,
        "steps_per_round": args.steps,
    }
    figures = Figures(args.json, settings)
    bench = Bench(args, device)
    for number, model in enumerate(args.models, 1):
        print(f"{number}/{len(args.models)}: {make_row_name(model)}", flush=True)
        figures.add(bench.measure(model))
        gc.collect()  # free the memory of the model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"\n{args.size}, {args.dtype} on {figures.origin['machine']}\n")
    print(format_table(figures.rows))
