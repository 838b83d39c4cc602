"""The runs of the controlled comparison that only AdamW trains: register rebinding and yardsticks.

    python data/registers/prepare.py --trained=swaps --val_sequences=8192 --out=data/registers_swaps
    python data/shakespeare_char/prepare.py
    python research/residual_streams/single_rate.py registers       # whether the erase lowers the loss on registers
    python research/residual_streams/single_rate.py shakespeare     # nanoGPT's example, validation loss 1.88
    python research/residual_streams/single_rate.py probe           # a public probe of 16 layers
    python research/residual_streams/single_rate.py registers --mode=show         # show how many runs are missing
    python research/residual_streams/single_rate.py registers --arms=ddl_tc       # only this arm

A command trains what is not trained yet, one run after another, each with one thread, and appends a
row to PROBLEM.jsonl in --results=FOLDER (default: results/residual_streams) as each run ends. A run
that was stopped resumes from its last checkpoint in --runs=FOLDER (default:
sweeps/residual_streams). Two processes may share a problem if they are given different arms.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import configurator
from research.residual_streams import rates, runner
from research.residual_streams.streams import ARMS, BASELINE
from research.rows import read_rows

TUNING_SEED = 1000


@dataclass(frozen=True)
class Problem:
    """A data set, with the sizes and arms that are trained on it."""

    name: str
    config: str
    dataset: str
    # how the data set is prepared
    command: str
    # keys of train.py that all runs share
    keys: dict[str, object]
    # keys of train.py for every size
    sizes: dict[str, dict[str, object]]
    # the seeds of every arm
    seeds: dict[str, tuple[int, ...]]
    # learning rate of the first try, and number of tries; without tries it is the rate of all runs
    start_rate: float
    num_tries: int
    # the part of the validation split that reported runs are evaluated on
    reported_part: str


THREE_SEEDS = (0, 1, 2)
FIVE_SEEDS = (0, 1, 2, 3, 4)

REGISTERS = Problem(
    name="registers",
    config="config/registers_cpu.py",
    dataset="registers_swaps",
    command="data/registers/prepare.py --trained=swaps --val_sequences=8192 --out=data/registers_swaps",
    keys={
        "optimizer": "adamw",
        "max_steps": 600,
        "warmup_steps": 60,
        "global_batch_size": 64,
        "micro_batch_size": 64,
        "eval_interval": 600,
        "eval_full": True,
        "checkpoint_interval": 200,
        "keep_last": 1,
    },
    sizes={
        "base": {
            "hidden_size": 16,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "head_dim": 8,
        },
        "wide": {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "head_dim": 16,
        },
        "deep": {
            "hidden_size": 16,
            "num_hidden_layers": 16,
            "num_attention_heads": 2,
            "head_dim": 8,
        },
    },
    seeds={
        BASELINE: THREE_SEEDS,
        "ddl_1": FIVE_SEEDS,
        "ddl_1_no_erase": FIVE_SEEDS,
        "ddl_tc": FIVE_SEEDS,
        "ddl_tc_no_erase": FIVE_SEEDS,
    },
    start_rate=5e-3,
    num_tries=5,
    reported_part="second",
)

# The size, the steps and the rate of nanoGPT's example; the rate is tuned around it.
SHAKESPEARE = Problem(
    name="shakespeare",
    config="config/shakespeare_char_cpu.py",
    dataset="shakespeare_char",
    command="data/shakespeare_char/prepare.py",
    keys={"eval_interval": 2000, "eval_full": True, "keep_last": 1},
    sizes={"nanogpt": {}},
    seeds={BASELINE: THREE_SEEDS, "ddl_tc": THREE_SEEDS},
    start_rate=1e-3,
    num_tries=5,
    # as published: the yardsticks decide no claim
    reported_part="all",
)

# After the setting of a public comparison, which trained every model with this rate.
PROBE = Problem(
    name="probe",
    config="config/shakespeare_char_cpu.py",
    dataset="shakespeare_char",
    command="data/shakespeare_char/prepare.py",
    keys={
        "num_hidden_layers": 16,
        "num_attention_heads": 4,
        "head_dim": 16,
        "hidden_size": 64,
        "global_batch_size": 32,
        "micro_batch_size": 32,
        "max_steps": 1200,
        "eval_interval": 1200,
        "eval_full": True,
        "checkpoint_interval": 400,
        "keep_last": 1,
    },
    sizes={"16_layers": {}},
    seeds=dict.fromkeys((BASELINE, "ihc", "hc", "ddl_1", "ddl_cc_ec"), THREE_SEEDS),
    start_rate=3e-3,
    num_tries=0,
    reported_part="all",
)

ARMS_OF_PROBLEMS = {
    **ARMS,
    # Hyper-Connections whose streams are not mixed
    "ihc": {"model": "mHC-gpt-mha-rope", "mhc_mix": "identity"},
}
PROBLEMS = {problem.name: problem for problem in (REGISTERS, SHAKESPEARE, PROBE)}


@dataclass(frozen=True)
class Run:
    """One training run of an arm at one size of a problem."""

    problem: str
    size: str
    arm: str
    phase: str  # "try" or "report"
    seed: int
    power: float  # the learning rate is the problem's first one times two to this power

    @property
    def name(self) -> str:
        """Return the name of the run's folder."""
        return f"{self.problem}-{self.size}-{self.arm}-{self.phase}-{self.seed}-{self.power:+g}"


