"""Group runs that differ only in their seed, and estimate the difference between two groups.

The n values of a setting, one for each seed, are taken as independent and normally distributed. An
interval covers the effect of the seed and nothing else: not the choice of a corpus, of a size or of
a learning rate.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from research.runs import Row, has_finished, import_polars, is_setting
from utils import errors

if TYPE_CHECKING:
    import polars as pl

CONFIDENCE_LEVEL = 0.95  # of every interval
SIGNIFICANCE_LEVEL = 1 - CONFIDENCE_LEVEL
MAX_LABEL_LENGTH = 60  # characters


class Metric(NamedTuple):
    """How tables display a metric; a fraction is displayed in percent."""

    label: str
    digits: int
    is_fraction: bool = False


METRICS = {
    "val_loss": Metric("validation loss", 4),
    "ema_val_loss": Metric("validation loss of averaged weights", 4),
    "val_perplexity": Metric("perplexity", 3),
    "val_bits_per_byte": Metric("bits per byte", 4),
    "val_accuracy": Metric("accuracy (%)", 2, is_fraction=True),
    "val_exact_match": Metric("exact match (%)", 2, is_fraction=True),
}


def import_stats() -> ModuleType:
    """Return scipy.stats."""
    return errors.import_optional("scipy.stats", "an interval over seeds")


# ---- estimates ----


class Estimate(NamedTuple):
    """A mean of n values, or a difference of two means.

    half_width: half the width of the two-sided 95% interval of Student's distribution; None for a
    single value. p_value: against a true value of 0, which is below 0.05 exactly if the interval
    excludes 0; 1 for a single value. n: for a difference of two means, that of the smaller sample.
    """

    mean: float
    half_width: float | None
    p_value: float
    n: int

    def format(self, number_format: str = ".3f") -> str:
        """Return `1.345 ± 0.012 (3)`: mean, half the interval, n; or `1.345 (1)` of one value."""
        if self.half_width is None:
            return f"{self.mean:{number_format}} (1)"
        half_width = f"{self.half_width:{number_format.lstrip('+')}}"
        return f"{self.mean:{number_format}} ± {half_width} ({self.n})"

    def scale(self, factor: float) -> "Estimate":
        """Return the estimate in another unit, of which the old one is `factor`."""
        half_width = None if self.half_width is None else factor * self.half_width
        return self._replace(mean=factor * self.mean, half_width=half_width)


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Estimate the mean of the values of one setting; there is at least one."""
    n = len(values)
    mean = float(np.mean(values))
    if n == 1:
        return Estimate(mean, half_width=None, p_value=1.0, n=1)
    if np.ptp(values) == 0:  # scipy's test divides by the spread
        return Estimate(mean, half_width=0.0, p_value=float(mean == 0), n=n)
    return make_estimate(mean, import_stats().ttest_1samp(values, 0), n)


def estimate_paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Estimate the mean of values - baseline, where values with the same index share a seed.

    An effect of the seed on both, for example through the order of the data, cancels.
    """
    return estimate_mean(np.subtract(values, baseline))


def estimate_unpaired_difference(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Estimate the mean of values minus that of the baseline, with independent seeds.

    The two may have unequal spreads (Welch 1947).
    """
    difference = float(np.mean(values) - np.mean(baseline))
    n = min(len(values), len(baseline))
    if n == 1:
        return Estimate(difference, half_width=None, p_value=1.0, n=1)
    test = import_stats().ttest_ind(values, baseline, equal_var=False)
    return make_estimate(difference, test, n)


def make_estimate(mean: float, test: Any, n: int) -> Estimate:
    """Return the estimate of one of scipy's t-tests."""
    interval = test.confidence_interval(CONFIDENCE_LEVEL)
    half_width = float(interval.high - interval.low) / 2
    return Estimate(mean, half_width, float(test.pvalue), n)


