"""Make the tables of a report: results of runs, beside the published ones and beside a baseline."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from research.compare import (
    FRACTION_METRICS,
    METRIC_LABELS,
    Comparison,
    Estimate,
    Group,
    describe_validation_data,
    estimate_mean,
    get_vocabulary,
    to_display_unit,
)
from research.runs import Run
from utils import units
from utils.tables import Table

DIGITS = {
    "val_loss": 4,
    "ema_val_loss": 4,
    "val_perplexity": 3,
    "val_bits_per_byte": 4,
    "val_accuracy": 2,
    "val_exact_match": 2,
}
DIFFERENCE_METRICS = [metric for metric in METRIC_LABELS if metric != "val_perplexity"]
TIMES = "\N{MULTIPLICATION SIGN}"
INTERVAL_NOTE = "± is half the 95% interval of the mean over runs, (n) the number of runs."
ACCURACY_NOTE = (
    f"{INTERVAL_NOTE} For a single run, ± is lm-eval's standard error over a task's items."
)


@dataclass
class Size:
    """The models with the same number of layers and the same width, and their baseline.

    differences: the comparisons with the baseline in each metric that all groups have. metric: the
    one that the verdicts are on.
    """

    name: str
    groups: list[Group]
    baseline: Group | None = None
    metric: str | None = None
    differences: dict[str, list[Comparison]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def comparisons(self) -> list[Comparison]:
        """The comparisons in `metric`."""
        return self.differences.get(self.metric, [])

    def get_short_name(self, group: Group) -> str:
        """Return the name of a group without that of the size."""
        return group.name.removesuffix(f", {self.name}")


def format_steps(group: Group) -> str:
    """Return the step of a group's last evaluation: 800, or 25 of 800.

    Without an evaluation it is the step that all of its runs have reached.
    """
    reached_step = min(run.step for run in group.runs)
    step = reached_step if group.step is None else int(group.step)
    for run in group.runs:
        if "max_steps" in run.settings and (run.finished is False or step < reached_step):
            return f"{step:,} of {run.settings['max_steps']:,}"
    return f"{step:,}"


def format_estimate(estimate: Estimate | None, metric: str) -> str | None:
    """Return mean ± half the interval (number of runs), or the mean alone of a single run."""
    if estimate is None:
        return None
    number_format = f".{DIGITS[metric]}f"
    if estimate.n == 1:
        return f"{estimate.mean:{number_format}}"
    return estimate.format(number_format)


def flatten_estimates(estimates: dict[str, Estimate]) -> dict[str, float | None]:
    """Return {name: mean, name_ci95: half the interval, or None of a single run}."""
    numbers = {}
    for name, estimate in estimates.items():
        numbers[name] = estimate.mean
        numbers[f"{name}_ci95"] = estimate.half_width if estimate.n > 1 else None
    return numbers


# ---- losses ----


def make_loss_table(groups: list[Group], comparisons: Sequence[Comparison] = ()) -> Table:
    """Make the table of each group's last evaluation.

    It has columns for the published loss if one is known, and for the difference to a baseline if
    comparisons are given.
    """
    metrics = [
        metric for metric in METRIC_LABELS if any(group.get_values(metric) for group in groups)
    ]
    metrics = metrics or ["val_loss"]
    published_by_group, published_notes = get_published_results(groups, "")
    comparison_by_group = {id(comparison.group): comparison for comparison in comparisons}
    header = ["model", "parameters", "runs", "steps", *(METRIC_LABELS[key] for key in metrics)]
    if published_by_group:
        header += ["published loss", "loss minus the published"]
    if comparisons:
        metric_label = METRIC_LABELS[comparisons[0].metric]
        header += [f"{metric_label} minus that of {comparisons[0].baseline.name}", "verdict"]
    notes = [INTERVAL_NOTE, *published_notes, *list_cautions(groups, comparisons)]
    table = Table("validation", "Validation", header, [], notes)
    for group in groups:
        published = published_by_group.get(group.name, {})
        comparison = comparison_by_group.get(id(group))
        estimates = {}
        for metric in metrics:
            estimate = group.estimate(metric)
            if estimate is not None:
                estimates[metric] = estimate
        parameters = group.runs[0].parameters
        cells = [format_estimate(estimates.get(metric), metric) for metric in metrics]
        if not estimates:
            cells[0] = "not evaluated"
        row = [
            group.name,
            f"{parameters:,}" if parameters else None,
            str(len(group.runs)),
            format_steps(group),
            *cells,
        ]
        if published_by_group:
            row += make_published_cells(group, estimates, published.get("val_loss"))
        if comparison is not None:
            row += [format_difference(comparison), comparison.verdict or None]
        elif comparisons:
            row += [None, None]
        table.rows.append(row)
        table.numbers.append(
            {
                "model": group.name,
                "model_name": group.model_name,
                "parameters": parameters,
                "runs": [run.name for run in group.runs],
                "seeds": group.seeds,
                "steps": format_steps(group),
                **flatten_estimates(estimates),
                **{f"published_{key}": value for key, value in published.items()},
                **(make_comparison_numbers(comparison) if comparison else {}),
            }
        )
    return table


def make_published_cells(
    group: Group, estimates: dict[str, Estimate], published_loss: float | None
) -> list[str | None]:
    """Return the cells of the published loss and of the loss minus the published one."""
    if published_loss is None:
        return [None, None]
    difference = None
    if published_loss and estimates and not group.unfinished:
        difference = f"{estimates['val_loss'].mean - published_loss:+.4f}"
    return [f"{published_loss:.4f}", difference]


def get_published_results(
    groups: list[Group], shots: int | str
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return the paper's row for each group by its name, and the lines that belong under a table."""
    rows: dict[str, dict] = {}
    names_by_line: dict[str, list[str]] = {}
    for group in groups:
        for run in group.runs:
            row: dict[str, float] = {}
            line = "The settings of {} are not known, so the paper's results are not shown."
            if run.published is not None:
                row = run.published.results.get(str(shots), {})
                line = run.published.remark("{}")
            if row:
                rows[group.name] = row
            names = names_by_line.setdefault(line, [])
            if group.name not in names:
                names.append(group.name)
    lines = [line.replace("{}", ", ".join(names)) for line, names in names_by_line.items() if line]
    return rows, lines


