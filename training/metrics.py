"""The record of a run: metrics.jsonl, progress lines, and trackers such as Weights & Biases."""

import dataclasses
import json
import math
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from model import cost
from model.gpt import GPT
from training import trackers
from training.checkpoint import TrainState
from training.config import TrainConfig
from utils import errors, files
from utils.processes import World
from utils.units import format_duration

# Peak FLOP/s in bf16, dense, from the data sheets; the keys are words of torch's device names. The
# first key that occurs in a name counts, so "H100 PCIe" comes before "H100".
PEAK_FLOPS = {
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}
MAX_EXPONENT = 700  # math.exp overflows above 709


# ---- the device ----


def get_peak_flops(device: torch.device) -> float | None:
    """Return the peak of a GPU in FLOP/s, or None if it is not known, as of a CPU."""
    if device.type != "cuda":
        return None
    device_name = torch.cuda.get_device_name(device)
    for words, peak in PEAK_FLOPS.items():
        # an RTX A1000 is no A100
        if re.search(rf"\b{words}\b", device_name):
            return peak
    return None


def get_peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB on Linux


def compute_nominal_flops_per_token(model: GPT) -> float:
    """Return 6 N + 12 L d T, the FLOPs per token that MFU counts by convention.

    N counts all parameters, L the layers, d is the hidden size and T the context length (PaLM,
    arXiv 2204.02311, appendix B). What the residual connection computes does not count.
    """
    config = model.config
    attention_flops = 12 * config.num_hidden_layers * config.hidden_size * config.block_size
    return 6 * model.num_parameters() + attention_flops


# ---- losses ----


def compute_validation_metrics(loss: float, bytes_per_token: float | None) -> dict[str, float]:
    """Return a validation loss in the units of metrics.jsonl.

    Args:
        loss: in nats per token
        bytes_per_token: mean size of a token; None if the corpus is not text

    Returns:
        "val_loss", "val_perplexity", and "val_bits_per_byte" if bytes_per_token is not None.
    """
    # a diverged run still has a perplexity, so that its evaluation can be written
    validation_metrics = {
        "val_loss": loss,
        "val_perplexity": math.exp(min(loss, MAX_EXPONENT)),
    }
    if bytes_per_token is not None:
        validation_metrics["val_bits_per_byte"] = compute_bits_per_byte(loss, bytes_per_token)
    return validation_metrics


