"""The paper's figures (results/published.csv), and which of its rows a model belongs to."""

import csv
import dataclasses
from functools import cache
from pathlib import Path

import configurator
from model import model_class

ROOT = Path(__file__).parents[1]


@cache
def figures() -> dict[tuple[str, str, str], dict[str, float]]:
    """{(size, shots, stem): {metric or task: value}}; shots "0", "1", or "" for what has none."""
    found: dict = {}
    lines = (ROOT / "results/published.csv").read_text(encoding="utf-8").splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        key = row["size"], row["shots"], row["model"]
        found.setdefault(key, {})[row["metric"]] = float(row["value"])
    return found


@cache
def configurations() -> list[tuple[str, str, dict]]:
    """(size, stem, model configuration) of the paper's models, from config/*_small.py and *_medium.py."""
    found = []
    for size in ("small", "medium"):
        for path in sorted(ROOT.glob(f"config/*_{size}.py")):
            keys = configurator.read_file(str(path))
            stem = keys["model"]
            config_class = model_class(stem).Config
            fields = {field.name for field in dataclasses.fields(config_class)}
            own = {key: value for key, value in keys.items() if key in fields}
            found.append((size, stem, dataclasses.asdict(config_class(**own))))
    return found


def size_of(stem: str, config) -> str | None:
    """small or medium, where the configuration is one of the paper's; a model with any other key has no row there."""
    wanted = stem, dataclasses.asdict(config)
    return next((size for size, *model in configurations() if tuple(model) == wanted), None)


def row(stem: str, size: str | None, shots: int | str) -> dict[str, float]:
    """The paper's values by task (in percent) and `average`; of shots "" val_loss, val_ppl and speeds. {}: no row."""
    return figures().get((size, str(shots), stem), {})
