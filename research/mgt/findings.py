"""What the runs of each experiment say: means over seeds, and a word for every hypothesis of the paper.

A hypothesis is that a mean over seeds lies on one side of a number named in advance: supported where
its whole 95% interval does, refuted where none of it does, else undecided. Where the paper names no
number, the one here is ours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from research import compare

NO_RISE = 0.05  # "monotonic" (H1): rises over falls
NEAR_ZERO = 0.1  # a rank "towards 0" (H1), and a "significant fraction" of negative gates
QUARTER, END = 0.25, 1.0  # shares of training
BELOW = "the full arm's loss less the standard arm's is below 0"


@dataclass(frozen=True)
class Findings:
    """groups: rows over seeds; columns: {title: its cell of a group}; verdicts: see `claim`."""

    groups: list[dict]
    columns: dict[str, Callable]
    verdicts: list[dict]

    @property
    def table(self) -> list[list]:
        return [[cell(group) for cell in self.columns.values()] for group in self.groups]


def claim(text: str, values, bound: float, above: bool) -> dict:
    """A hypothesis about the mean of `values`, one a seed: that it is above, or below, `bound`."""
    values, sign = list(values), -1 if above else 1
    word = compare.judge_hypothesis(
        compare.estimate_mean([sign * value for value in values]), sign * bound
    )
    return {"hypothesis": text, **compare.summarize(values), "verdict": word}


def said(text: str, n: int, word: str) -> dict:
    """A hypothesis that has a word without a number."""
    return {"hypothesis": text, "n": n, "mean": None, "ci95": None, "verdict": word}


def together(text: str, claims: list[dict]) -> dict:
    """A hypothesis that holds where all of its parts do."""
    words = [each["verdict"] for each in claims]
    word = next((word for word in ("refuted", "undecided") if word in words), "supported")
    return said(text, min(each["n"] for each in claims), word)


def by_seed(rows: list[dict], value: str | Callable, **where) -> dict:
    """{seed: a value of its row} for the rows with these entries."""
    get = value if callable(value) else itemgetter(value)
    return {row["seed"]: get(row) for row in rows if where.items() <= row.items()}


def less(own: dict, base: dict) -> list[float]:
    """own - base for every seed that both have."""
    return [own[seed] - base[seed] for seed in own if seed in base]


def groups_of(rows: list[dict], *keys: str) -> list[tuple[tuple, list[dict]]]:
    """(values of the keys, rows that have them), in the order of the rows."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(found.items())


def over_seeds(rows: list[dict], *keys: str, **figures: Callable) -> list[dict]:
    """Of all rows with the same values of the keys: these, and the summary of each figure."""
    result = []
    for values, group in groups_of(rows, *keys):
        found = {name: compare.summarize(list(map(of, group))) for name, of in figures.items()}
        result.append({**dict(zip(keys, values)), **found})
    return result


def mean(name: str, form: str = ".3f") -> Callable:
    """The cell of a figure: mean ± half its 95% interval (number of seeds)."""
    return lambda group: compare.estimate_mean(group[name]["values"]).format(form)


ARM = {"arm": lambda group: f"`{group['arm']}`"}
BLOCKS = {"blocks": itemgetter("layers")}
SIZE = {"parameters": lambda group: f"{group['parameters']:,}"}
LOSS = {"validation loss": mean("val_loss")}
AGAINST = {
    "less that of `standard`": lambda g: mean("less", "+.3f")(g) if "less" in g else None,
    "that is": lambda group: group.get("word"),
}

# ---- 1: effective rank ----


def last_rank(row: dict) -> float:
    return row["rank"][-1]


def lowest_rank(row: dict) -> float:
    return min(row["rank"])


def rises_over_falls(row: dict) -> float:
    """How much blocks raise the rank, in all, over how much others lower it: 0 where it decays
    monotonically."""
    steps = np.diff(row["rank"])
    return float(steps[steps > 0].sum() / max(-steps[steps < 0].sum(), 1e-12))


def rank_findings(rows: list[dict]) -> Findings:
    figures = {"untrained": lambda row: row["initial_rank"][-1], "end": last_rank}
    figures |= {"lowest": lowest_rank, "preservation": itemgetter("preservation")}
    columns = {**ARM, **BLOCKS, "untrained": mean("untrained"), "rank at the end": mean("end")}
    columns |= {"lowest": mean("lowest"), "preserved": mean("preservation")}
    columns["slope of log rank"] = mean("slope", "+.4f")
    found = over_seeds(rows, "arm", "layers", **figures, slope=itemgetter("slope"))
    return Findings(found, columns, rank_verdicts(rows))


