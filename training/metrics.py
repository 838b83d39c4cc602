"""What a run reports: metrics.jsonl (one JSON object a line), the progress line, wandb, FLOP utilisation."""

import contextlib
import json
import math
import os
import platform
import resource
import sys
from pathlib import Path

import torch

import configurator

# Dense bf16 peak in FLOP/s by a word of the device name (vendor data sheets, no sparsity); the first that fits counts.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}
# Memory bandwidth in TB/s by a word of the device name, from the same sheets; what is achieved is less.
PEAK_BANDWIDTH = {"H200": 4.8, "H100 PCIe": 2.0, "H100 NVL": 3.9, "H100": 3.35, "B200": 8.0, "A100": 2.0, "L40S": 0.864}


def peak_flops(device: torch.device) -> float | None:
    """Peak of the device where it is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for word, peak in PEAK_FLOPS.items() if word in name), None)


def chip(device: torch.device) -> dict:
    """{"chip": its name, "memory_tb_per_s": by its data sheet, where known}: a figure means little without them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    bandwidth = next((peak for word, peak in PEAK_BANDWIDTH.items() if word in name), None)
    return {"chip": name} | ({"memory_tb_per_s": bandwidth} if bandwidth and device.type == "cuda" else {})


def cpu_name() -> str:
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities.get("cpu_name", platform.processor() or platform.machine())


def nominal_flops_per_token(model) -> float:
    """6 N + 12 L d T, N all parameters, T tokens of context: by custom MFU counts these, whatever the residual does."""
    c = model.config
    return 6 * model.num_parameters() + 12 * c.num_hidden_layers * c.hidden_size * c.block_size


def validation_record(loss: float, bytes_per_token: float | None) -> dict:
    """val_loss (nats per token), val_perplexity and, where the text's size is known, val_bits_per_byte."""
    record = {"val_loss": loss, "val_perplexity": math.exp(min(loss, 700))}
    if bytes_per_token is not None:
        record["val_bits_per_byte"] = bits_per_byte(loss, bytes_per_token)
    return record


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """loss in nats per token -> bits per byte of text."""
    return loss / math.log(2) / bytes_per_token


def read(path: Path) -> list[dict]:
    """The records of a metrics.jsonl; a last line that a kill cut short is left out."""
    records = []
    for line in path.read_bytes().split(b"\n"):
        try:
            records.append(json.loads(line))
        except ValueError:  # no JSON, or no UTF-8
            break
    return records


def last_evaluation(path: Path) -> dict | None:
    """The last record of an evaluation in a metrics.jsonl; None without one."""
    records = read(path) if path.is_file() else []
    return next((record for record in reversed(records) if "val_loss" in record), None)


def wandb_of(config):
    """The package wandb, None where the run does not ask for it. ValueError: missing."""
    return configurator.optional("wandb", "wandb_log=True") if config.wandb_log else None


