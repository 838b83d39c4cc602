"""Train a grid of settings, one run of train.py each, and tabulate the last evaluations over seeds.

    python research/sweep.py config/ddl_dv4_small.py --ddl_value_channels=1,2,4 --seed=0..4
    python research/sweep.py config/ddl_dv4_small.py ... --nproc_per_node=4    each run on four GPUs
    python research/sweep.py config/demo_cpu.py --seed=0..4 --jobs=2         two runs at a time
    python research/sweep.py config/ddl_dv4_small.py ... --mode=slurm        write a Slurm array
    python research/sweep.py config/ddl_dv4_small.py ... --mode=table        tabulate what is there

A key of train.py with several values, `a,b,c` or an inclusive range of integers `a..b`, is swept;
every combination is a cell. A key with one value goes to every cell. A value that itself holds a
comma is not supported. The same command started again skips finished cells and continues the
others. `<out>/<cell>/` is the cell's run folder, `<out>/<cell>.log` what train.py printed;
`<out>/table.md`, `table.json` and `plot.png` are the results.
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
from typing import Literal
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import configurator
from model.options import Option, check_ranges, collect_options, option
from research import compare, plots, runs, tables
from training import checkpoint, metrics, resume, stopping
from training.provenance import store_figures
from training.settings import configure, every_option, known_options
from training.stopping import EXIT_CODE as STOPPED
from utils import files, units
from utils.tables import format_markdown

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)")
OWN_KEYS = ("out_dir", "resume", "dry_run")  # of train.py, set here for every cell
MOST_CELLS = 10_000


@dataclass
class SweepConfig:
    """Keys of the sweep."""

    mode: Literal["local", "slurm", "cell", "table"] = option(
        "local",
        "run all cells here; write a Slurm array; run cell --index; tabulate",
    )
    out: str | None = option(
        None,
        "its folder; None: sweeps/<name of the config file>",
    )
    metric: str = option(
        "val_loss",
        "what plot.png shows: a score of the last evaluation",
    )
    jobs: int = option(
        1,
        "local: cells at a time, which share the cores",
        low=1,
    )
    nproc_per_node: int = option(
        1,
        "processes of each cell, by torchrun",
        low=1,
    )
    gpus_per_node: int | None = option(
        None,
        "slurm: None: nproc_per_node; 0: none",
    )
    index: int | None = option(
        None,
        "cell: which one, from 0, counted over the full grid",
    )

    def __post_init__(self):
        check_ranges(self)


@dataclass(frozen=True)
class Cell:
    """One run of the grid.

    values: of the swept keys; settings: all keys of the run and its model; about: what else tells
    it apart.
    """

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


# ---- the grid ----


def read_arguments(argv: list[str]) -> tuple[SweepConfig, list[str], dict, dict]:
    """(SweepConfig, config files, {swept key: texts}, {other key: text}). ValueError: a mistake."""
    files, options = configurator.split_arguments(argv)
    schema = collect_options(SweepConfig)
    if "help" in options:
        errors.end_quietly_on_closed_pipe()
        print(f"{__doc__}\nKeys and defaults:\n")
        print(configurator.help_text(schema | every_option()))
        sys.exit(0)
    of_train = {key: text for key, text in options.items() if key not in schema}
    known = schema | keys_of_cells(files, of_train)
    configurator.check_names(options, configurator.known_names(known), prefix="--")
    sweep = SweepConfig(**configurator.read_settings({}, options, schema))
    for key in of_train.keys() & set(OWN_KEYS):
        fix = "leave it out; --out=FOLDER is the sweep's folder"
        raise ValueError(f"--{key} is set by sweep.py for every cell: {fix}")
    several = {key for key, text in of_train.items() if "," in text or RANGE.fullmatch(text)}
    swept = {key: expand(key, text) for key, text in of_train.items() if key in several}
    fixed = {key: text for key, text in of_train.items() if key not in several}
    if not swept:
        raise ValueError("nothing to sweep: give a key several values, --key=a,b,c or --key=0..4")
    if (sweep.index is None) == (sweep.mode == "cell"):
        raise ValueError("--index=N and --mode=cell go together")
    stem = Path(files[0]).stem if files else fixed.get("model", "sweep")
    return dataclasses.replace(sweep, out=sweep.out or f"sweeps/{stem}"), files, swept, fixed


def keys_of_cells(files: list[str], options: dict[str, str]) -> dict[str, Option]:
    """What train.py takes where it is given these."""
    there = files and Path(files[0]).is_file()  # train.py says that it is not
    from_file = configurator.read_config_file(files[0]) if there else {}
    return known_options({k: from_file[k] for k in ("model",) if k in from_file}, options)


def expand(key: str, text: str) -> list[str]:
    """The values of `a,b,c`, where each may be a range `0..4`. ValueError: one is empty."""
    values: list[str] = []
    for item in text.split(","):
        bounds = RANGE.fullmatch(item)
        low, high = map(int, bounds.groups()) if bounds else (0, 0)
        if not item or high < low:
            where = item or "nothing between two commas"
            raise ValueError(f"--{key}={text}: {where} gives no value")
        if high - low >= MOST_CELLS:
            raise ValueError(f"--{key}={text}: give at most {MOST_CELLS:,} values")
        values += map(str, range(low, high + 1)) if bounds else [item]
    return values


def make_cells(sweep: SweepConfig, files: list[str], swept: dict, fixed: dict) -> list[Cell]:
    """All cells. ValueError: too many, two are the same, or train.py would refuse one."""
    count = math.prod(map(len, swept.values()))
    if count > MOST_CELLS:
        raise ValueError(f"{count:,} cells: give fewer values, a sweep has {MOST_CELLS:,} at most")
    cells, seen = [], {}
    for index, combination in enumerate(itertools.product(*swept.values())):
        chosen = dict(zip(swept, combination))
        cell = make_cell(index, chosen, [*files, *as_options(fixed | chosen)], Path(sweep.out))
        same = tuple(sorted(cell.settings.items()))
        if same in seen:
            fix = "give every value once"
            raise ValueError(f"cells {seen[same]} and {index} are both {cell.title}: {fix}")
        seen[same] = index
        refuse_other_run(cell)
        cells.append(cell)
    return cells


def as_options(values: dict) -> list[str]:
    return [f"--{key}={value}" for key, value in values.items()]


def make_cell(index: int, chosen: dict[str, str], arguments: list[str], out: Path) -> Cell:
    try:
        known = keys_of_cells(*configurator.split_arguments(arguments))
        values = configurator.read_settings({}, chosen, known)
        folder = out / cell_name(values)
        arguments = [*arguments, f"--out_dir={folder}"]
        # The settings that the sweep asks for, whatever run the folder may already hold. The notes
        # are in the cell's log.
        configs = configure(arguments, note=lambda line: None)
    except ValueError as error:
        raise ValueError(f"cell {index} ({' '.join(as_options(chosen))}): {error}") from error
    settings = {k: v for each in configs for k, v in dataclasses.asdict(each).items()}
    settings = {key: value for key, value in settings.items() if key not in OWN_KEYS}
    return Cell(index, values, settings, [*arguments, "--resume=auto"], folder)


def cell_name(values: dict) -> str:
    """`key=value,...`: the same however keys are ordered and values spelt; no two alike."""
    keys = sorted(values, key=lambda key: (key == "seed", key))
    return ",".join(f"{key}={quote(str(values[key]), safe='')}" for key in keys)


def refuse_other_run(cell: Cell) -> None:
    """ValueError: the cell's folder holds a run with other settings."""
    steps, limit = saved_step(cell), cell.settings["max_steps"]
    if steps > limit:
        have = f"{cell.folder} has {steps} steps"
        raise ValueError(f"max_steps={limit}, but {have}: give another --out")
    if state := resume.read_saved_state("auto", str(cell.folder)):
        # Keys that are newer than the run keep the value that it had without them.
        stored_keys = state["run_config"].keys() | state["model_config"].keys() | {"model"}
        settings = {key: cell.settings[key] for key in cell.settings if key in stored_keys}
        saved = resume.saved_settings(state)
        resume.check_unchanged(settings, saved, cell.folder, "give another --out")