def rank_verdicts(rows: list[dict]) -> list[dict]:
    layers = {row["layers"] for row in rows}
    deep, shallow, verdicts = max(layers), min(layers), []

    def at(arm: str, value, layers: int = deep) -> dict:
        return by_seed(rows, value, arm=arm, layers=layers)

    if standard := at("standard", last_rank):
        slope = f"H1a: slope of the standard arm's log rank over {deep} blocks is below 0"
        rises = f"H1b: all rises of that rank are below {NO_RISE:.0%} (ours) of all falls"
        end = f"H1c: its rank at the end is below {NEAR_ZERO} (ours)"
        verdicts = [
            claim(slope, at("standard", "slope").values(), 0, False),
            claim(rises, at("standard", rises_over_falls).values(), NO_RISE, False),
            claim(end, standard.values(), NEAR_ZERO, False),
        ]
        if deep > shallow:
            change = less(standard, at("standard", last_rank, shallow))
            text = f"H1d: it is lower than after {shallow} blocks, by"
            verdicts.append(claim(text, change, 0, False))
        text = "H1: the standard arm's rank decays monotonically towards 0 (H1a to H1d)"
        verdicts.append(together(text, verdicts))
    for name, arm in (("H2: the full arm's", "full"), ("the additive arm's", "additive")):
        text = f"{name} rank after {deep} blocks is above 0.5"
        if ends := at(arm, last_rank).values():
            verdicts.append(claim(text, ends, 0.5, True))
            lowest = at(arm, lowest_rank).values()
            verdicts.append(claim(f"{text}, at every depth", lowest, 0.5, True))
    return verdicts


# ---- 2: ablation, and the copy task ----


def synergy(rows: list[dict]) -> list[float]:
    """Eq. 9 for every seed that has all four arms: the gain of both parts beyond the sum of either's
    gain, in nats."""
    arms = [by_seed(rows, "val_loss", arm=arm) for arm in ("standard", "full", "mhc", "ddl")]
    base, both, mhc, ddl = arms
    seeds = [seed for seed in base if all(seed in arm for arm in arms)]
    return [(base[s] - both[s]) - (base[s] - mhc[s]) - (base[s] - ddl[s]) for s in seeds]


def by_arm(rows: list[dict], **figures: Callable) -> list[dict]:
    """A group for each arm, with its validation loss and that less the standard arm's, and a word
    for it, corrected for the number of arms."""
    figures = {"val_loss": itemgetter("val_loss")} | figures
    found = over_seeds(rows, "arm", "parameters", **figures)
    base, differences = by_seed(rows, "val_loss", arm="standard"), []
    others = [group for group in found if group["arm"] != "standard"]
    others = [(g, less(by_seed(rows, "val_loss", arm=g["arm"]), base)) for g in others]
    others = [(group, values) for group, values in others if values]
    differences = [compare.estimate_mean(values) for _, values in others]
    for (group, values), word in zip(others, compare.judge_differences(differences)):
        group |= {"less": compare.summarize(values), "word": word}
    return found


def ablation_findings(rows: list[dict]) -> Findings:
    values = synergy(rows)
    verdicts = [claim("synergy S (eq. 9, nats) is above 0", values, 0, True)] if values else []
    return Findings(by_arm(rows), ARM | SIZE | LOSS | AGAINST, verdicts)


def copy_findings(rows: list[dict]) -> Findings:
    found = by_arm(rows, exact=lambda row: 100 * row["val_exact_match"])
    for group in found:
        group["solved_at"] = [row["solved_at"] for row in rows if row["arm"] == group["arm"]]
    columns = ARM | SIZE | LOSS | AGAINST | {"exact matches (%)": mean("exact", ".1f")}
    columns["solved at step"] = lambda g: ", ".join(str(step or "-") for step in g["solved_at"])
    full, standard = (by_seed(rows, "val_loss", arm=arm) for arm in ("full", "standard"))
    change = less(full, standard)
    return Findings(found, columns, [claim(BELOW, change, 0, False)] if change else [])


# ---- 3: the gate beta ----


