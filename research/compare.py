"""Runs that differ in their seed alone as one group, and what separates two groups.

The n values of a setting, one a seed, are taken as independent and normally distributed. An interval
covers what the seed changes, nothing else: not the choice of a corpus, a size or a learning rate.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from research.runs import Run
from utils import errors

LEVEL = 0.95  # of every interval
ERROR = 1 - LEVEL
SHARES = {"val_accuracy": "accuracy (%)", "val_exact_match": "exact match (%)"}  # stored as shares
METRICS = {"val_loss": "validation loss", "val_perplexity": "perplexity"}
METRICS |= {"val_bits_per_byte": "bits per byte"} | SHARES
LONGEST_LABEL = 60  # characters


def student():
    """scipy's special functions, with Student's distribution among them."""
    return errors.import_optional("scipy.special", "an interval over seeds")


# ---- estimates ----


@dataclass(frozen=True)
class Estimate:
    """A mean, or a difference of means, of `n` values (of a difference: of the fewer of the two).

    mean, standard_error: in the values' unit; degrees: of freedom. A single value has no spread: its
    standard error is inf, its degrees are 0.
    """

    mean: float
    standard_error: float
    degrees: float
    n: int

    @property
    def half(self) -> float:
        """Half the width of the two-sided 95% interval, by Student's distribution."""
        if self.n == 1:
            return math.inf
        return float(student().stdtrit(self.degrees, 1 - ERROR / 2)) * self.standard_error

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def p(self, smallest: float = 0.0) -> float:
        """p-value against a true value within +-smallest: below 0.05 if the interval is beyond."""
        beyond = abs(self.mean) - smallest
        if beyond <= 0 or self.n == 1:
            return 1.0
        if self.standard_error == 0:
            return 0.0
        return float(2 * student().stdtr(self.degrees, -beyond / self.standard_error))

    def text(self, form: str = ".3f") -> str:
        """`1.345 ± 0.012 (3)`: mean, half the interval, number of values; `1.345 (1)` of one."""
        half = f" ± {self.half:{form.lstrip('+')}}" if self.n > 1 else ""
        return f"{self.mean:{form}}{half} ({self.n})"

    def scaled(self, factor: float) -> "Estimate":
        return replace(
            self, mean=factor * self.mean, standard_error=abs(factor) * self.standard_error
        )


def interval(values: Sequence[float]) -> Estimate:
    """The mean of values of one setting; its error is s / sqrt(n). ValueError: no value."""
    n = len(values)
    if not n:
        raise ValueError("no value: a mean needs one, its interval two or more")
    error = float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return Estimate(float(np.mean(values)), error, n - 1, n)


def summary(values: Sequence[float]) -> dict:
    """The mean as it is stored: n, mean, ci95 (half the interval; None of one value), values."""
    estimate = interval(values)
    half = estimate.half if estimate.n > 1 else None
    return {"n": estimate.n, "mean": estimate.mean, "ci95": half, "values": list(values)}


def paired(own: Sequence[float], base: Sequence[float]) -> Estimate:
    """The mean of own - base, where values at one place share a seed.

    What a seed does to both, as by the order of the data, falls out. ValueError: of unequal number.
    """
    if len(own) != len(base):
        given = f"{len(own)} and {len(base)} values"
        raise ValueError(f"{given} are no pairs: give the same seeds of both")
    return interval(np.subtract(own, base))


def unpaired(own: Sequence[float], base: Sequence[float]) -> Estimate:
    """Mean of own less mean of base, of independent seeds and unequal spreads (Welch 1947)."""
    one, two = interval(own), interval(base)
    squares = [each.standard_error**2 for each in (one, two)]
    degrees = min(one.degrees, two.degrees)
    if degrees and sum(squares):
        degrees = sum(squares) ** 2 / sum(s**2 / e.degrees for s, e in zip(squares, (one, two)))
    return Estimate(one.mean - two.mean, math.sqrt(sum(squares)), degrees, min(one.n, two.n))


def verdict(difference: Estimate, smallest: float = 0.0, lower_is_better: bool = True) -> str:
    """A word for own - base.

    "better" or "worse" where the whole interval is beyond +-smallest, the smallest difference of
    interest; "level" where all of it is within; else "undecided".
    """
    if difference.p(smallest) < ERROR:
        return "better" if (difference.mean < 0) == lower_is_better else "worse"
    return "level" if max(-difference.low, difference.high) < smallest else "undecided"


