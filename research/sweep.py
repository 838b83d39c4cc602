"""Train a grid of settings, one run of train.py each, and tabulate the final evaluations over seeds.

    python research/sweep.py config/ddl_dv4_small.py --ddl_value_channels=1,2,4,8 --ddl_beta_init=0.5,1.0 --seed=0..4
    python research/sweep.py config/ddl_dv4_small.py ... --nproc_per_node=4    every run by torchrun on four GPUs
    python research/sweep.py config/demo_cpu.py --seed=0..4 --jobs=2         two runs at a time, which share the machine
    python research/sweep.py config/ddl_dv4_small.py ... --mode=slurm    write a Slurm array, a task per unfinished cell
    python research/sweep.py config/ddl_dv4_small.py ... --mode=table          tabulate and draw what is there

A key of train.py with several values, `a,b,c` or an inclusive integer range `a..b`, is swept; every combination is a
cell. A key with one value goes to every cell as it is. A value that itself holds a comma is not supported. The same
command started again skips finished cells and continues the others. `<out>/<cell>/` is the cell's run folder,
`<out>/<cell>.log` what train.py printed; `<out>/table.md`, `table.json` and `plot.png` are the results.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import configurator  # before all that is slow to import: it takes Ctrl+C

# isort: split
import train
from evaluation import tables
from model.keys import Key, check_ranges
from research import compare
from research.plots import pyplot
from training import checkpoint, metrics, start, stopping
from training.provenance import store
from training.stopping import EXIT_CODE as STOPPED

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)")
OWN_KEYS = ("out_dir", "resume", "dry_run")  # of train.py, set here for every cell


@dataclass
class SweepConfig:
    """Keys of the sweep."""

    mode: Annotated[
        Literal["local", "slurm", "cell", "table"],
        "run all cells here; write a Slurm array; run cell --index; tabulate",
    ] = "local"
    out: Annotated[str | None, "folder of the sweep; None: sweeps/<name of the config file>"] = None
    metric: Annotated[str, "what is drawn and comes first in the table: a key of an evaluation"] = (
        "val_loss"
    )
    jobs: Annotated[int, "local: cells at a time, each with its share of the cores", Key(low=1)] = 1
    nproc_per_node: Annotated[
        int, "processes of each cell, by torchrun; 1: plain python", Key(low=1)
    ] = 1
    gpus_per_node: Annotated[
        int | None, "slurm: GPUs of each task; None: nproc_per_node; 0: none"
    ] = None
    stop_on_failure: Annotated[bool, "local: start no further cell after one that failed"] = False
    index: Annotated[int | None, "cell: which one, from 0, counted over the full grid"] = None

    def __post_init__(self):
        check_ranges(self)


@dataclass(frozen=True)
class Cell:
    """One run of the grid; values: the swept keys', as train.py understands them; about: what else tells it apart."""

    index: int
    values: dict
    settings: dict
    arguments: list[str]
    folder: Path
    about: str = ""

    @property
    def title(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def log(self) -> Path:
        return self.folder.with_name(self.folder.name + ".log")


def read_arguments(argv: list[str]):
    """(SweepConfig, config files, swept keys -> texts, other keys -> text). ValueError: a mistake in them."""
    files, options = configurator.split_arguments(argv)
    schema = configurator.knobs(SweepConfig)
    if "help" in options:
        print(configurator.help_text(f"{__doc__}\nKeys and defaults:", schema | train.every_key()))
        sys.exit(0)
    everything = schema | keys_of_cells(
        files, {key: text for key, text in options.items() if key not in schema}
    )
    configurator.refuse_unknown(options, everything, dashes="--")
    sweep = SweepConfig(**configurator.given({}, options, schema))
    swept, fixed = {}, {}
    for key in options.keys() & set(OWN_KEYS):
        raise ValueError(
            f"--{key} is set by sweep.py for every cell: leave it out; --out=FOLDER is the sweep's folder"
        )
    for key, text in options.items():
        if key not in schema and ("," in text or RANGE.fullmatch(text)):
            swept[key] = expand(key, text)
        elif key not in schema:
            fixed[key] = text
    if not swept:
        raise ValueError("nothing to sweep: give a key several values, --key=a,b,c or --key=0..4")
    if (sweep.index is None) == (sweep.mode == "cell"):
        raise ValueError("--index=N and --mode=cell go together")
    stem = Path(files[0]).stem if files else fixed.get("model", "sweep")
    return dataclasses.replace(sweep, out=sweep.out or f"sweeps/{stem}"), files, swept, fixed


def keys_of_cells(files: list[str], options: dict[str, str]) -> dict[str, configurator.Knob]:
    """What train.py takes where it is given these."""
    there = files and Path(files[0]).is_file()  # train.py says that it is not
    from_file = configurator.read_file(files[0]) if there else {}
    return train.known_keys(
        {key: from_file[key] for key in ("model",) if key in from_file}, options
    )


def expand(key: str, text: str) -> list[str]:
    """The values of `a,b,c`, where each may be a range `0..4`. ValueError: an empty value or range."""
    values: list[str] = []
    for item in text.split(","):
        low, high = map(int, bounds.groups()) if (bounds := RANGE.fullmatch(item)) else (0, 0)
        if not item or high < low:
            raise ValueError(
                f"--{key}={text}: {item or 'nothing between two commas'} gives no value"
            )
        values += map(str, range(low, high + 1)) if bounds else [item]
    return values


def make_cells(sweep: SweepConfig, files: list[str], swept: dict, fixed: dict) -> list[Cell]:
    """All cells, in the order of the command line. ValueError: train.py would refuse one, or two are the same."""
    cells, seen = [], {}
    for index, combination in enumerate(itertools.product(*swept.values())):
        chosen = dict(zip(swept, combination))
        cell = make_cell(index, chosen, [*files, *as_options(fixed | chosen)], Path(sweep.out))
        same = tuple(sorted(cell.settings.items()))
        if same in seen:
            raise ValueError(
                f"cells {seen[same]} and {index} are both {cell.title}: give every value once"
            )
        seen[same] = index
        check_saved(cell)
        cells.append(cell)
    return cells


def as_options(values: dict) -> list[str]:
    return [f"--{key}={value}" for key, value in values.items()]


def make_cell(index: int, chosen: dict[str, str], arguments: list[str], out: Path) -> Cell:
    try:
        values = configurator.given(
            {}, chosen, keys_of_cells(*configurator.split_arguments(arguments))
        )
        folder = out / cell_name(values)
        arguments = [*arguments, f"--out_dir={folder}", "--resume=auto"]
        config, model_config = train.configure(
            arguments, note=lambda line: None
        )  # train.py's log has its notes
    except ValueError as error:
        raise ValueError(f"cell {index} ({' '.join(as_options(chosen))}): {error}") from error
    settings = {**dataclasses.asdict(config), **dataclasses.asdict(model_config)}
    return Cell(
        index, values, {k: v for k, v in settings.items() if k not in OWN_KEYS}, arguments, folder
    )


def cell_name(values: dict) -> str:
    """`key=value,...`: the same however the keys are ordered and the values spelt."""
    keys = sorted(values, key=lambda key: (key == "seed", key))
    return ",".join(
        f"{key}={quote(str(values[key]), safe='')}" for key in keys
    )  # % codes: no two values alike


def check_saved(cell: Cell) -> None:
    """ValueError: the cell's folder holds a run with other settings, which train.py would refuse, or not look at."""
    if (step := saved_step(cell)) > cell.settings["max_steps"]:
        raise ValueError(
            f"max_steps={cell.settings['max_steps']}, but {cell.folder} has {step} steps: give another --out"
        )
    if saved := start.saved_state("auto", str(cell.folder)):
        start.refuse_change(saved, cell.settings, train.TrainConfig, cell.folder, "another --out")


def saved_step(cell: Cell) -> int:
    """Step of the newest checkpoint; 0: none."""
    return max(map(checkpoint.step_of, checkpoint.all_of(cell.folder)), default=0)


def final_evaluation(cell: Cell) -> dict | None:
    """The evaluation after the last of max_steps; None for a cell that train.py has not finished."""
    status, last = stopping.read_status(cell.folder), cell.settings["max_steps"]
    if status["ended"] != "finished" or status["step"] != last:
        return None
    return metrics.last_evaluation(cell.folder / "metrics.jsonl")


def catch_signals() -> list[signal.Signals]:
    """A list to which every SIGINT and SIGTERM is added from now on."""
    signals: list[signal.Signals] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(signal.Signals(number)))
    return signals


