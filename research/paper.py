"""`report.py paper`: the tables and figures of a paper from finished runs, as one folder."""

import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from evaluation import published
from research import compare, plots, tables
from research.compare import METRICS, Comparison, Group, shown
from research.runs import Run
from training.provenance import store_figures
from utils.tables import format_csv

REPORT = "report.json"
FIGURE = r"figures(/(curves|costs|differences|final|residual_\w*)\.(png|svg))?"
MADE = re.compile(
    rf"report\.(json|md)|tables\.tex|{FIGURE}"
    r"|(curves|validation|differences|costs|accuracy_\w+|runs)\.csv"
)
UNKNOWN = "unknown size"
BANDS = "Lines: means over runs; bands: their 95% intervals, none of a single run."
CAPTIONS = {
    "curves": "Training loss (above, smoothed over 2% of each run) and validation loss (below) of "
    f"the models of each size, and of their variants. {BANDS} What is early may lie above.",
    "costs": f"Validation loss against steps, tokens, FLOPs and device-seconds. {BANDS}",
    "differences": "Difference to the baseline at every evaluation, run by run of the same seed. "
    "Bands: 95% intervals.",
    "final": "Final differences to the baseline with their 95% intervals, the number of pairs or "
    "runs in brackets, and what they allow to say, corrected for their number.",
    "residual": "What the sites of each block say of themselves, means over tokens and runs.",
}


