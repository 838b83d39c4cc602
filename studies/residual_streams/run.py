"""The study of residual streams (PLAN.md), stage by stage; each goes on where it was stopped.

    python studies/residual_streams/run.py rates                  the learning rate of every arm, on a seed of its own
    python studies/residual_streams/run.py tokens                 every arm and seed, the same number of tokens
    python studies/residual_streams/run.py seconds                on the language: every arm and seed, the same seconds
    python studies/residual_streams/run.py eager                  on the language: every arm's speed without compilation
    python studies/residual_streams/run.py tokens --problem=recall --arm=additive --arm=DDL --jobs=2
    python studies/residual_streams/run.py tokens --mode=show     which runs there are, and which are finished

Runs go to sweeps/residual_streams/ (--runs), what is kept of them to results/residual_streams/ (--results): the chosen
rates, and every run's settings, curve and evaluations. --preset=gpu: the sizes for a GPU (gpu.sh).
"""

import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import configurator  # before all that is slow to import

# isort: split
import sweep
from reporting import packed
from studies.residual_streams import grid
from studies.residual_streams.arms import ARMS, PRESETS
from training.provenance import store

FEW = 20  # points kept of the curve of a run that is no result
Cells = dict[tuple[str, str], list[sweep.Cell]]  # by problem and arm


def arguments():
    parser = configurator.Parser(description=__doc__)
    add = parser.add_argument
    add("stage", choices=grid.STAGES)
    add("--preset", choices=PRESETS, default="cpu")
    add("--problem", action="append", help="only this one, or several (default: all)")
    add("--arm", action="append", help="only this one, or several (default: all)")
    add("--jobs", type=int, default=2, help="runs at a time, which share the machine (default: %(default)s)")
    add("--runs", type=Path, default=Path("sweeps/residual_streams"))
    add("--results", type=Path, default=Path("results/residual_streams"))
    add("--mode", choices=("run", "show"), default="run")
    return parser.parse_args()


def pairs(args) -> list[tuple[str, str]]:
    """(problem, arm) of the stage. ValueError: one is not there."""
    problems = PRESETS[args.preset]
    if args.stage in ("seconds", "eager"):
        problems = {"language": problems["language"]}
    for name, given, known in (("problem", args.problem, problems), ("arm", args.arm, ARMS)):
        for each in given or ():
            if each not in known:
                raise ValueError(f"--{name}={each}: give one of {'; '.join(known)}")
    chosen = {problem: problems[problem].arms for problem in args.problem or problems}
    return [(problem, arm) for problem, arms in chosen.items() for arm in arms if arm in (args.arm or ARMS)]


def all_cells(args) -> Cells:
    """The runs of the stage, as far as they are known. ValueError: a stage before is not finished."""
    if args.stage == "rates":
        return {pair: grid.rate_cells(args.preset, *pair, args.runs) for pair in pairs(args)}
    cells_of = {"tokens": grid.token_cells, "seconds": grid.second_cells, "eager": grid.eager_cells}[args.stage]
    return {pair: cells_of(args.preset, *pair, args.runs, args.results) for pair in pairs(args)}


def in_turns(cells: Cells) -> list[sweep.Cell]:
    """Problem by problem, the first run of every arm, then the second of each, numbered: what else the machine does
    falls on all arms alike."""
    problems = list(dict.fromkeys(problem for problem, _ in cells))
    ordered = [
        (problems.index(problem), turn, cell) for (problem, _), own in cells.items() for turn, cell in enumerate(own)
    ]
    ordered.sort(key=lambda item: item[:2])
    return [replace(cell, index=index) for index, (*_, cell) in enumerate(ordered)]


def train(args) -> None:
    """Run what is left, until no further run is known to be needed; keep what is finished."""
    again = shlex.join(["python", *sys.argv])
    while True:
        cells = in_turns(all_cells(args))
        left = [cell for cell in cells if grid.final_loss(cell) is None]
        print(f"{args.stage}: {len(cells)} runs, {len(left)} to do, {args.jobs} at a time", flush=True)
        if not left:
            return keep(args)
        code = sweep.run_cells(cells, sweep.SweepConfig(jobs=args.jobs), again)
        keep(args)
        if code not in (0, 1):
            sys.exit(code)
        if code and any(grid.final_loss(cell) is None for cell in cells):
            sys.exit(code)  # a failure that is no divergence: trying again would find it again


def keep(args) -> None:
    """Pack the finished runs, a file for each problem, and store the rates that are settled."""
    cells = all_cells(args)
    for problem in dict.fromkeys(problem for problem, _ in cells):
        done = [
            (arm, cell)
            for (of, arm), own in cells.items()
            for cell in own
            if of == problem and grid.final_loss(cell) is not None  # one that diverged is a result as well
        ]
        if done:
            path = grid.packed_file(args.results, args.preset, args.stage, problem)
            points = packed.POINTS if args.stage in ("tokens", "seconds") else FEW
            packed.pack([grid.named(cell, arm) for arm, cell in done], path, points)
    if args.stage == "rates":
        keep_rates(args, cells)


def keep_rates(args, cells: Cells) -> None:
    chosen = grid.chosen_rates(args.results, args.preset)
    for (problem, arm), own in cells.items():
        if (best := grid.best_rate(own)) is not None:
            losses = {f"{cell.values['learning_rate']:g}": grid.final_loss(cell) for cell in own}
            tried = {rate: loss if math.isfinite(loss) else None for rate, loss in losses.items()}
            chosen.setdefault(problem, {})[arm] = {"learning_rate": best, "tried": tried}
    args.results.mkdir(parents=True, exist_ok=True)
    store(args.results / f"{args.preset}_rates.json", {"chosen": chosen})


def main():
    with configurator.one_line_errors():
        args = arguments()
        if args.jobs < 1:
            raise ValueError(f"--jobs={args.jobs}: give 1 or more")
        if args.mode == "show":
            for cell in in_turns(all_cells(args)):
                loss = grid.final_loss(cell)
                print(f"{cell.folder} | {'to do' if loss is None else f'{loss:.4f}'}")
            return
        train(args)


if __name__ == "__main__":
    main()
