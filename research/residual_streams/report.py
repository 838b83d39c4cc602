"""The study's report from the runs that are kept: tables and words by PLAN.md's rules, JSON, the picture.

    python research/residual_streams/report.py                  cpu_report.md, .json and .png, beside runs that are kept
    python research/residual_streams/report.py --preset=gpu     gpu_report.md, ..., from the runs of gpu.sh

README.md beside this file shows some of the tables: what it has between the marks `<!-- NAME -->` and `<!-- end -->` is
made here too; the rest of it is written by hand and stays as it is. Runs that are missing are said to be pending.
Nothing is trained.
"""

import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import configurator  # before all that is slow to import

# isort: split
from evaluation import tables
from evaluation.published import SIZES, figures
from research import compare
from research.residual_streams import equal, findings, picture
from research.residual_streams.arms import ARMS, BASELINE, PRESETS, SEEDS
from research.residual_streams.findings import Finding, Values
from research.residual_streams.grid import STAGES, Grid, arm_of
from training.provenance import store

PAGE = Path(__file__).with_name("README.md")
EQUAL = "tokens", "FLOPs", "seconds", "eager seconds"


def arguments():
    parser = configurator.Parser(description=__doc__)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="cpu")
    add(
        "--results",
        type=Path,
        default=Path("results/residual_streams"),
        help="folder of the kept runs",
    )
    add(
        "--out",
        type=Path,
        help="folder of PRESET_report.md, .json and .png (default: that of --results)",
    )
    add(
        "--page",
        type=Path,
        default=PAGE,
        help="whose marked parts are made anew (default: README.md)",
    )
    return parser.parse_args()


# ---- numbers ----


def numbers(grid: Grid) -> dict:
    """All that the report says, as JSON: by problem its arms and the comparisons of its hypotheses."""
    return {problem: of_problem(grid, problem) for problem in PRESETS[grid.preset]}


def of_problem(grid: Grid, problem: str) -> dict:
    of, values = grid.problem(problem), equal.values(grid, problem)
    families = (
        (findings.OF_LANGUAGE, findings.EXPLORED) if problem == "language" else (findings.OF_TASKS,)
    )
    made = [findings.compare(problem, of, family, values, SEEDS) for family in families]
    costs, chosen = equal.costs(grid, problem), grid.chosen().get(problem, {})
    arms, afterwards = {}, []
    swapped = findings.final_values(grid.kept("swapped", problem), of.metric, of.guess)
    values["tokens"] |= {f"{arm}{findings.OTHER_RATE}": by_seed for arm, by_seed in swapped.items()}
    for arm, than, equal_in in findings.AFTERWARDS.get(problem, ()):
        if found := findings.difference(values.get(equal_in, {}), arm, than, SEEDS):
            row = {"arm": arm, "than": than, "at": equal_in, "mean": found.mean, "ci95": found.half}
            afterwards.append(row)
    for arm in of.arms:
        arms[arm] = {
            "rate": chosen.get(arm, {}).get("learning_rate"),
            "tried": chosen.get(arm, {}).get("tried"),
        }
        arms[arm] |= asdict(costs[arm]) if arm in costs else {}
        arms[arm] |= {"equal": {name: of_values(values.get(name, {}), arm) for name in EQUAL}}
    runs = {stage: grid.kept(stage, problem) for stage in STAGES}
    return {
        "metric": of.metric,
        "guess": of.guess,
        "arms": arms,
        "steps": equal.shares_of_steps(grid, problem),
        "hypotheses": [
            of_hypothesis(each, found) for own, found in zip(families, made) for each in own
        ],
        "afterwards": afterwards,
        "again": again(*(runs[stage] for stage in ("tokens", "again"))),
        "runs": {stage: about(each) for stage, each in runs.items()},
        "corpora": corpora([run for each in runs.values() for run in each]),
    }


