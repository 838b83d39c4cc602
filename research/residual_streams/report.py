"""The study's report from the stored runs: tables and words by PLAN.md's rules, JSON, the picture.

    python research/residual_streams/report.py                 cpu_report.md, .json and .png
    python research/residual_streams/report.py --preset=gpu    gpu_report.md, ..., of gpu.sh's runs

README.md beside this file shows some of the tables: what it has between `<!-- NAME -->` and
`<!-- end -->` is made here too, the rest is written by hand. Runs that are missing are pending.
"""

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import configurator
from evaluation.published import SIZES, read_results
from research import plots
from research.compare import (
    SIGNIFICANCE_LEVEL,
    Estimate,
    correct_p_values,
    estimate_paired_difference,
    judge_difference,
    summarize,
)
from research.residual_streams import arms
from research.residual_streams.arms import ARMS, BASELINE, PRESETS, SEEDS, Hypothesis, Problem
from research.residual_streams.run import STAGES, Study, arm_of, over_baseline
from training.provenance import store_figures
from utils import files
from utils.tables import format_markdown

PAGE = Path(__file__).with_name("README.md")
SMALLEST = 0.01  # nats per token, or share of right answers: within it two arms are level
Values = dict[str, dict[int, float]]  # by arm and seed


# ---- values at equal cost ----


def final_values(study: Study, stage: str, problem: str) -> Values:
    """The metric after the last step; of a run that diverged that of a uniform guess."""
    of, found = study.problem(problem), {}
    for run in study.stored(stage, problem):
        value = run.final_evaluation[of.metric] if run.finished else math.nan
        found.setdefault(arm_of(run), {})[run.seed] = value if math.isfinite(value) else of.guess
    return found


def costs_of(study: Study, problem: str) -> dict[str, dict]:
    """By arm: parameters; FLOPs per token and speeds, compiled and eager, over the baseline's."""
    runs = study.stored("tokens", problem)
    flops = over_baseline({arm_of(run): run.flops_per_token for run in runs})
    fast, eager = (study.relative_speeds(stage, problem) for stage in ("alone", "eager"))
    ratios = {"flops": flops, "speed": fast, "eager": eager}
    return {
        arm_of(run): {"parameters": run.parameters}
        | {name: of_arms.get(arm_of(run)) for name, of_arms in ratios.items()}
        for run in runs
    }


def shares_of_steps(study: Study, problem: str) -> dict[str, float]:
    """{arm: steps of its equal-seconds runs over those of the others}."""
    whole, shorter = (
        {arm_of(run): run.settings["max_steps"] for run in study.stored(stage, problem)}
        for stage in ("tokens", "seconds")
    )
    return {arm: steps / whole[arm] for arm, steps in shorter.items() if arm in whole}


def equal_values(study: Study, problem: str) -> dict[str, Values]:
    """{what is equal: values}: tokens, seconds, and what runs of two lengths allow of the others."""
    whole, shorter = (final_values(study, stage, problem) for stage in ("tokens", "seconds"))
    if BASELINE not in whole:
        return {"tokens": whole}
    base = {BASELINE: whole[BASELINE]}
    found = {"tokens": whole, "seconds": base | shorter}
    found |= {"FLOPs": dict(base), "eager seconds": dict(base)}
    costs = costs_of(study, problem)
    for arm, share in shares_of_steps(study, problem).items():
        flops, eager = costs[arm]["flops"], costs[arm]["eager"]
        for equal, target in (("FLOPs", flops and 1 / flops), ("eager seconds", eager)):
            between = target and interpolated(whole[arm], shorter[arm], share, target)
            if between:
                found[equal][arm] = between
    return found


def interpolated(
    whole: dict[int, float], shorter: dict[int, float], share: float, target: float
) -> dict[int, float]:
    """By seed the loss at `target` times the steps of the whole run; empty outside of the two.

    Linear in the logarithm of the steps between it and the run of `share` times as many.
    """
    if not min(share, 1.0) <= target <= max(share, 1.0):
        return {}
    weight = math.log(target) / math.log(share) if share != 1 else 0.0
    seeds = whole.keys() & shorter.keys()
    return {seed: whole[seed] + weight * (shorter[seed] - whole[seed]) for seed in seeds}


# ---- hypotheses ----


