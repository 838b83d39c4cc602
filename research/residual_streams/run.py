"""The study of residual streams (PLAN.md), stage by stage; each goes on where it was stopped.

    python research/residual_streams/run.py rates                  the learning rate of every arm, on a seed of its own
    python research/residual_streams/run.py tokens                 every arm and seed, the same number of tokens
    python research/residual_streams/run.py again                  one run of two problems once more: the same bits?
    python research/residual_streams/run.py swapped                on tasks: two arms, with each other's learning rate
    python research/residual_streams/run.py alone --jobs=1        on the language: every arm's speed, on a quiet machine
    python research/residual_streams/run.py eager --jobs=1         the same without compilation
    python research/residual_streams/run.py seconds                on the language: every arm and seed, the same seconds
    python research/residual_streams/run.py tokens --problem=recall --arm=additive --arm=DDL --jobs=2
    python research/residual_streams/run.py tokens --mode=show     which runs there are, and which are finished

Runs go to sweeps/residual_streams/ (--runs), what is kept of them to results/residual_streams/ (--results): the chosen
rates, and every run's settings, curve and evaluations as soon as it is finished. What is kept is not trained again,
even where its folder is gone. --preset=gpu: the sizes for a GPU (gpu.sh).
"""

import math
import os
import shlex
import sys
import threading
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import configurator  # before all that is slow to import

# isort: split
from research import sweep
from research.residual_streams.arms import AGAIN, ARMS, PRESETS, SWAPPED, SWAPPED_ON
from research.residual_streams.grid import STAGES, Grid, final_loss, is_of, name_of
from training.provenance import store

Cells = dict[tuple[str, str], list[sweep.Cell]]  # by problem and arm


def arguments():
    parser = configurator.Parser(description=__doc__)
    add = parser.add_argument
    add("stage", choices=STAGES)
    add("--preset", choices=PRESETS, default="cpu")
    add("--problem", action="append", help="only this one, or several (default: all)")
    add("--arm", action="append", help="only this one, or several (default: all)")
    add(
        "--jobs",
        type=int,
        default=2,
        help="runs at a time, which share the machine (default: %(default)s)",
    )
    add("--runs", type=Path, default=Path("sweeps/residual_streams"))
    add("--results", type=Path, default=Path("results/residual_streams"))
    add("--mode", choices=("run", "show"), default="run")
    return parser.parse_args()


def pairs(args) -> list[tuple[str, str]]:
    """(problem, arm) of the stage. ValueError: one is not there."""
    problems = PRESETS[args.preset]
    if args.stage in ("seconds", "alone", "eager"):
        problems = {"language": problems["language"]}
    if args.stage == "swapped":
        problems = {
            name: replace(problems[name], arms=tuple(SWAPPED))
            for name in SWAPPED_ON
            if name in problems
        }
    if args.stage == "again":
        problems = {
            name: replace(problems[name], arms=(arm,))
            for name, arm in AGAIN.items()
            if name in problems
        }
    for name, given, known in (("problem", args.problem, problems), ("arm", args.arm, ARMS)):
        for each in given or ():
            if each not in known:
                raise ValueError(f"--{name}={each}: give one of {'; '.join(known)}")
    chosen = {problem: problems[problem].arms for problem in args.problem or problems}
    return [
        (problem, arm)
        for problem, arms in chosen.items()
        for arm in arms
        if arm in (args.arm or ARMS)
    ]


def all_cells(args, grid: Grid) -> Cells:
    """The runs of the stage, as far as they are known. ValueError: a stage before is not finished."""
    return {pair: grid.cells(args.stage, *pair) for pair in pairs(args)}


def losses(args, grid: Grid, cells: Cells) -> dict[Path, float | None]:
    """Of every cell's folder, as `Grid.losses`."""
    found = {}
    for (problem, arm), own in cells.items():
        found |= zip((cell.folder for cell in own), grid.losses(args.stage, problem, arm, own))
    return found