def compute_bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Convert a loss in nats per token to bits per byte of text."""
    return loss / math.log(2) / bytes_per_token


# ---- metrics.jsonl ----


def read(path: Path) -> list[dict]:
    """Return the records of a metrics.jsonl, up to the first line that is not valid JSON."""
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            records.append(parse_record(line))
        except ValueError:
            # Either the file ends here, or a kill cut the line short; a UnicodeDecodeError is a
            # ValueError as well.
            break
    return records


def parse_record(line: bytes) -> dict:
    """Return the record in a line of metrics.jsonl, with nan for null (`files.to_json`).

    Raises:
        ValueError: the line is not valid JSON
    """
    record = json.loads(line)
    return files.restore_nan(record) if b"null" in line else record


def find_evaluation(path: Path, step: int | None = None) -> dict | None:
    """Return the last record of an evaluation, of a step if one is given.

    Returns:
        None if there is no such record, or no metrics.jsonl.
    """
    if not path.is_file():
        return None
    for record in reversed(read(path)):
        if "val_loss" in record and step in (None, record["step"]):
            return record
    return None


def truncate_after(path: Path, step: int) -> None:
    """Remove the records of later steps from a metrics.jsonl; of a new run, set the file aside."""
    if step == 0:  # of an earlier start, whose checkpoints are gone
        path.replace(path.with_name(f"{path.name}.old"))
        return
    kept_records = [record for record in read(path) if record["step"] <= step]
    files.write_text(path, "".join(files.to_json(record) + "\n" for record in kept_records))


# ---- the log of a run ----


class Progress(NamedTuple):
    """How far a run is."""

    step: int
    seconds: float  # of training steps so far


class Speed(NamedTuple):
    """The mean speed between two steps."""

    tokens_per_second: float
    mfu: float | None  # model FLOP utilization; None if the peak of the device is not known


class RunLog:
    """Write metrics.jsonl, print progress lines, and log to a tracker if asked for.

    Only the main process has one. Every line of metrics.jsonl has `step`, `tokens`, `flops` and
    `seconds`, which count from the first step of the run, over all its restarts; `seconds` are
    those of training steps, without evaluations and checkpoints. docs/runs.md lists the other keys.

    Lines after `state.step` belong to steps that will be repeated, and are removed.
    """

    def __init__(
        self,
        run_folder: Path,
        config: TrainConfig,
        state: TrainState,
        model: GPT,
        world: World,
    ):
        """Open the log of a run.

        state: the counters of the run, which the log reads whenever it writes a line

        Raises:
            ValueError: the tracker cannot start
        """
        self.path = run_folder / "metrics.jsonl"
        self.config = config
        self.state = state
        self.device = world.device
        self.unwritten = b""  # lines that are not in the file yet
        self.has_warned = False  # that they cannot be written
        self.last_step = Progress(state.step, state.seconds)
        self.last_printed: Progress | None = None  # when a progress line was last printed

        self.tokens_per_step = config.global_batch_size * model.config.block_size
        self.flops_per_step = self.tokens_per_step * cost.flops_per_token(model)
        # the seconds that a step would take at the peak of all GPUs
        self.ideal_step_seconds = None
        peak = get_peak_flops(world.device)
        if peak is not None:
            nominal_flops = self.tokens_per_step * compute_nominal_flops_per_token(model)
            self.ideal_step_seconds = nominal_flops / peak / world.world_size

        if self.path.exists():
            truncate_after(self.path, state.step)
        self.tracker: trackers.Tracker | None = None
        if config.tracker is not None:
            settings = {**dataclasses.asdict(config), **dataclasses.asdict(model.config)}
            self.tracker = trackers.start(run_folder, config, settings, state)
            # checkpoints store it, so that a resumed run continues the same curves
            state.wandb_id = self.tracker.id

    def log_step(
        self,
        loss: float,
        grad_norm: float,
        learning_rates: dict[str, float],
        loss_scale: float | None = None,
        was_taken: bool = True,
    ) -> None:
        """Log a step, and print it if it is due, or if the optimizers did not take it.

        Args:
            loss: mean over the batch, in nats per token
            grad_norm: before clipping
            learning_rates: by name, "lr" among them (`optimizer.set_learning_rates`)
            loss_scale: of float16
            was_taken: False for a step that is not finite, and was skipped
        """
        if not was_taken:
            self.write(skipped=True, loss_scale=loss_scale)
            errors.say(
                f"note: step {self.state.step} was skipped: its loss is {loss} and its gradient norm "
                f"is {grad_norm}"
            )
            return
        progress = Progress(self.state.step, self.state.seconds)
        # metrics.jsonl has the speed of this step alone, a progress line the mean since the last
        speed = self.compute_speed(self.last_step, progress)
        self.write(
            loss=loss,
            grad_norm=grad_norm,
            **learning_rates,
            loss_scale=loss_scale,
            tokens_per_second=speed.tokens_per_second,
            mfu=speed.mfu,
            memory=get_peak_memory(self.device),
        )
        max_steps = self.config.max_steps
        is_due = progress.step % self.config.log_interval == 0 or progress.step == max_steps
        if self.last_printed is None or is_due:
            columns = [
                f"step {progress.step}/{max_steps}",
                f"loss {loss:.4f}",
                f"lr {learning_rates['lr']:.2e}",
                f"grad norm {grad_norm:.2f}",
            ]
            if self.last_printed is None:
                # It compiles and warms up, so its time says nothing about the speed. The next line
                # measures from here.
                step_seconds = progress.seconds - self.last_step.seconds
                columns.append(f"first step took {step_seconds:.1f} s")
            else:
                columns += self.describe_speed(progress)
            errors.say(" | ".join(columns))
            self.last_printed = progress
        self.last_step = progress

    def describe_speed(self, progress: Progress) -> list[str]:
        """Return the columns of a progress line on the speed since the last one, and on the time."""
        speed = self.compute_speed(self.last_printed, progress)
        remaining_tokens = (self.config.max_steps - progress.step) * self.tokens_per_step
        remaining_seconds = remaining_tokens / speed.tokens_per_second
        columns = [f"{speed.tokens_per_second:,.0f} tokens/s"]
        if speed.mfu is not None:
            columns.append(f"MFU {speed.mfu:.1%}")
        columns.append(f"elapsed {format_duration(progress.seconds)}")
        columns.append(f"remaining {format_duration(remaining_seconds)}")
        return columns

    def log_evaluation(
        self,
        scores: dict[str, float],
        bytes_per_token: float | None,
        num_sequences: int,
        split_size: int,
        is_full: bool,
        ema_scores: dict[str, float] | None = None,
    ) -> None:
        """Log and print an evaluation, and update `state.best_val_loss`.

        Args:
            scores: "loss" and, for a task, "accuracy" and "exact_match" (`validation.evaluate`)
            bytes_per_token: mean size of a token; None if the corpus is not text
            num_sequences: how many sequences were evaluated
            split_size: number of sequences in the validation split
            is_full: whether it is the evaluation of all of eval_part after the last step, whose loss
                cannot be compared with the earlier ones
            ema_scores: the same scores of the averaged weights, if the run has them
        """
        loss = scores["loss"]
        if not is_full:
            losses = [loss]
            if self.state.best_val_loss is not None:
                losses.append(self.state.best_val_loss)
            # a loss of nan would stay the best one forever, because no loss is less than it
            self.state.best_val_loss = min(filter(math.isfinite, losses), default=None)
        validation_metrics = compute_validation_metrics(loss, bytes_per_token)
        # a corpus that is a task also has the fractions of right answers
        task_scores = {name: score for name, score in scores.items() if name != "loss"}
        self.write(
            **validation_metrics,
            **{f"val_{name}": score for name, score in task_scores.items()},
            val_sequences=num_sequences,
            best_val_loss=self.state.best_val_loss,
            **{f"ema_val_{name}": score for name, score in (ema_scores or {}).items()},
        )

        columns = [
            f"step {self.state.step}",
            f"validation loss {loss:.4f}",
            f"perplexity {validation_metrics['val_perplexity']:.2f}",
        ]
        if bytes_per_token is not None:
            columns.append(f"{validation_metrics['val_bits_per_byte']:.4f} bits per byte")
        if ema_scores is not None:
            columns.append(f"validation loss of averaged weights {ema_scores['loss']:.4f}")
        for name, score in task_scores.items():
            columns.append(f"{name.replace('_', ' ')} {score:.1%}")
        if num_sequences == split_size:
            columns.append(f"all {split_size} sequences")
        else:
            columns.append(f"{num_sequences} of {split_size} sequences")
        errors.say(" | ".join(columns))

    def compute_speed(self, start: Progress, end: Progress) -> Speed:
        """Return the mean speed between two points of the run."""
        steps_per_second = (end.step - start.step) / (end.seconds - start.seconds)
        mfu = None
        if self.ideal_step_seconds is not None:
            mfu = self.ideal_step_seconds * steps_per_second
        return Speed(self.tokens_per_step * steps_per_second, mfu)

    def write(self, **values: object) -> None:
        """Append a line to metrics.jsonl, and log it to the tracker.

        A value of None is omitted. If the disk is full, the line is written with a later one.
        """
        step = self.state.step
        record = {
            "step": step,
            "tokens": step * self.tokens_per_step,
            "flops": step * self.flops_per_step,
            "seconds": self.state.seconds,
            **{key: value for key, value in values.items() if value is not None},
        }
        self.unwritten += files.to_json(record).encode() + b"\n"
        self.flush()
        if self.tracker is not None:
            self.call_tracker(lambda: self.tracker.log(trackers.flatten(record)))

    def call_tracker(self, action: Callable[[], object]) -> None:
        """Call the tracker. If it fails, say so and train on without it."""
        try:
            action()
        except Exception as error:  # of any kind: its log is no reason to end a run
            self.tracker = None
            errors.say(
                f"warning: {self.config.tracker} failed ({type(error).__name__}: {error}); training "
                "continues without it, and metrics.jsonl has all records",
                file=sys.stderr,
            )

    def flush(self, to_disk: bool = False) -> None:
        """Write the lines that could not be written before.

        Args:
            to_disk: also wait until the disk has the file
        """
        try:
            # somebody may have removed the folder
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab", buffering=0) as file:
                # an unbuffered write to a disk that becomes full writes only a part
                while self.unwritten:
                    num_bytes = file.write(self.unwritten)
                    self.unwritten = self.unwritten[num_bytes:]
                if to_disk:
                    os.fsync(file.fileno())
            self.has_warned = False
        except OSError as error:
            # a full disk would otherwise be reported after every step
            if not self.has_warned:
                errors.say(
                    f"warning: metrics.jsonl cannot be written ({error.strerror}); its new lines are "
                    "kept in memory until it can be written",
                    file=sys.stderr,
                )
            self.has_warned = True

    def close(self) -> None:
        """Write what is left, and finish the run of the tracker."""
        self.flush()
        if self.tracker is not None:
            self.call_tracker(self.tracker.finish)
