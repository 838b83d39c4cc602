"""The tables of a report: what runs came to, beside what was published and beside a baseline."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from research.compare import (
    METRICS,
    SHARES,
    Comparison,
    Estimate,
    Group,
    interval,
    shown,
    validated_on,
    vocabulary,
)
from utils import tables, units

DIGITS = {"val_loss": 4, "val_perplexity": 3, "val_bits_per_byte": 4} | dict.fromkeys(SHARES, 2)
DIFFERENCES = [metric for metric in METRICS if metric != "val_perplexity"]
TIMES = "\N{MULTIPLICATION SIGN}"
INTERVALS = "± is half the 95% interval of the mean over runs, (n) the number of runs."
ERRORS = f"{INTERVALS} Of a single run ± is lm-eval's standard error over a task's items."


@dataclass
class Table:
    """header, rows: cells of text, None for nothing; figures: the numbers, an object a row."""

    name: str
    title: str
    header: list[str]
    rows: list[list[str | None]]
    notes: list[str] = field(default_factory=list)
    figures: list[dict] = field(default_factory=list)

    def comma_separated(self) -> str:
        header = list(dict.fromkeys(key for row in self.figures for key in row))
        rows = [[row.get(key) for key in header] for row in self.figures]
        return tables.format_csv(header, rows)

    def markdown(self) -> str:
        grid = tables.format_markdown(self.header, self.rows)
        return "\n\n".join([f"## {self.title}", grid, *self.notes, ""])

    def latex(self) -> str:
        notes = [f"% {note.replace('±', '+-')}" for note in self.notes]
        below = ("published", "difference") if self.name.startswith("accuracy") else ()
        grid = tables.format_latex(self.header, self.rows, below)
        return "\n".join([f"% {self.title}", *notes, grid, ""])


def steps_text(group: Group) -> str:
    """How far the group's runs are: 800, or 25 of 800."""
    step, unfinished = (
        min(run.step for run in group.runs),
        [r for r in group.runs if r.finished is False],
    )
    return f"{step:,} of {unfinished[0].settings['max_steps']:,}" if unfinished else f"{step:,}"


def amount(estimate: Estimate | None, key: str) -> str | None:
    """mean ± half its interval (number of runs); the mean alone of one run."""
    if estimate is None:
        return None
    number = f"{estimate.mean:.{DIGITS[key]}f}"
    return number if estimate.n == 1 else estimate.text(f".{DIGITS[key]}f")


def flat(estimates: dict[str, Estimate]) -> dict:
    """{name: mean, name_ci95: half the interval, None of one run}, in the tables' units."""
    result = {}
    for key, each in estimates.items():
        result |= {key: each.mean, f"{key}_ci95": each.half if each.n > 1 else None}
    return result


# ---- losses ----


def table_of_losses(groups: list[Group], comparisons: list[Comparison] = ()) -> Table:
    """The last evaluation of every group, the published loss and the difference to a baseline."""
    keys = [key for key in METRICS if any(group.values(key) for group in groups)] or ["val_loss"]
    published, lines = published_beside(groups, "")
    compared = {id(each.group): each for each in comparisons}
    header = ["model", "parameters", "runs", "steps", *(METRICS[key] for key in keys)]
    header += ["published loss", "loss less the published"] if published else []
    if comparisons:
        first = comparisons[0]
        header += [f"{METRICS[first.metric]} less that of {first.baseline.name}", "that is"]
    notes = [INTERVALS, *lines, *cautions(groups, comparisons)]
    table = Table("validation", "Validation", header, [], notes)
    for group in groups:
        paper = published.get(group.name, {})
        estimates = {key: e for key in keys if (e := group.estimate(key))}
        cells = [amount(estimates.get(key), key) for key in keys]
        cells[0] = cells[0] if estimates else "not evaluated"
        parameters, steps = group.runs[0].parameters, steps_text(group)
        about = [f"{parameters:,}" if parameters else None, str(len(group.runs)), steps]
        row = [group.name, *about, *cells]
        if published:
            loss = paper.get("val_loss")
            own = (
                estimates["val_loss"].mean - loss
                if loss and estimates and not group.unfinished
                else None
            )
            row += [None if loss is None else f"{loss:.4f}"]
            row += [None if own is None else f"{own:+.4f}"]
        each = compared.get(id(group))
        if comparisons:
            row += [each and difference_text(each), (each and each.verdict) or None]
        table.rows.append(row)
        figures = {"model": group.name, "stem": group.stem, "parameters": parameters}
        figures |= {"runs": [run.name for run in group.runs], "seeds": group.seeds}
        figures |= {"steps": steps, **flat(estimates)}
        figures |= {f"published_{key}": value for key, value in paper.items()}
        table.figures.append(figures | (figures_of_comparison(each) if each else {}))
    return table


