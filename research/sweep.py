"""Train a grid of settings with train.py, or search for learning rates, and tabulate the results.

    python research/sweep.py config/ddl_dv4_small.py --ddl_value_channels=1,2,4 --seed=0..4
    python research/sweep.py config/ddl_dv4_small.py ... --nproc_per_node=4    # each run on four GPUs
    python research/sweep.py config/demo_cpu.py --seed=0..4 --jobs=2         # two runs at a time
    python research/sweep.py config/demo_cpu.py --model=gpt-mha-rope,DDL-gpt-mha-rope \
        --tune=learning_rate,muon_learning_rate --tries=12

A key of train.py with several values, `a,b,c` or an inclusive range of integers `a..b`, is swept;
every combination of values is a cell. A key with one value applies to all cells. A value that
itself contains a comma is not supported. If you rerun the command, it skips finished cells and
resumes the others. `<out>/<cell>/` is the run folder of a cell, and `<out>/<cell>.log` is the
output of its train.py. The results are in `<out>/table.md`.

With `--tune`, every combination of the swept values gets a search for its best rates, which starts
from those of the config file and makes at most `--tries` runs (research/tuning.py). The results are
in `<out>/tuning.md`.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import configurator
from configurator import Option, check_ranges, collect_options, option
from model import MODEL_NAMES, model_class
from research import compare, runs, tables, tuning
from training import checkpoint, metrics, settings
from training.config import TrainConfig
from training.settings import Arguments
from training.stopping import EXIT_CODE as STOPPED
from utils import errors, files, machine, units
from utils.tables import format_markdown

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
RANGE = re.compile(r"(-?[0-9]+)\.\.(-?[0-9]+)")
# A run may be resumed with other values of these, but its result is then another one.
DECIDING_KEYS = (
    "max_steps",
    "decay_steps",
    "skip_nonfinite",
    "ema_half_life",
    "eval_batches",
    "eval_full",
    "eval_part",
)
KEYS_OF_CELLS = ("out_dir", "resume", "dry_run")  # keys of train.py that the sweep sets itself
TUNING_SEED = "1000"  # no seed of the runs that are reported


@dataclass
class SweepConfig:
    """Keys of the sweep."""

    out: str | None = option(
        None,
        "folder of the sweep (default: sweeps/<name of the config file>)",
    )
    jobs: int = option(
        1,
        "number of cells that run at the same time; they share the CPU cores, and "
        "each has GPUs of its own if there are enough",
        low=1,
    )
    nproc_per_node: int = option(
        1,
        "number of processes of each cell, which torchrun starts",
        low=1,
    )
    tune: str | None = option(None, "one or two learning rates to search for, separated by a comma")
    tries: int = option(12, "largest number of runs of a search", low=1)

    def __post_init__(self):
        check_ranges(self)


@dataclass(frozen=True)
class Cell:
    """One run of the grid.

    values: the values of the swept keys. settings: all keys of the run and of its model. arguments:
    those of train.py.
    """

    index: int
    values: dict[str, Any]
    settings: dict[str, Any]
    arguments: list[str]
    folder: Path

    @property
    def title(self) -> str:
        """The values of the swept keys, as key=value."""
        return " ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def log(self) -> Path:
        """The file with the output of train.py."""
        return self.folder.with_name(self.folder.name + ".log")


# ---- the grid ----


class SweepArguments(NamedTuple):
    """The command line: keys of the sweep, what all cells share, and the texts of each swept key."""

    sweep: SweepConfig
    train: Arguments
    swept: dict[str, list[str]]


def read_arguments(argv: list[str]) -> SweepArguments:
    """Read the command line.

    Raises:
        ValueError: a key is unknown or has a wrong value, or nothing is swept
    """
    train = settings.read_arguments(argv)
    options = train.from_command_line
    sweep_options = collect_options(SweepConfig)
    if "help" in options:
        errors.end_quietly_on_closed_pipe()
        print(f"{__doc__}\nKeys and defaults:\n")
        configs = [model_class(name).Config for name in MODEL_NAMES]
        print(configurator.help_text(collect_options(SweepConfig, TrainConfig, *configs)))
        sys.exit(0)
    train_options = {key: text for key, text in options.items() if key not in sweep_options}
    known_keys = {**sweep_options, **known_options(train)}
    configurator.check_names(options, known_keys, prefix="--")
    sweep = SweepConfig(**configurator.read_settings({}, options, sweep_options))
    swept = {}
    fixed = {}
    for key, text in train_options.items():
        if key in KEYS_OF_CELLS:
            raise ValueError(
                f"--{key} is set by sweep.py for every cell: omit it; --out=FOLDER is the sweep's "
                "folder"
            )
        if text is None:  # a bare key
            fixed[key] = "True"
        elif "," in text or RANGE.fullmatch(text):
            swept[key] = expand_values(key, text)
        else:
            fixed[key] = text
    if sweep.tune:
        check_tuning(sweep, known_keys, swept)
        fixed = {"seed": TUNING_SEED, "eval_part": "first", **fixed}
    elif not swept:
        raise ValueError("nothing to sweep: give a key several values, --key=a,b,c or --key=0..4")
    if sweep.out is None:
        name = settings.join_stems(train.files) or fixed.get("model", "sweep")
        sweep = dataclasses.replace(sweep, out=f"sweeps/{name}")
    return SweepArguments(sweep, train._replace(from_command_line=fixed), swept)


def known_options(train: Arguments) -> dict[str, Option]:
    """Return the options of the run and of the models that are named, separated by commas."""
    texts = {**train.from_files, **train.from_command_line}
    names = str(texts.get("model", TrainConfig.model)).split(",")
    return collect_options(
        TrainConfig, *(model_class(name).Config for name in names if name in MODEL_NAMES)
    )


def check_tuning(
    sweep: SweepConfig, known_keys: dict[str, Option], swept: dict[str, list[str]]
) -> None:
    """Raise ValueError if `--tune` cannot be searched."""
    keys = sweep.tune.split(",")
    configurator.check_names(keys, known_keys, prefix="--tune=")
    if len(set(keys)) != len(keys) or len(keys) > 2:
        raise ValueError(f"--tune={sweep.tune}: give one or two different keys")
    for key in (*keys, "seed"):
        if key in swept:
            raise ValueError(
                f"--{key} has several values: a search starts from one rate, and trains one seed"
            )


def expand_values(key: str, text: str) -> list[str]:
    """Return the values of `a,b,c`, where each item can be a range `0..4`.

    Raises:
        ValueError: an item is empty
    """
    values: list[str] = []
    for item in text.split(","):
        bounds = RANGE.fullmatch(item)
        if bounds is None:
            values.append(item)
        else:
            low, high = map(int, bounds.groups())
            values += map(str, range(low, high + 1))
    if not values or "" in values:
        raise ValueError(f"--{key}={text}: a value or a range is empty")
    return values


def make_cells(sweep: SweepConfig, train: Arguments, swept: dict[str, list[str]]) -> list[Cell]:
    """Make all cells of the grid.

    Raises:
        ValueError: train.py would refuse a cell, or its folder has another run
    """
    cell_by_folder: dict[Path, Cell] = {}
    for index, texts in enumerate(itertools.product(*swept.values())):
        cell = make_cell(index, dict(zip(swept, texts)), train, Path(sweep.out))
        if cell.folder in cell_by_folder:
            raise ValueError(f"two cells are {cell.title}: give every value once")
        check_cell_folder(cell)
        cell_by_folder[cell.folder] = cell
    return list(cell_by_folder.values())


def format_options(values: dict[str, Any]) -> list[str]:
    """Return values as options of a command line."""
    return [f"--{key}={value}" for key, value in values.items()]


def make_cell(index: int, swept_texts: dict[str, str], train: Arguments, out: Path) -> Cell:
    """Make a cell from the texts of its swept keys and what all cells share.

    Raises:
        ValueError: train.py would refuse the arguments
    """
    texts = {**train.from_command_line, **swept_texts}
    try:
        arguments = train._replace(from_command_line=texts)
        values = configurator.read_settings({}, swept_texts, known_options(arguments))
        folder = out / make_cell_name(values)
        # the settings that the sweep asks for, whatever run is in the folder
        resolved = settings.merge(arguments, str(folder), resume_checkpoint=None)
    except ValueError as error:
        raise ValueError(
            f"cell {index} ({' '.join(format_options(swept_texts))}): {error}"
        ) from error
    all_settings = {
        **dataclasses.asdict(resolved.config),
        **dataclasses.asdict(resolved.model_config),
    }
    return Cell(
        index=index,
        values=values,
        settings={k: v for k, v in all_settings.items() if k not in KEYS_OF_CELLS},
        arguments=[
            *train.files,
            *format_options(texts),
            f"--out_dir={folder}",
            "--resume=auto",
        ],
        folder=folder,
    )


def make_cell_name(values: dict[str, Any]) -> str:
    """Return `key=value,...`, sorted by key with the seed last, safe as the name of a folder.

    The name does not depend on the order of the keys nor on how a number was written.
    """
    keys = sorted(values, key=lambda key: (key == "seed", key))
    return ",".join(f"{key}={quote(str(values[key]), safe='')}" for key in keys)


def check_cell_folder(cell: Cell) -> None:
    """Raise ValueError if the cell's folder has a run with other settings."""
    latest = checkpoint.find_latest(cell.folder)
    if latest is None:
        return
    state = checkpoint.read_state(latest)
    saved = settings.saved_settings(state)
    # keys that are newer than the run keep the value that it had without them
    stored_keys = state["run_config"].keys() | state["model_config"].keys() | {"model"}
    compared_keys = {
        key
        for key, declared in settings.options_of(saved["model"]).items()
        if key in stored_keys and (not declared.changeable or key in DECIDING_KEYS)
    }
    asked = {key: cell.settings[key] for key in cell.settings if key in compared_keys}
    if differences := settings.find_differences(asked, saved):
        raise ValueError(
            f"{cell.folder} was trained with {', '.join(differences)}; give another --out"
        )