def of_values(by_arm: Values, arm: str) -> dict | None:
    """The mean over seeds and the difference to the baseline, None where a seed is missing."""
    if set(by_arm.get(arm, {})) != set(SEEDS):
        return None
    summary = compare.summary([by_arm[arm][seed] for seed in SEEDS])
    less = findings.difference(by_arm, arm, BASELINE, SEEDS)
    return summary | {"difference": less and {"mean": less.mean, "ci95": less.half}}


def of_hypothesis(hypothesis: findings.Hypothesis, found: list[Finding]) -> dict:
    own = [each for each in found if each.hypothesis is hypothesis]
    comparisons = []
    for each in own:
        row = {
            "arm": each.arm,
            "than": each.than,
            "word": each.word,
            "published": published(each.arm, each.than),
        }
        if each.estimate:
            row |= {"mean": each.estimate.mean, "ci95": each.estimate.half, "p": each.p}
        comparisons.append(row | {"so": judged([each], own)})
    about = {"name": hypothesis.name, "text": hypothesis.text, "at": hypothesis.at}
    return about | {"comparisons": comparisons, "outcome": findings.outcome(own)}


def published(arm: str, than: str) -> dict[str, float]:
    """The difference of the validation losses in the paper by size, of a seed each; empty where it has not both."""
    stems = [ARMS[name]["model"] if len(ARMS[name]) == 1 else None for name in (arm, than)]
    found = {}
    for size in SIZES:
        one, other = (figures().get((size, "", stem), {}).get("val_loss") for stem in stems)
        if one and other:
            found[size] = one[0] - other[0]
    return found


def judged(one: list[Finding], every: list[Finding]) -> str:
    """What the hypothesis is: by this comparison, or by all of its comparisons where it asks for all of them."""
    return findings.outcome(one if every[0].hypothesis.each else every)


def about(runs: list) -> dict:
    """How many runs, of which code and on what machine; those that diverged by name."""
    return {
        "count": len(runs),
        "commits": sorted({run.commit for run in runs}),
        "machines": sorted(
            {
                f"{run.machine['machine']}, torch {run.machine['torch']}"
                for run in runs
                if run.machine
            }
        ),
        "diverged": sorted(f"{arm_of(run)}, seed {run.seed}" for run in runs if not run.finished),
    }


def corpora(runs: list) -> list[dict]:
    """The data that runs were trained on, each once: one, unless their files differ."""
    found = {run.corpus["sha256"]: run.corpus for run in runs}
    return [found[sha256] for sha256 in sorted(found)]


def again(first: list, second: list) -> list[dict]:
    """Final losses, all digits, of runs that were trained twice."""
    before = {(arm_of(run), run.seed): run.final for run in first}
    found = []
    for run in second:
        if earlier := before.get((arm_of(run), run.seed)):
            losses = earlier["val_loss"], run.final["val_loss"]
            found.append(
                {
                    "arm": arm_of(run),
                    "seed": run.seed,
                    "losses": losses,
                    "same": losses[0] == losses[1],
                }
            )
    return found


# ---- text ----


def signed(one: dict | None, digits: int = 3, factor: float = 1) -> str | None:
    """Mean ± half its interval of a difference."""
    return one and f"{factor * one['mean']:+.{digits}f} ± {factor * one['ci95']:.{digits}f}"


def amount(one: dict | None, digits: int = 3, factor: float = 1) -> str | None:
    return one and f"{factor * one['mean']:.{digits}f} ± {factor * one['ci95']:.{digits}f}"


def scale(problem: dict) -> tuple[float, int, str]:
    """(factor, digits, unit) in which its metric is shown."""
    return (1, 3, "nats") if problem["metric"] == "val_loss" else (100, 1, "points")


def verdicts(found: dict) -> str:
    """A table for the language and one for each task: a row for each comparison of each hypothesis."""
    return "\n\n".join(f"**{name}**\n\n{of_one(problem)}" for name, problem in found.items())