def run_cell(cell: Cell, nproc: int, signals: list, env: dict[str, str]) -> tuple[int, str]:
    """(exit code, last line printed) of train.py for this cell; STOPPED: saved before the end, to be started again."""
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        if nproc > 1
        else []
    )
    command = [sys.executable, *torchrun, str(TRAIN), *cell.arguments]
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    with open(cell.log, "a+b") as log:
        begin = log.seek(0, os.SEEK_END)
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        (cell.folder / "status.json").unlink(missing_ok=True)
        # Ctrl-C reaches the whole group. train.py takes it and our SIGTERM as one; torchrun must get the latter alone.
        group = {"process_group": 0} if torchrun else {}
        output = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        code, passed_on = wait(subprocess.Popen(command, env=env, **output, **group), signals)
        log.seek(begin)
        printed = log.read().decode(errors="replace")
    # torchrun has exit codes of its own, and SIGTERM before the first step just ends train.py.
    ended = stopping.read_status(cell.folder)["ended"]
    if ended == "stopped" or (passed_on and ended is None):
        return STOPPED, last_line(printed)
    if code == 0 and final_evaluation(cell) is None:
        return 1, "train.py ended without the final evaluation"
    return 128 - code if code < 0 else code, last_line(printed)


def wait(child: subprocess.Popen, signals: list) -> tuple[int, int]:
    """(exit code, signals passed on as SIGTERM) once the child has ended."""
    passed_on = 0
    while True:
        if len(signals) > passed_on:
            passed_on = len(signals)
            child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=0.2), passed_on


