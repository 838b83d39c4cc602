"""train.py as it is run, on tokens drawn at random: speed, utilisation and memory of its steps, and a run that goes on
against one that was never stopped, bit for bit: `bench.py train`.
"""

import json
import tempfile
from base64 import b64encode
from pathlib import Path

import numpy as np

from data import shards, tokenizer
from evaluation import tables
from research.benchmarks.apart import run_python
from research.benchmarks.figures import Figures
from research.benchmarks.suites import SIZE_KEYS
from research.benchmarks.timing import percentiles, spread
from training import checkpoint, distributed, metrics
from training.provenance import digest

ROOT = Path(__file__).parents[2]
CODE = ("train.py", "model/*.py", "model/kernels/*.py", "training/*.py")
WHAT = ("speed", "resume")
FILES = ("model.safetensors", "optimizer.safetensors")


def make_corpus(folder: Path, tokens: int, vocabulary: int) -> None:
    """Shards of tokens as frequent as words are (Zipf's law), and a tokenizer of as many entries."""
    draw = np.random.default_rng(0)
    for split, count in (("train", tokens), ("val", tokens // 4)):
        ids = (draw.zipf(1.2, count) - 1) % (vocabulary - 1)
        shards.write_shard(folder / f"random_{split}_000000.bin", ids.astype(np.uint16))
    words = [bytes([number]) for number in range(256)]
    words += [bytes(divmod(number, 256)) for number in range(vocabulary - 257)]
    described = {
        "name": "random",
        "pattern": tokenizer.SPLIT_PATTERN,
        "tokens": [b64encode(w).decode() for w in words],
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "meta.json").write_text(json.dumps(tokenizer.meta(tokenizer.from_json(described))))


def options(args, folder: Path, config: str) -> list[str]:
    """train.py's, for every run of a config."""
    keys = {
        "dataset": folder,
        "device": args.device,
        "dtype": args.dtype,
        "compile": args.compile,
        "warmup_steps": 10,
    }
    keys["kernels"] = args.kernels
    keys |= {
        key: getattr(args, key) for key in (*SIZE_KEYS, "global_batch_size", "micro_batch_size")
    }
    keys |= {"max_steps": args.steps, "eval_batches": 1, "eval_full": False, "log_interval": 10}
    given = (f"--{key}={value}" for key, value in keys.items() if value is not None)
    return ["train.py", f"config/{config}.py", *given]


def train(args, arguments: list[str]) -> None:
    """`python ARGUMENTS`, train.py's. ValueError: it failed, or did not end within args.limit seconds."""
    if why := run_python(arguments, args.limit):
        raise ValueError(f"{' '.join(arguments[:2])}: {why}")


def speed(args, corpus: Path, config: str, folder: Path) -> dict:
    """What metrics.jsonl says of the steps after the first fifth of the run: medians; memory is the peak."""
    train(args, [*options(args, corpus, config), f"--out_dir={folder / 'run'}"])
    steps = [
        record for record in metrics.read(folder / "run" / "metrics.jsonl") if "loss" in record
    ]
    row = {
        "memory_bytes": max(step["memory"] for step in steps),
        "first_step_seconds": steps[0]["seconds"],
    }
    for key in ("tokens_per_second", "mfu"):
        if values := [step[key] for step in steps[len(steps) // 5 :] if key in step]:
            row |= percentiles(key, values)
    return row | {"first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"]}


def resume(args, corpus: Path, config: str, folder: Path) -> dict:
    """Whether half of a run and its continuation end with the same bits as the whole run."""
    half, whole, parts = args.steps // 2, folder / "whole", folder / "parts"
    common = [
        *options(args, corpus, config),
        "--deterministic=True",
        f"--checkpoint_interval={half}",
    ]
    train(args, [*common, f"--out_dir={whole}"])
    start = whole / "checkpoints" / f"step_{half:08d}"
    train(args, [*common, f"--out_dir={parts}", f"--resume={start}"])
    ends = [
        (checkpoint.find(run) / "SHA256SUMS").read_text().splitlines() for run in (whole, parts)
    ]
    sums = [{line.split()[1]: line.split()[0] for line in lines} for lines in ends]
    return {
        "from_step": half,
        "same_bits": {file: sums[0][file] == sums[1][file] for file in FILES},
    }


def measured(args, corpus: Path, place: dict, folder: Path) -> dict:
    """Figures of one config, or why there are none."""
    args.kernels = place["kernels"]
    try:
        return {"speed": speed, "resume": resume}[place["what"]](
            args, corpus, place["config"], folder
        )
    except ValueError as error:
        return {"failed": str(error)}


def markdown(rows: list[dict]) -> str:
    header = [
        "config",
        "tokens/s (10th to 90th percentile)",
        "MFU",
        "peak memory",
        "first step",
        "resumed",
    ]
    lines = []
    for row in rows:
        if "failed" in row:
            cells = [None] * 4 + [row["failed"]]
        elif row["what"] == "resume":
            same = all(row["same_bits"].values())
            cells = [None] * 4 + ["the same bits" if same else f"differs: {row['same_bits']}"]
        else:
            cells = [
                spread(row, "tokens_per_second", ",.0f"),
                f"{row['mfu']:.1%}" if "mfu" in row else None,
            ]
            cells += [metrics.size(row["memory_bytes"]), f"{row['first_step_seconds']:.0f} s", None]
        name = f"`{row['config']}`" + (", kernels off" if row["kernels"] == "off" else "")
        lines.append([name, *cells])
    return tables.markdown(header, lines)


def run(args) -> None:
    """Print and store the figures of `bench.py train`."""
    device = distributed.pick_device(args.device)
    if args.steps < 2:
        raise ValueError(
            f"--steps={args.steps}: give 2 or more, that there is a half to go on from"
        )
    settings = {
        key: getattr(args, key)
        for key in ("steps", "dtype", "compile", "global_batch_size", *SIZE_KEYS)
    }
    figures = Figures(args.json, device, settings, args.resume, digest(*CODE)[:12])
    wanted = [(config, what) for what in args.what.split(",") for config in args.configs.split(",")]
    if unknown := {what for _, what in wanted} - set(WHAT):
        raise ValueError(f"--what: {unknown.pop()} is none of {', '.join(WHAT)}")
    for config in args.configs.split(","):
        if not (ROOT / "config" / f"{config}.py").is_file():
            raise ValueError(f"--configs={config}: there is no config/{config}.py")

    def stored(pair: tuple[str, str], kernels: str = "auto") -> dict:
        return figures.find(config=pair[0], what=pair[1], kernels=kernels) or {}

    with tempfile.TemporaryDirectory() as scratch:
        corpus = Path(scratch) / "corpus"
        corpus.mkdir()
        make_corpus(corpus, args.corpus_tokens, args.vocabulary)
        for config, what in sorted(wanted, key=lambda pair: bool(stored(pair).get("failed"))):
            for kernels in ("auto", "off"):  # off: where a run with them fails
                found, place = (
                    stored((config, what), kernels),
                    {"config": config, "what": what, "kernels": kernels},
                )
                if not found or "failed" in found:
                    with tempfile.TemporaryDirectory() as folder:
                        found = measured(args, corpus, place, Path(folder))
                    figures.add(place | found, *place)
                    print(f"{place}: {found}", flush=True)
                if "failed" not in found:
                    break
    print(f"on {figures.on_what()}\n\n{markdown(figures.rows)}")
