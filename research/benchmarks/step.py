"""Measure the speed and memory of training steps and forward passes relative to the baseline.

Each model takes turns with the baseline, so that other load on the machine affects both alike, and each
comparison comes from rounds in which both models ran. A ratio is the baseline's time over
the model's in the same round: the median over rounds, with the 10th and 90th percentile.
"""

import gc
import statistics
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from configurator import option
from research.benchmarks import suites
from research.benchmarks.contender import Contender, measure_memory
from research.benchmarks.figures import Figures, pop_used_launches
from research.benchmarks.options import MeasurementOptions, SuiteOptions
from research.benchmarks.suites import BASELINE, make_row_name
from research.benchmarks.timing import (
    compute_percentiles,
    compute_speed_ratios,
    format_spread,
    measure,
    repeat_and_synchronize,
)
from training.metrics import compute_nominal_flops_per_token, get_peak_flops
from utils import processes, tables

# the meaning of "activation" figures on a GPU and on a CPU
PEAK_DESCRIPTION = (
    "peak of a forward and backward pass minus weights, gradients and the optimizer's state"
)
SAVED_DESCRIPTION = "saved by a forward pass for its backward pass"


class Bench:
    """The measurement of one size: its baseline, which stays, and one model after the other."""

    def __init__(
        self,
        args: SimpleNamespace,
        size_name: str,
        size: dict[str, Any],
        device: torch.device,
        figures: Figures,
    ):
        self.args = args
        self.size_name = size_name
        self.size = size
        self.device = device
        self.figures = figures
        self.num_tokens = args.micro_batch_size * size["block_size"]
        shape = (2, args.micro_batch_size, size["block_size"])
        generator = torch.Generator().manual_seed(0)
        ids_and_targets = torch.randint(size["vocab_size"], shape, generator=generator)
        self.ids_and_targets = ids_and_targets.to(device)  # (2, B, T)
        model = suites.build_model(BASELINE, size, args, device)
        self.baseline = self.make_contender(BASELINE, model)

    def make_contender(self, name: str, model: torch.nn.Module) -> Contender:
        """Return a contender that is trained on the batch of this measurement."""
        return Contender(
            name,
            model,
            make_batch=lambda: self.ids_and_targets,
            device=self.device,
            dtype=getattr(torch, self.args.dtype),
            compiled=self.args.compile,
        )

    def measure(self, model: str) -> None:
        """Measure a model beside the baseline, and store its row."""
        pop_used_launches()  # forget those of another model
        contender = self.baseline
        if model != BASELINE:
            built = suites.build_model(model, self.size, self.args, self.device)
            contender = self.make_contender(make_row_name(model), built)
        row = {
            "size": self.size_name,
            "model": contender.name,
            "parameters": contender.model.num_parameters(),
            "compiled": contender.compiled,
            **self.measure_speed("train", "", contender),
            **self.measure_speed("evaluate", "forward_", contender),
            **measure_memory(contender, self.num_tokens),
        }
        baseline_memory = measure_memory(self.baseline, self.num_tokens)
        baseline_bytes = baseline_memory["activation_bytes_per_token"]
        row["activation_ratio"] = row["activation_bytes_per_token"] / baseline_bytes
        peak_flops = get_peak_flops(self.device)
        if peak_flops:
            flops_per_token = compute_nominal_flops_per_token(contender.model)
            row["mfu"] = flops_per_token * row["tokens_per_second"] / peak_flops
        self.figures.add({**row, **pop_used_launches()}, "size", "model")

    def measure_speed(self, method: str, prefix: str, contender: Contender) -> dict[str, float]:
        """Return the speed of a method of Contender, "train" or "evaluate", beside the baseline.

        Args:
            prefix: of the names of the figures
        """
        args = self.args
        turns = {
            member.name: repeat_and_synchronize(getattr(member, method), args.steps, self.device)
            for member in (self.baseline, contender)  # once if it is the baseline itself
        }
        label = f"{self.size_name}, {method}"
        seconds_per_turn = measure(turns, args.warmup, args.rounds, label)
        seconds = {}
        for name, turn_seconds in seconds_per_turn.items():
            seconds[name] = [turn / args.steps for turn in turn_seconds]
        return compute_speed_figures(
            seconds[contender.name], seconds[self.baseline.name], prefix, self.num_tokens
        )


