"""The tables of a report: what the runs of each group came to, beside what was published and beside a baseline."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from evaluation import tables
from evaluation.published import VALIDATION_TOKENS
from research import intervals
from research.reporting.groups import METRICS, SHARES, shown, vocabulary
from training import metrics

DIGITS = {"val_loss": 4, "val_perplexity": 3, "val_bits_per_byte": 4} | dict.fromkeys(SHARES, 2)
TIMES = "\N{MULTIPLICATION SIGN}"
INTERVALS = "± is half the 95% interval of the mean over runs, (n) the number of runs; a run alone has no interval."


@dataclass
class Table:
    """Cells of text, None where there is nothing; `figures`: the numbers behind them, an object a row, unrounded."""

    name: str
    title: str
    header: list[str]
    rows: list[list[str | None]]
    notes: list[str] = field(default_factory=list)
    figures: list[dict] = field(default_factory=list)

    def comma_separated(self) -> str:
        header = list(dict.fromkeys(key for row in self.figures for key in row))
        return tables.comma_separated(header, [[row.get(key) for key in header] for row in self.figures])

    def markdown(self) -> str:
        return "\n\n".join([f"## {self.title}", tables.markdown(self.header, self.rows), *self.notes, ""])

    def latex(self) -> str:
        notes = [f"% {note.replace('±', '+-')}" for note in self.notes]
        below = ("published", "difference") if self.name.startswith("accuracy") else ()
        return "\n".join([f"% {self.title}", *notes, tables.latex(self.header, self.rows, below), ""])


def gap(group) -> str | None:
    """Why a group has no result, None: it has one."""
    if any(run.finished is False for run in group.runs):
        run = next(run for run in group.runs if run.finished is False)
        return f"did not finish: step {run.step:,} of {run.settings['max_steps']:,}"
    return None if group.values("val_loss") else "not evaluated"


def steps_of(group) -> int:
    return min(run.step for run in group.runs)


def amount(estimate: intervals.Estimate, key: str) -> str:
    """The mean ± half its interval (number of runs)."""
    return shown(estimate, key).text(f".{DIGITS[key]}f")


def validation(groups: list) -> Table:
    """What the last evaluation of every group says, the loss beside the published one."""
    keys = columns_of([group for group in groups if not gap(group)])
    published, said = beside(groups, "")
    header = ["model", "runs", "steps", *(METRICS[key] for key in keys)]
    header += ["published loss", "published perplexity", "loss less the published"] if published else []
    table = Table("validation", "Validation", header, [], [INTERVALS, *said, *warnings(groups)])
    for group in groups:
        missing, paper = gap(group), published.get(group.name, {})
        estimates = {key: intervals.interval(v) for key in METRICS if (v := group.values(key))}
        cells = [missing] + [None] * (len(keys) - 1)
        if not missing:
            cells = [amount(estimates[key], key) if key in estimates else None for key in keys]
        row = [group.name, str(len(group.runs)), f"{steps_of(group):,}", *cells]
        if published:
            loss, perplexity = paper.get("val_loss"), paper.get("val_ppl")
            row += [None if number is None else f"{number:.4f}" for number in (loss, perplexity)]
            row.append(f"{estimates['val_loss'].mean - loss:+.4f}" if loss and not missing else None)
        table.rows.append(row)
        figures = {"model": group.name, "runs": len(group.runs), "steps": steps_of(group), "gap": missing}
        table.figures.append(figures | flat(estimates) | {f"published_{key}": value for key, value in paper.items()})
    return table


def columns_of(groups: list) -> list[str]:
    """The loss, and the other metrics that one of the groups has."""
    return [key for key in METRICS if key == "val_loss" or any(group.values(key) for group in groups)]


def flat(estimates: dict[str, intervals.Estimate]) -> dict:
    """{name: mean, name_ci95: half the interval, None of one run}."""
    result = {}
    for key, each in estimates.items():
        result |= {key: each.mean, f"{key}_ci95": each.half if each.n > 1 else None}
    return result


def beside(groups: list, shots: int | str, why: Callable = lambda group: ()) -> tuple[dict[str, dict], list[str]]:
    """({group: its published figures}, lines on why others have none, and in what these deviate).

    why: what else keeps the figures of a group out. Groups of which the same is said share a line.
    """
    found, lines = {}, {}
    for group in groups:
        said = "No published row beside {}: its settings are not known."
        for run in group.runs:
            if run.published is None:
                found.pop(group.name, None)
                break
            figures, said = run.published.beside("{}", shots, *why(group), notes=deviations(run, shots))
            if not figures:
                found.pop(group.name, None)
                break
            found[group.name] = figures
        if said:
            lines.setdefault(said, []).append(group.name)
    return found, [said.replace("{}", ", ".join(names), 1) for said, names in lines.items()]


def deviations(run, shots: int | str) -> list[str]:
    """A validation of another number of tokens than the texts'."""
    sequences, length = (run.final or {}).get("val_sequences"), run.settings.get("block_size")
    if shots != "" or not sequences or not length:
        return []
    count = int(sequences * length)
    other = abs(count / VALIDATION_TOKENS - 1) > 0.05
    return [f"{count:,} validation tokens, the texts' {VALIDATION_TOKENS:,}"] if other else []