def refuse_still_running(cells: list[Cell]) -> None:
    """ValueError: a process trains in a cell's folder; a sweep that was killed leaves such."""
    folders, running = {f"--out_dir={cell.folder}": cell for cell in cells}, {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for word in path.read_text(errors="replace").split("\0"):
                if word in folders:
                    running[path.parent.name] = folders[word].title
    if running:
        names = ", ".join(f"{pid} ({title})" for pid, title in running.items())
        fix = "wait for them, or end them with kill"
        raise ValueError(f"cells still run, of a sweep that was killed: processes {names}: {fix}")


def saved_step(cell: Cell) -> int:
    """Step of the newest checkpoint; 0: none."""
    return max(map(checkpoint.get_step, checkpoint.list_checkpoints(cell.folder)), default=0)


def final_evaluation(cell: Cell) -> dict | None:
    """The evaluation after the last of max_steps; None for a cell that is not finished."""
    status, last = stopping.read_status(cell.folder), cell.settings["max_steps"]
    if status.ended != "finished" or status.step != last:
        return None
    return metrics.find_last_evaluation(cell.folder / "metrics.jsonl")


# ---- running ----


def catch_signals() -> list[signal.Signals]:
    """A list to which every SIGINT and SIGTERM is added from now on."""
    signals: list[signal.Signals] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(signal.Signals(number)))
    return signals


