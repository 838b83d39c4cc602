"""Figures and tables of finished or running runs.

    python report.py curves runs/demo_cpu [RUN ...] [--x=seconds] [--y=bits_per_byte] [--out=FILE]
    python report.py table runs/demo_cpu [RUN ...] [--json=FILE]  the last evaluation of each run

RUN is a run folder made by train.py.
"""

import json
import os
from pathlib import Path

import configurator  # before all that is slow to import: it takes Ctrl+C

# isort: split
import numpy as np
import torch

import tables
from model import build
from training import checkpoint, metrics, start
from training.provenance import provenance

X_KEYS = {"steps": "step", "tokens": "tokens", "flops": "flops", "seconds": "seconds"}
X_LABELS = {"steps": "optimizer step", "tokens": "tokens", "flops": "FLOPs", "seconds": "seconds of training"}
Y_LABELS = {"loss": "loss (nats per token)", "bits_per_byte": "bits per byte"}
LONGEST_LABEL = 60  # characters


def read_run(run: str) -> list[dict]:
    """metrics.jsonl of a run folder. ValueError: none there, or empty."""
    path = Path(run) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{run} holds no metrics.jsonl: give a run folder made by train.py")
    records = metrics.read(path)
    if not records:
        raise ValueError(f"{path} has no step yet")
    return records


def series(records: list[dict], x: str, y: str, bytes_per_token: float | None):
    """(training x, y), (validation x, y)."""
    train = [r for r in records if "loss" in r]
    validation = [r for r in records if "val_loss" in r]
    scale = metrics.bits_per_byte(1.0, bytes_per_token) if y == "bits_per_byte" else 1.0
    name = "val_bits_per_byte" if y == "bits_per_byte" else "val_loss"
    return (
        ([r[X_KEYS[x]] for r in train], [r["loss"] * scale for r in train]),
        ([r[X_KEYS[x]] for r in validation], [r[name] for r in validation]),
    )


def smooth(values: list[float], window: int) -> list[float]:
    """Centred moving average; at the ends over what is there."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - window // 2, 0), np.minimum(index + window // 2 + 1, len(values))
    return ((sums[high] - sums[low]) / (high - low)).tolist()


def settings_of(run: str) -> dict:
    """What the run was trained with, by its newest checkpoint that can be read; nothing before its first one."""
    state = start.saved_state("auto", run)  # metrics.jsonl is enough for a curve
    settings = {**state.get("run_config", {}), **state.get("model_config", {})}
    return {key: value for key, value in settings.items() if key not in ("out_dir", "resume", "dry_run", "device")}


def labels_of(runs: list[str]) -> list[str]:
    """Short names that tell the runs apart: values of the keys in which they differ, else their folders' names."""
    settings = [settings_of(run) for run in runs]
    shared = [key for key in settings[0] if all(key in each for each in settings)]
    keys = [key for key in shared if any(each[key] != settings[0][key] for each in settings)]
    labels = [""] * len(runs)
    for key in keys:  # as many as fit
        start = "" if key == "model" else f"{key}="
        longer = [f"{label}, {start}{each[key]}".removeprefix(", ") for label, each in zip(labels, settings)]
        labels = longer if max(map(len, longer)) <= LONGEST_LABEL else labels
    return labels if len(set(labels)) == len(runs) else [shortened(Path(run).resolve().name) for run in runs]


def shortened(name: str) -> str:
    """A long name without its middle, beginning and end being what tells names apart."""
    half = LONGEST_LABEL // 2
    return name if len(name) <= LONGEST_LABEL else f"{name[:half]}...{name[-half:]}"


def beside(runs: list[str], name: str) -> Path:
    """A file in the run's folder, or, of several runs, in the folder that holds them."""
    folders = [Path(run).resolve() for run in runs]
    return (folders[0] if len(folders) == 1 else Path(os.path.commonpath([f.parent for f in folders]))) / name