def in_turns(cells: Cells) -> list[sweep.Cell]:
    """Problem by problem, the first run of every arm, then the second of each: what else the machine does falls on all
    arms alike."""
    problems = list(dict.fromkeys(problem for problem, _ in cells))
    ordered = [
        (problems.index(problem), turn, cell)
        for (problem, _), own in cells.items()
        for turn, cell in enumerate(own)
    ]
    ordered.sort(key=lambda item: item[:2])
    return [cell for *_, cell in ordered]


def train(args, grid: Grid) -> None:
    """Run what is left, until no further run is known to be needed; each is kept as soon as it is finished."""
    again, lock = shlex.join(["python", *sys.argv]), threading.Lock()
    while True:
        cells = all_cells(args, grid)
        found = losses(args, grid, cells)
        ordered = in_turns(cells)
        left = [cell for cell in ordered if found[cell.folder] is None]
        left = [replace(cell, index=index) for index, cell in enumerate(left)]
        print(
            f"{args.stage}: {len(ordered)} runs in all, {len(left)} to do, {args.jobs} at a time",
            flush=True,
        )
        keep_finished(args, grid, cells)
        if args.stage == "rates":
            keep_rates(grid, cells)
        if not left:
            return
        of = {cell.folder: pair for pair, own in cells.items() for cell in own}

        def keep(cell: sweep.Cell, of=of) -> None:
            if final_loss(cell) is None:
                return  # it failed, and did not diverge
            with lock:  # a file holds many runs
                grid.keep(args.stage, *of[cell.folder], cell)

        code = sweep.run_cells(left, sweep.SweepConfig(jobs=args.jobs), again, keep)
        if code not in (0, 1):
            sys.exit(code)
        if code and any(final_loss(cell) is None for cell in left):
            sys.exit(code)  # a failure that is no divergence: trying again would find it again


def keep_finished(args, grid: Grid, cells: Cells) -> None:
    """Those whose folder is there and that are not kept yet: an earlier call was killed between the two."""
    for (problem, arm), own in cells.items():
        kept = {run.name: run for run in grid.kept(args.stage, problem)}
        for cell in own:
            run = kept.get(name_of(args.stage, problem, arm, cell))
            if final_loss(cell) is not None and (run is None or not is_of(run, cell)):
                grid.keep(args.stage, problem, arm, cell)


def keep_rates(grid: Grid, cells: Cells) -> None:
    """Store the rate of every arm whose runs are all there."""
    chosen = grid.chosen()
    for (problem, arm), own in cells.items():
        losses = grid.losses("rates", problem, arm, own)
        if None not in losses:
            rates = [cell.values["learning_rate"] for cell in own]
            tried = {
                f"{rate:g}": loss if math.isfinite(loss) else None
                for rate, loss in zip(rates, losses)
            }
            best = rates[losses.index(min(losses))]
            chosen.setdefault(problem, {})[arm] = {"learning_rate": best, "tried": tried}
    if chosen != grid.chosen():
        grid.results.mkdir(parents=True, exist_ok=True)
        store(grid.results / f"{grid.preset}_rates.json", {"chosen": chosen})


def main():
    with configurator.one_line_errors():
        args = arguments()
        if args.jobs < 1:
            raise ValueError(f"--jobs={args.jobs}: give 1 or more")
        grid = Grid(args.preset, args.runs, args.results)
        if args.mode == "show":
            cells = all_cells(args, grid)
            found = losses(args, grid, cells)
            for cell in in_turns(cells):
                loss = found[cell.folder]
                print(f"{cell.folder} | {'to do' if loss is None else f'{loss:.4f}'}")
            return
        if args.preset == "cpu":
            os.environ.setdefault(
                "OMP_NUM_THREADS", "1"
            )  # also of a run that has the machine to itself (PLAN.md)
        train(args, grid)


if __name__ == "__main__":
    main()
