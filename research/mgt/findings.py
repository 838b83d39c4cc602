"""The findings of each experiment: means over seeds, and a verdict on every hypothesis of the paper.

A hypothesis says that a mean over seeds lies on one side of a number that was chosen in advance. It
is "supported" if the whole 95% interval of the mean does, "refuted" if none of it does, and
"undecided" otherwise. Numbers that the paper does not give are ours.

Rows are dicts, as `measures.py` makes them and JSON files store them, one for each run.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from research import compare

# H1: a rank is monotonic if its rises are less than this part of its falls
MONOTONIC_TOLERANCE = 0.05
# H1: a rank below this is near 0; experiment 3: a part of negative gates above it is significant
NEAR_ZERO = 0.1
# fractions of training after which experiment 3 compares gates
QUARTER = 0.25
END = 1.0
FULL_IS_BETTER = "the full arm's loss minus the standard arm's is below 0"


@dataclass(frozen=True)
class Findings:
    """The results of an experiment.

    groups: runs that differ only in their seed, one dict each. columns: the columns of the table, as
    functions from a group to its cell, by title. verdicts: see `judge`.
    """

    groups: list[dict]
    columns: dict[str, Callable[[dict], Any]]
    verdicts: list[dict]

    @property
    def table(self) -> list[list]:
        """The cells of the table, a row for each group."""
        return [[cell(group) for cell in self.columns.values()] for group in self.groups]


# ---- verdicts ----


def judge(hypothesis: str, values: Iterable[float], bound: float, above: bool) -> dict:
    """Return the verdict on the hypothesis that the mean of values is above, or below, a bound.

    values: one for each seed
    """
    values = list(values)
    sign = -1 if above else 1
    verdict = compare.judge_hypothesis(
        compare.estimate_mean([sign * value for value in values]), sign * bound
    )
    return {"hypothesis": hypothesis, **compare.summarize(values), "verdict": verdict}


def make_verdict(hypothesis: str, n: int, verdict: str) -> dict:
    """Return a verdict that does not come from a mean over seeds."""
    return {"hypothesis": hypothesis, "n": n, "mean": None, "ci95": None, "verdict": verdict}


def judge_together(hypothesis: str, parts: list[dict]) -> dict:
    """Return the verdict on a hypothesis that holds if all of its parts do."""
    part_verdicts = [part["verdict"] for part in parts]
    verdict = "supported"
    if "refuted" in part_verdicts:
        verdict = "refuted"
    elif "undecided" in part_verdicts:
        verdict = "undecided"
    return make_verdict(hypothesis, min(part["n"] for part in parts), verdict)


# ---- rows and groups of rows ----


def select_by_seed(
    rows: list[dict], get_value: Callable[[dict], Any], **conditions: Any
) -> dict[int, Any]:
    """Return the value of each row that meets the conditions, by the seed of the row."""
    return {row["seed"]: get_value(row) for row in rows if conditions.items() <= row.items()}


def subtract_by_seed(values: dict[int, float], baseline: dict[int, float]) -> dict[int, float]:
    """Return values - baseline for every seed that both have."""
    return {seed: values[seed] - baseline[seed] for seed in values if seed in baseline}


def group_rows(rows: list[dict], *keys: str) -> list[tuple[tuple, list[dict]]]:
    """Return the values of the keys and the rows that have them, in the order of the rows."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.items())


def summarize_groups(
    rows: list[dict], *keys: str, figures: dict[str, Callable[[dict], float]]
) -> list[dict]:
    """Summarize each figure over the rows that agree in the keys.

    Args:
        figures: functions from a row to a figure, by the name of the figure

    Returns:
        For each group of rows the values of the keys, and `compare.summarize` of each figure.
    """
    groups = []
    for values, group_members in group_rows(rows, *keys):
        group = dict(zip(keys, values))
        for name, get_figure in figures.items():
            group[name] = compare.summarize([get_figure(row) for row in group_members])
        groups.append(group)
    return groups


def mean_cell(name: str, number_format: str = ".3f") -> Callable[[dict], str]:
    """Return the function from a group to the cell of a figure: mean ± half interval (seeds)."""
    return lambda group: compare.estimate_mean(group[name]["values"]).format(number_format)


def format_difference(group: dict) -> str | None:
    """Return the cell of the difference from the standard arm."""
    return mean_cell("less", "+.3f")(group) if "less" in group else None


ARM_COLUMN = {"arm": lambda group: f"`{group['arm']}`"}
BLOCKS_COLUMN = {"blocks": itemgetter("layers")}
SIZE_COLUMN = {"parameters": lambda group: f"{group['parameters']:,}"}
LOSS_COLUMN = {"validation loss": mean_cell("val_loss")}
DIFFERENCE_COLUMNS = {
    "minus that of `standard`": format_difference,
    "verdict": lambda group: group.get("word"),
}
EPOCHS_COLUMN = {"epochs to the target": mean_cell("epochs_to_target")}