@dataclass(frozen=True)
class Finding:
    """One comparison; estimate: None and word: "pending" where a run is missing; p: corrected."""

    hypothesis: Hypothesis
    arm: str
    than: str
    estimate: Estimate | None
    p: float = 1.0
    word: str = "pending"


def findings_of(problem: Problem, family: tuple, values: dict[str, Values], seeds) -> list[Finding]:
    """One for every pair of every hypothesis, corrected for their number, pending ones included."""
    found = []
    for hypothesis in family:
        for arm, than in hypothesis.pairs:
            estimate = difference(values.get(hypothesis.at, {}), arm, than, seeds)
            found.append(Finding(hypothesis, arm, than, estimate))
    corrected = correct_p_values(
        [each.estimate.compute_p_value() if each.estimate else 1.0 for each in found]
    )
    for index, (each, p) in enumerate(zip(found, corrected)):
        if each.estimate:
            of_arms = values[each.hypothesis.at]
            means = [fmean(of_arms[arm][seed] for seed in seeds) for arm in (each.arm, each.than)]
            found[index] = replace(each, p=p, word=word_of(each.estimate, p, problem, means))
    return found


def difference(values: Values, arm: str, than: str, seeds=SEEDS) -> Estimate | None:
    """Of the same seeds; None where a run is missing."""
    own, base = ([values.get(name, {}).get(seed) for seed in seeds] for name in (arm, than))
    return None if None in own + base else estimate_paired_difference(own, base)


def word_of(estimate: Estimate, p: float, problem: Problem, means: list[float]) -> str:
    """PLAN.md's word for a comparison; p: corrected.

    "ceiling" and "floor": both arms have all answers, or no more than a guess has.
    """
    if not problem.lower_is_better and min(means) > 1 - SMALLEST:
        return "ceiling"
    if not problem.lower_is_better and max(means) < problem.guess + SMALLEST:
        return "floor"
    if p < SIGNIFICANCE_LEVEL:
        return judge_difference(estimate, 0.0, problem.lower_is_better)
    return "level" if max(-estimate.low, estimate.high) < SMALLEST else "undecided"


def outcome(findings: list[Finding]) -> str:
    """What comparisons that must all hold say of their hypothesis (PLAN.md)."""
    words, hypothesis = [each.word for each in findings], findings[0].hypothesis
    for word in ("pending", "ceiling", "floor"):
        if word in words:
            return word
    if hypothesis.differs:
        words = ["better" if word == "worse" else word for word in words]
    if set(words) == {"better"}:
        return "supported"
    return "refuted" if {"worse", "level"} & set(words) else "undecided"


# ---- numbers ----


def numbers_of(study: Study, problem: str) -> dict:
    """All that the report says of a problem, as JSON."""
    of, values = study.problem(problem), equal_values(study, problem)
    families = (arms.OF_LANGUAGE, arms.EXPLORED) if problem == "language" else (arms.OF_TASKS,)
    hypotheses = []
    for family in families:
        found = findings_of(of, family, values, SEEDS)
        for hypothesis in family:
            own = [each for each in found if each.hypothesis is hypothesis]
            hypotheses.append(numbers_of_hypothesis(hypothesis, own))
    swapped = final_values(study, "swapped", problem)
    values["tokens"] |= {f"{arm}{arms.OTHER_RATE}": each for arm, each in swapped.items()}
    afterwards = []
    for arm, than, at in arms.AFTERWARDS.get(problem, ()):
        if found := difference(values.get(at, {}), arm, than):
            row = {"arm": arm, "than": than, "at": at}
            afterwards.append(row | {"mean": found.mean, "ci95": found.half_width})
    costs, chosen, of_arms = costs_of(study, problem), study.rates().get(problem, {}), {}
    for arm in of.arms:
        rate = chosen.get(arm, {})
        of_arms[arm] = {"rate": rate.get("learning_rate"), "tried": rate.get("tried")}
        of_arms[arm] |= costs.get(arm, {})
        equal = {at: summary_of(values.get(at, {}), arm) for at in EQUAL}
        of_arms[arm]["equal"] = equal
    runs = {stage: study.stored(stage, problem) for stage in STAGES}
    corpora = {r.corpus["sha256"]: r.corpus for stage in STAGES for r in runs[stage]}
    return {
        "metric": of.metric,
        "guess": of.guess,
        "arms": of_arms,
        "steps": shares_of_steps(study, problem),
        "hypotheses": hypotheses,
        "afterwards": afterwards,
        "again": twice_trained(runs["tokens"], runs["again"]),
        "runs": {stage: about_runs(each) for stage, each in runs.items()},
        "corpora": [corpora[digest] for digest in sorted(corpora)],
    }


