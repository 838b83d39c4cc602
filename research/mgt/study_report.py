"""Tables, verdicts and figures of the MGT study (PLAN.md), from the rows that study.py stored.

    python research/mgt/study_report.py

Writes study.json, study.md and the figures to results/mgt/ (or to --results=FOLDER).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import numpy as np

import configurator
from research import compare, plots
from research.mgt import comparisons, ngrams, study
from research.mgt.arms import Experiment, Setting, make_experiments
from research.mgt.comparisons import Table
from research.rows import read_rows
from training.provenance import collect_provenance, store_figures
from utils import files, tables

ORDER = ("ablation", "rank", "beta", "depth", "language")
NUMBERS = {"rank": 1, "ablation": 2, "beta": 3, "depth": 4, "language": 5}


def summarize_setting(name: str, setting: Setting, rows: list[dict], table: Table) -> dict:
    """Return what a setting was trained with, its loss, and whether it learned."""
    own = [row for row in rows if row["setting"] == setting.name]
    tries = [row for row in own if row["kind"] == "try"]
    losses = {row["seed"]: row["val_loss"] for row in own if row["kind"] == "seed"}
    summary = {
        "experiment": name,
        "setting": setting.name,
        "arm": setting.arm,
        "layers": setting.num_layers,
        "equal": setting.equal,
        "tries": len(tries),
        "seeds": sorted(losses),
        "parameters": own[0]["parameters"] if own else None,
        "learned": table.has_learned(setting.arm, setting.num_layers, setting.equal),
        "bigram": table.bigram,
    }
    if tries:
        best = study.find_best(tries)
        rates = [row["learning_rate"] for row in tries]
        summary["learning_rate"] = best["learning_rate"]
        summary["warmup_fraction"] = best["warmup_fraction"]
        summary["rate_at_edge"] = best["learning_rate"] in (min(rates), max(rates))
    values = [losses[seed] for seed in sorted(losses)]
    summary["diverged"] = sum(value is None for value in values)
    if values and not summary["diverged"]:
        summary["val_loss"] = compare.summarize(values)
    return summary


def summarize_experiment(name: str, experiment: Experiment, rows: list[dict]) -> dict:
    """Return how much of an experiment is finished."""
    finished = [row for row in rows if row["kind"] != "repeat"]
    return {
        "experiment": name,
        "title": experiment.title,
        "steps": experiment.steps,
        "runs": len(finished),
        "runs_planned": study.count_runs(experiment) * len(experiment.settings),
        "minutes": round(sum(row["seconds"] for row in finished) / 60, 1),
        "commits": sorted({row["commit"] for row in rows}),
    }


def summarize(rows: dict[str, list[dict]], references: dict) -> dict:
    """Return everything that the tables show, from the rows of every experiment."""
    bigram = references["second"]["bigram"]
    experiments = make_experiments()
    tables_by_name = {name: Table(rows[name], experiments[name].seeds, bigram) for name in ORDER}
    return {
        "references": references,
        "experiments": [
            summarize_experiment(name, experiments[name], rows[name]) for name in ORDER
        ],
        # a trained setting each
        "groups": [
            summarize_setting(name, setting, rows[name], tables_by_name[name])
            for name in ORDER
            for setting in experiments[name].settings
        ],
        "verdicts": [
            {"experiment": name, **result}
            for name, table in tables_by_name.items()
            for result in comparisons.judge(comparisons.COMPARISONS[name](table), table)
        ],
        "repeats": [
            {key: row[key] for key in ("setting", "seed", "val_loss", "same_bits")}
            for name in ORDER
            for row in rows[name]
            if row["kind"] == "repeat"
        ],
    }


def select(entries: list[dict], name: str) -> list[dict]:
    """Return the entries of one experiment."""
    return [entry for entry in entries if entry["experiment"] == name]


# ---- tables ----


def format_learned(setting: dict) -> str | None:
    if setting["learned"] is None:
        return None
    return "yes" if setting["learned"] else "did not learn"


def format_settings(settings: list[dict]) -> str:
    """Format the settings of an experiment that have runs, with the bigram's loss beside them."""
    header = ("arm", "blocks", "parameters", "rate", "warm-up", "loss", "bigram", "learned")
    cells = []
    for setting in settings:
        if not setting["tries"]:
            continue
        edge = " (edge)" if setting["rate_at_edge"] else ""
        loss = None
        if "val_loss" in setting:
            loss = compare.estimate_mean(setting["val_loss"]["values"]).format()
        name = f"`{setting['arm']}`"
        if setting["equal"]:
            name += f", equal {setting['equal']}"
        cells.append(
            [
                name,
                setting["layers"],
                f"{setting['parameters']:,}",
                f"{setting['learning_rate']:g}{edge}",
                f"{setting['warmup_fraction']:.0%}",
                loss,
                f"{setting['bigram']:.3f}",
                format_learned(setting),
            ]
        )
    return tables.format_markdown(header, cells)