# ---- 1: effective rank ----


def get_last_rank(row: dict) -> float:
    return row["rank"][-1]


def get_lowest_rank(row: dict) -> float:
    return min(row["rank"])


def compute_rises_over_falls(row: dict) -> float:
    """Return the sum of all rises of the rank over that of all falls; 0 if it is monotonic."""
    steps = np.diff(row["rank"])
    return float(steps[steps > 0].sum() / max(-steps[steps < 0].sum(), 1e-12))


def find_rank_results(rows: list[dict]) -> Findings:
    """Return the findings of experiment 1."""
    groups = summarize_groups(
        rows,
        "arm",
        "layers",
        figures={
            "untrained": lambda row: row["initial_rank"][-1],
            "end": get_last_rank,
            "lowest": get_lowest_rank,
            "preservation": itemgetter("preservation"),
            "slope": itemgetter("slope"),
        },
    )
    columns = {
        **ARM_COLUMN,
        **BLOCKS_COLUMN,
        "untrained": mean_cell("untrained"),
        "rank at the end": mean_cell("end"),
        "lowest": mean_cell("lowest"),
        "preserved": mean_cell("preservation"),
        "slope of log rank": mean_cell("slope", "+.4f"),
    }
    return Findings(groups, columns, judge_ranks(rows))


def judge_ranks(rows: list[dict]) -> list[dict]:
    """Return the verdicts on H1, if the standard arm was trained, and on H2."""
    deepest = max(row["layers"] for row in rows)
    verdicts = []
    if any(row["arm"] == "standard" and row["layers"] == deepest for row in rows):
        verdicts.extend(judge_decay(rows))
    for arm, subject in (("full", "H2: the full arm's"), ("additive", "the additive arm's")):
        hypothesis = f"{subject} rank after {deepest} blocks is above 0.5"
        last = select_by_seed(rows, get_last_rank, arm=arm, layers=deepest)
        if not last:
            continue
        lowest = select_by_seed(rows, get_lowest_rank, arm=arm, layers=deepest)
        verdicts.append(judge(hypothesis, last.values(), 0.5, above=True))
        verdicts.append(judge(f"{hypothesis}, at every depth", lowest.values(), 0.5, above=True))
    return verdicts


def judge_decay(rows: list[dict]) -> list[dict]:
    """Return the verdicts on H1, of which there are at most four parts, and last on H1 itself."""
    layers = {row["layers"] for row in rows}
    deepest = max(layers)
    shallowest = min(layers)

    def select(get_value: Callable[[dict], float], num_layers: int) -> dict[int, float]:
        return select_by_seed(rows, get_value, arm="standard", layers=num_layers)

    last = select(get_last_rank, deepest)
    verdicts = [
        judge(
            f"H1a: slope of the standard arm's log rank over {deepest} blocks is below 0",
            select(itemgetter("slope"), deepest).values(),
            bound=0,
            above=False,
        ),
        judge(
            f"H1b: all rises of that rank are below {MONOTONIC_TOLERANCE:.0%} (ours) of all falls",
            select(compute_rises_over_falls, deepest).values(),
            bound=MONOTONIC_TOLERANCE,
            above=False,
        ),
        judge(
            f"H1c: its rank at the end is below {NEAR_ZERO} (ours)",
            last.values(),
            bound=NEAR_ZERO,
            above=False,
        ),
    ]
    if deepest > shallowest:
        change = subtract_by_seed(last, select(get_last_rank, shallowest))
        verdicts.append(
            judge(
                f"H1d: it is lower than after {shallowest} blocks, by",
                change.values(),
                bound=0,
                above=False,
            )
        )
    hypothesis = "H1: the standard arm's rank decays monotonically towards 0 (H1a to H1d)"
    return [*verdicts, judge_together(hypothesis, verdicts)]


# ---- 2: ablation, and the copy task ----


def select_losses(rows: list[dict], **conditions: Any) -> dict[int, float]:
    """Return the validation loss of each row that meets the conditions, by seed."""
    return select_by_seed(rows, itemgetter("val_loss"), **conditions)


def compute_synergy(rows: list[dict]) -> list[float]:
    """Return the synergy coefficient (eq. 9) in nats, for every seed that has all four arms.

    It is the gain of both parts together beyond the sum of their gains alone.
    """
    standard = select_losses(rows, arm="standard")
    full = select_losses(rows, arm="full")
    mhc = select_losses(rows, arm="mhc")
    ddl = select_losses(rows, arm="ddl")
    return [
        (standard[seed] - full[seed]) - (standard[seed] - mhc[seed]) - (standard[seed] - ddl[seed])
        for seed in standard
        if seed in full and seed in mhc and seed in ddl
    ]