EQUAL = ("tokens", "FLOPs", "seconds", "eager seconds")


def summary_of(values: Values, arm: str) -> dict | None:
    """The mean over seeds and the difference to the baseline; None where a seed is missing."""
    if set(values.get(arm, {})) != set(SEEDS):
        return None
    less = difference(values, arm, BASELINE)
    own = summarize([values[arm][seed] for seed in SEEDS])
    return own | {"difference": less and {"mean": less.mean, "ci95": less.half_width}}


def numbers_of_hypothesis(hypothesis: Hypothesis, own: list[Finding]) -> dict:
    comparisons = []
    for each in own:
        row = {"arm": each.arm, "than": each.than, "word": each.word}
        row["published"] = published_differences(each.arm, each.than)
        if each.estimate:
            row |= {"mean": each.estimate.mean, "ci95": each.estimate.half_width, "p": each.p}
        comparisons.append(row | {"so": outcome([each] if hypothesis.each else own)})
    about = {"name": hypothesis.name, "text": hypothesis.text, "at": hypothesis.at}
    return about | {"comparisons": comparisons, "outcome": outcome(own)}


def published_differences(arm: str, than: str) -> dict[str, float]:
    """By size, of validation losses of a seed each; empty where the paper has not both."""
    stems = [ARMS[name]["model"] if len(ARMS[name]) == 1 else None for name in (arm, than)]
    found = {}
    for size in SIZES:
        one, other = (
            read_results().get((stem, size), {}).get("", {}).get("val_loss") for stem in stems
        )
        if one and other:
            found[size] = one - other
    return found


def about_runs(runs: list) -> dict:
    machines = {f"{r.machine['machine']}, torch {r.machine['torch']}" for r in runs if r.machine}
    diverged = sorted(f"{arm_of(run)}, seed {run.seed}" for run in runs if not run.finished)
    commits = sorted({run.commit for run in runs})
    about = {"count": len(runs), "commits": commits, "machines": sorted(machines)}
    return about | {"diverged": diverged}


def twice_trained(first: list, second: list) -> list[dict]:
    """Final losses, all digits, of runs that were trained twice."""
    before = {
        (arm_of(run), run.seed): run.final_evaluation["val_loss"]
        for run in first
        if run.final_evaluation
    }
    found = []
    for run in second:
        if (arm_of(run), run.seed) in before:
            losses = [before[arm_of(run), run.seed], run.final_evaluation["val_loss"]]
            row = {"arm": arm_of(run), "seed": run.seed, "losses": losses}
            found.append(row | {"same": losses[0] == losses[1]})
    return found


# ---- tables ----


def with_interval(one: dict | None, form: str = ".3f", factor: float = 1) -> str | None:
    if one is None:
        return None
    half = f"{factor * one['ci95']:{form.lstrip('+')}}"
    return f"{factor * one['mean']:{form}} ± {half}"


def scale_of(problem: dict) -> tuple[str, float, str]:
    """(form, factor, unit) of differences in its metric."""
    return ("+.3f", 1, "nats") if problem["metric"] == "val_loss" else ("+.1f", 100, "points")


def verdicts_table(found: dict) -> str:
    """A row for each comparison of each hypothesis."""
    parts = []
    for name, problem in found.items():
        form, factor, unit = scale_of(problem)
        header = ["hypothesis", "difference", "at equal", f"mean ± 95% ({unit})", "p, corrected"]
        header += ["word", "hypothesis is"]
        header += [f"paper ({', '.join(SIZES)})"] if unit == "nats" else []
        rows = []
        for each in problem["hypotheses"]:
            for number, one in enumerate(each["comparisons"]):
                about = f"{each['name']} {each['text']}" if number == 0 else ""
                row = [about, f"{one['arm']} - {one['than']}", each["at"]]
                row.append(with_interval(one, form, factor) if "mean" in one else "pending")
                row += [f"{one['p']:.3f}" if "p" in one else None, one["word"], one["so"]]
                paper = ", ".join(f"{value:+.4f}" for value in one["published"].values())
                row += [(each["at"] == "tokens" and paper) or None] if unit == "nats" else []
                rows.append(row)
        parts.append(f"**{name}**\n\n{format_markdown(header, rows)}")
    return "\n\n".join(parts)