def find_saved_step(cell: Cell) -> int:
    """Return the step of the newest checkpoint, or 0 if there is none."""
    return max(map(checkpoint.get_step, checkpoint.list_checkpoints(cell.folder)), default=0)


def read_final_evaluation(cell: Cell) -> dict[str, Any] | None:
    """Return the evaluation after the last of max_steps, or None if the cell is not finished."""
    if find_saved_step(cell) != cell.settings["max_steps"]:
        return None
    return metrics.find_evaluation(cell.folder / "metrics.jsonl", cell.settings["max_steps"])


# ---- running ----


def catch_signals() -> list[signal.Signals]:
    """Return a list to which every later SIGINT and SIGTERM is appended."""
    signals: list[signal.Signals] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(signal.Signals(number)))
    return signals


def run_cell(
    cell: Cell, num_processes: int, signals: list[signal.Signals], environment: dict[str, str]
) -> tuple[int, str]:
    """Run train.py and return its exit code and the last line that it printed.

    The exit code is STOPPED if the run was saved before its end and can be resumed.
    """
    command = [sys.executable, str(TRAIN), *cell.arguments]
    process_group = None
    if num_processes > 1:
        launcher = f"-m torch.distributed.run --standalone --nproc_per_node={num_processes}"
        command[1:1] = launcher.split()
        # Ctrl-C reaches the whole process group. train.py treats it and our SIGTERM as one signal;
        # torchrun must get SIGTERM alone.
        process_group = 0
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    with open(cell.log, "a+b") as log:
        output_start = log.seek(0, os.SEEK_END)
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=process_group,
        )
        exit_code = wait_for_process(process, signals)
        log.seek(output_start)
        output = log.read().decode(errors="replace")
    is_finished = read_final_evaluation(cell) is not None
    # under torchrun, which has exit codes of its own, a run that was stopped ends with 0
    was_stopped = exit_code == STOPPED or signals or (num_processes > 1 and exit_code == 0)
    if was_stopped and not is_finished:
        return STOPPED, find_last_line(output)
    if exit_code == 0 and not is_finished:
        return 1, "train.py ended without the final evaluation"
    if exit_code < 0:
        exit_code = 128 - exit_code  # as a shell reports the signal that ended a process
    return exit_code, find_last_line(output)