def quarter(values: list[float], last: bool) -> float:
    """Mean over the first, or the last, quarter of the blocks."""
    count = max(len(values) // 4, 1)
    return float(np.mean(values[-count:] if last else values[:count]))


BETA_FIGURES = {
    "first quarter: mean": lambda row: quarter(row["mean"], False),
    "last quarter: mean": lambda row: quarter(row["mean"], True),
    "last quarter: variance": lambda row: quarter(row["variance"], True),
    "first quarter: below 0 (%)": lambda row: 100 * quarter(row["negative"], False),
    "last quarter: below 0 (%)": lambda row: 100 * quarter(row["negative"], True),
}


def beta_findings(rows: list[dict]) -> Findings:
    found = over_seeds(rows, "share", **BETA_FIGURES)
    for group in found:
        changes = [row["sign_changes"] for row in rows if row["share"] == group["share"]]
        group["sign_changes"] = changes
    columns = {"share of training": lambda group: f"{group['share']:.0%}"}
    columns |= {name: mean(name) for name in BETA_FIGURES}
    columns["blocks where the mean changes sign"] = lambda group: "; ".join(
        ", ".join(map(str, each)) or "none" for each in group["sign_changes"]
    )
    return Findings(found, columns, beta_verdicts(rows))


def beta_verdicts(rows: list[dict]) -> list[dict]:
    end = by_seed(rows, dict, share=END).values()
    early = "early blocks (the first quarter): E[beta] is above 0 at the end"
    deep = f"deep blocks (the last quarter): more than {NEAR_ZERO:.0%} (ours) of beta is below 0"
    return [
        claim(early, [quarter(row["mean"], False) for row in end], 0, True),
        claim(deep, [quarter(row["negative"], True) for row in end], NEAR_ZERO, True),
        sharpening(rows),
    ]


def sharpening(rows: list[dict]) -> dict:
    """Whether the step of E[beta] at the block where its sign first changes is larger at the end
    than at a quarter. Refuted where no run's sign changes at the end: nothing could sharpen."""
    text = "the step of E[beta] where its sign changes grows from 25% to 100% of training"
    early, end = (by_seed(rows, step_at_change, share=share) for share in (QUARTER, END))
    if not any(step is not None for step in end.values()):
        return said(f"{text}: it changes nowhere", len(end), "refuted")
    both = [seed for seed in end if None not in (end[seed], early.get(seed))]
    if len(both) < len(end):
        return said(text, len(both), "undecided")
    return claim(text, [end[seed] - early[seed] for seed in both], 0, True)


def step_at_change(row: dict) -> float | None:
    """None: its sign changes nowhere."""
    if not row["sign_changes"]:
        return None
    layer = row["sign_changes"][0]
    return abs(row["mean"][layer] - row["mean"][layer - 1])


# ---- 4: depth at one size; 5: language modelling ----


COURSE = {name: itemgetter(name) for name in ("val_loss", "val_perplexity", "epochs_to_target")}
EPOCHS = {"epochs to the target": mean("epochs_to_target")}


def gap(rows: list[dict], layers: int) -> dict:
    """{seed: loss of the full arm less that of the standard arm}."""
    full, base = (by_seed(rows, "val_loss", arm=a, layers=layers) for a in ("full", "standard"))
    return {seed: full[seed] - base[seed] for seed in full if seed in base}


def depth_findings(rows: list[dict]) -> Findings:
    found = over_seeds(rows, "layers", "arm", "width", "parameters", **COURSE)
    for group in found:
        losses = group["val_loss"]["values"]
        group["deviation"] = float(np.std(losses, ddof=1)) if len(losses) > 1 else None

    def deviation(group) -> str | None:
        return None if group["deviation"] is None else f"{group['deviation']:.3f}"

    columns = BLOCKS | ARM | {"width": itemgetter("width")} | SIZE | LOSS
    columns |= {"its deviation": deviation} | EPOCHS
    gaps = {layers: gap(rows, layers) for layers in sorted({row["layers"] for row in rows})}
    gaps = {layers: values for layers, values in gaps.items() if values}
    verdicts = [claim(f"{n} blocks: {BELOW}", each.values(), 0, False) for n, each in gaps.items()]
    if len(gaps) > 1 and (change := less(gaps[max(gaps)], gaps[min(gaps)])):
        text = f"it falls from {min(gaps)} to {max(gaps)} blocks, by"
        verdicts.append(claim(text, change, 0, False))
        text = "MGT scales better with depth: better at the deepest, by more"
        verdicts.append(together(text, verdicts[-2:]))
    return Findings(found, columns, verdicts)


def language_findings(rows: list[dict]) -> Findings:
    columns = ARM | SIZE | LOSS | {"perplexity": mean("val_perplexity", ".1f")} | EPOCHS
    values = gap(rows, rows[0]["layers"]).values()
    verdicts = [claim(BELOW, values, 0, False)] if values else []
    return Findings(over_seeds(rows, "arm", "parameters", **COURSE), columns, verdicts)
