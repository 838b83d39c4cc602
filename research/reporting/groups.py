"""Which runs are one setting with several seeds, what to call them, and which of them may be compared."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import configurator
from research import intervals
from research.reporting.runs import Run

METRICS = {"val_loss": "validation loss", "val_perplexity": "perplexity", "val_bits_per_byte": "bits per byte"}
SHARES = {"val_accuracy": "accuracy (%)", "val_exact_match": "exact match (%)"}  # stored as shares; higher is better
METRICS |= SHARES
LONGEST_LABEL = 60  # characters


@dataclass(frozen=True)
class Group:
    """Runs of one setting, a seed each, or a run by itself.

    step: of their last evaluation, None before it. settings: what all of them have. mixed: keys besides the seed in
    which they differ, where `--by` put them together.
    """

    name: str
    stem: str | None
    runs: tuple[Run, ...]
    settings: dict
    step: int | None
    mixed: tuple[str, ...] = ()

    @property
    def seeds(self) -> list[int | None]:
        return [run.seed for run in self.runs]

    @property
    def unfinished(self) -> bool:
        """Whether a run of it is known to have steps to do."""
        return any(run.finished is False for run in self.runs)

    @property
    def cautions(self) -> list[str]:
        """In what its runs are no repetitions of one setting with a seed each, a line each."""
        known = [seed for seed in self.seeds if seed is not None]
        again = [str(seed) for seed in dict.fromkeys(known) if known.count(seed) > 1]
        commits = sorted({run.commit or "unknown" for run in self.runs})
        corpora = sorted({corpus_of(run) or "unknown" for run in self.runs})
        lines = [f"its runs differ in {', '.join(self.mixed)} as well"] if self.mixed else []
        lines += [f"seed {', '.join(again)} comes more than once: such runs are not independent"] if again else []
        lines += [f"its runs were trained at several commits: {', '.join(commits)}"] if len(commits) > 1 else []
        return lines + ([f"its runs had several corpora: {', '.join(corpora)}"] if len(corpora) > 1 else [])

    def values(self, metric: str) -> list[float]:
        """The metric in the last evaluations, in the order of the runs; empty where one has none."""
        finals = [run.final or {} for run in self.runs]
        return [final[metric] for final in finals] if all(metric in final for final in finals) else []


def shown(estimate: intervals.Estimate, metric: str) -> intervals.Estimate:
    """As a table has it: shares in percent."""
    factor = 100 if metric in SHARES else 1
    return replace(estimate, mean=factor * estimate.mean, standard_error=factor * estimate.standard_error)


# ---- filters ----


def where(runs: list[Run], conditions: Sequence[str]) -> list[Run]:
    """The runs that fit every `key=value[,value]`. ValueError: no such condition, key, or run."""
    for condition in conditions:
        key, equals, values = condition.partition("=")
        if not equals:
            raise ValueError(f"--where={condition}: give key=value, or several values with commas between")
        refuse_unknown(runs, [key], "--where")
        have = sorted({str(value_of(run, key)) for run in runs})
        runs = [run for run in runs if any(fits(value_of(run, key), value) for value in values.split(","))]
        if not runs:
            raise ValueError(f"--where={condition}: no run; they have {', '.join(have)}")
    return runs


def value_of(run: Run, key: str):
    """A setting; `run` is its name, `commit` what trained it, `tokenizer` that of its corpus."""
    others = {"run": run.name, "model": run.stem, "commit": run.commit, "tokenizer": run.corpus.get("tokenizer")}
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
    """ValueError: a key that none of the runs has."""
    known = {"run", "model", "commit", "tokenizer"}.union(*(run.settings for run in runs))
    for key in keys:
        if key not in known:
            raise ValueError(f"{option}: no run has a key {key!r}{configurator.nearest(key, known)}")


# ---- groups ----


def groups_of(runs: list[Run], by: Sequence[str] = (), same_step: bool = True) -> list[Group]:
    """Runs of the same settings, corpus and steps, each seed once, as one group; any other run by itself.

    by: only these keys must be the same, and name the group. same_step=False: runs that are not equally far are one
    group as well. A run whose settings are not known is by itself. ValueError: a key that no run has.
    """
    refuse_unknown(runs, by, "--by")
    members: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        members.setdefault(key_of(run, by, same_step), []).append(index)
    names, groups = names_of(runs, by), []
    for indices in members.values():
        seeds = {runs[index].seed for index in indices}
        several = by or len(seeds) == len(indices)
        for chosen in [indices] if several else [[index] for index in indices]:
            groups.append(group_of(names[chosen[0]], [runs[index] for index in chosen]))
    return groups


def key_of(run: Run, by: Sequence[str], same_step: bool) -> str:
    """What runs of one group have in common, as text."""
    if not run.settings:
        return f"{run.path} {run.name}"
    keys = by or sorted(key for key in run.settings if key not in ("model", "seed"))
    same = {key: value_of(run, key) for key in keys}
    same |= {} if by else {"model": run.stem, "corpus": run.corpus.get("sha256")}
    return json.dumps([same_step and step_of(run), same], sort_keys=True)


def corpus_of(run: Run) -> str:
    """The beginning of its digest; "" where none is known."""
    return str(run.corpus.get("sha256") or "")[:8]


def step_of(run: Run) -> int | None:
    return run.final["step"] if run.final else None


def group_of(name: str, runs: list[Run]) -> Group:
    shared = {k: v for k, v in runs[0].settings.items() if all(k in r.settings and r.settings[k] == v for r in runs)}
    mixed = sorted(set().union(*(run.settings for run in runs)) - shared.keys() - {"seed"})
    stems = {run.stem for run in runs}
    return Group(name, stems.pop() if len(stems) == 1 else None, tuple(runs), shared, step_of(runs[0]), tuple(mixed))


def names_of(runs: list[Run], by: Sequence[str] = ()) -> list[str]:
    """For each run its stem, and the settings in which runs of the same stem differ, the seed aside, and its corpus
    where these do; or those of `by`.
    A run whose settings are not known has its own name."""
    if by:
        return [" ".join(named(key, value_of(run, key)) for key in by) for run in runs]
    names = []
    for run in runs:
        alike = [other.settings for other in runs if other.stem == run.stem]
        keys = [key for key, value in run.settings.items() if any(key in o and o[key] != value for o in alike)]
        shown = [f"{key}={run.settings[key]}" for key in keys if key not in ("model", "seed")]
        corpora = {corpus_of(other) for other in runs if other.stem == run.stem}
        shown += [f"corpus={corpus_of(run)}"] if len(corpora) > 1 and corpus_of(run) else []
        names.append(" ".join([run.stem or run.name, *shown]))
    return names


def named(key: str, value) -> str:
    """What says enough without the key stands alone."""
    return str(value) if key in ("model", "run") else f"{key}={value}"


def labels_of(runs: list[Run]) -> list[str]:
    """Short names that tell runs apart: values of the keys in which they differ, else their folders' names."""
    settings = [run.settings for run in runs]
    shared = [key for key in settings[0] if all(key in each for each in settings)]
    keys = [key for key in shared if any(each[key] != settings[0][key] for each in settings)]
    labels = [""] * len(runs)
    for key in keys:  # as many as fit
        start = "" if key == "model" else f"{key}="
        longer = [f"{label}, {start}{each[key]}".removeprefix(", ") for label, each in zip(labels, settings)]
        labels = longer if max(map(len, longer)) <= LONGEST_LABEL else labels
    return labels if len(set(labels)) == len(runs) else [shortened(run.name) for run in runs]