def list_cautions(groups: list[Group], comparisons: Sequence[Comparison] = ()) -> list[str]:
    """Return the reasons why the numbers of one column cannot be compared."""
    cautions = [f"{group.name}: {caution}." for group in groups for caution in group.cautions]
    # dicts, because a set would not keep the order of the names
    names_by_validation_data: dict[str, dict[str, bool]] = {}
    tokenizers: dict[str | None, bool] = {}
    for group in groups:
        for run in group.runs:
            validation_data = describe_validation_data(run)
            names_by_validation_data.setdefault(validation_data, {})[group.name] = True
            tokenizers[get_vocabulary(run)[0]] = True
    if len(names_by_validation_data) > 1:
        names = " | ".join(", ".join(names) for names in names_by_validation_data.values())
        tokenizer_names = ""
        if len(tokenizers) > 1:
            tokenizer_names = f" ({', '.join(map(str, tokenizers))})"
        cautions.append(
            "Losses cannot be compared between models that were validated on different texts or "
            f"tokens{tokenizer_names}: {names}."
        )
    for comparison in comparisons:
        if comparison.estimate is None:
            cautions.append(f"{comparison.group.name} is not compared: {comparison.reason}.")
        elif not comparison.paired:
            cautions.append(f"{comparison.group.name} is compared unpaired: {comparison.reason}.")
    return cautions


# ---- differences ----