def compare_arms(
    rows: list[dict], figures: dict[str, Callable[[dict], float]] | None = None
) -> list[dict]:
    """Return a group for each arm, with its validation loss and the figures.

    Arms other than the standard one also have the difference of their loss from that of the standard
    arm ("less") and the verdict on it ("word"), which is corrected for the number of arms.
    """
    groups = summarize_groups(
        rows,
        "arm",
        "parameters",
        figures={"val_loss": itemgetter("val_loss"), **(figures or {})},
    )
    baseline = select_losses(rows, arm="standard")
    compared_groups = []
    differences = []
    for group in groups:
        if group["arm"] == "standard":
            continue
        difference = subtract_by_seed(select_losses(rows, arm=group["arm"]), baseline)
        if difference:
            compared_groups.append(group)
            differences.append(list(difference.values()))
    verdicts = compare.judge_differences([compare.estimate_mean(values) for values in differences])
    for group, values, verdict in zip(compared_groups, differences, verdicts):
        group["less"] = compare.summarize(values)
        group["word"] = verdict
    return groups


def find_ablation_results(rows: list[dict]) -> Findings:
    """Return the findings of experiment 2."""
    synergy = compute_synergy(rows)
    verdicts = []
    if synergy:
        verdicts.append(judge("synergy S (eq. 9, nats) is above 0", synergy, 0, above=True))
    columns = {**ARM_COLUMN, **SIZE_COLUMN, **LOSS_COLUMN, **DIFFERENCE_COLUMNS}
    return Findings(compare_arms(rows), columns, verdicts)


def find_copy_results(rows: list[dict]) -> Findings:
    """Return the findings of the copy task."""
    groups = compare_arms(rows, {"exact": lambda row: 100 * row["val_exact_match"]})
    for group in groups:
        group["solved_at"] = [row["solved_at"] for row in rows if row["arm"] == group["arm"]]
    columns = {
        **ARM_COLUMN,
        **SIZE_COLUMN,
        **LOSS_COLUMN,
        **DIFFERENCE_COLUMNS,
        "exact matches (%)": mean_cell("exact", ".1f"),
        "solved at step": lambda group: ", ".join(str(step or "-") for step in group["solved_at"]),
    }
    return Findings(groups, columns, judge_full_arm(rows))


def judge_full_arm(rows: list[dict], **conditions: Any) -> list[dict]:
    """Return the verdict on the full arm's loss against the standard arm's, if both are there."""
    difference = compute_gap(rows, **conditions)
    if not difference:
        return []
    return [judge(FULL_IS_BETTER, difference.values(), 0, above=False)]


def compute_gap(rows: list[dict], **conditions: Any) -> dict[int, float]:
    """Return the loss of the full arm minus that of the standard arm, by seed."""
    return subtract_by_seed(
        select_losses(rows, arm="full", **conditions),
        select_losses(rows, arm="standard", **conditions),
    )


# ---- 3: the gate beta ----


