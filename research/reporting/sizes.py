"""The groups of a report by the size of their models, in the paper's order; each size has a baseline of its own."""

from dataclasses import dataclass, field, replace

from evaluation import published
from research.reporting import groups as grouping
from research.reporting.groups import Comparison, Group
from research.reporting.runs import Run
from research.reporting.style import BASELINE_STEM

UNKNOWN = "unknown size"
DIFFERENCES = [metric for metric in grouping.METRICS if metric != "val_perplexity"]


@dataclass
class Size:
    """Models of as many layers and as wide, and their differences to one of them in all that every one of them has;
    the word is on those in `metric` (`groups.metric_of`)."""

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
        """The group's name without the size, where it has it."""
        return group.name.removesuffix(f", {self.name}")


def size_of(run: Run) -> str:
    """small and medium are the paper's."""
    layers, width = (run.settings.get(key) for key in ("num_hidden_layers", "hidden_size"))
    for name, keys in published.SIZES.items():
        if (keys["num_hidden_layers"], keys["hidden_size"]) == (layers, width):
            return name
    return UNKNOWN if layers is None else f"{layers} layers, width {width}"


def sizes_of(runs: list[Run], by: list[str], against: str | None) -> list[Size]:
    """ValueError: `against` is in none of the sizes, or names several groups."""
    names = list(dict.fromkeys(map(size_of, runs)))
    sizes = [Size(name, grouping.groups_of([run for run in runs if size_of(run) == name], by)) for name in names]
    several = len(set(names) - {UNKNOWN}) > 1
    for size in sizes:
        suffix = f", {size.name}" if several and size.name != UNKNOWN else ""
        size.groups = with_own_names(sorted(size.groups, key=order), suffix)
    faults = [fault for size in sizes if (fault := find_baseline(size, against))]
    if against and len(faults) == len(sizes):
        raise ValueError(faults[0])
    compare([size for size in sizes if size.baseline])
    return sizes


def order(group: Group | Run) -> tuple[bool, int]:
    """The paper's models in its order, then all others as they were given."""
    stems = list(dict.fromkeys(stem for _, _, stem in published.figures()))
    return group.stem not in stems, stems.index(group.stem) if group.stem in stems else 0


def with_own_names(groups: list[Group], size: str) -> list[Group]:
    """Groups of one name have beside it that they are not finished, then their step, then their first run's name."""
    for more in (unfinished, lambda group: f", step {group.step}", lambda group: f", {group.runs[0].name}"):
        names = [group.name for group in groups]
        groups = [replace(g, name=g.name + more(g)) if names.count(g.name) > 1 else g for g in groups]
    return [replace(group, name=group.name + size) for group in groups]


def unfinished(group: Group) -> str:
    return " (not finished)" if group.unfinished else ""


def find_baseline(size: Size, against: str | None) -> str:
    """Set the baseline and put it first; what is wrong with it, "" for nothing."""
    finished = [group for group in size.groups if not group.unfinished and group.step is not None]
    try:
        size.baseline = grouping.find_baseline(finished or size.groups, against or BASELINE_STEM)
    except ValueError as error:
        size.notes.append(f"No comparison{f' of {size.name}' if size.name else ''}: {error}.")
        return str(error)
    size.groups.sort(key=lambda group: group is not size.baseline)
    return ""


def compare(sizes: list[Size]) -> None:
    """What can be compared, in one unit for all sizes."""
    evaluated = [[group for group in size.groups if group.values("val_loss")] for size in sizes]
    everyone = [group for groups in evaluated for group in groups]
    metric = grouping.metric_of(everyone)
    metrics = [each for each in DIFFERENCES if all(group.values(each) for group in everyone)]
    for size, groups in zip(sizes, evaluated):
        if size.baseline not in groups:
            size.notes.append(f"No comparison: {size.baseline.name} was not evaluated.")
            continue
        if len(groups) > 1:
            size.metric = metric
            size.differences = {each: grouping.compare(groups, size.baseline, each) for each in metrics}