def format_comparisons(verdicts: list[dict]) -> str:
    """Format the comparisons of an experiment with their verdicts."""
    cells = []
    for number, result in enumerate(verdicts, 1):
        estimate = None
        if result["values"] is not None:
            estimate = compare.estimate_mean(result["values"]).format("+.4f")
        corrected = None if result["p"] == 1 else f"{result['p_holm']:.2g}"
        cells.append(
            [number, result["hypothesis"], estimate, corrected, f"**{result['verdict']}**"]
        )
    header = ("", "claim", "mean ± 95% (seeds)", "p (Holm)", "verdict")
    return tables.format_markdown(header, cells)


def format_page(study_results: dict) -> str:
    """Return the Markdown page of all tables."""
    second = study_results["references"]["second"]
    scored = ", ".join(f"{name} {loss:.3f}" for name, loss in second.items())
    parts = [
        "# The MGT study: all settings and comparisons",
        "Made by `research/mgt/study_report.py` from the rows of `study.py`; the same figures are in "
        "`study.json`; the rules are those of "
        "`research/mgt/PLAN.md`. Losses are nats per character, means over seeds ± half their 95% "
        f"interval (seeds). n-gram models on the same characters: {scored}. Verdicts hold for this "
        "size and text.",
    ]
    for summary in study_results["experiments"]:
        name = summary["experiment"]
        settings = select(study_results["groups"], name)
        progress = (
            f"{summary['runs']} of {summary['runs_planned']} runs, {summary['minutes']} minutes; "
            f"rows: `{name}.jsonl`."
        )
        if summary["runs"] < summary["runs_planned"]:
            progress += f" The rest: `python research/mgt/study.py {name}`."
        parts += [f"## {NUMBERS[name]}. {summary['title'].capitalize()}", progress]
        if any(setting["tries"] for setting in settings):
            parts.append(format_settings(settings))
        parts.append(format_comparisons(select(study_results["verdicts"], name)))
    parts.append("## Runs that were trained again")
    for repeat in study_results["repeats"]:
        word = "the same bits" if repeat["same_bits"] else "other bits"
        parts.append(f"`{repeat['setting']}`, seed {repeat['seed']}: {word}.")
    return "\n\n".join(parts) + "\n"


# ---- figures ----


def draw_comparisons(verdicts: list[dict]) -> object:
    """Draw the comparisons of experiment 2 with their intervals."""
    figure, [[panel]] = plots.make_panels(1, 1, 3.0, [])
    judged = [result for result in verdicts if result["values"] is not None]
    for position, result in enumerate(reversed(judged)):
        color = plots.COLORS[2] if result["verdict"] == "supported" else plots.COLORS[1]
        if result["verdict"] not in ("supported", "refuted"):
            color = "gray"
        panel.errorbar(
            result["mean"], position, xerr=result["ci95"], fmt="o", color=color, capsize=3
        )
    labels = [shorten_claim(result["hypothesis"]) for result in reversed(judged)]
    panel.set_yticks(range(len(judged)), labels)
    panel.axvline(0, color="black", linewidth=0.8)
    panel.set_xlabel(
        "difference of losses (lower is better), or S (nats); green: supported, red: refuted"
    )
    return figure


def shorten_claim(claim: str) -> str:
    """Return a claim of experiment 2 as a label."""
    return (
        claim.replace(" has a lower loss than ", " < ")
        .replace("the two gates are synergistic (S > 0), ", "S > 0, ")
        .replace("`", "")
    )