def make_difference_table(sizes: list[Size]) -> Table:
    """Make the table of each group minus the baseline of its size, in all metrics they share."""
    first = next(size for size in sizes if size.metric)
    metric_labels = [METRIC_LABELS[metric] for metric in first.differences]
    more_is_better = ", of which more is better" if first.metric in FRACTION_METRICS else ""
    note = (
        "Mean difference ± half its 95% interval. The verdict is on "
        f"{METRIC_LABELS[first.metric]}{more_is_better}: better or worse where the interval "
        "excludes 0 after Holm's correction for the comparisons of this size, else undecided."
    )
    header = ["model", "baseline", *metric_labels, "verdict", "pairs or runs"]
    table = Table("differences", "Differences to the baseline", header, [], [note])
    for size in sizes:
        # one comparison in each metric, for each group
        comparisons_by_group = zip(*size.differences.values())
        for comparison, comparisons in zip(size.comparisons, comparisons_by_group):
            cells = [format_difference(in_metric) for in_metric in comparisons]
            if comparison.estimate is None:
                cells = [None] * len(comparisons)
                cells[0] = f"not compared: {comparison.reason}"
            table.rows.append(
                [
                    comparison.group.name,
                    comparison.baseline.name,
                    *cells,
                    comparison.verdict or None,
                    describe_sample(comparison),
                ]
            )
            estimates = {}
            for in_metric in comparisons:
                if in_metric.estimate is not None:
                    metric = in_metric.metric
                    estimates[metric] = to_display_unit(in_metric.estimate, metric)
            table.numbers.append(
                {
                    "model": comparison.group.name,
                    **make_comparison_numbers(comparison),
                    **flatten_estimates(estimates),
                }
            )
    return table


def format_difference(comparison: Comparison) -> str | None:
    """Return the difference ± half its interval; None if the groups are not comparable."""
    if comparison.estimate is None:
        return None
    estimate = to_display_unit(comparison.estimate, comparison.metric)
    digits = DIGITS[comparison.metric]
    text = f"{estimate.mean:+.{digits}f}"
    if estimate.n > 1:
        text += f" ± {estimate.half_width:.{digits}f}"
    if not comparison.paired:
        return f"{text} unpaired"
    num_runs = max(len(comparison.group.runs), len(comparison.baseline.runs))
    has_unpaired_runs = estimate.n < num_runs
    return f"{text} ({describe_sample(comparison)})" if has_unpaired_runs else text


def describe_sample(comparison: Comparison) -> str | None:
    """Return how many pairs or runs a difference is estimated from."""
    if comparison.estimate is None:
        return None
    if comparison.paired:
        num_pairs = comparison.estimate.n
        return f"{num_pairs} pairs" if num_pairs > 1 else f"{num_pairs} pair"
    num_runs = len(comparison.group.runs)
    num_baseline_runs = len(comparison.baseline.runs)
    return f"{num_runs} and {num_baseline_runs} runs, unpaired: {comparison.reason}"


