"""Group runs that differ only in their seed, and estimate the difference between two groups.

The n values of a setting, one for each seed, are taken as independent and normally distributed. An
interval covers the effect of the seed and nothing else: not the choice of a corpus, of a size or of
a learning rate.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from configurator import collect_options
from research.runs import Run
from training.config import TrainConfig
from utils import errors

CONFIDENCE_LEVEL = 0.95  # of every interval
SIGNIFICANCE_LEVEL = 1 - CONFIDENCE_LEVEL
# metrics that are stored as fractions and displayed in percent
FRACTION_METRICS = {"val_accuracy": "accuracy (%)", "val_exact_match": "exact match (%)"}
METRIC_LABELS = {
    "val_loss": "validation loss",
    "ema_val_loss": "validation loss of averaged weights",
    "val_perplexity": "perplexity",
    "val_bits_per_byte": "bits per byte",
    **FRACTION_METRICS,
}
MAX_LABEL_LENGTH = 60  # characters
FIRST_LABEL_KEYS = ("model", "hidden_size", "num_hidden_layers")


def import_special_functions() -> ModuleType:
    """Return scipy.special, which has Student's distribution."""
    return errors.import_optional("scipy.special", "an interval over seeds")


# ---- estimates ----


@dataclass(frozen=True)
class Estimate:
    """A mean of n values, or a difference of two means.

    mean and standard_error have the unit of the values. n is the number of values; for a difference
    of two means, that of the smaller sample. A single value has no spread: its standard error is
    infinite and it has no degrees of freedom.
    """

    mean: float
    standard_error: float
    degrees_of_freedom: float
    n: int

    @property
    def half_width(self) -> float:
        """Half the width of the two-sided 95% interval of Student's distribution."""
        if self.n == 1:
            return math.inf
        quantile = import_special_functions().stdtrit(
            self.degrees_of_freedom, 1 - SIGNIFICANCE_LEVEL / 2
        )
        return float(quantile) * self.standard_error

    @property
    def low(self) -> float:
        """The lower end of the 95% interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end of the 95% interval."""
        return self.mean + self.half_width

    def compute_p_value(self) -> float:
        """Return the p-value against a true value of 0; below 0.05 exactly if the interval excludes 0."""
        if self.mean == 0 or self.n == 1:
            return 1.0
        if self.standard_error == 0:
            return 0.0
        t_statistic = -abs(self.mean) / self.standard_error
        return float(2 * import_special_functions().stdtr(self.degrees_of_freedom, t_statistic))

    def format(self, number_format: str = ".3f") -> str:
        """Return `1.345 ± 0.012 (3)`: mean, half the interval, n; or `1.345 (1)` of one value."""
        half_width = ""
        if self.n > 1:
            half_width = f" ± {self.half_width:{number_format.lstrip('+')}}"
        return f"{self.mean:{number_format}}{half_width} ({self.n})"

    def scale(self, factor: float) -> "Estimate":
        """Return the estimate in another unit, of which the old one is `factor`."""
        return replace(
            self, mean=factor * self.mean, standard_error=abs(factor) * self.standard_error
        )


def estimate_mean(values: Sequence[float]) -> Estimate:
    """Estimate the mean of the values of one setting; its standard error is s / sqrt(n).

    Raises:
        ValueError: there is no value
    """
    n = len(values)
    if not n:
        raise ValueError("no value: give at least one value for a mean, two for its interval")
    standard_error = math.inf
    if n > 1:
        standard_error = float(np.std(values, ddof=1)) / math.sqrt(n)
    return Estimate(
        mean=float(np.mean(values)),
        standard_error=standard_error,
        degrees_of_freedom=n - 1,
        n=n,
    )