def run_cell(cell: Cell, nproc: int, signals: list, env: dict[str, str]) -> tuple[int, str]:
    """(exit code, last line printed) of train.py; STOPPED: saved before the end, to be continued."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    command = [sys.executable, *(launcher if nproc > 1 else []), str(TRAIN), *cell.arguments]
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    with open(cell.log, "a+b") as log:
        begin = log.seek(0, os.SEEK_END)
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        (cell.folder / "status.json").unlink(missing_ok=True)
        # Ctrl-C reaches the whole group. train.py takes it and our SIGTERM as one; torchrun must
        # get the latter alone.
        group = {"process_group": 0} if nproc > 1 else {}
        output = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        code, passed_on = wait(subprocess.Popen(command, env=env, **output, **group), signals)
        log.seek(begin)
        printed = log.read().decode(errors="replace")
    # torchrun has exit codes of its own, and SIGTERM before the first step just ends train.py.
    ended = stopping.read_status(cell.folder).ended
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
    """The last line of train.py's own, which torchrun's traceback may bury; else of all."""
    lines = [line for line in printed.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("train.py: ")]
    return [*lines[-1:], *own][-1]


def run_cells(
    cells: list[Cell], sweep: SweepConfig, again: str, ended: Callable = lambda cell: None
) -> int:
    """Run every unfinished cell, `jobs` at a time; `ended` is told of each that ended by itself.

    The exit code: 0, 1 where one failed, that of a stop else. again: the command that goes on.
    """
    refuse_still_running(cells)
    signals, codes, failed, seconds = catch_signals(), [], {}, []
    left = sum(final_evaluation(cell) is None for cell in cells)

    def attempt(cell: Cell):
        nonlocal left
        if signals or STOPPED in codes:
            return
        title = f"cell {cell.index + 1} of {len(cells)} | {cell.about}{', ' * bool(cell.about)}"
        title += f"{cell.title} | "
        if sweep.jobs == 1:
            print(title, end="", flush=True)
            title = ""
        begun = time.monotonic()
        if done := final_evaluation(cell):
            print(f"{title}val_loss {done['val_loss']:.4f} | finished before", flush=True)
            return
        code, line = run_cell(cell, sweep.nproc_per_node, signals, environment(sweep.jobs))
        codes.append(code)
        if signals or code == STOPPED:
            return
        left -= 1
        elapsed = time.monotonic() - begun
        if code:
            failed[cell.log], result = line, f"FAILED (exit code {code})"
        else:
            seconds.append(elapsed)
            result = f"val_loss {final_evaluation(cell)['val_loss']:.4f}"
        eta = left * sum(seconds) / max(len(seconds), 1) / sweep.jobs
        more = f" | ETA {units.format_duration(eta)}" * bool(seconds)
        print(f"{title}{result} | {units.format_duration(elapsed)}{more}", flush=True)
        ended(cell)

    with ThreadPoolExecutor(sweep.jobs) as pool:
        list(pool.map(attempt, cells))  # the first exception of any
    if signals or STOPPED in codes:
        by = f" by {signals[-1].name}" if signals else ""
        print(f"stopped{by}; to go on: {again}", flush=True)
        return 128 + signals[-1] if signals else STOPPED
    for log, line in failed.items():
        print(f"failed: {log}: {line}", file=sys.stderr)
    return 1 if failed else 0


def environment(jobs: int) -> dict[str, str]:
    """Of a cell's process: its share of the cores, unless the caller says otherwise."""
    # torchrun ends its processes 30 s after it was told to end, too few for a large model.
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
    indices = [str(cell.index) for cell in cells if final_evaluation(cell) is None]
    if not indices:
        print("every cell is finished: nothing to submit")
        return
    out = Path(sweep.out)
    gpus = sweep.nproc_per_node if sweep.gpus_per_node is None else sweep.gpus_per_node
    same = [a for a in argv if a.partition("=")[0] not in ("--mode", "--gpus_per_node")]
    command = [sys.executable, str(Path(__file__).resolve()), *same, "--mode=cell"]
    text = ARRAY.format(
        name=quote(out.absolute().name),
        indices=",".join(indices),
        gpus=f"#SBATCH --gpus-per-node={gpus}\n" if gpus else "",
        out=out.absolute(),
        here=shlex.quote(os.getcwd()),
        command=shlex.join(command),
        stopped=STOPPED,
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "array.sbatch").write_text(text, encoding="utf-8")
    submit = shlex.join(["sbatch", str(out / "array.sbatch")])
    print(f"{len(indices)} tasks; submit them with: {submit}")