def last_line(printed: str) -> str:
    """The last line of train.py's own, which torchrun's traceback may bury; else the last of all."""
    lines = [line for line in printed.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("train.py: ")), lines[-1])


def run_cells(
    cells: list[Cell],
    sweep: SweepConfig,
    again: str,
    ended: Callable[[Cell], None] = lambda cell: None,
) -> int:
    """Run every unfinished cell, `jobs` at a time; `ended` is told of each that has ended by itself.

    The exit code: 0, 1 where one failed, that of a stop else.
    """
    signals, codes, tally = catch_signals(), [], Tally(cells, sweep.jobs)

    def attempt(cell: Cell):
        if signals or STOPPED in codes or (sweep.stop_on_failure and any(codes)):
            return  # not begun
        tally.begins(cell)
        begun = time.monotonic()
        if final_evaluation(cell):
            tally.ends(cell)
            return
        code, line = run_cell(cell, sweep.nproc_per_node, signals, environment(sweep.jobs))
        codes.append(code)
        if not signals and code != STOPPED:
            tally.ends(cell, code, line, time.monotonic() - begun)
            ended(cell)

    with ThreadPoolExecutor(sweep.jobs) as pool:
        list(pool.map(attempt, cells))  # the first exception of any
    if signals or STOPPED in codes:
        print(
            f"stopped{f' by {signals[-1].name}' if signals else ''}; to go on: {again}", flush=True
        )
        return 128 + signals[-1] if signals else STOPPED
    for log, line in tally.failed.items():
        print(f"failed: {log}: {line}", file=sys.stderr)
    return 1 if tally.failed else 0


class Tally:
    """What is printed of a sweep: a line for each cell, which begins when the cell does where they go one by one."""

    def __init__(self, cells: list[Cell], jobs: int):
        self.cells, self.jobs, self.seconds, self.failed = len(cells), jobs, [], {}
        self.left = sum(final_evaluation(cell) is None for cell in cells)

    def title(self, cell: Cell) -> str:
        about = f"{cell.about}, " if cell.about else ""
        return f"cell {cell.index + 1} of {self.cells} | {about}{cell.title} | "

    def begins(self, cell: Cell) -> None:
        if self.jobs == 1:
            print(self.title(cell), end="", flush=True)

    def ends(self, cell: Cell, code: int = 0, line: str = "", elapsed: float | None = None) -> None:
        """elapsed: None for a cell that was finished before."""
        result = (
            f"FAILED (exit code {code})"
            if code
            else f"val_loss {final_evaluation(cell)['val_loss']:.4f}"
        )
        if code:
            self.failed[cell.log] = line
        if elapsed is None:
            result += " | finished before"
        else:
            self.left -= 1
            self.seconds += [] if code else [elapsed]
            result += f" | {metrics.duration(elapsed)}"
            if self.seconds:
                left = self.left * sum(self.seconds) / len(self.seconds) / self.jobs
                result += f" | ETA {metrics.duration(left)}"
        print(f"{'' if self.jobs == 1 else self.title(cell)}{result}", flush=True)