def duration(seconds: float) -> str:
    """1:05 or 2:03:09."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def short(number: float) -> str:
    """27.6K, 1.2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def size(count: float) -> str:
    """Bytes in a unit that fits: 71 bytes, 2.6 KiB, 3.54 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.3g} TiB"


SPIKE = 6.0  # standard deviations; what lies further off is noted


def deviation(courses: dict, name: str, value: float) -> float | None:
    """How many standard deviations a loss or gradient norm lies from its recent course; None in the first 50 steps.

    courses: {name: [count, mean, variance]}, a part of the run's progress; the value joins it.
    """
    count, mean, variance = courses.get(name, (0, value, 0.0))
    distance = value - mean
    result = distance / math.sqrt(variance) if count >= 50 and variance > 0 else None
    weight = max(1 - 0.98, 1 / (count + 1))
    variance = (1 - weight) * (variance + weight * distance * distance)
    courses[name] = [count + 1, mean + weight * distance, variance]
    return result


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class LineFile:
    """A file of JSON lines that a full disk does not end: lines that cannot be written wait for the next ones."""

    def __init__(self, path: Path):
        self.path, self.waiting = path, b""
        path.touch()

    def write(self, record: dict) -> None:
        """Append a line; a file that somebody removed, perhaps with its folder, goes on as a new one."""
        if not self.path.exists():
            lost = f"{self.path} was removed while the run writes to it"
            print(f"warning: {lost}: it goes on in a new file; the next checkpoint has all it needs", file=sys.stderr)
        self.waiting += json.dumps(record).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write what waits."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab", buffering=0) as file:
                self.waiting = self.waiting[file.write(self.waiting) :]
        except OSError as error:
            print(f"warning: metrics.jsonl cannot be written ({error.strerror}); trying again", file=sys.stderr)

    def sync(self) -> None:
        """On the disk, as a checkpoint that follows will be."""
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            os.fsync(file.fileno())


class RunLog:
    """The main process's record of a run: metrics.jsonl, progress lines and, when asked for, wandb and TensorBoard.

    Every line of metrics.jsonl has `step`, `tokens`, `flops` and `seconds` since the run's first step (seconds of
    training steps; evaluations and checkpoints aside), over all its restarts. docs/runs.md lists the others.
    """

    def __init__(self, run: Path, config, settings: dict, progress: dict, model, world):
        """Lines past `progress["step"]` belong to steps that will be done again: they are dropped."""
        self.config, self.start, self.previous, self.last_progress = config, dict(progress), dict(progress), None
        self.device = world.device
        self.tokens_per_step = config.global_batch_size * model.config.block_size
        self.flops_per_step = self.tokens_per_step * model.flops_per_token()
        peak = peak_flops(world.device)
        nominal = self.tokens_per_step * nominal_flops_per_token(model)
        self.steps_per_second_at_peak = peak * world.world_size / nominal if peak else None
        wandb = wandb_of(config)
        run.mkdir(parents=True, exist_ok=True)
        drop_after(run / "metrics.jsonl", progress["step"], progress["evaluated"])
        self.file = LineFile(run / "metrics.jsonl")
        self.wandb_run = None
        if wandb:
            names = {"project": config.wandb_project, "name": config.wandb_run_name}
            try:
                self.wandb_run = wandb.init(**names, id=progress["wandb_id"], resume="allow", config=settings, dir=run)
            except Exception as error:  # no login, no connection, a project that is not there
                reason = str(error).strip().partition("\n")[0]
                raise ValueError(f"wandb_log=True: {reason}; WANDB_MODE=offline logs without a login") from error
            progress["wandb_id"] = self.wandb_run.id

    def training_step(self, progress: dict, loss: float, grad_norm: float, rates: dict) -> None:
        """rates: the learning rates by name, `lr` and perhaps others (`optimizer.set_rates`)."""
        rate, mfu = self.speed(self.previous, progress)
        self.previous = dict(progress)
        values = {"loss": loss, "grad_norm": grad_norm}
        step, steps, memory = progress["step"], self.config.max_steps, peak_memory(self.device)
        distances = {name: deviation(progress["spikes"], name, value) for name, value in values.items()}
        values |= {f"{name}_deviation": distance for name, distance in distances.items()}
        self.write(progress, **values, **rates, tokens_per_second=rate, mfu=mfu, memory=memory)
        for name, distance in distances.items():
            if distance is not None and distance > SPIKE:
                print(f"note: step {step}: {name} {values[name]:.4g} is {distance:.1f} deviations above the mean")
        if self.last_progress is None:
            # The first step compiles and warms up: it gets its own line and stays out of the speed of the next.
            speed = f"first step {progress['seconds'] - self.start['seconds']:.1f} s"
        elif step % self.config.log_interval == 0 or step == steps:
            rate, mfu = self.speed(self.last_progress, progress)
            speed = f"{short(rate)} tok/s{f' | MFU {mfu:.1%}' if mfu else ''}"
            speed += f" | ETA {duration((steps - step) * self.tokens_per_step / rate)}"
        else:
            return
        self.last_progress = dict(progress)
        lr = rates["lr"]
        print(f"step {step}/{steps} | loss {loss:.4f} | lr {lr:.2e} | grad {grad_norm:.2f} | {speed}", flush=True)

    def skipped_step(self, progress: dict, loss: float, grad_norm: float) -> None:
        self.write(progress, skipped=True)
        print(f"note: step {progress['step']}: loss {loss}, gradient norm {grad_norm}: skipped", flush=True)

    def evaluation(
        self, progress: dict, scores: dict, bytes_per_token: float | None, sequences: int, all_sequences: int
    ):
        record = validation_record(scores["loss"], bytes_per_token)
        answers = {f"val_{key}": value for key, value in scores.items() if key != "loss"}
        known = [x for x in (scores["loss"], progress["best_val_loss"]) if x is not None and math.isfinite(x)]
        best = progress["best_val_loss"] = min(known, default=None)
        self.write(progress, **record, **answers, val_sequences=sequences, best_val_loss=best)
        share = "all" if sequences == all_sequences else f"{sequences} of"
        more = f" | {record['val_bits_per_byte']:.4f} bits per byte" if bytes_per_token else ""
        more += "".join(f" | {name.removeprefix('val_').replace('_', ' ')} {x:.1%}" for name, x in answers.items())
        print(
            f"step {progress['step']} | {share} {all_sequences} validation sequences | loss {scores['loss']:.4f} | "
            f"perplexity {record['val_perplexity']:.2f}{more}",
            flush=True,
        )

    def speed(self, before: dict, now: dict) -> tuple[float, float | None]:
        """(tokens/s, model FLOP utilisation where the peak is known) between two moments of the progress."""
        steps_per_second = (now["step"] - before["step"]) / (now["seconds"] - before["seconds"])
        best = self.steps_per_second_at_peak
        return self.tokens_per_step * steps_per_second, steps_per_second / best if best else None

    def write(self, progress: dict, **values) -> None:
        step = progress["step"]
        record = {"step": step, "tokens": step * self.tokens_per_step, "flops": step * self.flops_per_step}
        record |= {"seconds": progress["seconds"], **{key: value for key, value in values.items() if value is not None}}
        self.file.write(record)
        if self.wandb_run is not None:
            self.wandb_run.log(flat(record), step=step)

    def close(self) -> None:
        self.file.flush()
        if self.wandb_run is not None:
            self.wandb_run.finish()


def flat(record: dict) -> dict:
    """Nested objects and lists as `outer/inner/07`."""
    result = {}
    for key, value in record.items():
        if isinstance(value, list):
            value = {f"{index:02d}": item for index, item in enumerate(value)}
        if isinstance(value, dict):
            result |= {f"{key}/{inner}": item for inner, item in flat(value).items()}
        else:
            result[key] = value
    return result


def drop_after(path: Path, step: int, evaluated: bool = True) -> None:
    """Keep the records of a metrics.jsonl up to step, its evaluation only if done; the file is replaced whole."""
    if path.exists():
        kept = [r for r in read(path) if r["step"] < step or (r["step"] == step and (evaluated or "val_loss" not in r))]
        configurator.replace_text(path, "".join(json.dumps(record) + "\n" for record in kept))