def wait_for_process(process: subprocess.Popen, signals: list[signal.Signals]) -> int:
    """Return the exit code of a process, which is sent a SIGTERM for each signal that is caught."""
    num_signals_sent = 0
    while True:
        if len(signals) > num_signals_sent:
            num_signals_sent = len(signals)
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=0.2)


def find_last_line(output: str) -> str:
    """Return the last line that train.py itself printed, otherwise the last line.

    A traceback of torchrun may follow train.py's own error line.
    """
    lines = [line for line in output.splitlines() if line.strip()]
    train_lines = [line for line in lines if line.startswith("train.py: ")]
    return train_lines[-1] if train_lines else lines[-1]


class CellRunner:
    """Runs cells and prints their progress.

    signals: signals that were caught. exit_codes: those of the cells that were run. error_by_log: the
    last line of each failed cell, by its log.
    """

    def __init__(self, num_cells: int, sweep: SweepConfig):
        self.num_cells = num_cells
        self.sweep = sweep
        self.signals = catch_signals()
        self.exit_codes: list[int] = []
        self.error_by_log: dict[Path, str] = {}
        self.free_gpus: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for gpus in divide_gpus(sweep.jobs, sweep.nproc_per_node):
            self.free_gpus.put(gpus)

    @property
    def is_stopped(self) -> bool:
        """True if a signal was caught, or if a run stopped by itself and can be resumed."""
        return bool(self.signals) or STOPPED in self.exit_codes

    def run(self, cell: Cell) -> None:
        """Run a cell unless it is finished or the sweep is stopped."""
        if self.is_stopped:
            return
        title = f"cell {cell.index + 1} of {self.num_cells} | {cell.title} | "
        start = time.monotonic()
        evaluation = read_final_evaluation(cell)
        if evaluation:
            print(f"{title}val_loss {evaluation['val_loss']:.4f} | finished before", flush=True)
            return
        gpus = self.free_gpus.get()
        environment = make_environment(self.sweep.jobs, gpus)
        try:
            exit_code, last_line = run_cell(
                cell, self.sweep.nproc_per_node, self.signals, environment
            )
        finally:
            self.free_gpus.put(gpus)
        self.exit_codes.append(exit_code)
        if self.signals or exit_code == STOPPED:
            return
        duration = units.format_duration(time.monotonic() - start)
        if exit_code:
            self.error_by_log[cell.log] = last_line
            result = f"FAILED (exit code {exit_code})"
        else:
            result = f"val_loss {read_final_evaluation(cell)['val_loss']:.4f}"
        print(f"{title}{result} | {duration}", flush=True)

    def finish(self) -> int:
        """Report failures and the command that resumes a stopped sweep.

        Returns:
            the exit code: 0, 1 if a cell failed, or that of a stopped sweep
        """
        for log, line in self.error_by_log.items():
            print(f"failed: {log}: {line}", file=sys.stderr)
        if not self.is_stopped:
            return 1 if self.error_by_log else 0
        signal_name = f" by {self.signals[-1].name}" if self.signals else ""
        command = shlex.join(["python", *sys.argv])
        print(f"stopped{signal_name}; to resume: {command}", flush=True)
        return 128 + self.signals[-1] if self.signals else STOPPED