def verdicts(
    differences: Sequence[Estimate], smallest: float = 0.0, lower_is_better: bool = True
) -> list[str]:
    """`verdict` of many: a false "better" or "worse" among all of them in at most 5% of studies."""
    words = [verdict(each, smallest, lower_is_better) for each in differences]
    corrected = holm([each.p(smallest) for each in differences])
    changed = [w in ("better", "worse") and p >= ERROR for w, p in zip(words, corrected)]
    return ["undecided" if each else word for each, word in zip(changed, words)]


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number: those below 0.05 hold together (Holm 1979)."""
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return corrected.tolist()


def hypothesis(difference: Estimate, below: float) -> str:
    """Whether the true difference is below a number that was named in advance."""
    if difference.high < below:
        return "supported"
    return "refuted" if difference.low > below else "undecided"


# ---- groups of runs ----


@dataclass(frozen=True)
class Group:
    """Runs of one setting, a seed each, or a run by itself.

    step: of their last evaluation. mixed: keys besides the seed in which they differ, where `--by`
    put them together.
    """

    name: str
    stem: str | None
    runs: tuple[Run, ...]
    step: int | None
    mixed: tuple[str, ...] = ()

    @property
    def seeds(self) -> list[int | None]:
        return [run.seed for run in self.runs]

    @property
    def unfinished(self) -> bool:
        return any(run.finished is False for run in self.runs)

    @property
    def cautions(self) -> list[str]:
        """In what its runs are no repetitions of one setting with a seed each."""
        known = [seed for seed in self.seeds if seed is not None]
        again = [str(seed) for seed in dict.fromkeys(known) if known.count(seed) > 1]
        commits = sorted({run.commit or "unknown" for run in self.runs})
        corpora = sorted({corpus_digest(run) or "unknown" for run in self.runs})
        lines = [f"its runs differ in {', '.join(self.mixed)} as well"] * bool(self.mixed)
        if again:
            reason = "comes more than once: such runs are not independent"
            lines.append(f"seed {', '.join(again)} {reason}")
        if len(commits) > 1:
            lines.append(f"its runs were trained at several commits: {', '.join(commits)}")
        if len(corpora) > 1:
            lines.append(f"its runs had several corpora: {', '.join(corpora)}")
        return lines

    def values(self, metric: str) -> list[float]:
        """The metric of the last evaluations, a value a run; empty where one has none."""
        finals = [run.final or {} for run in self.runs]
        return [each[metric] for each in finals] if all(metric in e for e in finals) else []

    def estimate(self, metric: str) -> Estimate | None:
        """As a table shows it, shares in percent."""
        values = self.values(metric)
        return shown(interval(values), metric) if values else None


def shown(estimate: Estimate, metric: str) -> Estimate:
    return estimate.scaled(100) if metric in SHARES else estimate


def select(runs: list[Run], conditions: Sequence[str]) -> list[Run]:
    """The runs that fit every `key=value[,value]`. ValueError: no such condition, key, or run."""
    for condition in conditions:
        key, equals, values = condition.partition("=")
        if not equals:
            fix = "give key=value, or several values with commas between"
            raise ValueError(f"--where={condition}: {fix}")
        refuse_unknown(runs, [key], "--where")
        have = sorted({str(value_of(run, key)) for run in runs})
        runs = [run for run in runs if any(fits(value_of(run, key), v) for v in values.split(","))]
        if not runs:
            raise ValueError(f"--where={condition}: no run; they have {', '.join(have)}")
    return runs


def value_of(run: Run, key: str):
    """A setting; `run` is its name, `commit` what trained it, `tokenizer` that of its corpus."""
    others = {"run": run.name, "model": run.stem, "commit": run.commit}
    others["tokenizer"] = run.corpus.get("tokenizer")
    return others[key] if key in others else run.settings.get(key)


def fits(value, text: str) -> bool:
    """Whether a setting is what a user wrote: 1e-3 is 0.001."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(text) == value
        except ValueError:
            return False
    return str(value) == text


def refuse_unknown(runs: list[Run], keys: Sequence[str], option: str) -> None:
    known = {"run", "model", "commit", "tokenizer"}.union(*(run.settings for run in runs))
    for key in keys:
        if key not in known:
            raise ValueError(f"{option}: no run has a key {key!r}{errors.suggest(key, known)}")


