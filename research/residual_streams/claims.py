"""The claims of the controlled comparison (PLAN2.md), and their verdicts from stored rows."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from research import compare
from research.residual_streams import single_rate, study, variance
from research.residual_streams.streams import BASELINE

SAVED_TOKENS = 0.05  # of claims 1 to 3
# how much longer the longer rung is, in natural logarithms
LOG_RUNGS = math.log(study.RUNGS["long"] / study.RUNGS["short"])
NUM_RESAMPLES = 2000

# (arm, rung) of language, (arm, size) of registers
Setting = tuple[str, str]
# of settings in a contrast; the weights of settings sum to 0
Weights = Mapping[Setting, float]


@dataclass(frozen=True)
class Claim:
    """A claim that a contrast of losses is below 0."""

    number: int
    text: str
    weights: Weights
    # language or registers
    problem: str = "language"
    # whether an interval that holds 0 refutes the claim
    needs_proof: bool = False


@dataclass
class Losses:
    """Losses of reported runs in nats per token, by setting and seed."""

    # of every group of sequences, float64 (groups,)
    runs: dict[Setting, dict[int, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, rows: list[dict], setting_key: str, phase: str = "report") -> "Losses":
        """Collect the reported runs that did not diverge.

        Args:
            setting_key: the entry that makes a setting together with the arm, "rung" or "size"
            phase: "first_half" for the runs on the other half of validation
        """
        runs: dict[Setting, dict[int, np.ndarray]] = {}
        for row in rows:
            if row["phase"] == phase and row["val_loss"] is not None:
                setting = (row["arm"], row[setting_key])
                runs.setdefault(setting, {})[row["seed"]] = np.array(row["group_losses"])
        return cls(runs)

    def list_seeds(self, settings: Iterable[Setting]) -> list[int]:
        """Return the seeds that all of the settings have, in ascending order."""
        return sorted(set.intersection(*(set(self.runs.get(setting, ())) for setting in settings)))

    def table(self, setting: Setting, seeds: list[int] | None = None) -> np.ndarray:
        """Return the losses of a setting, (seeds, groups), of all its seeds or of some."""
        by_seed = self.runs[setting]
        return np.stack([by_seed[seed] for seed in (sorted(by_seed) if seeds is None else seeds)])

    def mean(self, setting: Setting) -> float:
        return float(self.table(setting).mean())

    def contrast(self, weights: Weights, min_seeds: int = 2) -> variance.Contrast | None:
        """Estimate a contrast over the seeds that all of its settings have.

        Returns:
            None if they have fewer than min_seeds
        """
        seeds = self.list_seeds(weights) if weights else []
        if len(seeds) < min_seeds:
            return None
        tables = {setting: self.table(setting, seeds) for setting in weights}
        return variance.estimate(variance.combine_arms(tables, weights))


# ---- the claims ----


def subtract(first: str, second: str, condition: str) -> dict[Setting, float]:
    """Return the weights of an arm minus another under the same condition, a rung or a size."""
    return {(first, condition): 1.0, (second, condition): -1.0}


def interpolate(arm: str, fraction: float) -> dict[Setting, float]:
    """Return the weights of an arm's loss at a fraction of the longer rung's tokens.

    The loss is linear in the logarithm of tokens between the two rungs.
    """
    short_weight = -math.log(fraction) / LOG_RUNGS
    return {(arm, "long"): 1 - short_weight, (arm, "short"): short_weight}


def average_erase(sizes: tuple[str, ...]) -> dict[Setting, float]:
    """Return the weights of the arms with erase minus those without, averaged over conditions.

    Args:
        sizes: of registers, or rungs of language
    """
    weights = {}
    for size in sizes:
        for arm in ("ddl_1", "ddl_tc"):
            weights[arm, size] = 0.5 / len(sizes)
            weights[f"{arm}_no_erase", size] = -0.5 / len(sizes)
    return weights


def list_claims(sizes: tuple[str, ...]) -> list[Claim]:
    """Return the claims of the plan.

    Args:
        sizes: of registers, at which every arm is below chance
    """
    saving = [
        Claim(
            number,
            f"`{arm}` saves at least 5% of tokens",
            {**interpolate(arm, 1 - SAVED_TOKENS), (BASELINE, "long"): -1.0},
        )
        for number, arm in enumerate(("ddl_1", "ddl_tc", "ddl_cc_ec"), 1)
    ]
    controls = [
        Claim(number, f"`ddl_tc` is better than `{control}`", subtract("ddl_tc", control, "long"))
        for number, control in enumerate(("main_gain", "conv", "wide"), 4)
    ]
    erase = [
        Claim(
            number,
            f"erase pays in `{arm}`",
            subtract(arm, f"{arm}_no_erase", "long"),
        )
        for number, arm in enumerate(("ddl_1", "ddl_tc"), 7)
    ]
    registers = Claim(
        9,
        "erase pays where writes must replace (registers)",
        average_erase(sizes),
        problem="registers",
        needs_proof=True,
    )
    return [*saving, *controls, *erase, registers]


def judge(claim: Claim, contrast: variance.Contrast, corrected_p: float) -> str:
    """Return the verdict on a claim: supported, refuted or undecided."""
    is_significant = corrected_p < compare.SIGNIFICANCE_LEVEL
    if is_significant and contrast.high < 0:
        return "supported"
    if claim.needs_proof and contrast.high >= 0:
        return "refuted"
    if is_significant and contrast.low > 0:
        return "refuted"
    return "undecided"


def judge_all(claims: list[Claim], losses: Mapping[str, Losses]) -> list[dict]:
    """Return the estimate and the verdict of every claim.

    Holm's correction counts all claims: one whose runs are not finished has p = 1.

    Args:
        losses: of "language" and "registers"
    """
    min_seeds = len(study.PLANNED_SEEDS)
    contrasts = [losses[claim.problem].contrast(claim.weights, min_seeds) for claim in claims]
    p_values = [1.0 if contrast is None else contrast.p_value() for contrast in contrasts]
    results = []
    for claim, contrast, p_value, corrected in zip(
        claims, contrasts, p_values, compare.correct_p_values(p_values), strict=True
    ):
        result = {"number": claim.number, "claim": claim.text, "p": p_value, "p_holm": corrected}
        if contrast is None:
            result["verdict"] = "not run"
        else:
            result.update(describe(contrast))
            result["verdict"] = judge(claim, contrast, corrected)
        results.append(result)
    return results


def describe(contrast: variance.Contrast) -> dict[str, float]:
    """Return the mean and the 95% interval of a contrast for a JSON file."""
    return {"mean": contrast.mean, "low": contrast.low, "high": contrast.high}


# ---- what is shown without a verdict ----


def list_effects() -> dict[str, Weights]:
    """Return the effects of DDL's parts at the longer rung, one after another."""
    return {
        "learned main gain: main_gain - additive": subtract("main_gain", BASELINE, "long"),
        "convolution of the read: conv - additive": subtract("conv", BASELINE, "long"),
        "convolution from the identity: conv_identity - additive": subtract(
            "conv_identity", BASELINE, "long"
        ),
        "DDL's columns and write, given that convolution: ddl_tc - conv_identity": subtract(
            "ddl_tc", "conv_identity", "long"
        ),
        "four columns: wide - conv": subtract("wide", "conv", "long"),
        "DDL's write to four columns: ddl_tc_no_erase - wide": subtract(
            "ddl_tc_no_erase", "wide", "long"
        ),
        "DDL's write to one column: ddl_1_no_erase - additive": subtract(
            "ddl_1_no_erase", BASELINE, "long"
        ),
        "erase, four columns: ddl_tc - ddl_tc_no_erase": subtract(
            "ddl_tc", "ddl_tc_no_erase", "long"
        ),
        "erase, one column: ddl_1 - ddl_1_no_erase": subtract("ddl_1", "ddl_1_no_erase", "long"),
        "erase: mean of both": average_erase(("long",)),
        "CC and EC in place of TC: ddl_cc_ec - ddl_tc": subtract("ddl_cc_ec", "ddl_tc", "long"),
    }