def shortened(name: str) -> str:
    """A long name without its middle, beginning and end being what tells names apart."""
    half = LONGEST_LABEL // 2
    return name if len(name) <= LONGEST_LABEL else f"{name[:half]}...{name[-half:]}"


# ---- comparisons ----


@dataclass(frozen=True)
class Comparison:
    """A group less its baseline; without an `estimate`, `reason` says why they are none. paired: run by run, over
    seeds that saw the data in the same order; unpaired: `reason` says why. verdict: corrected for their number."""

    group: Group
    baseline: Group
    metric: str
    estimate: intervals.Estimate | None
    paired: bool = False
    verdict: str = ""
    reason: str = ""


def find_baseline(groups: list[Group], against: str) -> Group:
    """The group with this name or stem, or with a run of this name or folder. ValueError: none, or several."""
    found = [group for group in groups if against in (group.name, group.stem)]
    found = found or [group for group in groups if any(is_named(run, against) for run in group.runs)]
    if len(found) != 1:
        names = ", ".join(group.name for group in found or groups)
        raise ValueError(f"--against={against}: {len(found) or 'none'} of the rows: give one of {names}, or one run")
    return found[0]


def is_named(run: Run, text: str) -> bool:
    return run.name == text or run.path.name == Path(text).name


def metric_of(groups: list[Group]) -> str:
    """What is compared: bits per byte where all groups have them, the accuracy where all have it and none has bits,
    else the loss. ValueError: not even that."""
    no_bits = not any(group.values("val_bits_per_byte") for group in groups)
    for metric in ("val_bits_per_byte", *["val_accuracy"] * no_bits, "val_loss"):
        if all(group.values(metric) for group in groups):
            return metric
    raise ValueError("a run has no evaluation: leave it out")