# ---- results ----


def write_table(cells: list[Cell], sweep: SweepConfig) -> None:
    """table.md and table.json, as of report.py, a row for each setting; plot.png."""
    done, out = [cell for cell in cells if final_evaluation(cell)], Path(sweep.out)
    found = runs.load([cell.folder for cell in done])[0]
    groups, unfinished = compare.group_runs(found), []
    for cell in cells:
        if cell not in done:
            steps = f"{saved_step(cell)} of {cell.settings['max_steps']}"
            unfinished.append(f"not finished: `{cell.folder.name}`, {steps} steps saved")
    table = tables.make_loss_table(groups)
    text = "\n".join([format_markdown(table.header, table.rows), "", *unfinished]).rstrip() + "\n"
    print(text, end="")
    store_figures(out / "table.json", {"groups": table.numbers, "unfinished": unfinished})
    files.write_text(out / "table.md", text)
    if groups:
        values = {cell.folder.resolve(): cell.values for cell in done}
        own = [values[group.runs[0].path.resolve()] for group in groups]
        plot(groups, own, sweep.metric, out)


def plot(groups: list[compare.Group], values: list[dict], metric: str, out: Path) -> None:
    """The metric against the first swept key of numbers, or the first; a line for the others."""
    estimates = [group.estimate(metric) for group in groups]
    if None in estimates:
        have = ", ".join(
            key for key in groups[0].runs[0].final_evaluation if key.startswith("val_")
        )
        raise ValueError(f"metric={metric} is in no last evaluation: give one of {have}")

    keys = [key for key in values[0] if key != "seed"]
    numeric = [key for key in keys if all(type(each[key]) in (int, float) for each in values)]
    x_key = [*numeric, *keys, None][0]
    lines: dict[str, list] = {}
    for own, estimate in zip(values, estimates):
        name = " ".join(f"{key}={own[key]}" for key in keys if key != x_key)
        x = own[x_key] if numeric else str(own.get(x_key, "all"))
        half = estimate.half_width if estimate.n > 1 else math.nan
        lines.setdefault(name, []).append((x, estimate.mean, half))
    with plots.use_print_style():
        figure, axes = plots.make_panels(1, 1, 3.0, [*lines])
        axis, entries = axes[0, 0], {}
        for number, (name, points) in enumerate(lines.items(), 1):
            x, mean, half = zip(*(sorted(points) if numeric else points))
            style = {"fmt": "o-", "capsize": 3, "color": plots.get_line_style(number)["color"]}
            entries[name or "mean over seeds"] = axis.errorbar(x, mean, yerr=half, **style)
        title = "error bars: 95% interval of the mean over seeds"
        axis.set(xlabel=x_key or "", ylabel=compare.METRIC_LABELS.get(metric, metric), title=title)
        ends = sorted(own[x_key] for own in values) if numeric else [1]
        if ends[0] > 0 and ends[-1] / ends[0] >= 20:
            axis.set_xscale("log")  # learning rates
        plots.add_legend(figure, entries)
        plots.save(figure, out / "plot.png")


def main() -> int:
    argv = sys.argv[1:]
    sweep, files, swept, fixed = read_arguments(argv)
    # As torchrun will set it: configure divides the batch.
    os.environ["WORLD_SIZE"] = str(sweep.nproc_per_node)
    cells = make_cells(sweep, files, swept, fixed)
    if sweep.index is not None and not 0 <= sweep.index < len(cells):
        known = f"there are {len(cells)} cells"
        raise ValueError(f"index={sweep.index}: {known}, give 0 to {len(cells) - 1}")
    if sweep.mode == "table" and not Path(sweep.out).is_dir():
        raise ValueError(f"out={sweep.out} is not there: nothing has run")
    if sweep.mode in ("local", "table"):
        # Missing, they should not be found at the end.
        runs.import_polars(), compare.import_special_functions(), plots.use_print_style()
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
    Path(sweep.out).mkdir(parents=True, exist_ok=True)
    done = sum(final_evaluation(cell) is not None for cell in cells)
    sizes = " x ".join(f"{len(values)} {key}" for key, values in swept.items())
    about = f"{len(cells)} cells ({sizes}), {done} finished: {len(cells) - done} runs to do"
    print(f"{about} in {sweep.out}", flush=True)
    if sweep.mode == "slurm":
        write_array(cells, sweep, argv)
        return 0
    code = run_cells(cells, sweep, shlex.join(["python", *sys.argv]))
    if code in (0, 1):
        write_table(cells, sweep)
    return code


if __name__ == "__main__":
    with errors.one_line_errors():
        sys.exit(main())
