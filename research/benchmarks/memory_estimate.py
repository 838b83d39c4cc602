"""`bench.py memory`: peak memory of training runs, each in a process of its own, against what train.py estimates."""

import itertools
import tempfile
import time
from pathlib import Path

import torch

import train
from data.shards import read_json
from evaluation import tables
from model import STEMS
from research.benchmarks import end_to_end
from training import distributed, metrics
from training.memory import memory_needed
from training.provenance import store

COMMON = {"dataset": "python_stdlib", "warmup_steps": 1, "max_steps": 3, "eval_full": False, "eval_batches": 1}
# Width, blocks, tokens of a sequence and vocabulary; on a GPU the paper's sizes.
SIZES = {
    "cpu": {
        "d=128 L=4 T=256 V=4096": {"num_attention_heads": 4, "head_dim": 32, "micro_batch_size": 16},
        "d=256 L=6 T=512 V=4096": {"num_attention_heads": 2, "micro_batch_size": 8},
        "d=768 L=4 T=1024 V=4096": {"num_attention_heads": 6, "micro_batch_size": 2},
        "d=256 L=6 T=512 V=50304": {"num_attention_heads": 2, "micro_batch_size": 8},
    },
    "cuda": {
        "d=768 L=12 T=1024 V=50304": {"num_attention_heads": 6, "micro_batch_size": 16},
        "d=1024 L=24 T=1024 V=50304": {"num_attention_heads": 8, "micro_batch_size": 16},
    },
}
KEYS = ("size", "activation_checkpointing", "compile", "model")  # of a row
LETTERS = {"d": "hidden_size", "L": "num_hidden_layers", "T": "block_size", "V": "vocab_size"}


def options(row: dict, device: str) -> list[str]:
    """train.py's for one row of the table."""
    size = {LETTERS[part[0]]: int(part[2:]) for part in row["size"].split()}
    keys = {**COMMON, **size, **SIZES[device][row["size"]], "device": device, "dtype": "bfloat16"}
    keys |= {key: row[key] for key in ("model", "compile", "activation_checkpointing")}
    keys["global_batch_size"] = keys["micro_batch_size"]
    return [f"--{key}={value}" for key, value in keys.items()]


def measured(arguments: list[str]) -> int:
    """Bytes at the peak of a run's training steps. ValueError: it failed."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        end_to_end.train(["train.py", *arguments, f"--out_dir={run}"], Path(folder) / "log")
        return max(record["memory"] for record in metrics.read(run / "metrics.jsonl") if "memory" in record)


def estimated(arguments: list[str], device: torch.device) -> int:
    config, model_config = train.configure(arguments)
    return memory_needed(config, model_config, device).total


def markdown(rows: list[dict]) -> str:
    """A line a model and size, and a column for eager and compiled, without and with checkpointing."""
    cells: dict[tuple, dict] = {}
    for row in rows:
        ratio = row["estimated"] / row["measured"]
        cell = f"{metrics.size(row['measured'])}, {ratio:.2f}"
        cells.setdefault((row["size"], row["model"]), {})[row["compile"], row["activation_checkpointing"]] = cell
    kinds = [(compiled, saving) for compiled in (False, True) for saving in (False, True)]
    titles = [f"{'compiled' if c else 'eager'}{', checkpointing' if s else ''}" for c, s in kinds]
    lines = [[size, f"`{model}`", *map(cell.get, kinds)] for (size, model), cell in cells.items()]
    return tables.markdown(["size", "model", *titles], lines)


def run(args) -> None:
    """Measure what the file of figures lacks, storing each, then print the table and the largest error."""
    device = distributed.pick_device(args.device)
    stems = args.models.split(",") if args.models else STEMS
    stored = read_json(args.json).get("rows", []) if args.json else []
    known = {tuple(row[key] for key in KEYS): row for row in stored}
    wanted = list(itertools.product(SIZES[device.type], (False, True), (False, True), stems))
    started, new = time.monotonic(), 0
    for number, key in enumerate(wanted, 1):
        row = dict(zip(KEYS, key))
        arguments = options(row, device.type)
        before = known.get(key)
        row["measured"] = before["measured"] if before else measured(arguments)
        row["estimated"] = estimated(arguments, device)
        known[key] = row
        if not before:
            new += 1
            left = (time.monotonic() - started) / new * (len(wanted) - number)
            print(*row.values(), f"({number} of {len(wanted)}, ETA {metrics.duration(left)})", flush=True)
        if args.json:
            store(args.json, {"sizes": SIZES[device.type], "rows": list(known.values())})
    rows = [known[key] for key in wanted]
    print(markdown(rows))
    worst = max(rows, key=lambda row: abs(row["estimated"] / row["measured"] - 1))
    print(f"largest error {worst['estimated'] / worst['measured'] - 1:+.1%}: {worst['size']}, {worst['model']}")