def compute_token_multiplier(
    arm_losses: tuple[float, float], baseline_losses: tuple[float, float]
) -> float:
    """Return the tokens that the baseline needs for the same loss, over those of the arm.

    Where the arm is ahead at the longer rung, these are the rung's tokens over those after which
    the arm has the baseline's loss; else the tokens after which the baseline has the arm's loss,
    over the rung's. Losses are linear in the logarithm of tokens.

    Args:
        arm_losses: at the shorter and the longer rung
        baseline_losses: the same of the baseline
    """
    is_ahead = arm_losses[1] <= baseline_losses[1]
    short_loss, long_loss = arm_losses if is_ahead else baseline_losses
    slope = (short_loss - long_loss) / LOG_RUNGS
    return math.exp((baseline_losses[1] - arm_losses[1]) / slope)


def resample_token_multiplier(losses: Losses, arm: str) -> dict[str, float]:
    """Return the token multiplier of an arm with its bootstrapped 95% interval.

    Seeds and groups of sequences are drawn with replacement, the same ones for both rungs and both
    arms. With five seeds, such an interval is narrower than one of Student's distribution.
    """
    settings = [(arm, "short"), (arm, "long"), (BASELINE, "short"), (BASELINE, "long")]
    common_seeds = losses.list_seeds(settings)
    num_seeds = len(common_seeds)
    # (settings, seeds, groups)
    stacked = np.stack([losses.table(setting, common_seeds) for setting in settings])
    rng = np.random.default_rng(0)
    multipliers = []
    for _ in range(NUM_RESAMPLES):
        seeds = rng.integers(num_seeds, size=num_seeds)
        groups = rng.integers(stacked.shape[2], size=stacked.shape[2])
        means = stacked[:, seeds][:, :, groups].mean((1, 2))
        multipliers.append(compute_token_multiplier(tuple(means[:2]), tuple(means[2:])))
    means = stacked.mean((1, 2))
    low, high = np.quantile(multipliers, [0.025, 0.975])
    return {
        "mean": compute_token_multiplier(tuple(means[:2]), tuple(means[2:])),
        "low": float(low),
        "high": float(high),
    }