def run_missing(
    list_missing: Callable[[], list], run: Callable, store: Callable, jobs: int
) -> None:
    """Run what is missing, `jobs` at the same time, until nothing is missing and all runs have ended.

    Args:
        list_missing: is called again after each run, which may have changed what is missing
        run: runs an item of the list in a thread; if it raises, no other run begins
        store: is called with an item and what `run` returned
    """
    running: dict[Future, Any] = {}
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            for item in list_missing():
                if len(running) < jobs and item not in running.values():
                    running[pool.submit(run, item)] = item
            if not running:
                return
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                store(running.pop(future), future.result())


def run_cells(cells: list[Cell], sweep: SweepConfig) -> int:
    """Run every unfinished cell, `jobs` at the same time, and return the exit code."""
    runner = CellRunner(len(cells), sweep)
    with ThreadPoolExecutor(sweep.jobs) as pool:
        list(pool.map(runner.run, cells))  # raises the first exception of a thread
    return runner.finish()


def divide_gpus(jobs: int, gpus_per_cell: int) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES for each of the cells that run at the same time.

    If there are fewer GPUs than the cells want, each GPU has about the same number of cells. None
    leaves the variable as it is: for a single cell, or if there are too few GPUs for even one.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    if jobs == 1 or len(gpus) < gpus_per_cell:
        return [None] * jobs
    turns = itertools.cycle(gpus)
    return [",".join(itertools.islice(turns, gpus_per_cell)) for _ in range(jobs)]