def make_comparison_numbers(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as files store it: with all digits, in the unit that tables show."""
    numbers = {
        "baseline": comparison.baseline.name,
        "metric": comparison.metric,
        "paired": comparison.paired,
        "verdict": comparison.verdict,
        "reason": comparison.reason,
    }
    if comparison.estimate is not None:
        estimate = to_display_unit(comparison.estimate, comparison.metric)
        numbers["n"] = estimate.n
        numbers["difference"] = estimate.mean
        numbers["difference_ci95"] = estimate.half_width if estimate.n > 1 else None
    return numbers


# ---- costs ----

COST_FORMATS = {
    "parameters": "{:,.0f}".format,
    "flops_per_token": units.format_count,
    "tokens_per_second": units.format_count,
    "memory": units.format_bytes,
    "device_seconds": "{:,.0f}".format,
}
MEASURED_COSTS = ("tokens_per_second", "memory", "device_seconds")


def make_cost_table(sizes: list[Size]) -> Table:
    """Make the table of each model's cost: means over runs, and the factor to its baseline."""
    baseline_names = [size.baseline.name for size in sizes if size.baseline]
    factor_note = ""
    if baseline_names:
        factor_note = f"; brackets give the ratio to those of {' and '.join(baseline_names)}"
    note = (
        "Tokens/s is the median over training. Peak memory is that of the main process, allocated "
        "on a GPU and resident on a CPU. Device-seconds are those of the training steps without "
        "step 1, which compiles; steps that compile again after a restart count. Values are means "
        f"over runs{factor_note}. Runs that shared a machine slowed each other down."
    )
    header = ["model", "parameters", "FLOPs per token", "tokens/s", "peak memory", "device-seconds"]
    groups = [group for size in sizes for group in size.groups]
    table = Table("costs", "Cost", header, [], [note, make_machine_note(groups)])
    for size in sizes:
        for group in size.groups:
            costs = compute_costs(group)
            factors = compute_cost_factors(group, size.baseline)
            cells = []
            for key, format_cost in COST_FORMATS.items():
                if costs[key] is None:
                    cells.append(None)
                elif key in factors:
                    cells.append(f"{format_cost(costs[key])} ({factors[key]:.2f}{TIMES})")
                else:
                    cells.append(format_cost(costs[key]))
            table.rows.append([group.name, *cells])
            table.numbers.append(
                {
                    "model": group.name,
                    **costs,
                    **{f"{key}_factor": factor for key, factor in factors.items()},
                }
            )
    return table


def compute_costs(group: Group) -> dict[str, float | None]:
    """Return the mean of each cost over the runs of a group, None where a run lacks it.

    The device-seconds are those of finished runs.
    """
    costs_by_run = []
    for run in group.runs:
        costs_by_run.append(
            {
                "parameters": run.parameters,
                "flops_per_token": run.flops_per_token,
                "tokens_per_second": run.totals.get("tokens_per_second"),
                "memory": run.totals.get("memory"),
                "device_seconds": None if run.finished is False else run.device_seconds,
            }
        )
    means = {}
    for key in COST_FORMATS:
        values = [costs[key] for costs in costs_by_run]
        means[key] = None if None in values else float(np.mean(values))
    return means


def compute_cost_factors(group: Group, baseline: Group | None) -> dict[str, float]:
    """Return each cost divided by the baseline's.

    Measured costs have no factor if the two were trained on different machines.
    """
    if baseline is None or group is baseline:
        return {}
    costs = compute_costs(group)
    baseline_costs = compute_costs(baseline)
    is_same_machine = describe_machines(group) == describe_machines(baseline)
    factors = {}
    for key in COST_FORMATS:
        if costs[key] and baseline_costs[key] and (is_same_machine or key not in MEASURED_COSTS):
            factors[key] = costs[key] / baseline_costs[key]
    return factors


def describe_machines(group: Group) -> str:
    """Return the machines that a group was trained on, or "" if they are not known."""
    return ", ".join(sorted({describe_machine(run) for run in group.runs}))


def describe_machine(run: Run) -> str:
    """Return the name of `utils.provenance.machine` and the number of processes, or ""."""
    name = (run.machine or {}).get("machine")
    if not name:
        return ""
    unit = "processes" if run.processes > 1 else "process"
    return f"{name}, {run.processes} {unit}"


def make_machine_note(groups: list[Group]) -> str:
    """Return a sentence on the machines that the groups were trained on."""
    names_by_machine: dict[str, list[str]] = {}
    for group in groups:
        names_by_machine.setdefault(describe_machines(group), []).append(group.name)
    if names_by_machine.keys() == {""}:
        return "The runs do not record on what machine they were trained."
    if len(names_by_machine) == 1:
        return f"Trained on {next(iter(names_by_machine))}."
    machines = "; ".join(
        f"{machine or 'unknown'}: {', '.join(names)}" for machine, names in names_by_machine.items()
    )
    return (
        f"Trained on different machines ({machines}): speed, memory and seconds have no factors "
        "across them."
    )


# ---- accuracy and provenance ----


def make_accuracy_tables(groups: list[Group]) -> list[Table]:
    """Make a table of the results of eval.py for each number of examples; none without results."""
    titles = {}
    for group in groups:
        for run in group.runs:
            for record in run.accuracy:
                for result in record.get("shown", ()):
                    title = make_accuracy_title(result["shots"], record["settings"])
                    titles[title] = result["shots"]
    ordered = sorted(titles, key=lambda title: (titles[title], title))
    return [make_accuracy_table(groups, title, titles[title]) for title in ordered]


def make_accuracy_title(shots: int, settings: dict) -> str:
    """Return the number of shots, and what else affects results."""
    items = f", only the first {settings['limit']} items" if settings["limit"] else ""
    return f"{shots}-shot, {settings['dtype']}{items}"


def make_accuracy_table(groups: list[Group], title: str, shots: int) -> Table:
    """Make the table of all results of eval.py with this title."""
    from evaluation.comparison import compute_average, format_value  # the import takes a second
    from evaluation.tasks import PAPER_METRICS

    metric_by_task: dict[str, str] = {}
    values_by_group = []
    for group in groups:
        results = [select_task_results(run, title) for run in group.runs]
        values = {}
        for task in results[0]:
            if not all(task in result for result in results):
                continue
            metric, value, error = results[0][task]
            metric_by_task[task] = metric
            if len(results) > 1:
                estimate = estimate_mean([result[task][1] for result in results])
                value = estimate.mean
                error = estimate.half_width
            values[task] = (value, error)
        # Each run is averaged by itself, because its seed changes all of its tasks together.
        averages = [
            compute_average({task: (value, error) for task, (_, value, error) in result.items()})
            for result in results
        ]
        if all(averages):
            values["average"] = averages[0]
            if len(averages) > 1:
                estimate = estimate_mean([average for average, _ in averages])
                values["average"] = (estimate.mean, estimate.half_width)
        values_by_group.append(values)
    # the paper's tasks first, in its order
    names = dict.fromkeys([task for task in PAPER_METRICS if task in metric_by_task])
    headings = {task: f"{task} ({metric_by_task[task]})" for task in {**names, **metric_by_task}}
    if any("average" in values for values in values_by_group):
        headings["average"] = "average of the eight"
    evaluated = [group for group, values in zip(groups, values_by_group) if values]
    published_by_group, published_notes = get_published_results(evaluated, shots)
    words = "".join(character if character.isalnum() else " " for character in title).split()
    table = Table(
        name=f"accuracy_{'_'.join(words)}",
        title=f"Accuracy in %, {title}",
        header=["model", *headings.values()],
        rows=[],
        notes=[ACCURACY_NOTE, *published_notes],
        continuations=("published",),
    )
    for group, values in zip(groups, values_by_group):
        label = f"{group.name} ({len(group.runs)})"
        published = published_by_group.get(group.name, {})
        row = [format_value(*values.get(task, (None,))) for task in headings]
        if not values:
            row[0] = "not evaluated"
        table.rows.append([label, *row])
        if published.keys() & headings.keys():
            row = [format_value(published.get(task)) for task in headings]
            table.rows.append(["published", *row])
        for task, (value, error) in values.items():
            table.numbers.append(
                {
                    "model": label,
                    "task": task,
                    "accuracy": value,
                    "error": error,
                    "published": published.get(task),
                }
            )
    return table


def select_task_results(run: Run, title: str) -> dict[str, tuple[str, float, float]]:
    """Return (metric, value in percent, standard error) by task, of the results with this title."""
    results = {}
    for record in run.accuracy:
        for result in record.get("shown", ()):
            if make_accuracy_title(result["shots"], record["settings"]) == title:
                numbers = (result["metric"], result["value"], result["standard_error"])
                results[result["task"]] = numbers
    return results


def make_run_table(groups: list[Group]) -> Table:
    """Make the table of the runs, the code that trained them and the machines."""
    header = ["run", "model", "seed", "steps", "trained at commit", "on"]
    table = Table("runs", "Runs", header, [])
    for group in groups:
        for run in group.runs:
            machine = describe_machine(run) or None
            table.rows.append(
                [
                    run.name,
                    group.name,
                    None if run.seed is None else str(run.seed),
                    str(run.step),
                    run.commit,
                    machine,
                ]
            )
            table.numbers.append(
                {
                    "run": run.name,
                    "model": group.name,
                    "seed": run.seed,
                    "steps": run.step,
                    "commit": run.commit,
                    "machine": machine,
                }
            )
    return table