@dataclass
class Size:
    """Models of as many layers and as wide, and their differences to one of them.

    differences: in every metric that all have; the verdicts are on those in `metric`.
    """

    name: str
    groups: list[Group]
    baseline: Group | None = None
    metric: str | None = None
    differences: dict[str, list[Comparison]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def comparisons(self) -> list[Comparison]:
        return self.differences.get(self.metric, [])

    def short(self, group: Group) -> str:
        """The group's name without that of the size."""
        return group.name.removesuffix(f", {self.name}")


def size_of(run: Run) -> str:
    """small and medium are the paper's."""
    layers, width = (run.settings.get(key) for key in ("num_hidden_layers", "hidden_size"))
    for name, keys in published.SIZES.items():
        if (keys["num_hidden_layers"], keys["hidden_size"]) == (layers, width):
            return name
    return UNKNOWN if layers is None else f"{layers} layers, width {width}"


def paper_order(group: Group | Run) -> tuple[bool, int]:
    """The paper's models in its order, then all others as they were given."""
    stems = list(published.CONFIG_NAMES)
    return group.stem not in stems, stems.index(group.stem) if group.stem in stems else 0


def sizes_of(runs: list[Run], by: list[str], against: str | None) -> list[Size]:
    """ValueError: `against` is in none of the sizes, or names several groups."""
    names, sizes, faults = list(dict.fromkeys(map(size_of, runs))), [], []
    several = len({*names} - {UNKNOWN}) > 1
    for name in names:
        groups = compare.groups_of([run for run in runs if size_of(run) == name], by)
        suffix = f", {name}" if several and name != UNKNOWN else ""
        sizes.append(Size(name, with_own_names(sorted(groups, key=paper_order), suffix)))
    for size in sizes:
        done = [group for group in size.groups if not group.unfinished and group.step is not None]
        try:
            against_or_usual = against or plots.BASELINE_STEM
            size.baseline = compare.find_baseline(done or size.groups, against_or_usual)
            size.groups.sort(key=lambda group, first=size.baseline: group is not first)
        except ValueError as error:
            faults.append(str(error))
            size.notes.append(f"No comparison of {size.name}: {error}.")
    if against and len(faults) == len(sizes):
        raise ValueError(faults[0])
    compare_sizes([size for size in sizes if size.baseline])
    return sizes


def with_own_names(groups: list[Group], suffix: str) -> list[Group]:
    """Groups of one name have beside it that they are not finished, their step, or a run's name."""
    for more in (
        lambda group: " (not finished)" if group.unfinished else "",
        lambda group: f", step {group.step}",
        lambda group: f", {group.runs[0].name}",
    ):
        names = [group.name for group in groups]
        groups = [
            replace(g, name=g.name + more(g)) if names.count(g.name) > 1 else g for g in groups
        ]
    return [replace(group, name=group.name + suffix) for group in groups]


def compare_sizes(sizes: list[Size]) -> None:
    """What can be compared, in one unit for all sizes."""
    evaluated = [[group for group in size.groups if group.values("val_loss")] for size in sizes]
    everyone = [group for groups in evaluated for group in groups]
    metric = compare.metric_of(everyone)
    shared = [m for m in tables.DIFFERENCES if all(group.values(m) for group in everyone)]
    for size, groups in zip(sizes, evaluated):
        if size.baseline not in groups:
            size.notes.append(f"No comparison: {size.baseline.name} was not evaluated.")
        elif len(groups) > 1:
            size.metric = metric
            size.differences = {m: compare.compare(groups, size.baseline, m) for m in shared}


def tables_of(sizes: list[Size]) -> list[tables.Table]:
    groups = [group for size in sizes for group in size.groups]
    made = [tables.table_of_losses(groups)]
    made[0].notes += [note for size in sizes for note in size.notes]
    if any(size.comparisons for size in sizes):
        made.append(tables.table_of_differences(sizes))
    made += [tables.table_of_costs(sizes), *tables.tables_of_accuracy(groups)]
    return [*made, tables.table_of_runs(groups)]


def lines_of(sizes: list[Size]) -> list[plots.Line]:
    """A line for each group; one model has the same look in all sizes, a baseline the first."""
    baselines = [size.short(size.baseline) for size in sizes if size.baseline]
    others = [size.short(group) for size in sizes for group in size.groups]
    names = list(dict.fromkeys(baselines + others))
    every = [group for size in sizes for group in size.groups]
    figures, _ = tables.published_beside(every, "")
    lines = []
    for size in sizes:
        compared = {each.group.name: each for each in size.comparisons}
        for group in size.groups:
            number = names.index(size.short(group)) + (0 if baselines else 1)
            loss = figures.get(group.name, {}).get("val_loss")
            about = {"size": size.name, "published": loss}
            lines.append(plots.line_of(group, number, compared.get(group.name), **about))
    return lines


def figures_of(sizes: list[Size], lines: list[plots.Line], x: str) -> dict:
    """{name: figure} of all for which there is something to draw, in the order of a paper."""
    names = {size.short(size.baseline) for size in sizes if size.baseline}
    baseline = names.pop() if len(names) == 1 else "the baseline"
    metric = next((size.metric for size in sizes if size.metric), "val_loss")
    unit = METRICS[metric] + " (nats per token)" * (metric == "val_loss")
    made = {}
    if any(line.curves for line in lines):
        made["curves"] = plots.plot_paper_curves(lines, x)
    if any("validation" in line.curves for line in lines):
        made["costs"] = plots.plot_costs(lines)
    if any("difference" in line.curves for line in lines):
        made["differences"] = plots.plot_differences(lines, baseline, unit)
    by_name = {line.name: line for line in lines}
    compared = [each for size in sizes for each in size.comparisons if each.estimate]
    if compared:
        rows = [(by_name[c.group.name], shown(c.estimate, c.metric), c.verdict) for c in compared]
        made["final"] = plots.plot_final(rows, baseline, unit)
    for name, members in plots.residual_figures(lines).items():
        made[name] = plots.plot_residual(members)
    return made


def curves_csv(lines: list[plots.Line]) -> str:
    """Every point of every curve."""
    axes = [axis for axis in plots.X_LABELS if axis != "steps"]
    rows = []
    for line in lines:
        for kind, curve in line.curves.items():
            nothing = [float("nan")] * len(curve.steps)
            columns = [curve.steps, *(curve.x.get(axis, nothing) for axis in axes)]
            for point in zip(*columns, curve.mean, curve.half):
                rows.append([line.name, kind, *(f"{value:.6g}" for value in point), line.runs])
    return format_csv(["model", "curve", "step", *axes, "mean", "ci95", "runs"], rows)


# ---- the folder ----


def check_out(out: Path) -> None:
    """ValueError: the folder holds something else than an earlier report, which would be lost."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / REPORT).is_file():
        fix = "name a folder that is not there, or an earlier report"
        raise ValueError(f"--out={out}: it is there, and no report: {fix}")
    others = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    if others := [name for name in others if not MADE.fullmatch(name)]:
        fix = "move that, or name another"
        raise ValueError(f"--out={out}: it holds {others[0]}, which is no part of a report: {fix}")


def write(
    runs: list[Run], left_out: list[str], by: list[str], against: str | None, x: str, out: Path
) -> None:
    """Write the report, in the place of an earlier one, which stays until the new one is whole.

    left_out: lines on runs that could not be read. x: the axis of the curves, of runs.AXES.
    """
    sizes = sizes_of(runs, by, against)
    made, lines = tables_of(sizes), lines_of(sizes)
    names = ", ".join(size.name for size in sizes)
    more = "; what was left out is said at the end" if left_out else ""
    summary = f"{len(runs)} runs in {len(lines)} groups ({names}){more}."
    parts = ["# Report of runs", summary, *(table.markdown() for table in made)]
    new, old = (out.with_name(f".{out.name}.{word}") for word in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    try:
        (new / "figures").mkdir(parents=True)
        with plots.printing():
            for name, figure in figures_of(sizes, lines, x).items():
                for suffix, data in plots.images_of(figure).items():
                    (new / "figures" / f"{name}.{suffix}").write_bytes(data)
                caption = CAPTIONS[name if name in CAPTIONS else "residual"]
                parts.append(f"![{caption}](figures/{name}.png)")
        if left_out:
            parts += ["## Left out", "\n".join(f"- {line}" for line in left_out)]
        (new / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        head = f"% {summary}\n% needs \\usepackage{{booktabs}}\n"
        text = "\n".join([head, *(table.latex() for table in made)])
        (new / "tables.tex").write_text(text, encoding="utf-8")
        for table in made:
            (new / f"{table.name}.csv").write_text(table.comma_separated(), encoding="utf-8")
        (new / "curves.csv").write_text(curves_csv(lines), encoding="utf-8")
        figures = {t.name: {"title": t.title, "rows": t.figures, "notes": t.notes} for t in made}
        store_figures(new / REPORT, {"summary": summary, "tables": figures, "left_out": left_out})
        shutil.rmtree(old, ignore_errors=True)
        if out.exists():
            out.replace(old)
        new.replace(out)
    except OSError as error:
        named = f"{error.strerror}: {error.filename or new}"
        raise ValueError(f"no report was written ({named})") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