def make_environment(jobs: int, gpus: str | None = None) -> dict[str, str]:
    """Return the environment of a cell's process; variables that the user set have precedence.

    Args:
        jobs: number of cells that share the cores
        gpus: value of CUDA_VISIBLE_DEVICES, which divide_gpus chose among those that the user set
    """
    # torchrun ends its processes 30 s after it was told to end, too few for a large model
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "110"}
    if jobs > 1:
        num_cores = machine.count_cores()
        environment["OMP_NUM_THREADS"] = str(max(num_cores // jobs, 1))
    environment.update(os.environ)
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    return environment


# ---- learning rates ----


@dataclass
class RateSearch:
    """The search for the rates of one combination of the swept values.

    swept_texts: these values. starts: the rate from which each tuned key starts.
    """

    index: int
    swept_texts: dict[str, str]
    starts: dict[str, float]
    sweep: SweepConfig
    train: Arguments

    @property
    def name(self) -> str:
        """The swept values, as key=value."""
        return " ".join(f"{key}={text}" for key, text in self.swept_texts.items()) or "all"

    def get_rates(self, point: tuning.Point) -> dict[str, float]:
        """Return the tuned keys at a point."""
        return {
            key: tuning.to_rate(start, power)
            for (key, start), power in zip(self.starts.items(), point)
        }

    def make_cell(self, point: tuning.Point) -> Cell:
        """Return the cell that trains with the rates of a point."""
        rate_texts = {key: str(rate) for key, rate in self.get_rates(point).items()}
        texts = {**self.swept_texts, **rate_texts}
        return make_cell(self.index, texts, self.train, Path(self.sweep.out))

    def follow(self) -> tuning.Search:
        """Return the state of the search, by the tries that are finished."""
        return tuning.follow_cross(
            lambda point: read_loss(self.make_cell(point)),
            num_rates=len(self.starts),
            max_tries=self.sweep.tries,
        )

    def describe(self) -> str:
        """Return the line below the table that gives the best rates."""
        search = self.follow()
        if not search.losses:
            return f"{self.name}: the first cross of tries is not finished"
        num_tries = len(search.losses)
        if not tuning.has_converged(search.losses):
            tried = [" ".join(format_options(self.get_rates(point))) for point in search.losses]
            return (
                f"{self.name}: no rates found, all {num_tries} tries diverged ({', '.join(tried)}); "
                "start from lower rates, or look for another cause"
            )
        rates = self.get_rates(tuning.find_minimum(search.losses))
        line = f"{self.name}: best after {num_tries} tries: {' '.join(format_options(rates))}"
        if not tuning.is_inside(search.losses):
            line += "; this is at the edge of what was tried, so better rates may exist"
        return line


def make_searches(
    sweep: SweepConfig, train: Arguments, swept: dict[str, list[str]]
) -> list[RateSearch]:
    """Return a search for each combination of the swept values.

    Raises:
        ValueError: train.py would refuse a combination, or a tuned key is not a number above 0
    """
    searches = []
    for index, texts in enumerate(itertools.product(*swept.values())):
        swept_texts = dict(zip(swept, texts))
        settings = make_cell(index, swept_texts, train, Path(sweep.out)).settings
        starts = {}
        for key in sweep.tune.split(","):
            start = settings.get(key)
            if type(start) not in (int, float) or start <= 0:
                raise ValueError(f"--tune={key}: it is {start}; set a number above 0 to start from")
            starts[key] = start
        searches.append(RateSearch(index, swept_texts, starts, sweep, train))
    return searches


def read_loss(cell: Cell) -> float | None:
    """Return the final loss of a try, infinity if it diverged, or None if it is not finished."""
    evaluation = read_final_evaluation(cell)
    if evaluation is not None:
        loss = evaluation["val_loss"]
        return loss if math.isfinite(loss) else math.inf
    # where train.py saves the state before a step that is not finite
    if (cell.folder / "nonfinite").is_dir():
        return math.inf
    return None


def tune(sweep: SweepConfig, train: Arguments, swept: dict[str, list[str]]) -> int:
    """Run the searches of `--tune`, `jobs` tries at the same time, and return the exit code."""
    searches = make_searches(sweep, train, swept)
    runner = CellRunner(len(searches) * sweep.tries, sweep)
    Path(sweep.out).mkdir(parents=True, exist_ok=True)
    print(f"{len(searches)} searches of at most {sweep.tries} tries in {sweep.out}", flush=True)

    def list_missing() -> list[Cell]:
        if runner.is_stopped or runner.error_by_log:
            return []
        return [search.make_cell(point) for search in searches for point in search.follow().missing]

    def run_try(cell: Cell) -> None:
        check_cell_folder(cell)
        runner.run(cell)

    def accept_divergence(cell: Cell, _: None) -> None:
        if read_loss(cell) == math.inf:
            runner.error_by_log.pop(cell.log, None)  # a diverged run is a result

    run_missing(list_missing, run_try, accept_divergence, sweep.jobs)
    exit_code = runner.finish()
    write_tuning(searches, sweep)
    return exit_code


def write_tuning(searches: list[RateSearch], sweep: SweepConfig) -> None:
    """Write tuning.md: the loss of every try, and the best rates of each search.

    Raises:
        ValueError: all tries of a search diverged
    """
    rows = []
    failures = []
    for search in searches:
        losses = search.follow().losses
        for point, loss in losses.items():
            rates = search.get_rates(point)
            text = "diverged"
            if math.isfinite(loss):
                is_best = point == tuning.find_best(losses)
                text = f"**{loss:.4f}**" if is_best else f"{loss:.4f}"
            rows.append([search.name, *(f"{rate:g}" for rate in rates.values()), text])
        if losses and not tuning.has_converged(losses):
            failures.append(search.describe())
    lines = [search.describe() for search in searches]
    grid = format_markdown(["settings", *sweep.tune.split(","), "validation loss"], rows)
    text = "\n".join([grid, "", *lines]) + "\n"
    print(text, end="")
    files.write_text(Path(sweep.out) / "tuning.md", text)
    if failures:
        raise ValueError("; ".join(failures))


# ---- results ----


def write_table(cells: list[Cell], out: Path) -> None:
    """Write table.md with a row for each setting, as report.py does."""
    finished = []
    unfinished_lines = []
    for cell in cells:
        evaluation = read_final_evaluation(cell)
        if evaluation and not math.isfinite(evaluation["val_loss"]):
            unfinished_lines.append(f"diverged: `{cell.folder.name}`, its loss is not finite")
        elif evaluation:
            finished.append(cell)
        else:
            steps = f"{find_saved_step(cell)} of {cell.settings['max_steps']}"
            unfinished_lines.append(f"not finished: `{cell.folder.name}`, {steps} steps saved")
    loaded, error_lines = runs.load([cell.folder for cell in finished])
    unfinished_lines += error_lines
    groups = compare.group_runs(loaded) if loaded.height else []
    table = tables.make_loss_table(groups)
    cautions = tables.list_cautions(groups)
    text = "\n".join([table.format(), "", *unfinished_lines, *cautions]).rstrip() + "\n"
    print(text, end="")
    files.write_text(out / "table.md", text)


def main() -> int:
    """Run the command and return its exit code."""
    sweep, train, swept = read_arguments(sys.argv[1:])
    # torchrun will set this for train.py, and `resolve` divides the batch by it
    os.environ["WORLD_SIZE"] = str(sweep.nproc_per_node)
    # a missing package must be reported before hours of training
    runs.import_polars()
    compare.import_stats()
    if sweep.tune:
        return tune(sweep, train, swept)
    cells = make_cells(sweep, train, swept)
    Path(sweep.out).mkdir(parents=True, exist_ok=True)
    num_finished = sum(read_final_evaluation(cell) is not None for cell in cells)
    sizes = " x ".join(f"{len(values)} {key}" for key, values in swept.items())
    print(
        f"{len(cells)} cells ({sizes}), {num_finished} finished: {len(cells) - num_finished} runs "
        f"left in {sweep.out}",
        flush=True,
    )
    exit_code = run_cells(cells, sweep)
    if exit_code in (0, 1):
        write_table(cells, Path(sweep.out))
    return exit_code


if __name__ == "__main__":
    with errors.one_line_errors():
        sys.exit(main())
