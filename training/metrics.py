"""What a run reports: metrics.jsonl (one JSON object a line), the progress line, wandb, FLOP utilisation."""

import json
import math
from pathlib import Path

import torch

from training.distributed import world_size

# Dense bf16 peak in FLOP/s by a word of the device name (vendor data sheets, no sparsity); the first that fits counts.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Peak of the device where it is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for word, peak in PEAK_FLOPS.items() if word in name), None)


def nominal_flops_per_token(model) -> float:
    """6 N + 12 L d T, N all parameters, T tokens of context: by custom MFU counts these, whatever the residual does."""
    c = model.config
    return 6 * model.num_parameters() + 12 * c.num_hidden_layers * c.hidden_size * c.block_size


def size_of_run(config, model, windows: int, device: torch.device) -> str:
    """Parameters, memory, tokens and FLOPs of a whole run, and its time at 45% utilisation where the peak is known."""
    tokens = config.max_steps * config.global_batch_size * model.config.block_size
    flops = tokens * model.flops_per_token()
    lines = [
        f"{config.model}: {model.num_parameters():,} parameters",
        f"{16 * model.num_parameters() / 2**30:.2f} GiB for weights, gradients and AdamW's state, before activations",
        f"{config.max_steps:,} steps x {config.global_batch_size} sequences x {model.config.block_size} tokens = "
        f"{tokens:,} tokens, {config.max_steps * config.global_batch_size / windows:.2f} epochs",
        f"{flops:.3g} FLOPs, {model.state_bytes_per_token()} bytes of bfloat16 state per token",
    ]
    if peak := peak_flops(device):
        # MFU counts nominal FLOPs, so the time at a given utilisation follows from them.
        seconds = tokens * nominal_flops_per_token(model) / (0.45 * peak * world_size())
        lines.append(f"about {duration(seconds)} on {world_size()} GPUs at 45% utilisation")
    return "\n".join(lines)


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
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def import_wandb():
    """The package (it logs online or offline, as WANDB_MODE says). ValueError: missing."""
    try:
        import wandb
    except ImportError as error:
        raise ValueError("wandb_log=True needs the wandb package: pip install wandb") from error
    return wandb


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


class RunLog:
    """The main process's record of a run: metrics.jsonl, progress lines and, when asked for, wandb.

    Every line of metrics.jsonl has `step`, `tokens`, `flops` and `seconds` since the run's first step (seconds of
    training steps; evaluations and checkpoints aside). A training step adds `loss` (nats per token), `grad_norm`,
    `lr`, `tokens_per_second` and `mfu`; an evaluation `val_loss`, `val_perplexity`, `val_bits_per_byte` and
    `val_sequences`, and for a corpus with answers (the copy task) `val_accuracy` of their tokens and
    `val_exact_match` of whole ones. What is not known is left out.
    """

    def __init__(self, run: Path, config, settings: dict, state: dict, model, world):
        """Lines past `state["step"]` belong to steps that will be done again: they are dropped."""
        self.config, self.start, self.previous, self.last_progress = config, dict(state), dict(state), None
        self.tokens_per_step = config.global_batch_size * model.config.block_size
        self.flops_per_step = self.tokens_per_step * model.flops_per_token()
        peak = peak_flops(world.device)
        nominal = self.tokens_per_step * nominal_flops_per_token(model)
        self.steps_per_second_at_peak = peak * world.world_size / nominal if peak else None
        wandb = import_wandb() if config.wandb_log else None
        run.mkdir(parents=True, exist_ok=True)
        drop_after(run / "metrics.jsonl", state["step"])
        self.file = open(run / "metrics.jsonl", "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
        self.wandb_run = None
        if wandb:
            names = {"project": config.wandb_project, "name": config.wandb_run_name}
            self.wandb_run = wandb.init(**names, config=settings, dir=run)

    def training_step(self, state: dict, loss: float, grad_norm: float, lr: float) -> None:
        rate, mfu = self.speed(self.previous, state)
        self.previous = dict(state)
        self.write(state, loss=loss, grad_norm=grad_norm, lr=lr, tokens_per_second=rate, mfu=mfu)
        step, steps = state["step"], self.config.max_steps
        if self.last_progress is None:
            # The first step compiles and warms up: it gets its own line and stays out of the speed of the next.
            speed = f"first step {state['seconds'] - self.start['seconds']:.1f} s"
        elif step % self.config.log_interval == 0 or step == steps:
            rate, mfu = self.speed(self.last_progress, state)
            speed = f"{short(rate)} tok/s{f' | MFU {mfu:.1%}' if mfu else ''}"
            speed += f" | ETA {duration((steps - step) * self.tokens_per_step / rate)}"
        else:
            return
        self.last_progress = dict(state)
        print(f"step {step}/{steps} | loss {loss:.4f} | lr {lr:.2e} | grad {grad_norm:.2f} | {speed}", flush=True)

    def evaluation(self, state: dict, scores: dict, bytes_per_token: float | None, sequences: int, all_sequences: int):
        record = validation_record(scores["loss"], bytes_per_token)
        answers = {f"val_{key}": value for key, value in scores.items() if key != "loss"}
        self.write(state, **record, **answers, val_sequences=sequences)
        share = "all" if sequences == all_sequences else f"{sequences} of"
        more = f" | {record['val_bits_per_byte']:.4f} bits per byte" if bytes_per_token else ""
        more += "".join(f" | {name.removeprefix('val_').replace('_', ' ')} {x:.1%}" for name, x in answers.items())
        print(
            f"step {state['step']} | {share} {all_sequences} validation sequences | loss {scores['loss']:.4f} | "
            f"perplexity {record['val_perplexity']:.2f}{more}",
            flush=True,
        )

    def speed(self, before: dict, now: dict) -> tuple[float, float | None]:
        """(tokens/s, model FLOP utilisation where the peak is known) between two states."""
        steps_per_second = (now["step"] - before["step"]) / (now["seconds"] - before["seconds"])
        best = self.steps_per_second_at_peak
        return self.tokens_per_step * steps_per_second, steps_per_second / best if best else None

    def write(self, state: dict, **values) -> None:
        step = state["step"]
        record = {"step": step, "tokens": step * self.tokens_per_step, "flops": step * self.flops_per_step}
        record |= {"seconds": state["seconds"], **{key: value for key, value in values.items() if value is not None}}
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.wandb_run is not None:
            self.wandb_run.log(record, step=step)

    def close(self) -> None:
        self.file.close()
        if self.wandb_run is not None:
            self.wandb_run.finish()


def drop_after(path: Path, step: int) -> None:
    """Keep the records of a metrics.jsonl up to step; the file is replaced whole."""
    if path.exists():
        kept = [record for record in read(path) if record["step"] <= step]
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        temporary.replace(path)