def judge_differences(differences: Sequence[Estimate], lower_is_better: bool = True) -> list[str]:
    """Return the verdict on each difference to a baseline, corrected for their number.

    A verdict is "better" or "worse" if the interval excludes 0 and the corrected p-value is below 0.05,
    otherwise "undecided". At most 5% of studies have a false "better" or "worse" among all of their
    verdicts. Differences of a single value, which are always undecided, do not count.
    """
    p_values = [difference.p_value for difference in differences if difference.n > 1]
    corrected_p_values = iter(correct_p_values(p_values))
    verdicts = []
    for difference in differences:
        corrected = next(corrected_p_values) if difference.n > 1 else 1.0
        if corrected >= SIGNIFICANCE_LEVEL:
            verdicts.append("undecided")
        elif (difference.mean < 0) == lower_is_better:
            verdicts.append("better")
        else:
            verdicts.append("worse")
    return verdicts


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number, so that all below 0.05 hold together (Holm 1979)."""
    order = np.argsort(p_values, kind="stable")
    num_remaining = np.arange(len(order), 0, -1)
    scaled = np.asarray(p_values, dtype=float)[order] * num_remaining
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(scaled), 1)
    return corrected.tolist()


# ---- groups of runs ----


@dataclass(frozen=True)
class Group:
    """Runs of one setting, which differ in their seed, or a run by itself."""

    name: str
    runs: "pl.DataFrame"

    @property
    def rows(self) -> list[Row]:
        return self.runs.to_dicts()

    @property
    def model_name(self) -> str | None:
        """The model of all runs, or None if they have several."""
        names = self.runs["model"].unique()
        return names[0] if len(names) == 1 else None

    @property
    def seeds(self) -> list[int | None]:
        return self.get_column("seed")

    @property
    def step(self) -> int | None:
        """The step of the last evaluation."""
        return self.get_column("val_step")[0]

    @property
    def unfinished(self) -> bool:
        """True if a run has not reached its last step."""
        return any(has_finished(row) is False for row in self.rows)

    @property
    def mixed_keys(self) -> list[str]:
        """The settings besides the seed in which the runs differ, as `--by` may allow."""
        return find_differing_keys(self.runs)

    @property
    def cautions(self) -> list[str]:
        """The reasons why the runs are no repetitions of one setting with one seed each."""
        seeds = Counter(seed for seed in self.seeds if seed is not None)
        repeated_seeds = [str(seed) for seed, count in seeds.items() if count > 1]
        commits = sorted({commit or "unknown" for commit in self.get_column("commit")})
        cautions = []
        if self.mixed_keys:
            cautions.append(f"its runs also differ in {', '.join(self.mixed_keys)}")
        if repeated_seeds:
            cautions.append(
                f"seed {', '.join(repeated_seeds)} occurs more than once: such runs are not "
                "independent"
            )
        if len(commits) > 1:
            cautions.append(f"its runs were trained at several commits: {', '.join(commits)}")
        return cautions

    def get_column(self, column: str) -> list:
        """Return a column of the runs, None for each run without a value."""
        return get_column(self.runs, column)

    def get_values(self, metric: str) -> list[float]:
        """Return the metric of each run's last evaluation, or [] if a run does not have it."""
        values = self.get_column(metric)
        return [] if None in values else values

    def estimate(self, metric: str) -> Estimate | None:
        """Estimate the metric's mean in the unit that tables display, or None if a run lacks it."""
        values = self.get_values(metric)
        return to_display_unit(estimate_mean(values), metric) if values else None


def get_column(runs: "pl.DataFrame", column: str) -> list:
    """Return a column of a frame of runs, None for each run without a value."""
    return runs[column].to_list() if column in runs.columns else [None] * runs.height


def to_display_unit(estimate: Estimate, metric: str) -> Estimate:
    """Convert an estimate of a fraction to percent; other metrics keep their unit."""
    return estimate.scale(100) if METRICS[metric].is_fraction else estimate


def find_column(runs: "pl.DataFrame", key: str) -> str:
    """Return the column of a key of `--by`: a setting, run, model, commit or tokenizer.

    Raises:
        ValueError: no run has the key
    """
    columns = {
        "run": "name",
        "tokenizer": "corpus.tokenizer",
        "seed": "seed",
        "model": "model",
        "commit": "commit",
        **{column: column for column in runs.columns if is_setting(column)},
    }
    if key not in columns:
        raise ValueError(f"--by: no run has a key {key!r}{errors.suggest(key, columns)}")
    return columns[key]