def summarize(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean of values as JSON files store it: n, mean, ci95 and the values.

    ci95 is half the width of the interval, or None for a single value.
    """
    estimate = estimate_mean(values)
    return {
        "n": estimate.n,
        "mean": estimate.mean,
        "ci95": estimate.half_width if estimate.n > 1 else None,
        "values": list(values),
    }


def estimate_paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Estimate the mean of values - baseline, where values with the same index share a seed.

    An effect of the seed on both, for example through the order of the data, cancels.

    Raises:
        ValueError: the numbers of values are not equal
    """
    if len(values) != len(baseline):
        raise ValueError(
            f"{len(values)} and {len(baseline)} values cannot be paired: give the same seeds for "
            "both"
        )
    return estimate_mean(np.subtract(values, baseline))


def estimate_unpaired_difference(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Estimate the mean of values minus that of the baseline, with independent seeds.

    The two may have unequal spreads (Welch 1947).
    """
    first = estimate_mean(values)
    second = estimate_mean(baseline)
    first_variance = first.standard_error**2
    second_variance = second.standard_error**2
    variance = first_variance + second_variance
    degrees_of_freedom = min(first.degrees_of_freedom, second.degrees_of_freedom)
    if degrees_of_freedom and variance:
        degrees_of_freedom = variance**2 / (
            first_variance**2 / first.degrees_of_freedom
            + second_variance**2 / second.degrees_of_freedom
        )
    return Estimate(
        mean=first.mean - second.mean,
        standard_error=math.sqrt(variance),
        degrees_of_freedom=degrees_of_freedom,
        n=min(first.n, second.n),
    )


def judge_differences(differences: Sequence[Estimate], lower_is_better: bool = True) -> list[str]:
    """Return the verdict on each difference to a baseline, corrected for their number.

    A verdict is "better" or "worse" if the interval excludes 0 and the corrected p-value is below 0.05,
    otherwise "undecided". At most 5% of studies have a false "better" or "worse" among all of their
    verdicts. Differences of a single value, which are always undecided, do not count.
    """
    p_values = [difference.compute_p_value() for difference in differences if difference.n > 1]
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
    """Runs of one setting, which differ in their seed, or a run by itself.

    step: the step of their last evaluation. mixed_keys: keys besides the seed in which the runs
    differ, which is possible where `--by` put them together.
    """

    name: str
    model_name: str | None
    runs: tuple[Run, ...]
    step: int | None
    mixed_keys: tuple[str, ...] = ()

    @property
    def seeds(self) -> list[int | None]:
        return [run.seed for run in self.runs]

    @property
    def unfinished(self) -> bool:
        """True if a run has not reached its last step."""
        return any(run.finished is False for run in self.runs)

    @property
    def cautions(self) -> list[str]:
        """The reasons why the runs are no repetitions of one setting with one seed each."""
        known_seeds = [seed for seed in self.seeds if seed is not None]
        repeated_seeds = [
            str(seed) for seed in dict.fromkeys(known_seeds) if known_seeds.count(seed) > 1
        ]
        commits = sorted({run.commit or "unknown" for run in self.runs})
        corpora = sorted({get_corpus_digest(run) or "unknown" for run in self.runs})
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
        if len(corpora) > 1:
            cautions.append(f"its runs were trained on several corpora: {', '.join(corpora)}")
        return cautions

    def get_values(self, metric: str) -> list[float]:
        """Return the metric of each run's last evaluation, or [] if a run does not have it."""
        evaluations = [run.final_evaluation or {} for run in self.runs]
        if not all(metric in evaluation for evaluation in evaluations):
            return []
        return [evaluation[metric] for evaluation in evaluations]

    def estimate(self, metric: str) -> Estimate | None:
        """Estimate the metric's mean in the unit that tables display, or None if a run lacks it."""
        values = self.get_values(metric)
        return to_display_unit(estimate_mean(values), metric) if values else None


def to_display_unit(estimate: Estimate, metric: str) -> Estimate:
    """Convert an estimate of a fraction to percent; other metrics keep their unit."""
    return estimate.scale(100) if metric in FRACTION_METRICS else estimate


def select_runs(runs: list[Run], conditions: Sequence[str]) -> list[Run]:
    """Return the runs that meet all conditions, each written as `key=value[,value]`.

    Raises:
        ValueError: a condition has no value, its key is unknown, or no run meets it
    """
    for condition in conditions:
        key, equals, values = condition.partition("=")
        if not equals:
            raise ValueError(
                f"--where={condition}: give key=value, or several values with commas between"
            )
        check_keys(runs, [key], "--where")
        existing_values = sorted({str(get_setting(run, key)) for run in runs})
        selected = []
        for run in runs:
            setting = get_setting(run, key)
            if any(matches_text(setting, text) for text in values.split(",")):
                selected.append(run)
        if not selected:
            raise ValueError(
                f"--where={condition}: no run matches; its values are {', '.join(existing_values)}"
            )
        runs = selected
    return runs


def get_setting(run: Run, key: str) -> Any:
    """Return a setting of a run, or its name, model, commit or tokenizer."""
    if key == "run":
        return run.name
    if key == "model":
        return run.model_name
    if key == "commit":
        return run.commit
    if key == "tokenizer":
        return run.corpus.get("tokenizer")
    return run.settings.get(key)


def matches_text(setting: Any, text: str) -> bool:
    """Return whether a setting has the value that a user wrote; 1e-3 equals 0.001."""
    if isinstance(setting, int | float) and not isinstance(setting, bool):
        try:
            return float(text) == setting
        except ValueError:
            return False
    return str(setting) == text


def check_keys(runs: list[Run], keys: Sequence[str], option: str) -> None:
    """Raise ValueError if no run has one of the keys; `option` is where the user wrote it."""
    known_keys = {"run", "model", "commit", "tokenizer"}.union(*(run.settings for run in runs))
    for key in keys:
        if key not in known_keys:
            raise ValueError(f"{option}: no run has a key {key!r}{errors.suggest(key, known_keys)}")


def group_runs(
    runs: list[Run], keys: Sequence[str] = (), require_same_step: bool = True
) -> list[Group]:
    """Group runs of the same settings, corpus and steps if each seed occurs once.

    Runs with a repeated seed are groups by themselves.

    Args:
        keys: if given, only these keys must agree, and they name the group
        require_same_step: whether runs must have their last evaluation at the same step

    Raises:
        ValueError: no run has one of the keys
    """
    check_keys(runs, keys, "--by")
    indices_by_key: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        group_key = make_group_key(run, keys, require_same_step)
        indices_by_key.setdefault(group_key, []).append(index)
    names = name_groups(runs, keys)
    groups = []
    for indices in indices_by_key.values():
        distinct_seeds = {runs[index].seed for index in indices}
        if keys or len(distinct_seeds) == len(indices):
            groups.append(make_group(names[indices[0]], [runs[index] for index in indices]))
        else:
            groups += [make_group(names[index], [runs[index]]) for index in indices]
    return make_names_unique(groups)


def make_names_unique(groups: list[Group]) -> list[Group]:
    """Add to equal names that the runs are not finished, their step, or the name of a run."""
    for describe in (
        lambda group: " (not finished)" if group.unfinished else "",
        lambda group: f", step {group.step}",
        lambda group: f", {group.runs[0].name}",
    ):
        names = [group.name for group in groups]
        groups = [
            replace(group, name=group.name + describe(group))
            if names.count(group.name) > 1
            else group
            for group in groups
        ]
    return groups


def make_group_key(run: Run, keys: Sequence[str], require_same_step: bool) -> str:
    """Return a text that is the same for runs of the same group."""
    if not run.settings:
        return f"{run.path} {run.name}"  # without settings, a run repeats no other run
    step = get_evaluated_step(run) if require_same_step else False
    if keys:
        shared = {key: get_setting(run, key) for key in keys}
    else:
        shared = {
            **{key: get_setting(run, key) for key in run.settings if key != "seed"},
            "model": run.model_name,
            "corpus": run.corpus.get("sha256"),
        }
    return json.dumps([step, shared], sort_keys=True)


def make_group(name: str, runs: list[Run]) -> Group:
    """Make a group of runs, and find the keys in which they differ."""
    first_settings = runs[0].settings
    mixed_keys = []
    for key in sorted(set().union(*(run.settings for run in runs)) - {"seed"}):
        for run in runs:
            if key not in run.settings or run.settings[key] != first_settings.get(key):
                mixed_keys.append(key)
                break
    model_names = {run.model_name for run in runs}
    return Group(
        name=name,
        model_name=runs[0].model_name if len(model_names) == 1 else None,
        runs=tuple(runs),
        step=get_evaluated_step(runs[0]),
        mixed_keys=tuple(mixed_keys),
    )


def get_evaluated_step(run: Run) -> int | None:
    """Return the step of the last evaluation, or None before the first one."""
    return run.final_evaluation["step"] if run.final_evaluation else None


def get_corpus_digest(run: Run) -> str:
    """Return the first eight digits of the corpus's checksum, or "" if it is not known."""
    return str(run.corpus.get("sha256") or "")[:8]


def name_groups(runs: list[Run], keys: Sequence[str] = ()) -> list[str]:
    """Return for each run the name of its group.

    The name has the values of `keys`. Without keys, it has the model and the settings in which runs
    of that model differ.
    """
    if keys:
        return [" ".join(describe_setting(run, key) for key in keys) for run in runs]
    runs_by_model: dict[str | None, list[Run]] = {}
    for run in runs:
        runs_by_model.setdefault(run.model_name, []).append(run)
    differing_keys = {
        model_name: find_differing_keys(same_model)
        for model_name, same_model in runs_by_model.items()
    }
    names = []
    for run in runs:
        parts = [run.model_name or run.name]
        parts += [
            f"{key}={run.settings[key]}"
            for key in differing_keys[run.model_name]
            if key in run.settings
        ]
        digests = {get_corpus_digest(other) for other in runs_by_model[run.model_name]}
        if get_corpus_digest(run) and len(digests) > 1:
            parts.append(f"corpus={get_corpus_digest(run)}")
        names.append(" ".join(parts))
    return names


def find_differing_keys(runs: list[Run]) -> list[str]:
    """Return the keys, other than the seed, in which runs of a model that have them differ."""
    values_by_key: dict[str, list] = {}
    for run in runs:
        for key, value in run.settings.items():
            values_by_key.setdefault(key, []).append(value)
    differing_keys = [
        key
        for key, values in values_by_key.items()
        if key not in ("model", "seed") and any(value != values[0] for value in values)
    ]
    return sorted(differing_keys, key=get_label_position)


def describe_setting(run: Run, key: str) -> str:
    """Return `key=value`; of a model or a run, the value alone."""
    value = str(get_setting(run, key))
    return value if key in ("model", "run") else f"{key}={value}"


def get_label_position(key: str) -> int:
    """Return the rank of a key in labels, where the model, its width and its depth come first."""
    if key in FIRST_LABEL_KEYS:
        return FIRST_LABEL_KEYS.index(key)
    run_option = collect_options(TrainConfig).get(key)
    if run_option is None:  # a key of the model
        return len(FIRST_LABEL_KEYS)
    # keys that may change when a run is resumed, such as compile and max_steps, come last
    return len(FIRST_LABEL_KEYS) + (2 if run_option.changeable else 1)


def make_labels(runs: list[Run]) -> list[str]:
    """Return short names for runs: the values of the keys in which they differ, as many as fit.

    Keys that distinguish models come first, those of the machine last (get_label_position). If the
    values do not tell the runs apart, the labels are the names of their folders.
    """
    settings_by_run = [run.settings for run in runs]
    labels = [""] * len(runs)
    # dict.fromkeys keeps the order of the keys, unlike a set
    keys = dict.fromkeys(key for settings in settings_by_run for key in settings)
    for key in sorted(keys, key=get_label_position):
        # a run of a model without this key has no part for it in its label
        values = [settings[key] for settings in settings_by_run if key in settings]
        if all(value == values[0] for value in values):
            continue
        longer_labels = []
        for label, settings in zip(labels, settings_by_run):
            if key not in settings:
                longer_labels.append(label)
                continue
            part = str(settings[key]) if key == "model" else f"{key}={settings[key]}"
            longer_labels.append(f"{label}, {part}" if label else part)
        if max(map(len, longer_labels)) <= MAX_LABEL_LENGTH:
            labels = longer_labels
    if len(set(labels)) == len(runs):
        return labels
    names = [shorten(run.name) for run in runs]
    if len(set(names)) < len(set(run.name for run in runs)):
        return [run.name for run in runs]  # they differ only in the middle
    return names


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
    """Return the group with this name or model, or with a run of this name or path.

    Raises:
        ValueError: there is no such group, or there are several
    """
    candidates: list[Group] = []
    for matches in (
        lambda group: against in (group.name, group.model_name),
        lambda group: any(is_run_at(run, against) for run in group.runs),
        lambda group: any(Path(against).name == run.path.name for run in group.runs),
    ):
        candidates = candidates or [group for group in groups if matches(group)]
    if len(candidates) != 1:
        names = ", ".join(group.name for group in candidates or groups)
        raise ValueError(
            f"--against={against}: {len(candidates) or 'none'} of the rows match: give one of "
            f"{names}, or the path of a run"
        )
    return candidates[0]


def is_run_at(run: Run, name_or_path: str) -> bool:
    """Return whether a run has this name or this path."""
    return name_or_path == run.name or Path(name_or_path).resolve() == run.path.resolve()


def choose_metric(groups: list[Group]) -> str:
    """Return the metric that groups are compared by, which all of them have.

    It is bits per byte if possible, for tasks the accuracy, otherwise the loss.

    Raises:
        ValueError: a run has no evaluation
    """
    metrics = ["val_bits_per_byte", "val_loss"]
    if not any(group.get_values("val_bits_per_byte") for group in groups):
        metrics = ["val_bits_per_byte", "val_accuracy", "val_loss"]
    for metric in metrics:
        if all(group.get_values(metric) for group in groups):
            return metric
    raise ValueError("a run has no evaluation: omit it")


def compare_groups(
    groups: list[Group], baseline: Group, metric: str | None = None
) -> list[Comparison]:
    """Compare every other group with the baseline.

    Raises:
        ValueError: a group has no evaluation
    """
    metric = metric or choose_metric(groups)
    comparisons = [
        compare_pair(group, baseline, metric) for group in groups if group is not baseline
    ]
    estimates = [comparison.estimate for comparison in comparisons if comparison.estimate]
    verdicts = iter(judge_differences(estimates, lower_is_better=metric not in FRACTION_METRICS))
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
    value_by_seed = dict(zip(group.seeds, group.get_values(metric)))
    baseline_by_seed = dict(zip(baseline.seeds, baseline.get_values(metric)))
    shared_seeds = [seed for seed in value_by_seed if seed in baseline_by_seed]
    estimate = estimate_paired_difference(
        [value_by_seed[seed] for seed in shared_seeds],
        [baseline_by_seed[seed] for seed in shared_seeds],
    )
    return Comparison(group, baseline, metric, estimate, paired=True)


def explain_incomparable(group: Group, baseline: Group, metric: str) -> str:
    """Return why two groups cannot be compared, or "" if they can."""
    has_unfinished_run = group.unfinished or baseline.unfinished
    if group.step != baseline.step or has_unfinished_run:
        reason = f"evaluated at step {group.step}, the baseline at {baseline.step}"
        return f"{reason}; a run is not finished" if has_unfinished_run else reason
    runs = (*group.runs, *baseline.runs)
    if len({describe_validation_data(run, metric) for run in runs}) == 1:
        return ""
    if metric == "val_bits_per_byte":
        return "another validation text"
    return "another vocabulary or validation text"


def describe_validation_data(run: Run, metric: str = "val_loss") -> str:
    """Return a text that is the same for runs whose metric is of the same validation data.

    It has the validation text and the part of it that was read, as far as a run knows them; for
    metrics per token, also the tokens.
    """
    counts = run.corpus.get("val", {})
    data = [
        run.corpus.get("source"),
        run.corpus.get("name"),
        counts.get("bytes"),
        run.settings.get("eval_part", "all"),
        *describe_evaluated_sequences(run),
    ]
    if metric != "val_bits_per_byte" or not counts.get("bytes"):
        data += [*get_vocabulary(run), counts.get("tokens")]
    return json.dumps(data)


def describe_evaluated_sequences(run: Run) -> list:
    """Return what tells the text of the last evaluation from other parts of the validation text.

    All of a text is the same text for every tokenizer and block size. The same number of sequences
    is not.
    """
    num_sequences = (run.final_evaluation or {}).get("val_sequences")
    block_size = run.settings.get("block_size")
    num_tokens = run.corpus.get("val", {}).get("tokens")
    if num_sequences is None:
        return []
    is_whole = run.settings.get("eval_part", "all") == "all" and block_size and num_tokens
    if is_whole and num_sequences == math.ceil((num_tokens - 1) / block_size):
        return ["all"]
    return [num_sequences, block_size, *get_vocabulary(run), num_tokens]


def get_vocabulary(run: Run) -> tuple[str | None, int | None]:
    """Return the tokenizer and the vocabulary size, None if they are not known."""
    return run.corpus.get("tokenizer"), run.corpus.get("vocab_size")


def explain_unpaired(group: Group, baseline: Group) -> str:
    """Return why no two runs had the same seed and order of data, or "" if some had."""
    for either_group in (group, baseline):
        if len(set(either_group.seeds)) < len(either_group.seeds):
            return f"{either_group.name} has runs of the same seed"
    # data/loader.py makes the order of the data from these, the corpus and the seed
    orders = [
        (run.corpus, run.settings.get("block_size"), run.settings.get("global_batch_size"))
        for run in (*group.runs, *baseline.runs)
    ]
    if any(order != orders[0] for order in orders):
        return "the data came in another order"
    shared_seeds = set(group.seeds) & set(baseline.seeds) - {None}
    if len(shared_seeds) == 1 and min(len(group.runs), len(baseline.runs)) > 1:
        return "one seed in common"  # a single pair has no interval
    return "" if shared_seeds else "no seed in common"
