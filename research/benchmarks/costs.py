"""`bench.py costs`: count the cost of every model: parameters, state and FLOPs."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch

from configurator import option
from model import build, cost
from research.benchmarks import suites
from research.benchmarks.suites import BASELINE
from utils import tables
from utils.provenance import collect_provenance, store_figures


def count_costs(model: str, size: dict[str, Any]) -> dict[str, Any]:
    """Return the costs of a model as `suites.parse_model` reads it."""
    model_name, settings, _ = suites.parse_model(model)
    with torch.device("meta"):
        built = build(model_name, **size, **settings)
    return {
        "model": model,
        "parameters": built.num_parameters(),
        "flops_per_token": cost.flops_per_token(built),
        "state_bytes_per_token": cost.state_bytes_per_token(built),
    }


def make_rows(models: list[str], size: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each model, with its costs relative to those of the baseline."""
    baseline = count_costs(BASELINE, size)
    rows = [count_costs(model, size) for model in models]
    for row in rows:
        row["added_parameters"] = row["parameters"] - baseline["parameters"]
        row["flops_ratio"] = row["flops_per_token"] / baseline["flops_per_token"]
        row["state_ratio"] = row["state_bytes_per_token"] / baseline["state_bytes_per_token"]
    return rows


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    header = (
        "model",
        "parameters",
        "extra parameters",
        "relative state",
        "relative FLOPs",
    )
    cells = []
    for row in rows:
        cells.append(
            (
                f"`{row['model']}`",
                f"{row['parameters']:,}",
                f"{row['added_parameters']:,}",
                f"{row['state_ratio']:.0f}",
                f"{row['flops_ratio']:.3f}",
            )
        )
    return tables.format_markdown(header, cells)


@dataclass(frozen=True)
class Options:
    """What is counted."""

    models: str | None = option(
        None,
        "models separated by commas, each as MODEL or MODEL:d_v, optionally followed by +KEY=VALUE "
        "(default: all models)",
    )
    size: Literal["small", "medium"] = option("small", "one of the paper's sizes")
    json: str | None = option(None, "also write the figures to this file")


def run(args: SimpleNamespace) -> None:
    """Print and store the figures of `bench.py costs`."""
    size = suites.PAPER[args.size]
    models = args.models.split(",") if args.models else list(suites.ALL_MODELS)
    origin = collect_provenance()
    rows = make_rows(models, size)
    print(format_table(rows))
    if args.json:
        store_figures(Path(args.json), {"size": size, "rows": rows}, origin)
