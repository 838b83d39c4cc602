"""What a run reports: metrics.jsonl (a JSON object a line), progress lines, wandb, utilisation."""

import json
import math
import os
import platform
import resource
import sys
from pathlib import Path

import torch

import configurator
from training.state import TrainState

# Dense bf16 peak in FLOP/s by a word of the device name (vendor data sheets, no sparsity); the
# first that fits counts.
PEAK_FLOPS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "B200": 2250e12}
PEAK_FLOPS |= {"A100": 312e12, "L40S": 362e12}


def peak_flops(device: torch.device) -> float | None:
    """Peak of the device in FLOP/s, where it is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for word, peak in PEAK_FLOPS.items() if word in name), None)


def cpu_name() -> str:
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities.get("cpu_name", platform.processor() or platform.machine())


def nominal_flops_per_token(model) -> float:
    """6 N + 12 L d T, N all parameters, T tokens of context.

    By custom MFU counts these, whatever the residual does.
    """
    c = model.config
    return 6 * model.num_parameters() + 12 * c.num_hidden_layers * c.hidden_size * c.block_size


def validation_record(loss: float, bytes_per_token: float | None) -> dict:
    """val_loss (nats per token), val_perplexity, and val_bits_per_byte if the text has a size."""
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


def peak_memory(device: torch.device) -> int:
    """Most bytes in use so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class RunLog:
    """The main process's record of a run: metrics.jsonl, progress lines and, when asked for, wandb.

    Every line of metrics.jsonl has `step`, `tokens`, `flops` and `seconds` since the run's first
    step (of training steps; evaluations and checkpoints aside), over all its restarts. docs/runs.md
    lists the others. Lines past `state.step` belong to steps that will be done again: they
    are dropped. ValueError: wandb cannot begin.
    """

    def __init__(self, run: Path, config, settings: dict, state: TrainState, model, world):
        self.path, self.waiting = run / "metrics.jsonl", b""
        self.config, self.state, self.device = config, state, world.device
        self.previous, self.shown = (state.step, state.seconds), None
        self.tokens = config.global_batch_size * model.config.block_size  # per step
        self.flops = self.tokens * model.flops_per_token()
        self.share = None  # of the GPUs' peak that one step a second would take
        if peak := peak_flops(world.device):
            self.share = self.tokens * nominal_flops_per_token(model) / peak / world.world_size
        drop_after(self.path, state.step, state.evaluated)
        self.wandb_run = None
        if config.wandb_log:
            wandb = configurator.optional("wandb", "wandb_log=True")
            names = {"project": config.wandb_project, "name": config.wandb_run_name, "dir": run}
            names |= {"id": state.wandb_id, "resume": "allow"}
            try:
                self.wandb_run = wandb.init(**names, config=settings)
            except Exception as error:  # no login, no connection, a project that is not there
                reason = str(error).strip().partition("\n")[0]
                fix = "WANDB_MODE=offline logs without a login"
                raise ValueError(f"wandb_log=True: {reason}; {fix}") from error
            state.wandb_id = self.wandb_run.id

    def training_step(self, loss: float, grad_norm: float, rates: dict) -> None:
        """rates: the learning rates by name, `lr` and perhaps others (`optimizer.set_learning_rates`)."""
        now, steps = (self.state.step, self.state.seconds), self.config.max_steps
        speed, mfu = self.speed(self.previous, now)
        values = {"loss": loss, "grad_norm": grad_norm, **rates, "tokens_per_second": speed}
        self.write(**values, mfu=mfu, memory=peak_memory(self.device))
        if self.shown is None:
            # The first step compiles and warms up: it has its own line, and no part in the speed.
            text = f"first step {now[1] - self.previous[1]:.1f} s"
        elif now[0] % self.config.log_interval == 0 or now[0] == steps:
            speed, mfu = self.speed(self.shown, now)
            left = duration((steps - now[0]) * self.tokens / speed)
            text = f"{short(speed)} tok/s{f' | MFU {mfu:.1%}' if mfu else ''} | ETA {left}"
        else:
            text = ""
        self.previous = now
        if text:
            self.shown = now
            line = f"loss {loss:.4f} | lr {rates['lr']:.2e} | grad {grad_norm:.2f} | {text}"
            print(f"step {now[0]}/{steps} | {line}", flush=True)

    def skipped_step(self, loss: float, grad_norm: float) -> None:
        step = self.state.step
        self.write(skipped=True)
        print(f"note: step {step}: loss {loss}, gradient norm {grad_norm}: skipped", flush=True)

    def evaluation(self, scores: dict, bytes_per_token: float | None, count: int, of: int) -> None:
        """scores: of `validation.evaluate`, over `count` of the `of` windows of the split."""
        loss, state = scores["loss"], self.state
        known = [x for x in (loss, state.best_val_loss) if x is not None and math.isfinite(x)]
        best = state.best_val_loss = min(known, default=None)
        record = validation_record(loss, bytes_per_token)
        answers = {f"val_{key}": value for key, value in scores.items() if key != "loss"}
        self.write(**record, **answers, val_sequences=count, best_val_loss=best)
        text = f"loss {loss:.4f} | perplexity {record['val_perplexity']:.2f}"
        if bytes_per_token:
            text += f" | {record['val_bits_per_byte']:.4f} bits per byte"
        for name, share in answers.items():
            text += f" | {name.removeprefix('val_').replace('_', ' ')} {share:.1%}"
        share = "all" if count == of else f"{count} of"
        print(f"step {state.step} | {share} {of} validation sequences | {text}", flush=True)

    def speed(self, before: tuple, now: tuple) -> tuple[float, float | None]:
        """(tokens/s, model FLOP utilisation or None) between two (step, seconds)."""
        steps_per_second = (now[0] - before[0]) / (now[1] - before[1])
        return self.tokens * steps_per_second, self.share and self.share * steps_per_second

    def write(self, **values) -> None:
        """Append a line; on a full disk it waits for the next one, and the run goes on."""
        step = self.state.step
        record = {"step": step, "tokens": step * self.tokens, "flops": step * self.flops}
        record["seconds"] = self.state.seconds
        record |= {key: value for key, value in values.items() if value is not None}
        self.waiting += json.dumps(record).encode() + b"\n"
        self.flush()
        if self.wandb_run is not None:
            self.wandb_run.log(flat(record), step=step)

    def flush(self, to_disk: bool = False) -> None:
        """Write the lines that wait, and wait until the disk has them where asked for."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
            with open(self.path, "ab", buffering=0) as file:
                while self.waiting:
                    self.waiting = self.waiting[file.write(self.waiting) :]
                if to_disk:
                    os.fsync(file.fileno())
        except OSError as error:
            line = f"warning: metrics.jsonl cannot be written ({error.strerror}); trying again"
            print(line, file=sys.stderr)

    def close(self) -> None:
        self.flush()
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
    """Keep the records of a metrics.jsonl up to `step`, of its evaluation only if it is done."""
    if path.exists():
        records = [r for r in read(path) if r["step"] <= step]
        kept = [r for r in records if evaluated or r["step"] < step or "val_loss" not in r]
        configurator.replace_text(path, "".join(json.dumps(record) + "\n" for record in kept))