def published_beside(groups: list[Group], shots: int | str) -> tuple[dict[str, dict], list[str]]:
    """Return the paper's row for each group by its name, and the lines that belong under a table."""
    rows: dict[str, dict] = {}
    names_by_line: dict[str, list[str]] = {}
    for group in groups:
        for run in group.runs:
            row: dict[str, float] = {}
            line = "The settings of {} are not known, so the paper's results are not shown."
            if run.published is not None:
                row, line = run.published.beside("{}", shots)
            if row:
                rows[group.name] = row
            names = names_by_line.setdefault(line, [])
            if group.name not in names:
                names.append(group.name)
    lines = [line.replace("{}", ", ".join(names)) for line, names in names_by_line.items() if line]
    return rows, lines


def cautions(groups: list[Group], comparisons: list[Comparison] = ()) -> list[str]:
    """What keeps numbers of one column from being compared."""
    lines = [f"{group.name}: {line}." for group in groups for line in group.cautions]
    texts, tokens = {}, {}
    for group in groups:
        for run in group.runs:
            texts.setdefault(validated_on(run), {})[group.name] = True
            tokens.setdefault(vocabulary(run)[0], {})[group.name] = True
    if len(texts) > 1:
        of = " | ".join(", ".join(names) for names in texts.values())
        kinds = f" ({', '.join(map(str, tokens))})" if len(tokens) > 1 else ""
        reason = f"Validated on other text or in other tokens{kinds}"
        lines.append(f"{reason}, their losses are no comparison: {of}.")
    for each in comparisons:
        if not each.paired:
            how = "not compared" if each.estimate is None else "compared unpaired"
            lines.append(f"{each.group.name} is {how}: {each.reason}.")
    return lines


# ---- differences ----


def table_of_differences(sizes: list) -> Table:
    """Every group less the baseline of its size, in all metrics that every group has."""
    first = next(size for size in sizes if size.metric)
    header = ["model", "less", *(METRICS[key] for key in first.differences), "that is", "rests on"]
    better = ", of which more is better" * (first.metric in SHARES)
    note = (
        f"Mean difference ± half its 95% interval. The word is on {METRICS[first.metric]}{better}: "
        "better or worse where the interval leaves out 0 after Holm's correction for the "
        "comparisons of this size, else undecided."
    )
    table = Table("differences", "Differences to the baseline", header, [], [note])
    for size in sizes:
        for each, *row in zip(size.comparisons, *size.differences.values()):
            cells = [one.estimate and difference_text(one) for one in row]
            if each.estimate is None:
                cells = [f"not compared: {each.reason}", *[None] * (len(row) - 1)]
            about = [each.group.name, each.baseline.name]
            table.rows.append([*about, *cells, each.verdict or None, rests_on(each)])
            estimates = {e.metric: shown(e.estimate, e.metric) for e in row if e.estimate}
            figures = {"model": each.group.name, **figures_of_comparison(each), **flat(estimates)}
            table.figures.append(figures)
    return table