def compare(groups: list[Group], baseline: Group, metric: str | None = None) -> list[Comparison]:
    """Every other group against the baseline, in their order. ValueError: a group has no evaluation."""
    metric = metric or metric_of(groups)
    compared = [compared_one(group, baseline, metric) for group in groups if group is not baseline]
    estimates = [each.estimate for each in compared if each.estimate]
    words = iter(intervals.verdicts(estimates, lower_is_better=metric not in SHARES))
    return [replace(each, verdict=next(words)) if each.estimate else each for each in compared]


def compared_one(group: Group, baseline: Group, metric: str) -> Comparison:
    """Without its verdict."""
    about = (group, baseline, metric)
    if why := incomparable(group, baseline, metric):
        return Comparison(*about, None, reason=why)
    if why := why_unpaired(group, baseline):
        estimate = intervals.unpaired(group.values(metric), baseline.values(metric))
        return Comparison(*about, estimate, reason=why)
    own, base = (dict(zip(each.seeds, each.values(metric))) for each in (group, baseline))
    seeds = [seed for seed in own if seed in base]
    return Comparison(*about, intervals.paired([own[s] for s in seeds], [base[s] for s in seeds]), paired=True)


def incomparable(group: Group, baseline: Group, metric: str) -> str:
    """Why two groups are no comparison, "" where they are one."""
    if group.step != baseline.step or group.unfinished or baseline.unfinished:
        return f"evaluated at step {group.step}, the baseline at {baseline.step}" + (
            "; a run is not finished" if group.unfinished or baseline.unfinished else ""
        )
    texts = {json.dumps(validated_on(run, metric)) for run in (*group.runs, *baseline.runs)}
    if len(texts) > 1:
        return "another vocabulary or validation text" if metric != "val_bits_per_byte" else "another validation text"
    return ""


def validated_on(run: Run, metric: str) -> list:
    """What must be the same for two figures to be of the same thing: the text, and for nats per token its tokens.

    As far as a checkpoint knows it: the corpus's source, the size of its validation split, and which half was read.
    """
    corpus = run.corpus
    counts = corpus.get("val", {})
    text = [corpus.get(key) for key in ("source", "name")] + [counts.get("bytes"), run.settings.get("eval_part", "all")]
    if metric == "val_bits_per_byte" and counts.get("bytes"):
        return text
    return [*text, *vocabulary(run), counts.get("tokens")]


def vocabulary(run: Run) -> list:
    """What tells one vocabulary from another, as far as a checkpoint knows it."""
    return [run.corpus.get(key) for key in ("tokenizer", "vocab_size")]


def why_unpaired(group: Group, baseline: Group) -> str:
    """Why no two of their runs had the same seed and the same order of data, "" where they had."""
    for each in (group, baseline):
        if len(set(each.seeds)) < len(each.seeds):
            return f"{each.name} has runs of the same seed"
    orders = {json.dumps(data_order(run), sort_keys=True) for run in (*group.runs, *baseline.runs)}
    if len(orders) > 1:
        return "the data came in another order"
    return "" if set(group.seeds) & set(baseline.seeds) else "no seed in common"


def data_order(run: Run) -> list:
    """What decides, with the seed, which sequences a step sees (data/loader.py)."""
    return [run.corpus, *(run.settings.get(key) for key in ("block_size", "global_batch_size"))]
