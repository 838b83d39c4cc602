"""Figures and tables of finished or running runs.

    python report.py curves runs/demo_cpu [RUN ...] [--x=seconds] [--y=bits_per_byte] [--out=FILE]
    python report.py table runs/demo_cpu [RUN ...] [--json=FILE]  the last evaluation of each run
    python report.py python_lines FILE_OR_CORPUS ...              share of lines that Python's tokenizer accepts

RUN is a run folder made by train.py.
"""

import contextlib
import io
import json
import os
import tokenize
from pathlib import Path

import configurator  # before all that is slow to import: it takes Ctrl+C

# isort: split
import torch

from data import tokenizer
from data.shards import open_corpus
from model import build
from training import checkpoint, metrics
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
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    bounds = [(max(i - window // 2, 0), min(i + window // 2 + 1, len(values))) for i in range(len(values))]
    return [(sums[high] - sums[low]) / (high - low) for low, high in bounds]


def settings_of(run: str) -> dict:
    """What the run was trained with, by its newest checkpoint; nothing before its first one or where it is damaged."""
    checkpoints, found = checkpoint.all_of(Path(run)), {}
    with contextlib.suppress(ValueError):  # metrics.jsonl is enough for a curve
        state = checkpoint.read_state(checkpoints[-1]) if checkpoints else {}
        found = {**state.get("run_config", {}), **state.get("model_config", {})}
    return {key: value for key, value in found.items() if key not in ("out_dir", "resume", "dry_run", "device")}


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
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("figures need the matplotlib package: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def table_rows(runs: list[str]) -> list[dict]:
    """The last evaluation of each run. ValueError: a run without one."""
    rows = []
    for run in runs:
        last = next((r for r in reversed(read_run(run)) if "val_loss" in r), None)
        if last is None:
            raise ValueError(f"{run} has no evaluation yet")
        state = checkpoint.read_state(checkpoint.find(run))
        with torch.device("meta"):
            parameters = build(state["model"], **state["model_config"]).num_parameters()
        rows.append({"run": Path(run).name, "model": state["model"], "parameters": parameters, **last})
    return rows


def markdown(rows: list[dict]) -> str:
    lines = ["| model | parameters | steps | seconds | validation loss | bits per byte |", "|---|---|---|---|---|---|"]
    for r in rows:
        bpb = f"{r['val_bits_per_byte']:.3f}" if "val_bits_per_byte" in r else "-"
        lines.append(
            f"| `{r['model']}` | {r['parameters']:,} | {r['step']} | {r['seconds']:.0f} | {r['val_loss']:.3f} | {bpb} |"
        )
    return "\n".join(lines)


def python_line_share(text: str) -> tuple[int, int]:
    """(accepted, all) non-blank lines; a line is accepted where `tokenize` reads it, alone and unindented, to the end.

    Lines inside a docstring or an open bracket fail in correct code as well: compare with validation text.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return sum(map(is_python_line, lines)), len(lines)


def is_python_line(line: str) -> bool:
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line + "\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    # Python 3.11 marks what it cannot read instead of raising.
    return all(token.type != tokenize.ERRORTOKEN for token in tokens)


def read_text(path: Path) -> str:
    """The text of a file, or of a corpus folder's validation split."""
    if not path.is_dir():
        return path.read_text(encoding="utf-8")
    encoding = tokenizer.from_json(tokenizer.describe(path))
    tokens = [int(token) for shard in open_corpus(str(path)).val for token in shard]
    return encoding.decode(tokens).replace(tokenizer.END_OF_TEXT, "\n")


def python_lines(paths: list[Path]) -> str:
    report = []
    for path in paths:
        accepted, total = python_line_share(read_text(path))
        if not total:
            raise ValueError(f"{path} has no line of text")
        report.append(f"{path}: {accepted:,} of {total:,} lines ({accepted / total:.1%}) tokenise as Python")
    return "\n".join(report)


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
    lines = commands.add_parser("python_lines", help="share of lines that tokenise as Python")
    lines.add_argument("paths", nargs="+", type=Path, help="text files, or corpus folders for their validation text")
    args = parser.parse_args()
    with configurator.one_line_errors():
        if args.command == "curves":
            curves(args.runs, args.x, args.y, args.out or beside(args.runs, "loss.png"))
        elif args.command == "table":
            rows = table_rows(args.runs)
            if args.json:
                args.json.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
            print(markdown(rows))
        else:
            print(python_lines(args.paths))


if __name__ == "__main__":
    main()
