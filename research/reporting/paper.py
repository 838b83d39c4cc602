"""`report.py paper`: the tables and figures of a paper from finished runs, as one folder."""

import io
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import configurator
from configurator import replace_text
from evaluation import tables
from research.reporting import figures, results
from research.reporting.drawing import drawn, unit_of
from research.reporting.groups import shown
from research.reporting.runs import Run
from research.reporting.sizes import Size, sizes_of
from training.provenance import store

REPORT = "report.json"
DRAWN = r"figures(/(curves|costs|differences|final|residual_\w*)\.(png|svg))?"
MADE = re.compile(
    rf"report\.(json|md)|tables\.tex|(curves|validation|differences|costs|accuracy_\w+|runs)\.csv|{DRAWN}"
)
TITLE = "Report of runs"
LONGEST_KIND = 100  # characters in a file's name


@dataclass
class Report:
    """All that is written. figures: name, caption, png, svg of each."""

    sizes: list[Size]
    groups: list[figures.Drawn]
    tables: list[results.Table]
    figures: list[dict]
    left_out: list[str]
    x: str

    @property
    def summary(self) -> str:
        runs = sum(len(group.runs) for size in self.sizes for group in size.groups)
        sizes = ", ".join(size.name for size in self.sizes)
        missing = "; what was left out is said at the end" if self.left_out else ""
        return f"{runs} runs in {len(self.groups)} groups ({sizes}){missing}."

    @property
    def difference(self) -> str:
        """What the curves of differences show."""
        metric = next((size.metric for size in self.sizes if size.metric), "val_loss")
        return f"{unit_of(metric)} less that of {baseline_of(self.sizes)}"


def make(runs: list[Run], left_out: list[str], by: list[str], against: str | None, x: str) -> Report:
    """x: the axis of the curves. ValueError: `against` or a key of `by` is not there."""
    sizes = sizes_of(runs, by, against)
    report = Report(sizes, drawn(sizes), tables_of(sizes), [], left_out, x)
    with figures.printed():
        for name, caption, figure in figures_of(report):
            report.figures.append({"name": name, "caption": caption, **files(figure)})
    return report


def tables_of(sizes: list[Size]) -> list[results.Table]:
    groups = [group for size in sizes for group in size.groups]
    found = [results.validation(groups)]
    found[0].notes += [note for size in sizes for note in size.notes]
    if any(size.comparisons for size in sizes):
        found.append(results.comparison(sizes))
    found.append(results.costs(sizes))
    if any(run.accuracy for group in groups for run in group.runs):
        from research.reporting.accuracy import accuracy  # it takes a second to import

        found += accuracy(groups)
    return [*found, results.provenance(groups)]


def baseline_of(sizes: list[Size]) -> str:
    """Its name, where all sizes have the same one."""
    names = {size.short(size.baseline) for size in sizes if size.baseline}
    return names.pop() if len(names) == 1 else "the baseline"


def figures_of(report: Report):
    """(name, caption, figure) of all for which there is something to draw, in the order of a paper."""
    groups, baseline = report.groups, baseline_of(report.sizes)
    unit = report.difference.partition(" less ")[0]
    if any(group.curves for group in groups):
        yield "curves", figures.CURVES, figures.curves(groups, report.x)
    if any("validation" in group.curves for group in groups):
        yield "costs", figures.COSTS, figures.costs(groups)
    if any("difference" in group.curves for group in groups):
        yield "differences", figures.DIFFERENCES, figures.differences(groups, baseline, unit)
    by_name = {group.name: group for group in groups}
    compared = [c for size in report.sizes for c in size.comparisons if c.estimate]
    if compared:
        rows = [(by_name[c.group.name], shown(c.estimate, c.metric), c.verdict) for c in compared]
        yield "final", figures.FOREST, figures.forest(rows, baseline, unit)
    taken: set[str] = set()
    for kind, members in figures.kinds_of([group for group in groups if group.residual]).items():
        yield residual_name(kind, taken), figures.RESIDUAL, figures.residual(members)