def groups_of(runs: list[Run], by: Sequence[str] = (), same_step: bool = True) -> list[Group]:
    """Runs of the same settings, corpus and steps, each seed once, as one group; others alone.

    by: only these keys must be the same, and name the group. same_step=False: runs that are not
    equally far are one group as well. ValueError: a key that no run has.
    """
    refuse_unknown(runs, by, "--by")
    members: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        members.setdefault(group_key(run, by, same_step), []).append(index)
    names, groups = group_names(runs, by), []
    for indices in members.values():
        together = by or len({runs[i].seed for i in indices}) == len(indices)
        for chosen in [indices] if together else [[index] for index in indices]:
            groups.append(group_of(names[chosen[0]], [runs[index] for index in chosen]))
    return groups


def group_key(run: Run, by: Sequence[str], same_step: bool) -> str:
    if not run.settings:
        return f"{run.path} {run.name}"  # nobody knows what it is a repetition of
    keys = by or sorted(key for key in run.settings if key not in ("model", "seed"))
    same = {key: value_of(run, key) for key in keys}
    same |= {} if by else {"model": run.stem, "corpus": run.corpus.get("sha256")}
    return json.dumps([same_step and step_of(run), same], sort_keys=True)


def group_of(name: str, runs: list[Run]) -> Group:
    keys = set().union(*(run.settings for run in runs)) - {"seed"}
    first = runs[0].settings
    mixed = [
        k for k in keys if any(k not in r.settings or r.settings[k] != first.get(k) for r in runs)
    ]
    stems = {run.stem for run in runs}
    stem = runs[0].stem if len(stems) == 1 else None
    return Group(name, stem, tuple(runs), step_of(runs[0]), tuple(sorted(mixed)))


def step_of(run: Run) -> int | None:
    return run.final["step"] if run.final else None


def corpus_digest(run: Run) -> str:
    return str(run.corpus.get("sha256") or "")[:8]


def group_names(runs: list[Run], by: Sequence[str] = ()) -> list[str]:
    """For each run its stem and the settings in which runs of the stem differ; or those of `by`."""
    if by:
        texts = [[(key, str(value_of(run, key))) for key in by] for run in runs]
        alone = ("model", "run")
        return [" ".join(v if k in alone else f"{k}={v}" for k, v in each) for each in texts]
    names = []
    for run in runs:
        alike = [other for other in runs if other.stem == run.stem]
        parts = [run.stem or run.name]
        for key, value in run.settings.items():
            others = [o.settings[key] for o in alike if key in o.settings]
            if key not in ("model", "seed") and any(other != value for other in others):
                parts.append(f"{key}={value}")
        if corpus_digest(run) and len({corpus_digest(other) for other in alike}) > 1:
            parts.append(f"corpus={corpus_digest(run)}")
        names.append(" ".join(parts))
    return names


def labels_of(runs: list[Run]) -> list[str]:
    """Short names: values of the keys in which runs differ, as many as fit, else their folders'."""
    settings = [run.settings for run in runs]
    shared = [key for key in settings[0] if all(key in each for each in settings)]
    labels = [""] * len(runs)
    for key in shared:
        start = "" if key == "model" else f"{key}="
        if any(each[key] != settings[0][key] for each in settings):
            parts = [f"{start}{each[key]}" for each in settings]
            longer = [f"{label}, {part}" if label else part for label, part in zip(labels, parts)]
            labels = longer if max(map(len, longer)) <= LONGEST_LABEL else labels
    return labels if len(set(labels)) == len(runs) else [shortened(run.name) for run in runs]


def shortened(name: str) -> str:
    """A long name without its middle."""
    half = LONGEST_LABEL // 2
    return name if len(name) <= LONGEST_LABEL else f"{name[:half]}...{name[-half:]}"


# ---- comparisons ----


@dataclass(frozen=True)
class Comparison:
    """A group less its baseline; without an estimate, `reason` says why there is none.

    paired: run by run, over seeds that saw the data in the same order; else `reason` says why not.
    verdict: corrected for the number of comparisons.
    """

    group: Group
    baseline: Group
    metric: str
    estimate: Estimate | None
    paired: bool = False
    verdict: str = ""
    reason: str = ""


def find_baseline(groups: list[Group], against: str) -> Group:
    """The group of this name or stem, or with a run of this name. ValueError: none, or several."""
    found = [group for group in groups if against in (group.name, group.stem)]
    name = Path(against).name
    found = found or [
        g for g in groups if any(against == r.name or name == r.path.name for r in g.runs)
    ]
    if len(found) != 1:
        names = ", ".join(group.name for group in found or groups)
        fix = f"give one of {names}, or one run"
        raise ValueError(f"--against={against}: {len(found) or 'none'} of the rows: {fix}")
    return found[0]