def average_first_quarter(values: list[float]) -> float:
    """Return the mean over the first quarter of the blocks."""
    return float(np.mean(values[: max(len(values) // 4, 1)]))


def average_last_quarter(values: list[float]) -> float:
    """Return the mean over the last quarter of the blocks."""
    return float(np.mean(values[-max(len(values) // 4, 1) :]))


BETA_FIGURES = {
    "first quarter: mean": lambda row: average_first_quarter(row["mean"]),
    "last quarter: mean": lambda row: average_last_quarter(row["mean"]),
    "last quarter: variance": lambda row: average_last_quarter(row["variance"]),
    "first quarter: below 0 (%)": lambda row: 100 * average_first_quarter(row["negative"]),
    "last quarter: below 0 (%)": lambda row: 100 * average_last_quarter(row["negative"]),
}


def format_sign_changes(group: dict) -> str:
    """Return the blocks at which the mean changes its sign, of each seed."""
    return "; ".join(", ".join(map(str, layers)) or "none" for layers in group["sign_changes"])


def find_beta_results(rows: list[dict]) -> Findings:
    """Return the findings of experiment 3."""
    groups = summarize_groups(rows, "training_fraction", figures=BETA_FIGURES)
    for group in groups:
        group["sign_changes"] = [
            row["sign_changes"]
            for row in rows
            if row["training_fraction"] == group["training_fraction"]
        ]
    columns = {
        "share of training": lambda group: f"{group['training_fraction']:.0%}",
        **{name: mean_cell(name) for name in BETA_FIGURES},
        "blocks where the mean changes sign": format_sign_changes,
    }
    return Findings(groups, columns, judge_gates(rows))


def judge_gates(rows: list[dict]) -> list[dict]:
    """Return the verdicts on the sign of early and deep gates, and on their sharpening."""
    last_rows = [row for row in rows if row["training_fraction"] == END]
    return [
        judge(
            "early blocks (the first quarter): E[beta] is above 0 at the end",
            [average_first_quarter(row["mean"]) for row in last_rows],
            bound=0,
            above=True,
        ),
        judge(
            f"deep blocks (the last quarter): more than {NEAR_ZERO:.0%} (ours) of beta is below 0",
            [average_last_quarter(row["negative"]) for row in last_rows],
            bound=NEAR_ZERO,
            above=True,
        ),
        judge_sharpening(rows),
    ]


def judge_sharpening(rows: list[dict]) -> dict:
    """Return the verdict on whether the step of E[beta] where its sign first changes grows.

    The hypothesis is refuted if no run has a change of sign at the end.
    """
    hypothesis = "the step of E[beta] where its sign changes grows from 25% to 100% of training"
    early = select_by_seed(rows, compute_step_at_sign_change, training_fraction=QUARTER)
    end = select_by_seed(rows, compute_step_at_sign_change, training_fraction=END)
    if all(step is None for step in end.values()):
        return make_verdict(f"{hypothesis}: it changes nowhere", len(end), "refuted")
    paired_seeds = [seed for seed in end if end[seed] is not None and early.get(seed) is not None]
    if len(paired_seeds) < len(end):
        return make_verdict(hypothesis, len(paired_seeds), "undecided")
    growth = [end[seed] - early[seed] for seed in paired_seeds]
    return judge(hypothesis, growth, 0, above=True)


def compute_step_at_sign_change(row: dict) -> float | None:
    """Return how far E[beta] jumps at the first block where its sign changes; None without one."""
    if not row["sign_changes"]:
        return None
    layer = row["sign_changes"][0]
    return abs(row["mean"][layer] - row["mean"][layer - 1])


# ---- 4: depth at one size; 5: language modeling ----


CURVE_FIGURES = {
    "val_loss": itemgetter("val_loss"),
    "val_perplexity": itemgetter("val_perplexity"),
    "epochs_to_target": itemgetter("epochs_to_target"),
}


def format_deviation(group: dict) -> str | None:
    """Return the cell of the standard deviation of the losses."""
    return None if group["deviation"] is None else f"{group['deviation']:.3f}"


def find_depth_results(rows: list[dict]) -> Findings:
    """Return the findings of experiment 4."""
    groups = summarize_groups(rows, "layers", "arm", "width", "parameters", figures=CURVE_FIGURES)
    for group in groups:
        losses = group["val_loss"]["values"]
        group["deviation"] = float(np.std(losses, ddof=1)) if len(losses) > 1 else None
    columns = {
        **BLOCKS_COLUMN,
        **ARM_COLUMN,
        "width": itemgetter("width"),
        **SIZE_COLUMN,
        **LOSS_COLUMN,
        "its deviation": format_deviation,
        **EPOCHS_COLUMN,
    }
    return Findings(groups, columns, judge_depths(rows))


def judge_depths(rows: list[dict]) -> list[dict]:
    """Return the verdicts on the full arm at each depth, and on how its gain grows with depth."""
    gaps = {}
    for layers in sorted({row["layers"] for row in rows}):
        gap = compute_gap(rows, layers=layers)
        if gap:
            gaps[layers] = gap
    verdicts = [
        judge(f"{layers} blocks: {FULL_IS_BETTER}", gap.values(), 0, above=False)
        for layers, gap in gaps.items()
    ]
    if len(gaps) < 2:
        return verdicts
    shallowest = min(gaps)
    deepest = max(gaps)
    change = subtract_by_seed(gaps[deepest], gaps[shallowest])
    if change:
        hypothesis = f"it falls from {shallowest} to {deepest} blocks, by"
        verdicts.append(judge(hypothesis, change.values(), 0, above=False))
        hypothesis = "MGT scales better with depth: better at the deepest, by more"
        verdicts.append(judge_together(hypothesis, verdicts[-2:]))
    return verdicts


def find_language_results(rows: list[dict]) -> Findings:
    """Return the findings of experiment 5."""
    columns = {
        **ARM_COLUMN,
        **SIZE_COLUMN,
        **LOSS_COLUMN,
        "perplexity": mean_cell("val_perplexity", ".1f"),
        **EPOCHS_COLUMN,
    }
    groups = summarize_groups(rows, "arm", "parameters", figures=CURVE_FIGURES)
    return Findings(groups, columns, judge_full_arm(rows, layers=rows[0]["layers"]))