def environment(jobs: int) -> dict[str, str]:
    """Of a cell's process: with several at a time each has its share of the cores, unless the caller says otherwise."""
    # torchrun ends its processes this long after it was told to end; by default 30 s, too few for a large model.
    defaults = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "110"}
    if jobs > 1:
        defaults["OMP_NUM_THREADS"] = str(max(len(os.sched_getaffinity(0)) // jobs, 1))
    return defaults | os.environ


ARRAY = """#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --array={indices}
#SBATCH --nodes=1
#SBATCH --ntasks=1
{gpus}#SBATCH --requeue
# Two minutes before the time limit the srun step is told to end, and train.py saves.
#SBATCH --signal=TERM@120
#SBATCH --output="{out}/slurm-%A_%a.out"
#SBATCH --open-mode=append
cd {here} || exit
code=0
srun {command} --index="$SLURM_ARRAY_TASK_ID" || code=$?
# {stopped}: saved before the end
if [ "$code" = {stopped} ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def write_array(cells: list[Cell], sweep: SweepConfig, argv: list[str]) -> None:
    """`<out>/array.sbatch`: a task per unfinished cell, numbered as in the full grid."""
    indices = [cell.index for cell in cells if final_evaluation(cell) is None]
    if not indices:
        print("every cell is finished: nothing to submit")
        return
    out = Path(sweep.out).absolute()
    gpus = sweep.nproc_per_node if sweep.gpus_per_node is None else sweep.gpus_per_node
    same = [
        argument
        for argument in argv
        if argument.partition("=")[0] not in ("--mode", "--gpus_per_node")
    ]
    text = ARRAY.format(
        name=quote(out.name),
        indices=",".join(map(str, indices)),
        gpus=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        out=out,
        here=shlex.quote(os.getcwd()),
        command=shlex.join([sys.executable, str(Path(__file__).resolve()), *same, "--mode=cell"]),
        stopped=STOPPED,
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "array.sbatch").write_text(text, encoding="utf-8")
    print(
        f"{len(indices)} tasks; submit them with: sbatch {shlex.quote(str(Path(sweep.out) / 'array.sbatch'))}"
    )


def summarise(cells: list[Cell], metric: str) -> dict:
    """Rows of the table, one for each setting of the swept keys but the seed, and the cells that are not finished."""
    final = {cell.index: record for cell in cells if (record := final_evaluation(cell))}
    numbers = {
        key
        for record in final.values()
        for key, value in record.items()
        if isinstance(value, int | float)
    }
    if final and metric not in numbers:
        raise ValueError(
            f"metric={metric} is in no final evaluation, which have {', '.join(sorted(numbers))}"
        )
    shown = dict.fromkeys([metric, "val_loss", "val_bits_per_byte", "val_perplexity"])
    groups: dict[tuple, list[Cell]] = {}
    for cell in cells:
        setting = {key: value for key, value in cell.values.items() if key != "seed"}
        groups.setdefault(tuple(setting.items()), []).append(cell)
    rows = []
    for setting, members in groups.items():
        records = [final[cell.index] for cell in members if cell.index in final]
        values = {
            key: [record[key] for record in records if key in record]
            for key in shown
            if key in numbers
        }
        finished = {"settings": dict(setting), "runs": len(members), "finished": len(records)}
        rows.append(
            {
                **finished,
                "metrics": {key: compare.summary(each) for key, each in values.items() if each},
            }
        )
    unfinished = [
        {
            "cell": cell.folder.name,
            "saved_step": saved_step(cell),
            "max_steps": cell.settings["max_steps"],
        }
        for cell in cells
        if cell.index not in final
    ]
    return {"metric": metric, "rows": rows, "unfinished": unfinished}


def markdown(summary: dict) -> str:
    keys = list(summary["rows"][0]["settings"])
    shown = list(dict.fromkeys(key for row in summary["rows"] for key in row["metrics"]))
    rows = []
    for row in summary["rows"]:
        cells = [*row["settings"].values(), f"{row['finished']} of {row['runs']}"]
        for key in shown:
            figures = row["metrics"].get(key, {"mean": None, "ci95": None})
            cells += [x if x is None else f"{x:.4f}" for x in (figures["mean"], figures["ci95"])]
        rows.append(cells)
    header = [*keys, "finished", *(title for key in shown for title in (key, "± 95%"))]
    notes = [
        f"\nnot finished: `{cell['cell']}`, {cell['saved_step']} of {cell['max_steps']} steps saved"
        for cell in summary["unfinished"]
    ]
    return "\n".join([tables.markdown(header, rows), *notes]) + "\n"


def is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def draw(summary: dict, path: Path) -> None:
    """The metric against the first swept key of numbers, else the first key; a line for each setting of the others."""
    plt, metric = pyplot(), summary["metric"]
    rows = [row for row in summary["rows"] if metric in row["metrics"]]
    values = {
        key: [row["settings"][key] for row in summary["rows"]]
        for key in summary["rows"][0]["settings"]
    }
    numeric = [key for key in values if all(map(is_number, values[key]))]
    x_key = [*numeric, *values, None][0]
    lines: dict[str, list] = {}
    for row in rows:
        others = " ".join(
            f"{key}={value}" for key, value in row["settings"].items() if key != x_key
        )
        x, figures = row["settings"].get(x_key, "all"), row["metrics"][metric]
        lines.setdefault(others, []).append(
            (x if numeric else str(x), figures["mean"], figures["ci95"] or math.nan)
        )
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for others, points in lines.items():
        x, mean, half = zip(*(sorted(points) if numeric else points))
        axes.errorbar(x, mean, yerr=half, fmt="o-", capsize=4, label=others or "mean over seeds")
    axes.set(
        xlabel=x_key or "", ylabel=metric, title="error bars: 95% confidence interval of the mean"
    )
    if numeric and min(values[x_key]) > 0 and max(values[x_key]) / min(values[x_key]) >= 20:
        axes.set_xscale("log")  # learning rates
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def write_table(cells: list[Cell], sweep: SweepConfig) -> None:
    summary, out = summarise(cells, sweep.metric), Path(sweep.out)
    store(out / "table.json", summary)
    (out / "table.md").write_text(markdown(summary), encoding="utf-8")
    print(markdown(summary), end="")
    if any(row["finished"] for row in summary["rows"]):
        try:
            draw(summary, out / "plot.png")
        except ValueError as error:  # matplotlib is missing; the tables are there
            print(f"no plot: {error}")


def main() -> int:
    argv = sys.argv[1:]
    sweep, files, swept, fixed = read_arguments(argv)
    os.environ["WORLD_SIZE"] = str(
        sweep.nproc_per_node
    )  # as torchrun will set it: train.configure divides the batch
    cells = make_cells(sweep, files, swept, fixed)
    if sweep.index is not None and not 0 <= sweep.index < len(cells):
        raise ValueError(
            f"index={sweep.index}: there are {len(cells)} cells, give 0 to {len(cells) - 1}"
        )
    if sweep.mode == "table" and not Path(sweep.out).is_dir():
        raise ValueError(f"out={sweep.out} is not there: nothing has run")
    if sweep.mode in ("local", "table") and len(swept.get("seed", ())) > 1:
        compare.student()  # missing, it should not be found at the end
    if sweep.mode == "table":
        write_table(cells, sweep)
        return 0
    if sweep.mode == "cell":
        cell = cells[sweep.index]
        if final_evaluation(cell):
            print(f"{cell.folder} is finished")
            return 0
        print(f"cell {cell.index} | {cell.title} | {cell.log}", flush=True)
        code, line = run_cell(cell, sweep.nproc_per_node, catch_signals(), environment(1))
        print(f"exit code {code}: {line}")
        return code
    done = sum(final_evaluation(cell) is not None for cell in cells)
    sizes = " x ".join(f"{len(values)} {key}" for key, values in swept.items())
    print(
        f"{len(cells)} cells ({sizes}), {done} finished: {len(cells) - done} runs to do in {sweep.out}",
        flush=True,
    )
    if sweep.mode == "slurm":
        write_array(cells, sweep, argv)
        return 0
    code = run_cells(cells, sweep, shlex.join(["python", *sys.argv]))
    if code in (0, 1):
        write_table(cells, sweep)
    return code


if __name__ == "__main__":
    with configurator.one_line_errors():
        sys.exit(main())