def of_one(problem: dict) -> str:
    factor, digits, unit = scale(problem)
    in_nats, rows = problem["metric"] == "val_loss", []
    for each in problem["hypotheses"]:
        for number, one in enumerate(each["comparisons"]):
            said = signed(one, digits, factor) if "mean" in one else "pending"
            corrected = f"{one['p']:.3f}" if "p" in one else None
            about = f"{each['name']} {each['text']}" if number == 0 else ""
            pair = f"{one['arm']} - {one['than']}"
            row = [about, pair, each["at"], said, corrected, one["word"], one["so"]]
            paper = ", ".join(f"{value:+.4f}" for value in one["published"].values()) or None
            rows.append(row + [paper if each["at"] == "tokens" else None] * in_nats)
    header = [
        "hypothesis",
        "difference",
        "at equal",
        f"mean ± 95% ({unit})",
        "p, corrected",
        "word",
        "hypothesis is",
    ]
    header += [f"paper ({', '.join(SIZES)})"] * in_nats
    return tables.markdown(header, rows)


def afterwards(found: dict) -> str:
    """Comparisons that no plan had."""
    rows = []
    for name, problem in found.items():
        factor, digits, unit = scale(problem)
        for one in problem["afterwards"]:
            difference = f"{one['arm']} - {one['than']}"
            rows.append([name, difference, one["at"], f"{signed(one, digits, factor)} {unit}"])
    return tables.markdown(["problem", "difference", "at equal", "mean ± 95%, uncorrected"], rows)


def language(found: dict) -> str:
    """Loss of every arm at equal cost, best first at equal tokens."""
    problem = found["language"]
    header = [
        "arm",
        "rate",
        "loss, equal tokens",
        "- additive",
        "equal FLOPs",
        "equal seconds",
        "- additive",
    ]
    header += ["steps", "equal eager seconds", "FLOPs", "speed", "eager", "parameters"]
    rows = []
    for arm, one in ordered(problem).items():
        at = one["equal"]
        tokens, seconds = at["tokens"], at["seconds"]
        cells = [
            amount(tokens),
            less(arm, tokens),
            amount(at["FLOPs"]),
            amount(seconds),
            less(arm, seconds),
        ]
        share = problem["steps"].get(arm)
        cells += [
            share and f"{share:.1%}",
            amount(at["eager seconds"]) or at_least(one, share, seconds),
        ]
        cells += [one.get(key) and f"{one[key]:.2f}" for key in ("flops", "speed", "eager")]
        count = one.get("parameters")
        rows.append(
            [arm, f"{one['rate']:g}" if one["rate"] else None, *cells, count and f"{count:,}"]
        )
    return tables.markdown(header, rows)


def less(arm: str, at: dict | None, digits: int = 3, factor: float = 1) -> str | None:
    return signed(at["difference"], digits, factor) if at and arm != BASELINE else None


def at_least(one: dict, share: float | None, seconds: dict | None) -> str | None:
    """Where the eager speed allows fewer steps than were run, a loss that more steps came to."""
    if not seconds or not share or not one.get("eager") or one["eager"] >= share:
        return None
    return f"> {seconds['mean']:.3f}"


def ordered(problem: dict) -> dict[str, dict]:
    """The arms, best first; those that are not finished last."""
    sign = 1 if problem["metric"] == "val_loss" else -1

    def place(item):
        tokens = item[1]["equal"]["tokens"]
        return (tokens is None, sign * tokens["mean"] if tokens else 0)

    return dict(sorted(problem["arms"].items(), key=place))


def tasks(found: dict) -> str:
    """Right answers of every arm on every task, in percent, and the difference to the baseline in points."""
    if not (names := [name for name in found if name != "language"]):
        return "None at this size."
    header = ["arm", *(title for name in names for title in (f"{name} (%)", "- additive"))]
    arms = [arm for arm in ARMS if any(arm in found[name]["arms"] for name in names)]
    rows = []
    for arm in arms:
        cells = []
        for name in names:
            at = found[name]["arms"].get(arm, {}).get("equal", {}).get("tokens")
            cells += [amount(at, 1, 100), less(arm, at, 1, 100)]
        rows.append([arm, *cells])
    return tables.markdown(header, rows)


