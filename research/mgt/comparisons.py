"""The comparisons of the MGT study and their verdicts, by the rules of PLAN.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from research import compare

MONOTONIC = 0.05  # rises over falls below this are "monotonic"
TOWARDS_ZERO = 0.1
SIGNIFICANT = 0.1
DEEPEST = 100
SHALLOWEST = 12

ValueBySeed = dict[int, float]


@dataclass(frozen=True)
class Comparison:
    """A claim that the mean over seeds of some values is above, or below, a bound."""

    claim: str

    # one value per seed; None if runs are missing
    values: Sequence[float] | None

    bound: float = 0.0
    above: bool = False

    # (arm, blocks, equal) of the settings that must have learned for it to be judged
    settings: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True)
class Table:
    """The reported runs of one experiment."""

    rows: list[dict]
    seeds: tuple[int, ...]

    # mean loss of the bigram model on the scored sequences
    bigram: float

    def by_seed(
        self, arm: str, layers: int, value: str | Callable[[dict], float], equal: str = ""
    ) -> ValueBySeed | None:
        """Return the values of a setting by seed; None unless every seed is there.

        The value of a run that diverged is None.
        """
        get = value if callable(value) else lambda row: row[value]
        values = {
            row["seed"]: None if row["val_loss"] is None else get(row)
            for row in self.rows
            if row["kind"] == "seed"
            and (row["arm"], row["layers"], row["equal"]) == (arm, layers, equal)
        }
        if set(values) != set(self.seeds):
            return None
        return {seed: values[seed] for seed in self.seeds}

    def has_learned(self, arm: str, layers: int, equal: str = "") -> bool | None:
        """Return whether the upper 95% limit of the loss is below the bigram's; None: not run."""
        losses = self.by_seed(arm, layers, "val_loss", equal)
        if losses is None:
            return None
        if any(loss is None for loss in losses.values()):
            return False
        return compare.estimate_mean(list(losses.values())).high < self.bigram


def combine(signed_terms: list[tuple[int, ValueBySeed | None]]) -> list[float] | None:
    """Return the signed sum of values for every seed; None if a term is missing or diverged."""
    for _, values in signed_terms:
        if values is None or None in values.values():
            return None
    seeds = signed_terms[0][1]
    return [sum(sign * values[seed] for sign, values in signed_terms) for seed in seeds]


def judge(comparisons: list[Comparison], table: Table) -> list[dict]:
    """Return the comparisons with estimates, corrected p-values and verdicts.

    Holm's correction counts all of them: a comparison that cannot be judged has p = 1.
    """
    results = []
    for comparison in comparisons:
        result = {
            "hypothesis": comparison.claim,
            "bound": comparison.bound,
            "above": comparison.above,
            "n": 0,
            "mean": None,
            "ci95": None,
            "values": None,
            "p": 1.0,
        }
        learned = [table.has_learned(*setting) for setting in comparison.settings]
        # a run that diverged has no values, and did not learn
        is_missing = comparison.values is None and False not in learned
        if None in learned or is_missing:
            result["verdict"] = "not run"
            results.append(result)
            continue
        if comparison.values is not None:
            result.update(compare.summarize(comparison.values))
        if False in learned:
            result["verdict"] = "did not learn"
        else:
            beyond_bound = compare.estimate_mean([x - comparison.bound for x in comparison.values])
            result["p"] = beyond_bound.compute_p_value()
        results.append(result)

    for result, corrected in zip(
        results, compare.correct_p_values([r["p"] for r in results]), strict=True
    ):
        result["p_holm"] = corrected
        if "verdict" in result:
            continue
        if corrected >= compare.SIGNIFICANCE_LEVEL:
            result["verdict"] = "undecided"
        elif (result["mean"] > result["bound"]) == result["above"]:
            result["verdict"] = "supported"
        else:
            result["verdict"] = "refuted"
    return results


def is_below(table: Table, own: str, base: str, layers: int, equal: str = "") -> Comparison:
    """Claim that an arm has a lower loss than another."""
    losses = [table.by_seed(arm, layers, "val_loss", equal) for arm in (own, base)]
    return Comparison(
        f"`{own}` has a lower loss than `{base}`",
        combine([(1, losses[0]), (-1, losses[1])]),
        settings=((own, layers, equal), (base, layers, equal)),
    )


