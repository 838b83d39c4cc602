"""Time and peak memory of `report.py` over many long runs, whose files are made up and lie in a temporary folder."""

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from model import model_class
from train import TrainConfig
from training.provenance import ROOT, provenance, store

STEMS = "gpt-mha-rope", "DDL-vdim1-gpt-mha-rope", "DDL-gpt-mha-rope", "DDL-gpt-mha-rope-CC"
TOKENS = 480 * 1024  # of a step
FLOPS = 6 * 124e6 * TOKENS
EVALUATED, STATISTICS = 100, 1000  # steps between
LAYERS = 12
ARGUMENTS = {"curves": ["--band", "--out=loss.png"], "pack": ["--out=runs.jsonl"], "paper": ["--out=paper"]}


def metrics_lines(steps: int, seed: int):
    """A metrics.jsonl as train.py writes it: about 300 bytes a line."""
    draw = random.Random(seed)
    for step in range(1, steps + 1):
        about = {"step": step, "tokens": step * TOKENS, "flops": int(step * FLOPS), "seconds": 30 + 0.31 * step}
        loss = 3 + 5 / step**0.5 + draw.gauss(0, 0.05)
        values = {"loss": loss, "grad_norm": draw.random(), "loss_deviation": draw.gauss(0, 1)}
        values |= {"grad_norm_deviation": draw.gauss(0, 1), "lr": 1e-3 * draw.random(), "mfu": 0.4 * draw.random()}
        yield {**about, **values, "tokens_per_second": 1e6 * draw.random(), "memory": 60 * 2**30}
        if step % STATISTICS == 0:
            names = [f"{site}.{what}" for site in ("attn", "mlp") for what in ("state_rms", "beta_mean", "beta_std")]
            yield {**about, "residual": {name: [draw.random() for _ in range(LAYERS)] for name in names}}
        if step % EVALUATED == 0:
            yield {**about, "val_loss": loss, "val_perplexity": 20 * loss, "val_sequences": 3840, "best_val_loss": loss}


def make_run(folder: Path, metrics: Path, stem: str, seed: int, steps: int) -> None:
    """A run folder with one checkpoint, whose state.json alone is there."""
    state = {"model": stem, "step": steps, "seconds": 1.0, "corpus": {"tokenizer": "gpt2", "vocab_size": 50257}}
    config = dataclasses.asdict(TrainConfig(model=stem, seed=seed, max_steps=steps))
    state |= {"run_config": config, "model_config": dataclasses.asdict(model_class(stem).Config())}
    checkpoint = folder / "checkpoints" / f"step_{steps:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(state))
    shutil.copy(metrics, folder / "metrics.jsonl")


def make_runs(folder: Path, count: int, steps: int) -> list[Path]:
    """Run folders: the stems in turn, a seed each; runs of one seed have the same metrics."""
    seeds = -(-count // len(STEMS))
    sources = [folder / f"{seed}.jsonl" for seed in range(min(seeds, 4))]
    for seed, path in enumerate(sources):
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in metrics_lines(steps, seed))
    made = []
    for index in range(count):
        stem, seed = STEMS[index % len(STEMS)], index // len(STEMS)
        made.append(folder / "runs" / f"{stem}-{seed}")
        make_run(made[-1], sources[seed % len(sources)], stem, seed, steps)
    return made


def measure(command: str, folders: list[Path], where: Path) -> dict:
    """Seconds, and peak bytes resident, of `report.py COMMAND` in a process of its own. ValueError: it failed."""
    words = [sys.executable, str(ROOT / "research/report.py"), command, *map(str, folders), *ARGUMENTS.get(command, [])]
    begun = time.perf_counter()
    process = subprocess.Popen(words, cwd=where, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise ValueError(f"report.py {command} ended with {os.waitstatus_to_exitcode(status)}")
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_bytes": usage.ru_maxrss * 1024}


def run(args) -> None:
    origin, rows = provenance(), []
    with tempfile.TemporaryDirectory(prefix="report_") as temporary:
        folders = make_runs(Path(temporary), args.runs, args.lines)
        size = (folders[0] / "metrics.jsonl").stat().st_size
        for command in args.commands.split(","):
            row = {"command": command, "runs": args.runs, "steps": args.lines, "bytes_per_run": size}
            rows.append(row | measure(command, folders, Path(temporary)))
            print(line_of(rows[-1]), flush=True)
            if args.json:
                store(args.json, {"rows": rows}, origin)


def line_of(row: dict) -> str:
    peak = f"{row['peak_bytes'] / 2**30:.2f} GiB"
    seconds = f"{row['seconds']:.1f} s, {row['cpu_seconds']:.1f} s of them on a core"
    return f"{row['command']}: {row['runs']} runs of {row['steps']:,} steps in {seconds}, at most {peak}"