def rates(found: dict) -> str:
    """The learning rate of every arm on every problem, and what was tried."""
    header = ["problem", "arm", "chosen", "loss by rate"]
    rows = []
    for name, problem in found.items():
        for arm, one in problem["arms"].items():
            tried = sorted((one["tried"] or {}).items(), key=lambda item: float(item[0]))
            said = ", ".join(
                f"{rate}: {'diverged' if loss is None else f'{loss:.3f}'}" for rate, loss in tried
            )
            rows.append([name, arm, f"{one['rate']:g}" if one["rate"] else None, said or None])
    return tables.markdown(header, rows)


def data(found: dict) -> str:
    """What every problem's runs were trained and scored on."""
    rows = []
    for name, problem in found.items():
        for corpus in problem["corpora"]:
            for split in ("train", "val"):
                of = corpus[split]
                size = f"{of['bytes'] / 1e6:.1f} MB" if "bytes" in of else None
                rows.append(
                    [
                        name,
                        split,
                        corpus["source"],
                        f"{of['documents']:,}",
                        size,
                        f"{of['tokens']:,}",
                        corpus["sha256"],
                    ]
                )
    return tables.markdown(
        ["problem", "split", "source", "documents", "size", "tokens", "sha256 of all"], rows
    )


def runs(found: dict) -> str:
    """How many runs there are, of which code, on what."""
    rows = []
    for name, problem in found.items():
        for stage, one in problem["runs"].items():
            if one["count"]:
                made = [", ".join(one[key]) or None for key in ("commits", "machines")]
                rows.append(
                    [name, stage, str(one["count"]), *made, "; ".join(one["diverged"]) or "none"]
                )
    text = tables.markdown(["problem", "stage", "runs", "commit", "machine", "diverged"], rows)
    for name, problem in found.items():
        for one in problem["again"]:
            twice = " and ".join(map(repr, one["losses"]))
            text += f"\n\n{name}, {one['arm']}, seed {one['seed']}, trained twice: a validation loss of {twice}."
    return text


PARTS = {make.__name__: make for make in (verdicts, afterwards, language, tasks, rates, data, runs)}


def filled(page: str, parts: dict[str, str]) -> str:
    """The page with its marked parts made anew. ValueError: a part has no end."""
    for name, text in parts.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if mark and not end:
            raise ValueError(
                f"the page has no end of {name}: write <!-- end --> below <!-- {name} -->"
            )
        page = f"{before}{mark}{text}\n{end}{after}" if mark else page
    return page


# ---- files ----


def write(grid: Grid, out: Path, page: Path) -> None:
    found = numbers(grid)
    parts = {name: make(found) for name, make in PARTS.items()}
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{grid.preset}_report.json"
    picture.draw(found, path.with_suffix(".png"))
    store(path, {"problems": found})
    text = "".join(f"## {name}\n\n{part}\n\n" for name, part in parts.items())
    configurator.replace_text(
        path.with_suffix(".md"), f"# Residual streams compared: tables\n\n{text}"
    )
    if grid.preset == "cpu":
        configurator.replace_text(page, filled(page.read_text(encoding="utf-8"), parts))
    print(f"wrote {path}, and the same as .md and .png")


def main():
    with configurator.one_line_errors():
        args = arguments()
        if not args.results.is_dir():
            raise ValueError(
                f"--results={args.results}: no such folder; give the one that run.py keeps its runs in"
            )
        grid = Grid(args.preset, Path("sweeps/residual_streams"), args.results)
        write(grid, args.out or args.results, args.page)


if __name__ == "__main__":
    main()