def draw_ranks(rows: list[dict], seeds: tuple[int, ...]) -> object:
    """Draw rank, centered rank and cosine over relative depth, trained and untrained (thin)."""
    names = {
        "rank": "effective rank",
        "centered_rank": "centered rank",
        "cosine": "mean cosine",
    }
    reported = [row for row in rows if row["kind"] == "seed"]
    depths = sorted({row["layers"] for row in reported})
    arms = list(dict.fromkeys(row["arm"] for row in reported))
    figure, axes = plots.make_panels(len(names), len(depths), 1.8, arms, sharey="row", sharex="col")
    entries = {}
    for line, (name, label) in zip(axes, names.items(), strict=True):
        for panel, depth in zip(line, depths, strict=True):
            for number, arm in enumerate(arms):
                own = [row for row in reported if (row["arm"], row["layers"]) == (arm, depth)]
                if len(own) < len(seeds):
                    continue
                trained = np.mean([row[name] for row in own], axis=0)
                untrained = np.mean([row[f"untrained_{name}"] for row in own], axis=0)
                color = plots.COLORS[number]
                (entries[arm],) = panel.plot(trained, color=color)
                panel.plot(untrained, color=color, linewidth=0.6, linestyle="--")
        line[0].set_ylabel(label)
    for panel, depth in zip(axes[-1], depths, strict=True):
        panel.set_xlabel(f"block of {depth}")
    plots.add_legend(figure, entries)
    return figure


def draw_depth(settings: list[dict], bigram: float) -> object:
    """Draw the loss of experiment 4 over the number of blocks, a dot per seed and the means."""
    arms = list(dict.fromkeys(setting["arm"] for setting in settings))
    figure, [[panel]] = plots.make_panels(1, 1, 2.4, [*arms, "bigram"])
    entries = {}
    for number, arm in enumerate(arms):
        own = [setting for setting in settings if setting["arm"] == arm and "val_loss" in setting]
        depths = [setting["layers"] for setting in own]
        means = [setting["val_loss"]["mean"] for setting in own]
        color = plots.COLORS[number]
        (entries[arm],) = panel.plot(depths, means, color=color)
        for setting in own:
            values = setting["val_loss"]["values"]
            panel.plot([setting["layers"]] * len(values), values, "o", color=color, markersize=3)
    entries["bigram"] = panel.axhline(bigram, color="black", linestyle="--", linewidth=0.8)
    panel.set(xscale="log", xlabel="blocks, at 300,000 parameters")
    panel.set_xticks(depths, [str(depth) for depth in depths])
    panel.set_xticks([], minor=True)
    panel.set_ylabel("validation loss (nats; lower is better)")
    plots.add_legend(figure, entries)
    return figure


# The findings of the figures.
TITLES = {
    "study_comparisons": "Both gates help, but together they gain less than the sum of their gains (S < 0)",
    "study_ranks": "Training lowers the rank of the post-norm Transformer over depth (solid; dashed: untrained), "
    "but not towards 0",
    "study_depth": "The post-norm Transformer barely learns with 48 blocks; MGT does, but it does not gain "
    "from depth",
}


def draw_figures(
    study_results: dict, rows: dict[str, list[dict]], rank_seeds: tuple[int, ...]
) -> dict[str, object]:
    """Draw the figures of the experiments that have reported runs."""
    figures = {}
    ablation_verdicts = select(study_results["verdicts"], "ablation")
    if any(result["values"] is not None for result in ablation_verdicts):
        figures["study_comparisons"] = draw_comparisons(ablation_verdicts)
    if any(row["kind"] == "seed" for row in rows["rank"]):
        figures["study_ranks"] = draw_ranks(rows["rank"], rank_seeds)
    depth_settings = select(study_results["groups"], "depth")
    if any("val_loss" in setting for setting in depth_settings):
        bigram = study_results["references"]["second"]["bigram"]
        figures["study_depth"] = draw_depth(depth_settings, bigram)
    return figures


def main() -> None:
    with errors.one_line_errors(ValueError, OSError):
        names, options = configurator.split_arguments(sys.argv[1:])
        if "help" in options:
            print((__doc__ or "").strip())
            return
        if names or options.keys() - {"results"}:
            raise ValueError(f"{' '.join(sys.argv[1:])}: give --results=FOLDER or nothing")
        results = Path(options.get("results", "results/mgt"))
        if not results.is_dir():
            raise ValueError(f"--results={results} is not a folder; give the folder of study.py")
        references = ngrams.compute_references("shakespeare_char")
        experiments = make_experiments()
        rows = {name: read_rows(results / f"{name}.jsonl") for name in ORDER}
        study_results = summarize(rows, references)
        store_figures(results / "study.json", study_results, collect_provenance())
        files.write_text(results / "study.md", format_page(study_results))
        with plots.use_print_style():
            figures = draw_figures(study_results, rows, experiments["rank"].seeds)
            for name, figure in figures.items():
                figure.suptitle(TITLES[name], fontsize=9)
                plots.save(figure, results / f"{name}.png")
    print((results / "study.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