def has_synergy(table: Table, base: str, gate: str, delta: str, both: str, note: str) -> Comparison:
    """Claim that S (equation 9) of four arms is above 0.

    S = (L_base - L_both) - (L_base - L_gate) - (L_base - L_delta) = L_gate + L_delta - L_base - L_both
    """
    arms = ((1, gate), (1, delta), (-1, base), (-1, both))
    terms = [(sign, table.by_seed(arm, 24, "val_loss")) for sign, arm in arms]
    return Comparison(
        f"the two gates are synergistic (S > 0), {note}",
        combine(terms),
        above=True,
        settings=tuple((arm, 24, "") for _, arm in arms),
    )


def compare_ablation(table: Table) -> list[Comparison]:
    return [
        is_below(table, "additive", "standard", 24),
        has_synergy(table, "standard", "mhc", "ddl", "full", "paper's arms (eq. 9)"),
        has_synergy(table, "additive", "mhc_pre", "ddl", "full", "norm before"),
        has_synergy(table, "standard", "mhc", "ddl_post", "full_post", "norm after"),
        is_below(table, "full", "additive_038", 24),
        is_below(table, "full", "standard", 24),
        is_below(table, "mhc", "standard", 24),
        is_below(table, "ddl", "standard", 24),
        is_below(table, "full", "additive", 24),
        is_below(table, "full_post", "standard", 24),
    ]


# ---- experiment 1 ----


def compute_slope(row: dict) -> float:
    """Return the slope of the logarithm of the rank over depth, by least squares."""
    return float(np.polyfit(np.arange(len(row["rank"])), np.log(row["rank"]), 1)[0])


def compute_rises_over_falls(row: dict) -> float:
    """Return the sum of all rises of the rank over that of all falls; 0 if it only falls."""
    steps = np.diff(row["rank"])
    return float(steps[steps > 0].sum() / max(-steps[steps < 0].sum(), 1e-12))


def get_last_rank(row: dict) -> float:
    return row["rank"][-1]


def compare_rank(table: Table) -> list[Comparison]:
    def get(arm: str, value: Callable[[dict], float], layers: int = DEEPEST) -> ValueBySeed | None:
        return table.by_seed(arm, layers, value)

    def at_end(arm: str, layers: int = DEEPEST) -> ValueBySeed | None:
        return get(arm, get_last_rank, layers)

    standard = (("standard", DEEPEST, ""),)
    both_depths = (("standard", DEEPEST, ""), ("standard", SHALLOWEST, ""))
    full = (("full", DEEPEST, ""),)
    additive = (("additive", DEEPEST, ""),)
    return [
        Comparison(
            "H1a: log rank of `standard` falls over depth (slope below 0)",
            combine([(1, get("standard", compute_slope))]),
            settings=standard,
        ),
        Comparison(
            f"H1b: it falls monotonically (rises divided by falls below {MONOTONIC})",
            combine([(1, get("standard", compute_rises_over_falls))]),
            MONOTONIC,
            settings=standard,
        ),
        Comparison(
            f"H1c: rank of `standard` after the last block is below {TOWARDS_ZERO}",
            combine([(1, at_end("standard"))]),
            TOWARDS_ZERO,
            settings=standard,
        ),
        Comparison(
            f"H1d: that rank is lower than with {SHALLOWEST} blocks",
            combine([(1, at_end("standard")), (-1, at_end("standard", SHALLOWEST))]),
            settings=both_depths,
        ),
        Comparison(
            "H2: rank of `full` after the last block is above 0.5",
            combine([(1, at_end("full"))]),
            0.5,
            above=True,
            settings=full,
        ),
        Comparison(
            "rank of `additive` after the last block is above 0.5",
            combine([(1, at_end("additive"))]),
            0.5,
            above=True,
            settings=additive,
        ),
        Comparison(
            "rank of `full` after the last block is higher than that of `standard`",
            combine([(1, at_end("full")), (-1, at_end("standard"))]),
            above=True,
            settings=full + standard,
        ),
        Comparison(
            "rank of `full` after the last block is higher than that of `additive`",
            combine([(1, at_end("full")), (-1, at_end("additive"))]),
            above=True,
            settings=full + additive,
        ),
    ]