def difference_text(compared: Comparison) -> str | None:
    if compared.estimate is None:
        return None
    estimate, digits = shown(compared.estimate, compared.metric), DIGITS[compared.metric]
    half = f" ± {estimate.half:.{digits}f}" if estimate.n > 1 else ""
    return f"{estimate.mean:+.{digits}f}{half}" + ("" if compared.paired else " unpaired")


def rests_on(compared: Comparison) -> str | None:
    if compared.estimate is None:
        return None
    if compared.paired:
        return f"{compared.estimate.n} pair{'s' * (compared.estimate.n > 1)}"
    runs = f"{len(compared.group.runs)} and {len(compared.baseline.runs)} runs"
    return f"{runs}, unpaired: {compared.reason}"


def figures_of_comparison(compared: Comparison) -> dict:
    """mean and ci95 in the metric's own unit, all digits."""
    estimate = compared.estimate
    figures = {"baseline": compared.baseline.name, "metric": compared.metric}
    figures |= {"paired": compared.paired, "verdict": compared.verdict, "reason": compared.reason}
    if estimate:
        half = estimate.half if estimate.n > 1 else None
        figures |= {"n": estimate.n, "difference": estimate.mean, "difference_ci95": half}
    return figures


# ---- costs ----

COSTS = {
    "parameters": "{:,.0f}".format,
    "flops_per_token": units.format_count,
    "tokens_per_second": units.format_count,
    "memory": units.format_bytes,
    "device_seconds": "{:,.0f}".format,
}
MEASURED = ("tokens_per_second", "memory", "device_seconds")


def table_of_costs(sizes: list) -> Table:
    """What each model takes: means over runs, and how many times that of its baseline."""
    names = [size.baseline.name for size in sizes if size.baseline]
    header = ["model", "parameters", "FLOPs per token", "tokens/s", "peak memory", "device-seconds"]
    times = f"; in brackets how many times those of {' and '.join(names)}" if names else ""
    about = (
        "Tokens/s: median over training. Peak memory: of the main process, allocated on a GPU, "
        "resident on a CPU. Device-seconds: of training steps without the first one, which "
        f"compiles. Means over runs{times}. Runs that shared a machine slowed each other down."
    )
    groups = [group for size in sizes for group in size.groups]
    table = Table("costs", "Cost", header, [], [about, machine_note(groups)])
    for size in sizes:
        for group in size.groups:
            own, factors = cost_of(group), cost_factors(group, size.baseline)
            cells = []
            for key, text_of in COSTS.items():
                factor = f" ({factors[key]:.2f}{TIMES})" if key in factors else ""
                cells.append(None if own[key] is None else text_of(own[key]) + factor)
            table.rows.append([group.name, *cells[:-1], cells[-1]])
            named = {f"{key}_factor": value for key, value in factors.items()}
            table.figures.append({"model": group.name, **own, **named})
    return table


def cost_of(group: Group) -> dict[str, float | None]:
    """Means over runs, None where one lacks the number; seconds of finished runs alone."""
    rows = []
    for run in group.runs:
        row = {"parameters": run.parameters, "flops_per_token": run.flops_per_token}
        row |= {key: run.totals.get(key) for key in ("tokens_per_second", "memory")}
        row["device_seconds"] = None if run.finished is False else run.device_seconds
        rows.append(row)
    values = {key: [row[key] for row in rows] for key in COSTS}
    return {k: None if None in each else float(np.mean(each)) for k, each in values.items()}


def cost_factors(group: Group, baseline: Group | None) -> dict[str, float]:
    """How many times the baseline's; what was measured has none across machines."""
    if baseline is None or group is baseline:
        return {}
    own, base, alike = cost_of(group), cost_of(baseline), machine_of(group) == machine_of(baseline)
    compared = [key for key in COSTS if alike or key not in MEASURED]
    return {key: own[key] / base[key] for key in compared if own[key] and base[key]}