def group_runs(
    runs: "pl.DataFrame", keys: Sequence[str] = (), same_step: bool = True
) -> list[Group]:
    """Group runs of the same settings, corpus and steps if each seed occurs once.

    Runs with a repeated seed are groups by themselves, as are runs whose settings are not known.

    Args:
        keys: if given, only these keys must agree, and they name the group
        same_step: whether runs must have their last evaluation at the same step

    Raises:
        ValueError: no run has one of the keys
    """
    pl = import_polars()
    columns = [find_column(runs, key) for key in keys]
    if not keys:
        settings = [column for column in runs.columns if is_setting(column)]
        columns = ["model", *settings, "corpus.sha256"]
    if same_step:
        columns.append("val_step")
    unknown = pl.when(pl.col("model").is_null()).then(pl.col("name")).alias("unknown model")
    named = runs.with_columns(unknown, pl.Series("group", name_groups(runs, keys), dtype=pl.String))
    columns = ["unknown model", *(column for column in columns if column in runs.columns)]
    groups = []
    for members in named.partition_by(columns, maintain_order=True):
        names = members["group"].to_list()
        members = members.drop("group", "unknown model")
        if keys or members["seed"].n_unique() == members.height:
            groups.append(Group(names[0], members))
        else:
            groups += [Group(name, members[index]) for index, name in enumerate(names)]
    return make_names_unique(groups)


def make_names_unique(groups: list[Group]) -> list[Group]:
    """Add the name of its first run to each group whose name another group has, too."""
    names = [group.name for group in groups]
    return [
        replace(group, name=f"{group.name}, {group.runs['name'][0]}")
        if names.count(group.name) > 1
        else group
        for group in groups
    ]


def get_corpus_digest(row: Row) -> str:
    """Return the first eight digits of the corpus's checksum, or "" if it is not known."""
    return str(row.get("corpus.sha256") or "")[:8]


def name_groups(runs: "pl.DataFrame", keys: Sequence[str] = ()) -> list[str]:
    """Return for each run the name of its group.

    The name has the values of `keys`. Without keys, it has the model and the settings in which runs
    of that model differ.
    """
    if keys:
        columns = {key: find_column(runs, key) for key in keys}
        names = []
        for row in runs.iter_rows(named=True):
            values = {key: str(row[column]) for key, column in columns.items()}
            bare_keys = ("model", "run")
            parts = [
                value if key in bare_keys else f"{key}={value}" for key, value in values.items()
            ]
            names.append(" ".join(parts))
        return names
    names = []
    for row in runs.iter_rows(named=True):
        same_model = runs.filter(import_polars().col("model").eq_missing(row["model"]))
        parts = [row["model"] or row["name"]]
        if row["model"] is not None:
            parts += [f"{key}={row[key]}" for key in find_differing_keys(same_model)]
        digests = {get_corpus_digest(other) for other in same_model.to_dicts()}
        if get_corpus_digest(row) and len(digests) > 1:
            parts.append(f"corpus={get_corpus_digest(row)}")
        names.append(" ".join(parts))
    return names


def find_differing_keys(runs: "pl.DataFrame") -> list[str]:
    """Return the settings in which runs differ."""
    return [key for key in runs.columns if is_setting(key) and runs[key].n_unique() > 1]


def shorten(name: str) -> str:
    """Return a name with its middle replaced by an ellipsis if it is longer than MAX_LABEL_LENGTH."""
    if len(name) <= MAX_LABEL_LENGTH:
        return name
    ellipsis = "..."
    half = (MAX_LABEL_LENGTH - len(ellipsis)) // 2
    return f"{name[:half]}{ellipsis}{name[-half:]}"


# ---- comparisons ----


@dataclass(frozen=True)
class Comparison:
    """The difference of a group to its baseline.

    estimate: the group minus the baseline; if it is None, `reason` says why they are not
    comparable. paired: whether runs are compared one by one, with seeds that saw the data in the
    same order; if not, `reason` says why. verdict: is corrected for the number of comparisons.
    """

    group: Group
    baseline: Group
    metric: str
    estimate: Estimate | None
    paired: bool = False
    verdict: str = ""
    reason: str = ""


def find_baseline(groups: list[Group], against: str) -> Group:
    """Return the group with this name or model.

    Raises:
        ValueError: there is no such group, or there are several
    """
    candidates = [group for group in groups if against in (group.name, group.model_name)]
    if len(candidates) != 1:
        names = ", ".join(group.name for group in candidates or groups)
        raise ValueError(
            f"--against={against}: {len(candidates) or 'none'} of the rows match: give one of {names}"
        )
    return candidates[0]