# ---- experiment 3 ----


def mean_of_quarter(row: dict, name: str, last: bool) -> float:
    """Return the mean over the first or last quarter of blocks, after the last step."""
    values = row["gates"][str(row["steps"])][name]
    count = len(values) // 4
    return float(np.mean(values[-count:] if last else values[:count]))


def compare_beta(table: Table) -> list[Comparison]:
    def deep(arm: str, name: str) -> ValueBySeed | None:
        return table.by_seed(arm, 24, lambda row: mean_of_quarter(row, name, last=True))

    full = (("full", 24, ""),)
    early = table.by_seed("full", 24, lambda row: mean_of_quarter(row, "sign_varies", last=False))
    return [
        Comparison(
            f"`full`, last quarter of blocks: share of features whose sign varies is above {SIGNIFICANT}",
            combine([(1, deep("full", "sign_varies"))]),
            SIGNIFICANT,
            above=True,
            settings=full,
        ),
        Comparison(
            f"`full_bias_0`, last quarter of blocks: share of features whose sign varies is above {SIGNIFICANT}",
            combine([(1, deep("full_bias_0", "sign_varies"))]),
            SIGNIFICANT,
            above=True,
            settings=(("full_bias_0", 24, ""),),
        ),
        Comparison(
            "`full`, last quarter of blocks: mean of beta alpha is above 0",
            combine([(1, deep("full", "erasure"))]),
            above=True,
            settings=full,
        ),
        Comparison(
            "`full`, last quarter of blocks: mean cos(X' - X, X) is below 0",
            combine([(1, deep("full", "cosine"))]),
            settings=full,
        ),
        Comparison(
            "`full`: that share is higher in the last than in the first quarter of blocks",
            combine([(1, deep("full", "sign_varies")), (-1, early)]),
            above=True,
            settings=full,
        ),
        is_below(table, "full_bias_0", "full", 24),
    ]


# ---- experiments 4 and 5 ----


def compare_depth(table: Table) -> list[Comparison]:
    depths = (6, 12, 24, 48)

    def steps_to_bigram(row: dict) -> float:
        evaluations = [*row["evaluations"], [row["steps"], row["val_loss"]]]
        return next((step for step, loss in evaluations if loss < table.bigram), row["steps"])

    gaps = {depth: is_below(table, "full", "standard", depth, "size") for depth in depths}
    comparisons = [
        Comparison(f"{depth} blocks: {gap.claim}", gap.values, settings=gap.settings)
        for depth, gap in gaps.items()
    ]
    shallow = gaps[depths[0]]
    deep = gaps[depths[-1]]
    change = None
    if shallow.values is not None and deep.values is not None:
        change = [x - y for x, y in zip(deep.values, shallow.values, strict=True)]
    comparisons.append(
        Comparison(
            f"`full` is further ahead of `standard` with {depths[-1]} blocks than with {depths[0]}",
            change,
            settings=deep.settings + shallow.settings,
        )
    )
    for depth in depths:
        steps = [table.by_seed(arm, depth, steps_to_bigram, "size") for arm in ("full", "standard")]
        comparisons.append(
            Comparison(
                f"{depth} blocks: `full` reaches the bigram's loss in fewer steps than `standard`",
                combine([(1, steps[0]), (-1, steps[1])]),
                settings=gaps[depth].settings,
            )
        )
    return comparisons


def compare_language(table: Table) -> list[Comparison]:
    comparisons = []
    for base in ("standard", "additive"):
        for equal in ("width", "size"):
            plain = is_below(table, "full", base, 6, equal)
            claim = f"equal {equal}: {plain.claim}"
            comparisons.append(Comparison(claim, plain.values, settings=plain.settings))
    return comparisons


COMPARISONS: dict[str, Callable[[Table], list[Comparison]]] = {
    "rank": compare_rank,
    "ablation": compare_ablation,
    "beta": compare_beta,
    "depth": compare_depth,
    "language": compare_language,
}