def compare_at_equal_seconds(
    losses: Losses, arm: str, relative_speed: float
) -> variance.Contrast | None:
    """Estimate an arm's loss minus the baseline's, both after the baseline's seconds.

    Args:
        relative_speed: tokens per second of the arm over those of the baseline; a faster arm is
            taken at the tokens of the longer rung
    """
    weights = interpolate(arm, min(relative_speed, 1.0))
    return losses.contrast({**weights, (BASELINE, "long"): -1.0})


def compute_relative_speeds(rows: list[dict]) -> dict[str, list[float]]:
    """Return each arm's tokens per second over the baseline's in every round.

    Rounds in which the baseline is not measured yet are left out.
    """
    baseline_speeds = {
        row["round"]: row["tokens_per_second"] for row in rows if row["arm"] == BASELINE
    }
    relative_speeds: dict[str, list[float]] = {}
    for row in rows:
        if row["round"] in baseline_speeds:
            ratio = row["tokens_per_second"] / baseline_speeds[row["round"]]
            relative_speeds.setdefault(row["arm"], []).append(ratio)
    return relative_speeds


def list_sizes_below_chance(rows: list[dict], chance: float) -> tuple[str, ...]:
    """Return the sizes of registers at which every arm has a reported mean loss below chance."""
    losses = Losses.from_rows(rows, "size")
    return tuple(
        size
        for size in single_rate.REGISTERS.sizes
        if all(
            (arm, size) in losses.runs and losses.mean((arm, size)) < chance
            for arm in single_rate.REGISTERS.seeds
        )
    )
