"""What `bench.py step` shows of its figures: a table, and a bar chart beside the JSON file."""

import re
from pathlib import Path

import report
import tables
from benchmarks.figures import Figures
from benchmarks.suites import BASELINE
from benchmarks.timing import spread

KINDS = {"transcription (compiled)": "C1", "transcription (eager)": "C3", "mHC": "C2"}  # all others are models

BACKGROUND = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # of figures that cross the line at 1


def number(row: dict, key: str, form: str, scale: float = 1) -> str | None:
    return format(row[key] / scale, form) if key in row else None


COLUMNS = {
    "model": lambda r: f"`{r['model']}`",
    "parameters": lambda r: number(r, "parameters", ",.0f"),
    "training tokens/s": lambda r: number(r, "tokens_per_second", ",.0f"),
    "relative to additive (10th to 90th percentile)": lambda r: spread(r, "ratio", ".3f"),
    "forward tokens/s": lambda r: number(r, "forward_tokens_per_second", ",.0f"),
    "forward relative to additive": lambda r: spread(r, "forward_ratio", ".3f"),
    "training speed over its transcription": lambda r: spread(r, "speedup", ".2f"),
    "forward speed over its transcription": lambda r: spread(r, "forward_speedup", ".2f"),
    "MFU": lambda r: number(r, "mfu", ".1%"),
    "activations per token, KiB": lambda r: number(r, "activation_bytes_per_token", ",.0f", 2**10),
    "activations relative to additive": lambda r: number(r, "activation_ratio", ".2f"),
    "peak memory, GiB": lambda r: number(r, "peak_memory_bytes", ".1f", 2**30),
}


def markdown(rows: list[dict]) -> str:
    """The rows as a table, without the columns in which no row has anything."""
    cells = {title: [column(row) for row in rows] for title, column in COLUMNS.items()}
    cells = {title: column for title, column in cells.items() if any(column)}
    return tables.markdown(list(cells), zip(*cells.values()))


def beside(path: Path, suffix: str) -> Path:
    """A file for `suffix`, any text, in the folder of `path` and beginning with its name."""
    return path.with_name(f"{path.stem}_{re.sub(r'[^A-Za-z0-9.=-]+', '_', suffix).strip('_')}")


def by_size(rows: list[dict]) -> dict[str, list[dict]]:
    sizes: dict[str, list[dict]] = {}
    for row in rows:
        sizes.setdefault(row["size"], []).append(row)
    return sizes


def present(path: Path | None, settings: dict, figures: Figures) -> None:
    """Print a table for each size, and draw the chart beside the JSON, which is stored already."""
    rows = figures.rows
    for size, members in by_size(rows).items():
        where = f"{settings['dtype']} on {figures.on_what()}"
        print(f"\n{size}: {settings['sizes'][size]}, {where}\n\n{markdown(members)}")
    print(f"\nactivations: {settings['activations']}")
    for line in settings["left_out"]:
        print(f"left out: {line}")
    if path:
        try:
            chart(rows, path.with_suffix(".png"))
            print(f"stored {path} and {path.with_suffix('.png')}")
        except ValueError as error:  # the figures themselves are there
            print(f"stored {path}, without a chart: {error}")


def color_of(row: dict) -> str:
    return "0.5" if row["model"] == BASELINE else next((c for k, c in KINDS.items() if k in row["model"]), "C0")


def bars(axes, rows: list[dict], key: str) -> None:
    """One panel: a bar for each row, from the 10th to the 90th percentile an error bar, and the median in figures."""
    middles = [row[key] for row in rows]
    errors = [[r[key] - r[f"{key}_p10"] for r in rows], [r[f"{key}_p90"] - r[key] for r in rows]]
    axes.barh(range(len(rows)), middles, xerr=errors, color=[color_of(r) for r in rows], capsize=2, height=0.75)
    for place, row in enumerate(rows):
        axes.text(row[f"{key}_p90"] + 0.02, place, f"{row[key]:.2f}", va="center", fontsize=8, bbox=BACKGROUND)
    axes.axvline(1, color="0.3", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, 1.15 * max(row[f"{key}_p90"] for row in rows))
    axes.margins(y=0.01)
    axes.grid(axis="x", alpha=0.3)


def chart(rows: list[dict], path: Path) -> None:
    """Bars of the ratios to the baseline: a row of panels for each size, training on the left and forward right."""
    plt, sizes = report.pyplot(), by_size(rows)
    counts = [len(members) for members in sizes.values()]
    figure, panels = plt.subplots(
        len(sizes),
        2,
        figsize=(11, 1 + 0.6 * len(sizes) + 0.26 * sum(counts)),
        sharey="row",
        squeeze=False,
        layout="constrained",
        height_ratios=counts,
    )
    titles = {"ratio": "training step", "forward_ratio": "forward only"}
    for (size, members), pair in zip(sizes.items(), panels):
        for axes, (key, title) in zip(pair, titles.items()):
            bars(axes, members, key)
            axes.set(title=f"{size}: {title}", xlabel="tokens/s relative to additive")
        pair[0].set_yticks(range(len(members)), [row["model"] for row in members], fontsize=8)
        pair[0].invert_yaxis()
    figure.savefig(path, dpi=120)