def select_losses(rows: list[dict], arm: str, size: str) -> dict[float, float]:
    """Return the losses of the tries of an arm at a size by power, in the order of the tries."""
    return {
        row["power"]: float("inf") if row["val_loss"] is None else row["val_loss"]
        for row in rows
        if (row["arm"], row["size"], row["phase"]) == (arm, size, "try")
    }


def next_run(problem: Problem, arm: str, size: str, rows: list[dict]) -> Run | None:
    """Return the next run of an arm at a size, None if all are finished."""
    losses = select_losses(rows, arm, size)
    if len(losses) < problem.num_tries:
        power = rates.next_power(losses)
        return Run(problem.name, size, arm, "try", TUNING_SEED, power)
    power = rates.find_best_power(losses) if losses else 0.0
    finished = {
        row["seed"]
        for row in rows
        if (row["arm"], row["size"], row["phase"]) == (arm, size, "report")
    }
    for seed in problem.seeds[arm]:
        if seed not in finished:
            return Run(problem.name, size, arm, "report", seed, power)
    return None


def missing_runs(problem: Problem, arms: list[str], path: Path) -> Iterator[Run]:
    """Yield the runs that have no row, each after the row of the one before is stored."""
    for size in problem.sizes:
        for arm in arms:
            while (run := next_run(problem, arm, size, read_rows(path))) is not None:
                yield run


def count_missing(problem: Problem, arms: list[str], rows: list[dict]) -> int:
    """Return how many runs have no row."""
    num_runs = sum(problem.num_tries + len(problem.seeds[arm]) for arm in arms)
    return len(problem.sizes) * num_runs - sum(row["arm"] in arms for row in rows)


def make_arguments(run: Run) -> list[str]:
    """Return the arguments of train.py for a run."""
    problem = PROBLEMS[run.problem]
    learning_rate = problem.start_rate * 2**run.power
    keys = {
        **problem.keys,
        **problem.sizes[run.size],
        **ARMS_OF_PROBLEMS[run.arm],
        "dataset": problem.dataset,
        "learning_rate": learning_rate,
        "min_lr": learning_rate / 10,
        "seed": run.seed,
        "eval_part": problem.reported_part if run.phase == "report" else "first",
        "resume": "auto",
    }
    return runner.format_arguments(problem.config, keys)


def train_run(run: Run, folder: Path) -> dict:
    """Train a run to its end, and return its row."""
    result = runner.train(make_arguments(run), folder, is_reported=run.phase == "report")
    return {**asdict(run), **result}


def read_options(argv: list[str]) -> tuple[Problem, list[str], dict[str, str]]:
    """Return the problem, its arms and the options.

    Raises:
        ValueError: a mistake in them
    """
    names, command_line = configurator.split_arguments(argv)
    if "help" in command_line:
        print(__doc__.strip())
        sys.exit(0)
    if len(names) != 1 or names[0] not in PROBLEMS:
        mistake = f"'{' '.join(names)}' is not a problem" if names else "no problem is given"
        raise ValueError(f"{mistake}; the problems are {', '.join(PROBLEMS)}")
    problem = PROBLEMS[names[0]]
    arms, options = runner.read_options(
        command_line, f"the problem {problem.name}", list(problem.seeds)
    )
    return problem, arms, options


def main() -> None:
    with errors.one_line_errors(ValueError, OSError, RuntimeError):
        problem, arms, options = read_options(sys.argv[1:])
        path = Path(options["results"]) / f"{problem.name}.jsonl"
        if options["mode"] == "show":
            num_missing = count_missing(problem, arms, read_rows(path))
            print(f"{problem.name}: {num_missing} runs are missing")
            return
        runner.check_dataset(problem.dataset, problem.command)
        runner.store_runs(
            missing_runs(problem, arms, path),
            train_run,
            lambda: count_missing(problem, arms, read_rows(path)),
            path=path,
            folder=Path(options["runs"]),
        )


if __name__ == "__main__":
    main()