def metric_of(groups: list[Group]) -> str:
    """Bits per byte where all groups have them; on tasks the accuracy; else the loss."""
    no_bits = not any(group.values("val_bits_per_byte") for group in groups)
    for metric in ("val_bits_per_byte", *["val_accuracy"] * no_bits, "val_loss"):
        if all(group.values(metric) for group in groups):
            return metric
    raise ValueError("a run has no evaluation: leave it out")


def compare(groups: list[Group], baseline: Group, metric: str | None = None) -> list[Comparison]:
    """Every other group against the baseline. ValueError: a group has no evaluation."""
    metric = metric or metric_of(groups)
    compared = [difference(each, baseline, metric) for each in groups if each is not baseline]
    estimates = [each.estimate for each in compared if each.estimate]
    words = iter(verdicts(estimates, lower_is_better=metric not in SHARES))
    return [replace(each, verdict=next(words)) if each.estimate else each for each in compared]


def difference(group: Group, baseline: Group, metric: str) -> Comparison:
    """Without its verdict, which depends on what else is compared."""
    about = (group, baseline, metric)
    if why := incomparable(group, baseline, metric):
        return Comparison(*about, None, reason=why)
    if why := why_unpaired(group, baseline):
        estimate = unpaired(group.values(metric), baseline.values(metric))
        return Comparison(*about, estimate, reason=why)
    own, base = (dict(zip(each.seeds, each.values(metric))) for each in (group, baseline))
    seeds = [seed for seed in own if seed in base]
    estimate = paired([own[seed] for seed in seeds], [base[seed] for seed in seeds])
    return Comparison(*about, estimate, paired=True)


def incomparable(group: Group, baseline: Group, metric: str) -> str:
    """Why two groups are no comparison, "" where they are one."""
    unfinished = group.unfinished or baseline.unfinished
    if group.step != baseline.step or unfinished:
        steps = f"evaluated at step {group.step}, the baseline at {baseline.step}"
        return steps + ("; a run is not finished" if unfinished else "")
    if len({validated_on(run, metric) for run in (*group.runs, *baseline.runs)}) == 1:
        return ""
    of_tokens = "vocabulary or " if metric != "val_bits_per_byte" else ""
    return f"another {of_tokens}validation text"


def validated_on(run: Run, metric: str = "val_loss") -> str:
    """What must be the same for two figures to be of the same thing, as far as a run knows it.

    The text and which half of it was read; for nats per token also its tokens.
    """
    counts, half = run.corpus.get("val", {}), run.settings.get("eval_part", "all")
    text = [run.corpus.get("source"), run.corpus.get("name"), counts.get("bytes"), half]
    if metric != "val_bits_per_byte" or not counts.get("bytes"):
        text += [*vocabulary(run), counts.get("tokens")]
    return json.dumps(text)


def vocabulary(run: Run) -> tuple:
    return run.corpus.get("tokenizer"), run.corpus.get("vocab_size")


def why_unpaired(group: Group, baseline: Group) -> str:
    """Why no two of their runs had the same seed and order of data, "" where they had."""
    for each in (group, baseline):
        if len(set(each.seeds)) < len(each.seeds):
            return f"{each.name} has runs of the same seed"
    keys = ("block_size", "global_batch_size")  # with the seed and the corpus: data/loader.py
    runs = (*group.runs, *baseline.runs)
    orders = [[run.corpus, *(run.settings.get(key) for key in keys)] for run in runs]
    if any(order != orders[0] for order in orders):
        return "the data came in another order"
    return "" if set(group.seeds) & set(baseline.seeds) else "no seed in common"


def paired_by_sequence(own: Run, base: Run) -> Estimate:
    """Own loss less the other's, over the validation sequences of their losses.npz, nats per token.

    Of two runs, one a setting: what other sequences would say, nothing of other seeds. ValueError:
    a file is missing, or they are not of the same sequences and tokens.
    """
    losses = []
    for run in (own, base):
        path = run.path / "losses.npz"
        if not path.is_file():
            raise ValueError(f"{path} is missing: the last evaluation of train.py writes it")
        with np.load(path) as stored:
            losses.append(dict(zip(stored["window"].tolist(), stored["loss"].tolist())))
    if losses[0].keys() != losses[1].keys() or validated_on(own) != validated_on(base):
        names = f"{own.name} and {base.name}"
        raise ValueError(f"{names} were validated on other sequences: evaluate both alike")
    return paired([losses[0][window] for window in losses[1]], list(losses[1].values()))
