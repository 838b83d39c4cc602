"""Reports of the MGT experiments: JSON, a page and a figure of each, from the runs that are finished."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import configurator
from evaluation import tables
from research import compare, runs, sweep
from research.benchmarks.figures import Figures
from research.mgt import drawings, findings, measures
from research.plots import pyplot
from training import distributed
from training.provenance import digest

# Whose code the figures of a run that is not trained again depend on.
CODE = (
    "model/*.py",
    "research/analysis/common.py",
    "research/analysis/rank.py",
    "research/mgt/measures.py",
    "data/loader.py",
)
# What a page says that every run shares.
SHOWN = (
    "dataset",
    "block_size",
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "max_steps",
)
SHOWN += (
    "global_batch_size",
    "optimizer",
    "learning_rate",
    "warmup_steps",
    "schedule",
    "weight_decay",
    "dtype",
)


# The `cpu` models of text end above its unigram entropy: they have not even learned how frequent
# its tokens are, so that they have nothing to say of a hypothesis about trained models.
TOO_SHORT = {(name, "cpu") for name in ("rank", "ablation", "beta", "depth", "language")}
NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Kind:
    """rows(cells, figures): a row for each figure; find(rows) -> Findings; draw(rows, file)."""

    title: str
    rows: Callable
    find: Callable
    draw: Callable
    note: str = ""


def of_cells(rows: Callable) -> Callable:
    """For rows that come from the run folders alone and are quickly made."""
    return lambda cells, figures: rows(cells)


SEEDS = "Figures are means over seeds ± half their 95% interval (number of seeds)."
KINDS = {
    "rank": Kind(
        "Experiment 1: effective rank over depth",
        measures.measure_rank,
        findings.rank_findings,
        drawings.rank,
        f"Ranks are those of {measures.WINDOWS} validation sequences (eq. 8), after the last block where nothing else "
        "is said; untrained: before the first step. In the figure, bands go from the lowest to the highest seed, and "
        "thin lines are untrained models.",
    ),
    "ablation": Kind(
        "Experiment 2: ablation",
        of_cells(measures.final_rows),
        findings.ablation_findings,
        drawings.losses,
    ),
    "beta": Kind(
        "Experiment 3: the gate beta over depth and training",
        measures.measure_beta,
        findings.beta_findings,
        drawings.beta,
        "beta is taken over tokens, features and both sites of a block. At 0% its bias alone sets its mean.",
    ),
    "depth": Kind(
        "Experiment 4: depth at one size",
        of_cells(measures.course_rows),
        findings.depth_findings,
        drawings.depth,
        "The target is the highest final loss of any run of that depth.",
    ),
    "language": Kind(
        "Experiment 5: language modelling",
        of_cells(measures.course_rows),
        findings.language_findings,
        drawings.curves,
    ),
    "copy": Kind(
        "The copy task of section 4.1",
        of_cells(measures.copy_rows),
        findings.copy_findings,
        drawings.curves,
    ),
}


def check() -> None:
    """ValueError: a package that a report needs is missing, which should not be found after the training."""
    pyplot()
    compare.student()


def write(experiment: str, preset: str, cells: list[sweep.Cell], results: Path) -> None:
    """`<results>/<experiment>_<preset>.json`, .md and .png, rows of runs.csv. ValueError: no run is finished."""
    done = [cell for cell in cells if sweep.final_evaluation(cell)]
    if not done:
        raise ValueError(
            f"no run of {experiment} is finished in {cells[0].folder.parent}: nothing to report"
        )
    results.mkdir(parents=True, exist_ok=True)
    kind, path = KINDS[experiment], results / f"{experiment}_{preset}.json"
    about = {"experiment": experiment, "preset": preset, "settings": shared(done)}
    figures = Figures(
        path, distributed.pick_device("auto"), about, resume=True, code=digest(*CODE)[:12]
    )
    found = judged(kind.find(kind.rows(done, figures)), experiment, preset)
    left = [cell.title for cell in cells if cell not in done]
    figures.rows = [{**row, **figures.made} for row in found.rows]
    figures.notes = {"groups": found.groups, "verdicts": found.verdicts, "unfinished": left}
    figures.store()
    keep_rows(done, f"{experiment}/{preset}", results)
    kind.draw(found.rows, path.with_suffix(".png"))
    configurator.replace_text(path.with_suffix(".md"), page(kind, about, found, left, path))
    print(path.with_suffix(".md").read_text(encoding="utf-8"))
    print(f"wrote {path}, {path.with_suffix('.md').name} and {path.with_suffix('.png').name}")


def keep_rows(cells: list[sweep.Cell], name: str, results: Path) -> None:
    """A row of runs.csv for each run."""
    found, _ = runs.load([str(cell.folder) for cell in cells])
    titles = {cell.folder: cell.title for cell in cells}
    runs.write_csv(
        [replace(run, name=f"{name}/{titles[run.path]}") for run in found], results / "runs.csv"
    )


def judged(found: findings.Findings, experiment: str, preset: str) -> findings.Findings:
    """The findings, without words for the hypotheses where the models have learned too little."""
    if (experiment, preset) not in TOO_SHORT:
        return found
    return replace(found, verdicts=[{**each, "verdict": NOT_JUDGED} for each in found.verdicts])


def shared(cells: list[sweep.Cell]) -> dict:
    """The settings that a page names, where they are the same in every run."""
    first = cells[0].settings
    return {
        key: first[key] for key in SHOWN if all(cell.settings[key] == first[key] for cell in cells)
    }


def page(kind: Kind, about: dict, found: findings.Findings, left: list[str], path: Path) -> str:
    settings = ", ".join(
        f"{key} {value}" for key, value in about["settings"].items() if value is not None
    )
    parts = [
        f"# {kind.title}, preset `{about['preset']}`",
        f"{settings}. {SEEDS} {kind.note}".strip(),
        tables.markdown(found.header, found.table),
        verdict_table(found.verdicts),
        *([f"Not finished: {'; '.join(left)}."] if left else []),
        f"![{kind.title}]({path.with_suffix('.png').name})",
        f"Made by `research/mgt/run.py {about['experiment']} --preset={about['preset']}`; figures: `{path.name}`.",
    ]
    return "\n\n".join(parts) + "\n"


def verdict_table(verdicts: list[dict]) -> str:
    """Without the column of words where nothing is judged; a part that is a word alone then goes."""
    header, rows = ("hypothesis", "mean ± 95% (seeds)", "verdict"), list(map(verdict_row, verdicts))
    if {each["verdict"] for each in verdicts} == {NOT_JUDGED}:
        header, rows = header[:2], [row[:2] for row in rows if row[1]]
    return tables.markdown(header, rows)


def verdict_row(verdict: dict) -> list[str]:
    mean, half = verdict["mean"], verdict["ci95"]
    text = (
        None
        if mean is None
        else f"{mean:.4f}{'' if half is None else f' ± {half:.4f}'} ({verdict['n']})"
    )
    return [verdict["hypothesis"], text, f"**{verdict['verdict']}**"]
