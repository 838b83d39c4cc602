"""From runs to what the figures draw."""

import math

import numpy as np

from research.reporting.bands import Curve, Series, series, training_curve, validation_curve
from research.reporting.figures import Drawn
from research.reporting.groups import METRICS, SHARES, Comparison, Group
from research.reporting.results import beside
from research.reporting.sizes import Size
from training import metrics


def drawn(sizes: list[Size]) -> list[Drawn]:
    """All groups; one model has the same look in all sizes, a baseline the first."""
    baselines = [size.short(size.baseline) for size in sizes if size.baseline]
    others = [size.short(group) for size in sizes for group in size.groups]
    names = list(dict.fromkeys(baselines + others))
    published, _ = beside([group for size in sizes for group in size.groups], "")
    found = []
    for size in sizes:
        compared = {each.group.name: each for each in size.comparisons}
        for group in size.groups:
            look = names.index(size.short(group)) + (0 if baselines else 1)
            each = Drawn(group.name, look, size.name, group.stem, group is size.baseline)
            each.curves = curves_of(group, compared.get(group.name))
            each.bits = bits_of(group)
            each.published = published.get(group.name, {}).get("val_loss")
            each.residual = residual_of(group)
            found.append(each)
    return found


def curves_of(group: Group, compared: Comparison | None) -> dict[str, Curve]:
    """Those that there is something of; none where a run is a row of runs.csv."""
    if not all(run.has_curve for run in group.runs):
        return {}
    training = [series(run, run.training, "loss") for run in group.runs]
    evaluations = [series(run, run.evaluations, "val_loss") for run in group.runs]
    curves = {"training": training_curve(training), "validation": validation_curve(evaluations)}
    if compared and compared.paired and all(run.has_curve for run in compared.baseline.runs):
        curves["difference"] = validation_curve(differences(compared))
    return {kind: curve for kind, curve in curves.items() if curve}


def differences(compared: Comparison) -> list[Series]:
    """Own less the baseline's at every evaluation of both, for every seed that both have; of shares in percent."""
    base = {run.seed: series(run, run.evaluations, compared.metric) for run in compared.baseline.runs}
    found = []
    for run in compared.group.runs:
        if run.seed in base:
            own, other = series(run, run.evaluations, compared.metric), base[run.seed]
            steps, i, j = np.intersect1d(own.steps, other.steps, return_indices=True)
            values = (own.values[i] - other.values[j]) * (100 if compared.metric in SHARES else 1)
            found.append(Series(steps, {axis: x[i] for axis, x in own.x.items()}, values))
    return found


def bits_of(group: Group) -> dict[str, float]:
    """Bits per byte of each nat per token, by kind of curve, where all runs have the same."""
    training = {run.bytes_per_token for run in group.runs}
    bytes_per_token = training.pop() if len(training) == 1 else None
    bits = {"training": metrics.bits_per_byte(1.0, bytes_per_token)} if bytes_per_token else {}
    values = zip(group.values("val_bits_per_byte"), group.values("val_loss"))
    factors = [own / loss for own, loss in values if loss]
    if factors and math.isclose(min(factors), max(factors), rel_tol=1e-3):
        bits["validation"] = float(np.mean(factors))
    return bits


def residual_of(group: Group) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """{site: {statistic: (steps (n,), values (n, blocks))}}: means over tokens, and over the runs at the steps that all
    have."""
    records = [{record["step"]: record["residual"] for record in run.residual} for run in group.runs]
    steps = sorted(set.intersection(*(set(each) for each in records)))
    names = [name for name in records[0][steps[0]] if name.endswith("_mean")] if steps else []
    found: dict = {}
    for name in names:
        values = [[each[step].get(name) for step in steps] for each in records]
        if len({len(row) if isinstance(row, list) else 0 for rows in values for row in rows}) == 1:
            site, _, statistic = name.partition(".")
            mean = np.mean(np.array(values, dtype=float), axis=0)
            found.setdefault(site, {})[statistic.removesuffix("_mean")] = np.array(steps), mean
    return found


def unit_of(metric: str) -> str:
    return METRICS[metric] + " (nats per token)" * (metric == "val_loss")