def machine_of(group: Group) -> str:
    """Where its runs were trained; "" where nobody knows."""
    return ", ".join(sorted({trained_on(run) for run in group.runs}))


def trained_on(run) -> str:
    """The machine as `training.provenance.machine` names it, and how many processes ran there."""
    name = (run.machine or {}).get("machine")
    return f"{name}, {run.processes} process{'es' * (run.processes > 1)}" if name else ""


def machine_note(groups: list[Group]) -> str:
    by_machine: dict[str, list[str]] = {}
    for group in groups:
        by_machine.setdefault(machine_of(group), []).append(group.name)
    if by_machine.keys() == {""}:
        return "The runs do not say on what machine they were trained."
    if len(by_machine) == 1:
        return f"Trained on {next(iter(by_machine))}."
    of = "; ".join(f"{name or 'unknown'}: {', '.join(own)}" for name, own in by_machine.items())
    reason = f"Trained on different machines ({of})"
    return f"{reason}: speed, memory and seconds have no factors across them."


# ---- accuracy and provenance ----


def tables_of_accuracy(groups: list[Group]) -> list[Table]:
    """What eval.py stored, a table for each number of examples; none where it stored nothing."""
    entries = [
        e for g in groups for run in g.runs for e in run.accuracy if e["task"] != "validation"
    ]
    if not entries:
        return []
    from eval import make_title  # takes a second

    titles = {make_title(entry): entry for entry in entries}
    order = sorted(titles, key=lambda title: (titles[title]["shots"], title))
    made = []
    for title in order:
        made.append(table_of_accuracy(groups, title, make_title, titles[title]["shots"]))
    return made


def table_of_accuracy(groups, title: str, make_title: Callable, shots: int) -> Table:
    from evaluation import comparison

    models, names = [], {}
    for group in groups:
        by_run = []
        for run in group.runs:
            own = [e for e in run.accuracy if e["task"] != "validation" and make_title(e) == title]
            by_run.append({task: row for entry in own for task, row in entry["shown"].items()})
        values = {}
        for task in [t for t in by_run[0] if all(t in each for each in by_run)]:
            names[task], value, error = by_run[0][task]
            if len(by_run) > 1:
                estimate = interval([each[task][1] for each in by_run])
                value, error = estimate.mean, estimate.half
            values[task] = value, error
        models.append((group, values))
    evaluated = [group for group, values in models if values]
    published, lines = published_beside(evaluated, shots)
    rows = [
        comparison.make_task_row(
            f"{group.name} ({len(group.runs)})", values, published.get(group.name, {}), ""
        )
        for group, values in models
    ]
    compared = comparison.make_task_table(title, names, rows)
    head, *body = compared.format_rows()
    for row in body:
        if not any(row[1:]):
            row[1] = "not evaluated"
    figures = [
        {"model": row.label, "task": task, "accuracy": value, "error": error}
        | {"published": row.paper.get(task)}
        for row in compared.rows
        for task, (value, error) in row.values.items()
    ]
    name = "_".join("".join(c if c.isalnum() else " " for c in title).split())
    heading = f"Accuracy in %, {title}"
    return Table(f"accuracy_{name}", heading, head, body, [ERRORS, *lines], figures)


def table_of_runs(groups: list[Group]) -> Table:
    """What every figure rests on: the runs, the code that trained them and the machine."""
    header = ["run", "model", "seed", "steps", "trained at commit", "on"]
    table = Table("runs", "Runs", header, [])
    for group in groups:
        for run in group.runs:
            about = {"seed": run.seed, "steps": run.step, "commit": run.commit}
            figures = {"run": run.name, "model": group.name, **about}
            table.figures.append(figures | {"machine": trained_on(run) or None})
            cells = [None if value is None else str(value) for value in about.values()]
            table.rows.append([run.name, group.name, *cells, trained_on(run) or None])
    return table