def afterwards_table(found: dict) -> str:
    """Comparisons that no plan had."""
    rows = []
    for name, problem in found.items():
        form, factor, unit = scale_of(problem)
        for one in problem["afterwards"]:
            text = f"{with_interval(one, form, factor)} {unit}"
            rows.append([name, f"{one['arm']} - {one['than']}", one["at"], text])
    return format_markdown(["problem", "difference", "at equal", "mean ± 95%, uncorrected"], rows)


def language_table(found: dict) -> str:
    """Loss of every arm at equal cost, best first at equal tokens."""
    problem, rows = found["language"], []
    header = ["arm", "rate", "loss, equal tokens", "- additive", "equal FLOPs", "equal seconds"]
    header += ["- additive", "steps", "equal eager seconds", "FLOPs", "speed", "eager"]

    def place(arm: str) -> tuple:
        tokens = problem["arms"][arm]["equal"]["tokens"]
        return tokens is None, tokens["mean"] if tokens else 0

    for arm in sorted(problem["arms"], key=place):
        one, share = problem["arms"][arm], problem["steps"].get(arm)
        tokens, seconds = one["equal"]["tokens"], one["equal"]["seconds"]
        eager = with_interval(one["equal"]["eager seconds"])
        if eager is None and seconds and share and one.get("eager") and one["eager"] < share:
            eager = f"> {seconds['mean']:.3f}"  # it allows fewer steps than were run
        row = [arm, f"{one['rate']:g}" if one["rate"] else None]
        row += [with_interval(tokens), less_text(arm, tokens), with_interval(one["equal"]["FLOPs"])]
        row += [with_interval(seconds), less_text(arm, seconds), share and f"{share:.1%}", eager]
        row += [one.get(key) and f"{one[key]:.2f}" for key in ("flops", "speed", "eager")]
        rows.append([*row, one.get("parameters") and f"{one['parameters']:,}"])
    return format_markdown([*header, "parameters"], rows)


def less_text(arm: str, at: dict | None, form: str = "+.3f", factor: float = 1) -> str | None:
    return with_interval(at["difference"], form, factor) if at and arm != BASELINE else None


def tasks_table(found: dict) -> str:
    """Right answers of every arm on every task in percent, and points more than the baseline."""
    if not (names := [name for name in found if name != "language"]):
        return "None at this size."
    header = ["arm", *(title for name in names for title in (f"{name} (%)", "- additive"))]
    rows = []
    for arm in (arm for arm in ARMS if any(arm in found[name]["arms"] for name in names)):
        row = [arm]
        for name in names:
            at = found[name]["arms"].get(arm, {}).get("equal", {}).get("tokens")
            row += [with_interval(at, ".1f", 100), less_text(arm, at, "+.1f", 100)]
        rows.append(row)
    return format_markdown(header, rows)


def rates_table(found: dict) -> str:
    """The learning rate of every arm on every problem, and what was tried."""
    rows = []
    for name, problem in found.items():
        for arm, one in problem["arms"].items():
            tried = sorted((one["tried"] or {}).items(), key=lambda item: float(item[0]))
            texts = [f"{r}: {'diverged' if loss is None else f'{loss:.3f}'}" for r, loss in tried]
            rate = f"{one['rate']:g}" if one["rate"] else None
            rows.append([name, arm, rate, ", ".join(texts) or None])
    return format_markdown(["problem", "arm", "chosen", "loss by rate"], rows)


def data_table(found: dict) -> str:
    """What every problem's runs were trained and scored on."""
    header, rows = ["problem", "split", "source", "documents", "size", "tokens"], []
    for name, problem in found.items():
        for corpus in problem["corpora"]:
            for split in ("train", "val"):
                of = corpus[split]
                size = f"{of['bytes'] / 1e6:.1f} MB" if "bytes" in of else None
                counts = [f"{of['documents']:,}", size, f"{of['tokens']:,}", corpus["sha256"]]
                rows.append([name, split, corpus["source"], *counts])
    return format_markdown([*header, "sha256 of all"], rows)