def compute_speed_figures(
    seconds: list[float], baseline_seconds: list[float], prefix: str, num_tokens: int
) -> dict[str, float]:
    """Return tokens per second of a model and of the baseline in the same rounds, and their ratio."""
    tokens_per_second = [num_tokens / round_seconds for round_seconds in seconds]
    baseline_speed = statistics.median(
        num_tokens / round_seconds for round_seconds in baseline_seconds
    )
    return {
        **compute_percentiles(f"{prefix}tokens_per_second", tokens_per_second),
        f"{prefix}baseline_tokens_per_second": baseline_speed,
        **compute_speed_ratios(f"{prefix}ratio", baseline_seconds, seconds),
    }


def release_memory(device: torch.device) -> None:
    """Free the memory of models that are no longer referenced."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def format_number(row: dict[str, Any], key: str, number_format: str, unit: float = 1) -> str | None:
    """Format a figure of a row in multiples of `unit`, or return None if the row lacks it."""
    return format(row[key] / unit, number_format) if key in row else None


COLUMNS = {
    "model": lambda row: f"`{row['model']}`",
    "parameters": lambda row: format_number(row, "parameters", ",.0f"),
    "training tokens/s": lambda row: format_spread(row, "tokens_per_second", ",.0f"),
    "additive in the same rounds": lambda row: format_number(
        row, "baseline_tokens_per_second", ",.0f"
    ),
    "relative to additive (10th to 90th percentile)": lambda row: format_spread(
        row, "ratio", ".3f"
    ),
    "forward tokens/s": lambda row: format_spread(row, "forward_tokens_per_second", ",.0f"),
    "forward relative to additive": lambda row: format_spread(row, "forward_ratio", ".3f"),
    "MFU": lambda row: format_number(row, "mfu", ".1%"),
    "activations per token, KiB": lambda row: format_number(
        row, "activation_bytes_per_token", ",.0f", 2**10
    ),
    "activations relative to additive": lambda row: format_number(row, "activation_ratio", ".2f"),
    "peak memory, GiB": lambda row: format_number(row, "peak_memory_bytes", ".1f", 2**30),
}


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table, without columns that are empty in all rows."""
    cells = {}
    for title, format_cell in COLUMNS.items():
        column = [format_cell(row) for row in rows]
        if any(column):
            cells[title] = column
    return tables.format_markdown(list(cells), zip(*cells.values()))


@dataclass(frozen=True)
class Options(SuiteOptions, MeasurementOptions):
    """Turns."""

    warmup: int = option(3, "number of warmup turns of each model", low=1)
    rounds: int = option(20, "number of measured turns of each model", low=1)
    steps: int | None = option(
        None,
        "number of steps per turn (default: 1 on a CPU, 4 on a GPU)",
        low=1,
    )


def run(args: SimpleNamespace) -> None:
    """Print and store the figures of `bench.py step`; rows that the file has are not repeated."""
    device = processes.pick_device(args.device)
    sizes = suites.complete_arguments(args, device)
    if device.type == "cpu":
        processes.keep_freed_memory()
    # All models share the code that is compiled. With the default limit the ninth would silently run
    # eagerly.
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 1000
    activations = PEAK_DESCRIPTION if device.type == "cuda" else SAVED_DESCRIPTION
    settings = {
        "suite": args.suite,
        "sizes": sizes,
        "device": device.type,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "micro_batch_size": args.micro_batch_size,
        "compile": args.compile,
        "kernels": args.kernels,
        "state_checkpoint_interval": args.state_checkpoint_interval,
        "rounds": args.rounds,
        "steps_per_round": args.steps,
        "activations": activations,
    }
    figures = Figures(args.json, device, settings, args.resume)
    for size_name, size in sizes.items():
        measure_size(args, size_name, size, device, figures)
        torch.compiler.reset()
        release_memory(device)
    for size_name, size in sizes.items():
        rows = [row for row in figures.rows if row["size"] == size_name]
        print(f"\n{size_name}: {size}, {args.dtype} on {figures.format_chip()}\n")
        print(format_table(rows))
    print(f"\nactivations: {activations}")


def measure_size(
    args: SimpleNamespace,
    size_name: str,
    size: dict[str, Any],
    device: torch.device,
    figures: Figures,
) -> None:
    """Measure all models of one size that have no row yet."""
    models = [
        model
        for model in args.models
        if figures.find(size=size_name, model=make_row_name(model)) is None
    ]
    if not models:
        return
    bench = Bench(args, size_name, size, device, figures)
    for number, model in enumerate(models, 1):
        print(f"{size_name}, {number}/{len(models)}: {make_row_name(model)}", flush=True)
        bench.measure(model)
        release_memory(device)