def residual_name(kind: str, taken: set[str]) -> str:
    """A name for a file and a page from those that a model gives its statistics, which may hold any character."""
    name = "residual_" + re.sub(r"[^A-Za-z0-9_]+", "_", kind)[:LONGEST_KIND]
    while name in taken:
        name += "_again"
    taken.add(name)
    return name


def files(figure) -> dict[str, bytes]:
    """The same bytes from the same numbers. Each is drawn once, which `savefig` would do twice."""
    agg = configurator.optional("matplotlib.backends.backend_agg", "a figure").FigureCanvasAgg
    svg = configurator.optional("matplotlib.backends.backend_svg", "a figure").FigureCanvasSVG
    bitmap, drawing = io.BytesIO(), io.BytesIO()
    figure.dpi = 200
    agg(figure).print_png(bitmap, metadata={"Software": None})
    figure.set_layout_engine("none")  # it stays as it was laid out
    svg(figure).print_svg(drawing, metadata={"Date": None})
    return {"png": bitmap.getvalue(), "svg": drawing.getvalue()}


# ---- on the disk ----


def check(out: Path) -> None:
    """ValueError: the folder holds something else than a report, which would be lost with the earlier one."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not is_report(out):
        raise ValueError(
            f"--out={out}: it is there, and no report: name a folder that is not there, or an earlier report"
        )
    others = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    if others := [name for name in others if not MADE.fullmatch(name)]:
        raise ValueError(f"--out={out}: it holds {others[0]}, which is no part of a report: move that, or name another")


def is_report(out: Path) -> bool:
    """Whether its report.json is one of `write`."""
    try:
        return configurator.read_json(out / REPORT).keys() >= {"summary", "tables", "left_out"}
    except ValueError:
        return False


def write(report: Report, out: Path) -> None:
    """The folder, in the place of an earlier report, which stays as it was until all of the new one is there."""
    new, old = (out.with_name(f".{out.name}.{word}") for word in ("new", "old"))
    if old.exists() and not out.exists():  # a call was killed between the two steps below
        old.replace(out)
    for folder in (new, old):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        fill(report, new)
        if out.exists():
            out.replace(old)
        new.replace(out)
    finally:
        shutil.rmtree(new, ignore_errors=True)  # it is there where something failed
    shutil.rmtree(old, ignore_errors=True)


def fill(report: Report, new: Path) -> None:
    (new / "figures").mkdir(parents=True)
    for figure in report.figures:
        for kind in ("png", "svg"):
            (new / "figures" / f"{figure['name']}.{kind}").write_bytes(figure[kind])
    for name, text in texts(report).items():
        replace_text(new / name, text)
    store(new / REPORT, numbers(report))


def texts(report: Report) -> dict[str, str]:
    """Files by their names."""
    found = {f"{table.name}.csv": table.comma_separated() for table in report.tables}
    head = f"% {report.summary}\n% needs \\usepackage{{booktabs}}\n"
    found["tables.tex"] = "\n".join([head, *(table.latex() for table in report.tables)])
    found["curves.csv"] = curves_csv(report.groups)
    return found | {"report.md": markdown(report)}


def curves_csv(groups: list[figures.Drawn]) -> str:
    """Every point of every curve."""
    rows = []
    for group in groups:
        for kind, curve in group.curves.items():
            columns = curve.steps, *(curve.x[axis] for axis in figures.AXES if axis != "steps"), curve.mean, curve.half
            rows += [[group.name, kind, *(f"{v:.6g}" for v in point), curve.runs] for point in zip(*columns)]
    axes = [axis for axis in figures.AXES if axis != "steps"]
    return tables.comma_separated(["model", "curve", "step", *axes, "mean", "ci95", "runs"], rows)


def markdown(report: Report) -> str:
    drawn = [f"![{figure['caption']}](figures/{figure['name']}.png)" for figure in report.figures]
    parts = [f"# {TITLE}", report.summary, *(table.markdown() for table in report.tables), *drawn]
    if report.left_out:
        parts += ["## Left out", "\n".join(f"- {line}" for line in report.left_out)]
    return "\n\n".join(parts) + "\n"


def numbers(report: Report) -> dict:
    found = {table.name: {"title": table.title, "rows": table.figures, "notes": table.notes} for table in report.tables}
    return {"summary": report.summary, "tables": found, "left_out": report.left_out}