def warnings(groups: list) -> list[str]:
    """What keeps numbers of one column from being compared."""
    lines = [f"{group.name}: {line}." for group in groups for line in group.cautions]
    vocabularies = {}
    for group in groups:
        vocabularies.setdefault(tuple(vocabulary(group.runs[0])), []).append(group.name)
    if len(vocabularies) > 1:
        of = "; ".join(f"{tokenizer or 'unknown'}: {', '.join(each)}" for (tokenizer, _), each in vocabularies.items())
        lines.append(f"The tokens are not the same ({of}): losses and perplexities per token are not compared.")
    sequences = {}
    for group in groups:
        if not gap(group):
            sequences.setdefault(group.runs[0].final.get("val_sequences"), []).append(group.name)
    if len(sequences) > 1:
        of = "; ".join(f"{count or 0:,.0f}: {', '.join(each)}" for count, each in sequences.items())
        lines.append(f"The last evaluations are not of as many validation sequences ({of}).")
    return lines


def comparison(sizes: list) -> Table:
    """Every group less the baseline of its size: run by run where they had the same seeds and data."""
    first = next(size for size in sizes if size.metric)
    header = ["model", "less", *(METRICS[key] for key in first.differences), "that is", "rests on"]
    better = ", of which more is better" * (first.metric in SHARES)
    note = f"Mean difference ± half its 95% interval. The word is on {METRICS[first.metric]}{better}: better or worse "
    note += "where the interval leaves out 0 after Holm's correction for the comparisons of this size, else undecided."
    table = Table("differences", "Differences to the baseline", header, [], [note])
    for size in sizes:
        for each, *row in zip(size.comparisons, *size.differences.values()):
            cells = [one.estimate and difference_text(one) for one in row]
            if each.estimate is None:
                cells = [f"not compared: {each.reason}", *[None] * (len(row) - 1)]
            table.rows.append([each.group.name, each.baseline.name, *cells, each.verdict or None, rests_on(each)])
            table.figures.append(comparison_figures(each, row))
    return table


def difference_text(compared) -> str:
    estimate, digits = shown(compared.estimate, compared.metric), DIGITS[compared.metric]
    half = f" ± {estimate.half:.{digits}f}" if estimate.n > 1 else ""
    return f"{estimate.mean:+.{digits}f}{half}"


def rests_on(compared) -> str | None:
    """How many runs of each."""
    if compared.estimate is None:
        return None
    if compared.paired:
        return f"{compared.estimate.n} pair{'s' * (compared.estimate.n > 1)}"
    runs = f"{len(compared.group.runs)} and {len(compared.baseline.runs)} runs"
    return f"{runs}, unpaired: {compared.reason}"


def comparison_figures(compared, every: list) -> dict:
    """every: the comparisons of the same two groups in all metrics."""
    estimates = {each.metric: each.estimate for each in every if each.estimate}
    about = {"model": compared.group.name, "baseline": compared.baseline.name, "metric": compared.metric}
    about |= {"n": compared.estimate and compared.estimate.n, "paired": compared.paired, "verdict": compared.verdict}
    return about | {"reason": compared.reason} | flat(estimates)


