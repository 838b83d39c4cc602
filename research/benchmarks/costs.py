"""`bench.py costs`: what every model costs by its equations, counted: parameters, numbers in its state, operations."""

import torch

from model import build
from research.benchmarks import suites
from research.benchmarks.suites import BASELINE
from training.provenance import collect_provenance, store_figures
from utils import tables


def row(model: str, size: dict) -> dict:
    """model: as `suites.split_model` reads it."""
    stem, keys, _ = suites.split_model(model)
    with torch.device("meta"):
        made = build(stem, **size, **keys)
    facts = {"parameters": made.num_parameters(), "flops_per_token": made.flops_per_token()}
    return {"model": model, **facts, "state_bytes_per_token": made.state_bytes_per_token()}


def rows_of(models: list[str], size: dict) -> list[dict]:
    """A row for each, with "added_parameters", "flops_ratio" and "state_ratio" to the baseline."""
    base = row(BASELINE, size)
    rows = [row(model, size) for model in models]
    for each in rows:
        each["added_parameters"] = each["parameters"] - base["parameters"]
        each["flops_ratio"] = each["flops_per_token"] / base["flops_per_token"]
        each["state_ratio"] = each["state_bytes_per_token"] / base["state_bytes_per_token"]
    return rows


def markdown(rows: list[dict]) -> str:
    header = (
        "model",
        "parameters",
        "beyond the baseline",
        "state, of the baseline's",
        "FLOPs, of the baseline's",
    )
    cells = [
        (f"`{r['model']}`", f"{r['parameters']:,}", f"{r['added_parameters']:,}", f"{r['state_ratio']:.0f}",
         f"{r['flops_ratio']:.3f}")
        for r in rows
    ]  # fmt: skip
    return tables.format_markdown(header, cells)


def run(args) -> None:
    """Print and store the figures of `bench.py costs`."""
    size = suites.PAPER[args.size]
    models, origin = (
        args.models.split(",") if args.models else list(suites.EVERY_STEM),
        collect_provenance(),
    )
    rows = rows_of(models, size)
    print(markdown(rows))
    if args.json:
        store_figures(args.json, {"size": size, "rows": rows}, origin)
