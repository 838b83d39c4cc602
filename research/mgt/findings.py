"""What the runs of each experiment say: a row for each of them, and a word for every hypothesis of the paper.

A hypothesis is that a mean over seeds lies on one side of a number named in advance: supported where its whole 95%
interval does, refuted where none of it does, else undecided. Where the paper names no number, the one here is ours.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from research import compare
from research.mgt.measures import SHARES

NO_RISE = 0.05  # "monotonic" (H1): rises over falls
NEAR_ZERO = 0.1  # a rank "towards 0" (H1), and a "significant fraction" of negative gates


def claim(text: str, values: list[float], bound: float, above: bool) -> dict:
    """A hypothesis about the mean of `values`, one a seed: that it is above, or below, `bound`."""
    sign = -1 if above else 1
    word = compare.hypothesis(compare.interval([sign * value for value in values]), sign * bound)
    return {"hypothesis": text, **compare.summary(values), "verdict": word}


def together(text: str, claims: list[dict]) -> dict:
    """A hypothesis that holds where all of its parts do."""
    words = [each["verdict"] for each in claims]
    word = next((word for word in ("refuted", "undecided") if word in words), "supported")
    return {
        "hypothesis": text,
        "n": min(each["n"] for each in claims),
        "mean": None,
        "ci95": None,
        "verdict": word,
    }


def by_seed(rows: list[dict], value: str | Callable, **where) -> dict:
    """{seed: a value of its row} for the rows with these entries."""
    get = value if callable(value) else lambda row: row[value]
    return {row["seed"]: get(row) for row in rows if where.items() <= row.items()}


def less(own: dict, base: dict) -> list[float]:
    """own - base for every seed that both have."""
    return [own[seed] - base[seed] for seed in own if seed in base]


@dataclass(frozen=True)
class Findings:
    """rows: a figure of each run. groups: the same over seeds. header, table: their cells. verdicts: see `claim`."""

    rows: list[dict]
    groups: list[dict]
    header: list[str]
    table: list[list]
    verdicts: list[dict]


def over_seeds(rows: list[dict], *keys: str, **figures: Callable) -> list[dict]:
    """A group for all rows with the same values of the keys: these, and the summary of each figure of a row."""
    result = []
    for values, group in groups(rows, *keys):
        found = {
            name: compare.summary([figure(row) for row in group])
            for name, figure in figures.items()
        }
        result.append({**dict(zip(keys, values)), **found})
    return result


def shown(summary: dict, form: str = ".3f") -> str:
    """mean ± half its 95% interval (number of seeds)."""
    return compare.interval(summary["values"]).text(form)


def groups(rows: list[dict], *keys: str) -> list[tuple[tuple, list[dict]]]:
    """(values of the keys, rows that have them), in the order of the rows."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(found.items())


# ---- 1: effective rank ----


def rank_findings(rows: list[dict]) -> Findings:
    figures = {"untrained": untrained_rank, "end": last_rank, "lowest": lowest_rank}
    figures |= {name: operator.itemgetter(name) for name in ("preservation", "slope")}
    found = over_seeds(rows, "arm", "layers", **figures)
    header = [
        "arm",
        "blocks",
        "untrained",
        "rank at the end",
        "lowest",
        "preserved",
        "slope of log rank",
    ]
    names = ("untrained", "end", "lowest", "preservation")
    table = [
        [
            f"`{g['arm']}`",
            g["layers"],
            *(shown(g[name]) for name in names),
            shown(g["slope"], "+.4f"),
        ]
        for g in found
    ]
    return Findings(rows, found, header, table, rank_verdicts(rows))


def untrained_rank(row: dict) -> float:
    return row["initial_rank"][-1]


def last_rank(row: dict) -> float:
    return row["rank"][-1]


def lowest_rank(row: dict) -> float:
    return min(row["rank"])


def rises_over_falls(row: dict) -> float:
    """How much blocks raise the rank, in all, over how much others lower it: 0 where it decays monotonically."""
    steps = np.diff(row["rank"])
    return float(steps[steps > 0].sum() / max(-steps[steps < 0].sum(), 1e-12))


def rank_verdicts(rows: list[dict]) -> list[dict]:
    deep, shallow = (pick(row["layers"] for row in rows) for pick in (max, min))
    ends = {
        arm: by_seed(rows, last_rank, arm=arm, layers=deep)
        for arm in ("standard", "full", "additive")
    }
    verdicts = []
    if standard := ends["standard"]:
        slopes, risen = (
            by_seed(rows, key, arm="standard", layers=deep) for key in ("slope", rises_over_falls)
        )
        parts = [
            claim(
                f"H1a: slope of the standard arm's log rank over {deep} blocks is below 0",
                [*slopes.values()],
                0,
                False,
            ),
            claim(
                f"H1b: all rises of that rank are below {NO_RISE:.0%} (ours) of all falls",
                [*risen.values()],
                NO_RISE,
                False,
            ),
            claim(
                f"H1c: its rank at the end is below {NEAR_ZERO} (ours)",
                [*standard.values()],
                NEAR_ZERO,
                False,
            ),
        ]
        if deep > shallow:
            change = less(standard, by_seed(rows, last_rank, arm="standard", layers=shallow))
            parts.append(
                claim(f"H1d: it is lower than after {shallow} blocks, by", change, 0, False)
            )
        verdicts = [
            *parts,
            together(
                "H1: the standard arm's rank decays monotonically towards 0 (H1a to H1d)", parts
            ),
        ]
    for name, arm in (("H2: the full arm's", "full"), ("the additive arm's", "additive")):
        if ends[arm]:
            lowest = by_seed(rows, lowest_rank, arm=arm, layers=deep)
            text = f"rank after {deep} blocks is above 0.5"
            verdicts.append(claim(f"{name} {text}", [*ends[arm].values()], 0.5, True))
            verdicts.append(claim(f"{name} {text}, at every depth", [*lowest.values()], 0.5, True))
    return verdicts


