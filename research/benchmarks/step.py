"""Measure the speed and memory of training steps and forward passes relative to the baseline.

Models are measured in groups: the baseline, one model and, with --peers=transcription, the model's
straight transcription. They take turns, so that other load on the machine affects all of them alike,
and each comparison comes from rounds in which both models ran. A ratio is the baseline's time over
the model's in the same round: the median over rounds, with the 10th and 90th percentile.
"""

import gc
import statistics
from argparse import Namespace
from typing import Any

import torch

from research.benchmarks import suites
from research.benchmarks.contender import Contender, measure_memory
from research.benchmarks.figures import Figures, pop_used_launches
from research.benchmarks.suites import BASELINE, make_row_name
from research.benchmarks.timing import (
    compute_percentiles,
    compute_speed_ratios,
    format_spread,
    measure,
    repeat_and_synchronize,
)
from research.benchmarks.transcription import Transcription
from training import distributed
from training.metrics import compute_nominal_flops_per_token, get_peak_flops
from utils import tables

# the meaning of "activation" figures on a GPU and on a CPU
PEAK_DESCRIPTION = (
    "peak of a forward and backward pass minus weights, gradients and the optimizer's state"
)
SAVED_DESCRIPTION = "saved by a forward pass for its backward pass"


class Bench:
    """The measurement of one size: its baseline, which stays, and one model after the other."""

    def __init__(
        self,
        args: Namespace,
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
        self.compiled = args.compile == "True"
        self.num_tokens = args.micro_batch_size * size["block_size"]
        shape = (2, args.micro_batch_size, size["block_size"])
        generator = torch.Generator().manual_seed(0)
        ids_and_targets = torch.randint(size["vocab_size"], shape, generator=generator)
        self.ids_and_targets = ids_and_targets.to(device)  # (2, B, T)
        model = suites.build_model(BASELINE, size, args, device)
        self.baseline = self.make_contender(BASELINE, model, self.compiled)

    def make_contender(
        self,
        name: str,
        model: torch.nn.Module | None,
        compiled: bool,
        partner: Contender | None = None,
    ) -> Contender:
        """Make a contender that is trained on the batch of this measurement."""
        return Contender(
            name,
            model,
            make_batch=lambda: self.ids_and_targets,
            device=self.device,
            dtype=getattr(torch, self.args.dtype),
            compiled=compiled,
            partner=partner,
        )

    def make_transcriptions(self, contender: Contender) -> list[Contender]:
        """Return the model's transcription, eager and with --compile=True compiled.

        Those that do not fit into memory are left out, with a line that says so.
        """
        try:
            model = Transcription(contender.name, contender.model.config)
        except ValueError:  # this model has no transcription
            return []
        model.load_state_dict(contender.model.state_dict())
        eager = self.make_contender(
            f"{contender.name} transcription (eager)", model, compiled=False
        )
        transcriptions = [eager]
        if self.compiled:
            transcriptions.append(
                self.make_contender(
                    f"{contender.name} transcription (compiled)",
                    model=None,
                    compiled=True,
                    partner=eager,
                )
            )
        return [transcription for transcription in transcriptions if self.can_train(transcription)]

    def can_train(self, contender: Contender) -> bool:
        """Take a training step, and return whether the memory suffices."""
        try:
            repeat_and_synchronize(contender.train, 1, self.device)()
        except torch.OutOfMemoryError as error:
            contender.optimizer.zero_grad(set_to_none=True)
            first_line = str(error).partition("\n")[0]
            print(f"skipped {contender.name}: {first_line}", flush=True)
            release_memory(self.device)
            return False
        return True

    def measure(self, model: str) -> None:
        """Measure a model beside the baseline and its peers, and store a row for each of them."""
        pop_used_launches()  # forget those of another model
        contender = self.baseline
        if model != BASELINE:
            built = suites.build_model(model, self.size, self.args, self.device)
            contender = self.make_contender(make_row_name(model), built, self.compiled)
        peers = []
        if self.args.peers == "transcription":
            peers = self.make_transcriptions(contender)
        contenders = [self.baseline, *peers]
        if contender is not self.baseline:
            contenders.insert(1, contender)
        rows = {}
        for member in contenders:
            rows[member.name] = {
                "size": self.size_name,
                "model": member.name,
                "parameters": member.model.num_parameters(),
                "compiled": member.compiled,
            }
        self.measure_speed("train", "", contender, contenders, peers, rows)
        self.measure_speed("evaluate", "forward_", contender, contenders, peers, rows)
        self.measure_memory(contenders, rows)
        rows[contender.name].update(pop_used_launches())
        for member in contenders:
            # the baseline has a row of its own measurement alone
            if member is contender or member is not self.baseline:
                self.figures.add(rows[member.name], "size", "model")

    def measure_speed(
        self,
        method: str,
        prefix: str,
        contender: Contender,
        contenders: list[Contender],
        peers: list[Contender],
        rows: dict[str, dict[str, Any]],
    ) -> None:
        """Add the speed of a method of Contender, "train" or "evaluate", to the rows.

        prefix: of the names of the figures
        """
        args = self.args
        turns = {
            member.name: repeat_and_synchronize(getattr(member, method), args.steps, self.device)
            for member in contenders
        }
        label = f"{self.size_name}, {method}"
        seconds_per_turn = measure(turns, args.warmup, args.rounds, label)
        seconds = {}
        for name, turn_seconds in seconds_per_turn.items():
            seconds[name] = [turn / args.steps for turn in turn_seconds]
        for name in seconds:
            rows[name].update(
                compute_speed_figures(seconds[name], seconds[BASELINE], prefix, self.num_tokens)
            )
        if peers:
            # the last peer is the compiled one, if there is one
            rows[contender.name].update(
                compute_speed_ratios(
                    f"{prefix}speedup", seconds[peers[-1].name], seconds[contender.name]
                )
            )

    def measure_memory(self, contenders: list[Contender], rows: dict[str, dict[str, Any]]) -> None:
        """Add memory and, on a GPU of known speed, the model FLOPs utilization to the rows."""
        baseline_memory = measure_memory(self.baseline, self.num_tokens)
        baseline_bytes = baseline_memory["activation_bytes_per_token"]
        peak_flops = get_peak_flops(self.device)
        for member in contenders:
            row = rows[member.name]
            row.update(measure_memory(member, self.num_tokens))
            row["activation_ratio"] = row["activation_bytes_per_token"] / baseline_bytes
            if peak_flops:
                flops_per_token = compute_nominal_flops_per_token(member.model)
                row["mfu"] = flops_per_token * row["tokens_per_second"] / peak_flops


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
    "training speed over its transcription": lambda row: format_spread(row, "speedup", ".2f"),
    "forward speed over its transcription": lambda row: format_spread(
        row, "forward_speedup", ".2f"
    ),
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


def run(args: Namespace) -> None:
    """Print and store the figures of `bench.py step`; rows that the file has are not repeated."""
    device = distributed.pick_device(args.device)
    if args.peers is None:
        args.peers = "transcription" if suites.SUITES[args.suite].with_peers else "none"
    sizes = suites.complete_arguments(args, device)
    # as in training
    torch.set_float32_matmul_precision("high")
    if device.type == "cpu":
        distributed.keep_freed_memory()
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
        "peers": args.peers,
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
    args: Namespace, size_name: str, size: dict[str, Any], device: torch.device, figures: Figures
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