def runs_table(found: dict) -> str:
    """How many runs there are, of which code, on what."""
    rows, notes = [], []
    for name, problem in found.items():
        for stage, one in problem["runs"].items():
            if one["count"]:
                made = [", ".join(one[key]) or None for key in ("commits", "machines")]
                diverged = "; ".join(one["diverged"]) or "none"
                rows.append([name, stage, str(one["count"]), *made, diverged])
        for one in problem["again"]:
            losses, run = (
                " and ".join(map(repr, one["losses"])),
                f"{one['arm']}, seed {one['seed']}",
            )
            notes.append(f"{name}, {run}, trained twice: a validation loss of {losses}.")
    grid = format_markdown(["problem", "stage", "runs", "commit", "machine", "diverged"], rows)
    return "\n\n".join([grid, *notes])


PARTS = {
    "verdicts": verdicts_table,
    "afterwards": afterwards_table,
    "language": language_table,
    "tasks": tasks_table,
    "rates": rates_table,
    "data": data_table,
    "runs": runs_table,
}


def filled(page: str, parts: dict[str, str]) -> str:
    """The page with its marked parts made anew. ValueError: a part has no end."""
    for name, text in parts.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if mark and not end:
            fix = f"write <!-- end --> below <!-- {name} -->"
            raise ValueError(f"the page has no end of {name}: {fix}")
        page = f"{before}{mark}{text}\n{end}{after}" if mark else page
    return page


# ---- the picture ----

SHOWN = ("DDL, 1 column", "DDL", "DDL, no erase", "DDL-CC-EC", "HC", "mHC", "AttnRes")


def plot_study(found: dict):
    """Seven arms' losses less the baseline's, at equal tokens and at equal seconds."""
    problem = found["language"]["arms"]
    figure, axes = plots.make_panels(1, 2, 2.4, [], sharey=True, sharex=True)
    base = problem[BASELINE]["equal"]["tokens"]
    for axis, at in zip(axes[0], ("tokens", "seconds")):
        for number, arm in enumerate(SHOWN):
            color = plots.get_line_style(number + 1)["color"]
            equal = problem.get(arm, {"equal": {}})["equal"].get(at)
            if equal and equal["difference"]:
                less = equal["difference"]
                points = {"fmt": "o", "color": color, "capsize": 2}
                axis.errorbar(less["mean"], -number, xerr=less["ci95"], **points)
                seeds = [own - other for own, other in zip(equal["values"], base["values"])]
                dots = {"color": color, "alpha": 0.4, "markersize": 2.5}
                axis.plot(seeds, [-number + 0.25] * len(seeds), "o", **dots)
        axis.axvline(0, color=plots.BASELINE_COLOR, linewidth=0.8)
        axis.set_title(f"equal {at}")
        axis.set_xlabel("loss less that of additive (nats per token)")
    axes[0, 0].set_yticks([-number for number in range(len(SHOWN))], SHOWN)
    axes[0, 0].set_ylim(-len(SHOWN) + 0.4, 0.7)
    return figure


def write(study: Study, out: Path, page: Path) -> None:
    found = {problem: numbers_of(study, problem) for problem in PRESETS[study.preset]}
    parts = {name: make(found) for name, make in PARTS.items()}
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{study.preset}_report.json"
    if found["language"]["arms"][BASELINE]["equal"]["tokens"]:
        with plots.use_print_style():
            plots.save(plot_study(found), path.with_suffix(".png"))
    store_figures(path, {"problems": found})
    text = "".join(f"## {name}\n\n{part}\n\n" for name, part in parts.items())
    title = "# Residual streams compared: tables"
    files.write_text(path.with_suffix(".md"), f"{title}\n\n{text}")
    if study.preset == "cpu":
        files.write_text(page, filled(page.read_text(encoding="utf-8"), parts))
    print(f"wrote {path}, and the same as .md and .png")


def main():
    with errors.one_line_errors():
        parser = configurator.Parser(description=__doc__)
        add = parser.add_argument
        add("--preset", choices=PRESETS, default="cpu")
        default = Path("results/residual_streams")
        add("--results", type=Path, default=default, help="folder of the stored runs")
        add("--out", type=Path, help="folder of PRESET_report.* (default: that of --results)")
        add("--page", type=Path, default=PAGE, help="whose marked parts are made anew")
        args = parser.parse_args()
        if not args.results.is_dir():
            fix = "give the one that run.py stores runs in"
            raise ValueError(f"--results={args.results}: no such folder; {fix}")
        study = Study(args.preset, Path("sweeps/residual_streams"), args.results)
        write(study, args.out or args.results, args.page)


if __name__ == "__main__":
    main()