# ---- 2: ablation, and the copy task ----


def synergy(rows: list[dict]) -> list[float]:
    """Eq. 9 for every seed that has all four arms: the gain of both parts beyond the sum of either's gain, in nats."""
    arms = [by_seed(rows, "val_loss", arm=arm) for arm in ("standard", "full", "mhc", "ddl")]
    seeds = [seed for seed in arms[0] if all(seed in arm for arm in arms)]
    values = []
    for seed in seeds:
        base, both, mhc, ddl = (arm[seed] for arm in arms)
        values.append((base - both) - (base - mhc) - (base - ddl))
    return values


def by_arm(rows: list[dict], **figures: Callable) -> list[dict]:
    """A group for each arm, with its validation loss and that less the standard arm's, and a word for it, corrected for
    the number of arms."""
    found = over_seeds(
        rows, "arm", "parameters", val_loss=operator.itemgetter("val_loss"), **figures
    )
    base, differences = by_seed(rows, "val_loss", arm="standard"), {}
    for number, group in enumerate(found):
        values = less(by_seed(rows, "val_loss", arm=group["arm"]), base)
        if group["arm"] != "standard" and values:
            differences[number] = compare.interval(values)
            group["less"] = compare.summary(values)
    for number, word in zip(differences, compare.verdicts([*differences.values()])):
        found[number]["word"] = word
    return found


def compared(group: dict) -> list:
    """Its cells of the comparison with the standard arm."""
    return [shown(group["less"], "+.3f"), group["word"]] if "less" in group else [None, None]


def ablation_findings(rows: list[dict]) -> Findings:
    found = by_arm(rows)
    header = ["arm", "parameters", "validation loss", "less that of `standard`", "that is"]
    table = [
        [f"`{g['arm']}`", f"{g['parameters']:,}", shown(g["val_loss"]), *compared(g)] for g in found
    ]
    values = synergy(rows)
    verdicts = [claim("synergy S (eq. 9, nats) is above 0", values, 0, True)] if values else []
    return Findings(rows, found, header, table, verdicts)


def copy_findings(rows: list[dict]) -> Findings:
    found = by_arm(rows, exact=lambda row: 100 * row["val_exact_match"])
    header = [
        "arm",
        "parameters",
        "validation loss",
        "less that of `standard`",
        "that is",
        "exact matches (%)",
    ]
    header.append("solved at step")
    table = []
    for group in found:
        group["solved_at"] = [row["solved_at"] for row in rows if row["arm"] == group["arm"]]
        solved = ", ".join(str(step or "-") for step in group["solved_at"])
        about = [
            f"`{group['arm']}`",
            f"{group['parameters']:,}",
            shown(group["val_loss"]),
            *compared(group),
        ]
        table.append([*about, shown(group["exact"], ".1f"), solved])
    change = less(by_seed(rows, "val_loss", arm="full"), by_seed(rows, "val_loss", arm="standard"))
    verdicts = (
        [claim("the full arm's loss less the standard arm's is below 0", change, 0, False)]
        if change
        else []
    )
    return Findings(rows, found, header, table, verdicts)


# ---- 3: the gate beta ----