def curves(runs: list[str], x: str, y: str, out: Path) -> None:
    """Draw the runs' loss curves: training smoothed over 1% of the steps on its raw trace, validation as points."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    lowest, highest, labels = [], [], labels_of(runs) if len(runs) > 1 else [""]
    for index, (run, name) in enumerate(zip(runs, labels)):
        records, bytes_per_token = read_run(run), None
        if y == "bits_per_byte":
            counts = checkpoint.read_state(checkpoint.find(run))["corpus"].get("train", {})
            if "bytes" not in counts:
                raise ValueError(f"--y=bits_per_byte: {run} was trained on shards whose text size is unknown")
            bytes_per_token = counts["bytes"] / counts["tokens"]
        (train_x, train_y), (val_x, val_y) = series(records, x, y, bytes_per_token)
        color = f"C{index}"
        smoothed = smooth(train_y, max(len(train_y) // 100, 1) * 2)
        axes.plot(train_x, train_y, color=color, alpha=0.2, linewidth=0.8)
        axes.plot(train_x, smoothed, color=color, label=f"{name} training".strip())
        if val_x:
            label = f"{name} validation ({val_y[-1]:.3f})".strip()
            axes.plot(val_x, val_y, "o--", color=color, markersize=4, label=label)
        lowest += [min(smoothed + val_y)]
        highest += [smoothed[0]]
    margin = 0.05 * (max(highest) - min(lowest)) or 0.1
    axes.set(xlabel=X_LABELS[x], ylabel=Y_LABELS[y], ylim=(min(lowest) - margin, max(highest) + margin))
    axes.set_title(shortened(Path(runs[0]).resolve().name) if len(runs) == 1 else "", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    print(f"drew {out}")


def pyplot():
    """matplotlib.pyplot without a display. ValueError: the package is missing."""
    configurator.optional("matplotlib", "a figure").use("Agg")
    return configurator.optional("matplotlib.pyplot", "a figure")


def table_rows(runs: list[str]) -> list[dict]:
    """The last evaluation of each run. ValueError: a run without one."""
    rows = []
    for run in runs:
        if not (last := metrics.last_evaluation(Path(run) / "metrics.jsonl")):
            raise ValueError(f"{run} has no evaluation yet")
        state = checkpoint.read_state(checkpoint.find(run))
        with torch.device("meta"):
            parameters = build(state["model"], **state["model_config"]).num_parameters()
        rows.append({"run": Path(run).name, "model": state["model"], "parameters": parameters, **last})
    return rows


def markdown(rows: list[dict]) -> str:
    header = ("model", "parameters", "steps", "seconds", "validation loss", "bits per byte")
    cells = []
    for r in rows:
        bpb = f"{r['val_bits_per_byte']:.3f}" if "val_bits_per_byte" in r else None
        size, seconds, loss = f"{r['parameters']:,}", f"{r['seconds']:.0f}", f"{r['val_loss']:.3f}"
        cells.append((f"`{r['model']}`", size, r["step"], seconds, loss, bpb))
    return tables.markdown(header, cells)


def main():
    parser = configurator.Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("curves", help="loss curves as a PNG")
    command.add_argument("runs", nargs="+", metavar="RUN")
    command.add_argument("--x", choices=X_KEYS, default="steps")
    command.add_argument("--y", choices=Y_LABELS, default="loss")
    command.add_argument("--out", type=Path, help="default: loss.png in the run, or in the folder of all runs")
    command = commands.add_parser("table", help="the last evaluation of each run, as Markdown")
    command.add_argument("runs", nargs="+", metavar="RUN")
    command.add_argument("--json", type=Path, help="write the rows there as well, with commit, machine and date")
    args = parser.parse_args()
    with configurator.one_line_errors():
        if args.command == "curves":
            curves(args.runs, args.x, args.y, args.out or beside(args.runs, "loss.png"))
        else:
            rows = table_rows(args.runs)
            if args.json:
                args.json.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
            print(markdown(rows))


if __name__ == "__main__":
    main()