def choose_metric(groups: list[Group]) -> str:
    """Return the metric that groups are compared by, which all of them have.

    It is bits per byte if possible, for tasks the accuracy, otherwise the loss.
    """
    metrics = ["val_bits_per_byte"]
    if not any(group.get_values("val_bits_per_byte") for group in groups):
        metrics.append("val_accuracy")
    for metric in metrics:
        if all(group.get_values(metric) for group in groups):
            return metric
    return "val_loss"


def compare_groups(
    groups: list[Group], baseline: Group, metric: str | None = None
) -> list[Comparison]:
    """Compare every other group with the baseline; all groups have evaluations."""
    metric = metric or choose_metric(groups)
    comparisons = [
        compare_pair(group, baseline, metric) for group in groups if group is not baseline
    ]
    estimates = [comparison.estimate for comparison in comparisons if comparison.estimate]
    lower_is_better = not METRICS[metric].is_fraction
    verdicts = iter(judge_differences(estimates, lower_is_better))
    return [
        replace(comparison, verdict=next(verdicts)) if comparison.estimate else comparison
        for comparison in comparisons
    ]


def compare_pair(group: Group, baseline: Group, metric: str) -> Comparison:
    """Compare a group with a baseline, without a verdict, which depends on the other groups."""
    if reason := explain_incomparable(group, baseline, metric):
        return Comparison(group, baseline, metric, estimate=None, reason=reason)
    if reason := explain_unpaired(group, baseline):
        estimate = estimate_unpaired_difference(
            group.get_values(metric), baseline.get_values(metric)
        )
        return Comparison(group, baseline, metric, estimate, reason=reason)
    pairs = group.runs.join(baseline.runs, on="seed", suffix=" of the baseline")
    estimate = estimate_paired_difference(
        pairs[metric].to_list(), pairs[f"{metric} of the baseline"].to_list()
    )
    return Comparison(group, baseline, metric, estimate, paired=True)


def explain_incomparable(group: Group, baseline: Group, metric: str) -> str:
    """Return why two groups cannot be compared, or "" if they can."""
    has_unfinished_run = group.unfinished or baseline.unfinished
    if group.step != baseline.step or has_unfinished_run:
        reason = f"evaluated at step {group.step}, the baseline at {baseline.step}"
        return f"{reason}; a run is not finished" if has_unfinished_run else reason
    rows = [*group.rows, *baseline.rows]
    if len({describe_validation_data(row, metric) for row in rows}) == 1:
        return ""
    if metric == "val_bits_per_byte":
        return "another validation text"
    return "another vocabulary or validation text"


def describe_validation_data(row: Row, metric: str = "val_loss") -> str:
    """Return a text that is the same for runs whose metric is of the same validation data.

    It has the validation text and the part of it that was read, as far as a run knows them; for
    metrics per token, also the tokens.
    """
    counts = json.loads(row.get("corpus.val") or "{}")
    tokens = [*get_vocabulary(row), counts.get("tokens")]
    part = row.get("eval_part") or "all"
    data = [row.get("corpus.source"), row.get("corpus.name"), counts.get("bytes"), part]
    # all of a text is the same text for every tokenizer and block size
    if part != "all" or not row.get("eval_full"):
        data += [row.get("val_sequences"), row.get("block_size"), *tokens]
    if metric != "val_bits_per_byte" or not counts.get("bytes"):
        data += tokens
    return json.dumps(data)


def get_vocabulary(row: Row) -> tuple[str | None, int | None]:
    """Return the tokenizer and the vocabulary size, None if they are not known."""
    return row.get("corpus.tokenizer"), row.get("corpus.vocab_size")


def explain_unpaired(group: Group, baseline: Group) -> str:
    """Return why no two runs had the same seed and order of data, or "" if some had."""
    for either_group in (group, baseline):
        if len(set(either_group.seeds)) < len(either_group.seeds):
            return f"{either_group.name} has runs of the same seed"
    # data/loader.py makes the order of the data from these, the corpus and the seed
    orders = []
    for row in [*group.rows, *baseline.rows]:
        corpus = {column: value for column, value in row.items() if column.startswith("corpus.")}
        orders.append((corpus, row.get("block_size"), row.get("global_batch_size")))
    if any(order != orders[0] for order in orders):
        return "the data came in another order"
    shared_seeds = set(group.seeds) & set(baseline.seeds) - {None}
    if len(shared_seeds) == 1 and min(len(group.seeds), len(baseline.seeds)) > 1:
        return "one seed in common"  # a single pair has no interval
    return "" if shared_seeds else "no seed in common"