def costs(sizes: list) -> Table:
    """What each model takes: means over its runs, and how many times that of the baseline of its size."""
    names = [size.baseline.name for size in sizes if size.baseline]
    header = ["model", "parameters", "FLOPs per token", "tokens/s", "peak memory", "device-seconds"]
    about = "Tokens/s: median over training. Peak memory: of the main process, allocated on a GPU, resident on a CPU. "
    about += "Device-seconds: of training steps, the first one, which compiles, left out. Means over runs"
    about += f"; in brackets how many times those of {' and '.join(names)}." if names else "."
    shared = "Runs that shared a machine slowed each other down."
    groups = [group for size in sizes for group in size.groups]
    table = Table("costs", "Cost", header, [], [about, shared, *machines(groups)])
    for size in sizes:
        for group in size.groups:
            own, factors = cost_of(group), factors_of(group, size.baseline)
            cells = [cost_cell(key, own[key], factors) for key in COSTS]
            cells[-1] = cells[-1] or gap(group)
            table.rows.append([group.name, *cells])
            named = {f"{key}_factor": value for key, value in factors.items()}
            table.figures.append({"model": group.name, **own, **named})
    return table


COSTS = {
    "parameters": "{:,.0f}".format,
    "flops_per_token": metrics.short,
    "tokens_per_second": metrics.short,
    "memory": metrics.size,
    "device_seconds": "{:,.0f}".format,
}
MEASURED = "tokens_per_second", "memory", "device_seconds"


def cost_cell(key: str, value: float | None, factors: dict[str, float]) -> str | None:
    factor = f" ({factors[key]:.2f}{TIMES})" if key in factors else ""
    return None if value is None else COSTS[key](value) + factor


def factors_of(group, baseline) -> dict[str, float]:
    """How many times the baseline's; what was measured has none across machines, nor has what one of them lacks."""
    if baseline is None or group is baseline:
        return {}
    own, base, alike = cost_of(group), cost_of(baseline), machine_of(group) == machine_of(baseline)
    return {key: own[key] / base[key] for key in COSTS if own[key] and base[key] and (alike or key not in MEASURED)}


def cost_of(group) -> dict[str, float | None]:
    """Means over runs, None where one lacks the number; seconds of finished runs alone."""
    runs = [run for run in group.runs if run.totals]
    unfinished = any(run.finished is False for run in group.runs)
    return {
        "parameters": mean([run.parameters for run in group.runs]),
        "flops_per_token": mean([run.flops_per_token for run in runs]),
        "tokens_per_second": mean([run.tokens_per_second for run in runs]),
        "memory": mean([run.memory for run in runs]),
        "device_seconds": None if unfinished else mean([run.device_seconds for run in runs]),
    }


def mean(values: list) -> float | None:
    return float(np.mean(values)) if values and None not in values else None


def machine_of(group) -> str:
    """The chips that its runs were trained on; "" where nobody knows."""
    return ", ".join(sorted({trained_on(run) for run in group.runs}))


def trained_on(run) -> str:
    """Processes and their chip; "" where nobody knows."""
    chip = (run.machine or {}).get("chip")
    return f"{run.processes} {TIMES} {chip}" if chip else ""


def machines(groups: list) -> list[str]:
    """On what the runs were trained, where it is known and where it differs."""
    found: dict[str, list[str]] = {}
    for group in groups:
        found.setdefault(machine_of(group), []).append(group.name)
    if found.keys() == {""}:
        return ["On what machine they were trained, the runs do not say."]
    if len(found) == 1:
        return [f"Trained on {next(iter(found))}."]
    of = "; ".join(f"{machine or 'unknown'}: {', '.join(names)}" for machine, names in found.items())
    return [f"Trained on different machines ({of}): speed, memory and seconds have no factors across them."]


def provenance(groups: list) -> Table:
    """What every figure rests on: the runs, the code that trained them and the machine."""
    header = ["run", "model", "seed", "steps", "trained at commit", "on"]
    table = Table("runs", "Runs", header, [])
    for group in groups:
        for run in group.runs:
            about = {"run": run.name, "model": group.name, "seed": run.seed, "steps": run.step, "commit": run.commit}
            table.figures.append(about | {"machine": run.machine and str(run.machine), "processes": run.processes})
            cells = [None if value is None else str(value) for value in (run.seed, run.step, run.commit)]
            table.rows.append([run.name, group.name, *cells, trained_on(run) or None])
    return table