def quarter(values: list[float], last: bool) -> float:
    """Mean over the first, or the last, quarter of the blocks."""
    count = max(len(values) // 4, 1)
    return float(np.mean(values[-count:] if last else values[:count]))


BETA_FIGURES = {  # name: (what, of the last blocks or the first, in which unit)
    "first quarter: mean": ("mean", False, 1),
    "last quarter: mean": ("mean", True, 1),
    "last quarter: variance": ("variance", True, 1),
    "first quarter: below 0 (%)": ("negative", False, 100),
    "last quarter: below 0 (%)": ("negative", True, 100),
}


def beta_findings(rows: list[dict]) -> Findings:
    figures = {
        name: lambda row, key=key, last=last, unit=unit: unit * quarter(row[key], last)
        for name, (key, last, unit) in BETA_FIGURES.items()
    }
    found = over_seeds(rows, "share", **figures)
    table = []
    for group in found:
        changes = [row["sign_changes"] for row in rows if row["share"] == group["share"]]
        group["sign_changes"] = changes
        said = "; ".join(", ".join(map(str, each)) or "none" for each in changes)
        table.append(
            [f"{group['share']:.0%}", *(shown(group[name]) for name in BETA_FIGURES), said]
        )
    header = ["share of training", *BETA_FIGURES, "blocks where the mean changes sign"]
    return Findings(rows, found, header, table, beta_verdicts(rows))


def beta_verdicts(rows: list[dict]) -> list[dict]:
    end = [row for row in rows if row["share"] == SHARES[-1]]
    early, deep = (
        [quarter(row["mean"], False) for row in end],
        [quarter(row["negative"], True) for row in end],
    )
    return [
        claim("early blocks (the first quarter): E[beta] is above 0 at the end", early, 0, True),
        claim(
            f"deep blocks (the last quarter): more than {NEAR_ZERO:.0%} (ours) of beta is below 0",
            deep,
            NEAR_ZERO,
            True,
        ),
        sharpening(rows),
    ]


def sharpening(rows: list[dict]) -> dict:
    """Whether the step of E[beta] at the block where its sign first changes is larger at the end than at a quarter.

    Refuted where no run's sign changes at the end: there is nothing that could sharpen.
    """
    text = "the step of E[beta] where its sign changes grows from 25% to 100% of training"
    quarter_of, end = (
        {r["seed"]: r for r in rows if r["share"] == share} for share in (SHARES[1], SHARES[-1])
    )
    if not any(row["sign_changes"] for row in end.values()):
        return {
            "hypothesis": f"{text}: it changes nowhere",
            "n": len(end),
            "mean": None,
            "ci95": None,
            "verdict": "refuted",
        }
    both = [
        seed
        for seed in end
        if end[seed]["sign_changes"] and quarter_of.get(seed, {}).get("sign_changes")
    ]
    if len(both) < len(end):
        return {
            "hypothesis": text,
            "n": len(both),
            "mean": None,
            "ci95": None,
            "verdict": "undecided",
        }
    return claim(
        text,
        [step_at_change(end[seed]) - step_at_change(quarter_of[seed]) for seed in both],
        0,
        True,
    )


def step_at_change(row: dict) -> float:
    layer = row["sign_changes"][0]
    return abs(row["mean"][layer] - row["mean"][layer - 1])


# ---- 4: depth at one size; 5: language modelling ----


COURSE = {
    name: operator.itemgetter(name) for name in ("val_loss", "val_perplexity", "epochs_to_target")
}


def depth_findings(rows: list[dict]) -> Findings:
    found = over_seeds(rows, "layers", "arm", "width", "parameters", **COURSE)
    header = [
        "blocks",
        "arm",
        "width",
        "parameters",
        "validation loss",
        "its deviation",
        "epochs to the target",
    ]
    table = []
    for group in found:
        losses = group["val_loss"]["values"]
        group["deviation"] = float(np.std(losses, ddof=1)) if len(losses) > 1 else None
        spread = None if group["deviation"] is None else f"{group['deviation']:.3f}"
        about = [group["layers"], f"`{group['arm']}`", group["width"], f"{group['parameters']:,}"]
        table.append([*about, shown(group["val_loss"]), spread, shown(group["epochs_to_target"])])
    return Findings(rows, found, header, table, depth_verdicts(rows))


def gap(rows: list[dict], layers: int) -> dict:
    """{seed: loss of the full arm less that of the standard arm}."""
    full, standard = (
        by_seed(rows, "val_loss", arm=arm, layers=layers) for arm in ("full", "standard")
    )
    return {seed: full[seed] - standard[seed] for seed in full if seed in standard}


def depth_verdicts(rows: list[dict]) -> list[dict]:
    gaps = {layers: gap(rows, layers) for layers in sorted({row["layers"] for row in rows})}
    gaps = {layers: values for layers, values in gaps.items() if values}
    if not gaps:
        return []
    text = "the full arm's loss less the standard arm's is below 0"
    parts = [
        claim(f"{layers} blocks: {text}", [*values.values()], 0, False)
        for layers, values in gaps.items()
    ]
    deepest, shallowest = gaps[max(gaps)], gaps[min(gaps)]
    if len(gaps) > 1 and (change := less(deepest, shallowest)):
        parts.append(
            claim(f"it falls from {min(gaps)} to {max(gaps)} blocks, by", change, 0, False)
        )
        parts.append(
            together("MGT scales better with depth: better at the deepest, by more", parts[-2:])
        )
    return parts


def language_findings(rows: list[dict]) -> Findings:
    found = over_seeds(rows, "arm", "parameters", **COURSE)
    header = ["arm", "parameters", "validation loss", "perplexity", "epochs to the target"]
    table = [
        [
            *(f"`{group['arm']}`", f"{group['parameters']:,}", shown(group["val_loss"])),
            *(shown(group["val_perplexity"], ".1f"), shown(group["epochs_to_target"])),
        ]
        for group in found
    ]
    values = [*gap(rows, rows[0]["layers"]).values()]
    named = "the full arm's loss less the standard arm's is below 0"
    return Findings(rows, found, header, table, [claim(named, values, 0, False)] if values else [])
