"""What `bench.py step` shows of its figures: a table for each size."""

import re
from pathlib import Path

import tables
from benchmarks.figures import Figures
from benchmarks.timing import spread


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


def present(settings: dict, figures: Figures) -> None:
    """Print a table for each size, and what could not be measured."""
    sizes = dict.fromkeys(row["size"] for row in figures.rows)
    for size in sizes:
        where = f"{settings['dtype']} on {figures.on_what()}"
        table = markdown([row for row in figures.rows if row["size"] == size])
        print(f"\n{size}: {settings['sizes'][size]}, {where}\n\n{table}")
    print(f"\nactivations: {settings['activations']}")
    for line in settings["left_out"]:
        print(f"left out: {line}")
