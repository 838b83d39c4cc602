"""Test and measure on a GPU in packs, each of which fits into the minutes that a borrowed GPU has.

    python research/gpu.py tests --out=figures                     # at most 5 minutes
    python research/gpu.py speed --out=figures2                    # at most 8
    python research/gpu.py learning --out=figures3                 # at most 9
    python research/gpu.py tests speed --device=cpu --out=figures  # rehearse with tiny models

    tests     is what runs on a GPU correct? has it the same losses without kernels?
    speed     train.py with 124M parameters, a float32 and a bfloat16 state, and graphs of a step
    learning  the losses of the additive model and CC-EC in one pass over the installed packages

Each figure is printed and written to OUT/figures.json when it is measured, and the output of programs to
OUT/log.txt. A program that fails or hangs is recorded. Without the git history, set COMMIT to the output of
`git describe --always`.
"""

import dataclasses
import functools
import gzip
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from configurator import argument, option, read_command_line
from training import metrics, settings
from utils import errors, processes
from utils.provenance import ROOT, current_commit, describe_machine

WORK = Path(tempfile.gettempdir()) / "deep_delta_learning_gpu"
RUNS = WORK / "runs"
COMPILED = WORK / "compiled"  # later calls find their code in it
CORPUS = WORK / "packages"
FIRST_STEPS = 10  # of train.py, which compile and let the allocator grow
TURN_STEPS = 30
NUM_TURNS = 2
START_SECONDS = 180  # six programs side by side needed 42 to 113 (results/gpu/pack1_call1.json)
RUN_BYTES = 11 * 2**30  # more than a run with a bfloat16 state reserves (pack 2: up to 10.2 GiB)
PROFILED_STEPS = 3
TRAIN = (
    "$PYTHON train.py config/{config}.py --dataset=python_stdlib --vocab_size=50304 --global_batch_size=32 "
    "--micro_batch_size=16 --warmup_steps=20 --max_steps=3000 --eval_batches=1 --eval_full=False "
    "--device={device} --out_dir={run} {options}"
)
TINY = (  # for a rehearsal; with shorter sequences, the validation split would have many
    " --num_hidden_layers=1 --num_attention_heads=2 --head_dim=8 --hidden_size=16 --vocab_size=4096 "
    "--block_size=128 --global_batch_size=2 --micro_batch_size=1 --compile=False"
)
# other test files import packages that a borrowed machine may lack
PYTEST = "$PYTHON -m pytest tests/test_gpu*.py research/tests/test_bench.py -m gpu -v --tb=short -k"
CC_EC = "ddl_dv4_cc_ec_small"
CONFIGS = ("gpt_small", CC_EC, "ddl_dv1_small", "ddl_dv4_small", "ddl_dv4_cc_small")
# the settings of a run that the table names, as far as its model has them
FORM_KEYS = ("state_dtype", "kernels", "cuda_graphs", "ddl_v_sigmoid", "ddl_v_bias", "ddl_cc_read")
LISTS = ("losses", "val_losses", "gpu_kernels")  # figures that are stored, but not printed
ENVIRONMENT = {
    "PYTHON": sys.executable,
    "PYTHONUNBUFFERED": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for deterministic matrix products
    "TORCHINDUCTOR_CACHE_DIR": str(COMPILED),
    "TRITON_CACHE_DIR": str(COMPILED / "triton"),
    "TORCHINDUCTOR_COMPILE_THREADS": "3",  # many programs compile side by side
    "OMP_NUM_THREADS": "1",
}


# ---- what is measured ----


@dataclass(frozen=True)
class Task:
    """A script of bash, which is ended after num_steps of the run of train.py in the folder `run`."""

    name: str
    script: str
    run: Path | None = None
    num_steps: int | None = None


def make_command(device: str, config: str, run: Path, options: str) -> str:
    """Return a command that trains on 32 sequences a step."""
    command = TRAIN.format(config=config, device=device, run=run, options=options)
    return command + TINY if device == "cpu" else command


def train(device: str, config: str, options: str, num_steps: int | None = None) -> Task:
    """Return a task that trains until max_steps, or is ended after num_steps."""
    name = f"{config} {options}".replace("--", "").strip()
    run = RUNS / name.replace(" ", "_").replace("/", "_")
    return Task(name, make_command(device, config, run, options), run, num_steps)


def list_tests(device: str) -> list[Task]:
    """Return the tests, which run side by side."""
    parallel = "-n 8" if device == "cuda" else ""  # one process would need nine minutes
    return [
        Task("GPU tests", f"{PYTEST} 'not graph_of_a_step' {parallel}"),
        # a capture that fails leaves its process on the capture stream, so that later tests fail
        Task("GPU tests of the graph of a step", f"{PYTEST} graph_of_a_step"),
        *check_training(device),
        train(device, CC_EC, "--kernels=auto", num_steps=200),
        train(device, CC_EC, "--kernels=off", num_steps=200),
        # a smaller micro-batch, because float32 needs more memory
        train(device, CC_EC, "--kernels=off --dtype=float32 --micro_batch_size=8", num_steps=200),
    ]


def check_training(device: str) -> list[Task]:
    """Return a task that resumes a run, which must end with the same bits, and one of NCCL."""
    last_step = 4 if device == "cpu" else 20
    steps = f"--max_steps={last_step} --checkpoint_interval={last_step // 2} --deterministic=True"
    last = f"checkpoints/step_{last_step:08d}"
    run = RUNS / "run"
    resumed = RUNS / "resumed"
    # from the middle, as if the run had been killed after it
    resume = f"""
        {make_command(device, CC_EC, run, steps)}
        cp -r {run} {resumed}
        rm -r {resumed}/{last}
        {make_command(device, CC_EC, resumed, f"{steps} --resume=auto")}
        cmp {run}/{last}/model.safetensors {resumed}/{last}/model.safetensors
        cmp {run}/{last}/optimizer.safetensors {resumed}/{last}/optimizer.safetensors
        $PYTHON eval.py {run} --val --device={device} --out={RUNS}/eval
        $PYTHON export.py {run} {RUNS}/exported
        $PYTHON sample.py {run} --device={device} --prompt=def --max_new_tokens=20
    """
    one_rank = make_command(device, "gpt_small", RUNS / "one_rank", f"--max_steps={last_step}")
    torchrun = "$PYTHON -m torch.distributed.run --standalone --nproc_per_node=1"
    return [
        Task("resume to the bit, evaluate, export, sample", resume),
        Task("one rank", one_rank.replace("$PYTHON", torchrun), RUNS / "one_rank"),
    ]


def list_speeds(device: str) -> list[list[Task]]:
    """Return two groups of runs in the form of their configs; those of a group take turns."""
    groups = []
    for state in ("--state_dtype=bfloat16", "--state_dtype=float32"):
        graphs = ("", " --cuda_graphs=step")
        options = [(config, state + setting) for setting in graphs for config in CONFIGS]
        if not groups:  # all of the kernels, that of SwiGLU among them
            options += [(config, f"{state} --kernels=on") for config in CONFIGS[:2]]
        if device == "cpu":  # which has no graphs
            options = options[:2]
        groups.append([train(device, config, setting) for config, setting in options])
    return groups


def count_runs_at_once(device: str) -> int:
    """Return how many runs the memory holds."""
    if device == "cpu":
        return 2
    return max(torch.cuda.get_device_properties(0).total_memory // RUN_BYTES, 1)


def profile(device: str) -> Task:
    """Return a task that records the kernels of the additive model, with SwiGLU's among them."""
    kernels = "on" if device == "cuda" else "off"
    options = f"--state_dtype=bfloat16 --kernels={kernels} --profile_steps={PROFILED_STEPS}"
    return train(device, "gpt_small", options, num_steps=FIRST_STEPS + 1)


def prepare_packages(device: str) -> Task:
    """Return a task that prepares the source of the installed packages, 80 to 90 million tokens."""
    source = sysconfig.get_path("purelib")
    vocab_size = 50304
    if device == "cpu":
        source = "training"
        vocab_size = 4096
    script = (
        f"$PYTHON data/text/prepare.py --source={shlex.quote(source)} --suffixes=.py "
        f"--vocab_size={vocab_size} --out={CORPUS}"
    )
    return Task("prepare the packages", script)


def list_learning(device: str) -> list[Task]:
    """Return runs with the same batches, which run side by side, so that a deadline cuts both alike."""
    steps = 2400 if device == "cuda" else 40  # of 32,768 tokens, so that hardly a token comes twice
    options = (
        f"--dataset={CORPUS} --max_steps={steps} --warmup_steps={steps // 10} "
        f"--eval_interval={steps // 8} --eval_batches=8 --checkpoint_interval={steps}"
    )
    return [
        dataclasses.replace(train(device, config, options), name=f"{config}, {steps} steps")
        for config in CONFIGS[:2]
    ]


# ---- how it is measured ----


class Program:
    """The processes of a task. Those of a run of train.py can be held, and then take turns."""

    def __init__(self, task: Task, log: BinaryIO):
        self.task = task
        self.is_held = False
        self.turns: list[list[dict]] = []
        self.start_time = time.monotonic()
        # -e ends the script at the first failure, and -x writes its commands to the log
        self.process = subprocess.Popen(
            ["bash", "-ex", "-c", task.script],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, deadline: float, num_steps: int | None = None) -> bool:
        """Wait until the run has num_steps steps, or the program ends; return whether it has."""
        while self.process.poll() is None and time.monotonic() < deadline:
            if num_steps is not None and len(read_steps(self.task.run)) >= num_steps:
                return True
            time.sleep(0.05)
        return False

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes, unless the program has ended."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def take_turn(self, deadline: float) -> None:
        """Let a held run train alone."""
        # the step after these was interrupted
        first = len(read_steps(self.task.run)) + 1
        self.send(signal.SIGCONT)
        self.wait(deadline, first + TURN_STEPS)
        self.send(signal.SIGSTOP)
        self.turns.append(read_steps(self.task.run)[first : first + TURN_STEPS])

    def describe(self) -> dict:
        """Return what the program has shown; one that has not ended is going to be stopped."""
        exit_code = self.process.poll()
        figures = {
            "seconds": round(time.monotonic() - self.start_time, 1),
            "exit_code": "stopped" if exit_code is None else exit_code,
        }
        if self.task.run is not None:
            figures.update(describe_form(self.task.script))
            figures.update(summarize_run(self.task.run, self.turns))
        return figures

    def end(self) -> None:
        """End all processes."""
        self.send(signal.SIGKILL)
        self.process.wait()


class Session:
    """The figures of a call, and its log."""

    def __init__(self, out: Path):
        self.out = out
        self.figures = {}
        self.lock = threading.Lock()  # tasks that run side by side add figures
        self.log = (out / "log.txt").open("wb", buffering=0)

    def add(self, name: str, value: dict) -> None:
        """Store a figure, and print it without its lists."""
        with self.lock:
            self.figures[name] = value
            (self.out / "figures.json").write_text(json.dumps(self.figures, indent=1) + "\n")
        numbers = {key: item for key, item in value.items() if key not in LISTS}
        print(f"{name}: {json.dumps(numbers)}", flush=True)

    def run(self, task: Task, deadline: float) -> None:
        """Run a task until it ends, or until the deadline."""
        program = Program(task, self.log)
        program.wait(deadline, task.num_steps)
        self.add(task.name, program.describe())
        program.end()

    def run_side_by_side(self, tasks: list[Task], deadline: float) -> None:
        """Run tasks that are not timed."""
        with ThreadPoolExecutor(len(tasks)) as pool:
            list(pool.map(functools.partial(self.run, deadline=deadline), tasks))

    def run_in_turns(self, tasks: list[Task], deadline: float) -> None:
        """Start runs of train.py side by side, and hold each until it trains alone, in turns.

        Starting one takes ten times as long as the steps that are timed, and needs the GPU little.
        """
        start_deadline = min(time.monotonic() + START_SECONDS, deadline)

        def start(task: Task) -> Program:
            program = Program(task, self.log)
            program.is_held = program.wait(start_deadline, FIRST_STEPS)
            # one that is late would disturb the others
            program.send(signal.SIGSTOP if program.is_held else signal.SIGKILL)
            return program

        with ThreadPoolExecutor(len(tasks)) as pool:
            programs = list(pool.map(start, tasks))
        for _ in range(NUM_TURNS):
            for program in programs:
                if program.is_held:
                    program.take_turn(deadline)
                self.add(program.task.name, program.describe())
        for program in programs:
            program.end()


def describe_form(script: str) -> dict[str, object]:
    """Return the settings of FORM_KEYS with which a command of train.py trains."""
    _, _, options = script.partition("train.py ")
    run = settings.merge(settings.read_arguments(shlex.split(options)), "", resume_checkpoint=None)
    values = {**dataclasses.asdict(run.config), **dataclasses.asdict(run.model_config)}
    return {key: values[key] for key in FORM_KEYS if key in values}


def read_records(run: Path) -> list[dict]:
    """Return the records in the metrics.jsonl of a run that may still be writing it."""
    path = run / "metrics.jsonl"
    return metrics.read(path) if path.exists() else []


def read_steps(run: Path) -> list[dict]:
    """Return the records of training steps."""
    return [record for record in read_records(run) if "loss" in record]


def summarize_run(run: Path, turns: list[list[dict]]) -> dict:
    """Return the losses of a run, and the medians over its turns, or over all but the first steps."""
    records = read_records(run)
    steps = [record for record in records if "loss" in record]
    timed_steps = [step for turn in turns for step in turn] or steps[FIRST_STEPS:]
    summary = {
        "steps": len(steps),
        "losses": [round(step["loss"], 5) for step in steps],
        "val_losses": [
            (record["step"], record["val_loss"]) for record in records if "val_loss" in record
        ],
        **find_medians(timed_steps),
    }
    if turns:
        summary["turns"] = [find_medians(turn).get("tokens_per_second") for turn in turns]
    if len(steps) > FIRST_STEPS:  # a profile has been written completely
        for trace in run.glob("profile/*.json.gz"):
            summary["gpu_kernels"] = list_kernels(trace)
    return summary


def find_medians(steps: list[dict]) -> dict[str, float]:
    """Return the medians of the speed and of the peak memory, as far as the steps have them."""
    medians = {}
    for key in ("tokens_per_second", "mfu", "memory"):
        values = [step[key] for step in steps if key in step]
        if values:
            medians[key] = statistics.median(values)
    return medians


def list_kernels(trace: Path) -> list[tuple[str, float, float]]:
    """Return the 40 longest kernels of a profile: name, launches and microseconds of a step."""
    durations = defaultdict(list)
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        if event.get("cat") == "kernel":
            durations[event["name"][:100]].append(event["dur"])
    kernels = [
        (name, len(values) / PROFILED_STEPS, sum(values) / PROFILED_STEPS)
        for name, values in durations.items()
    ]
    return sorted(kernels, key=lambda kernel: -kernel[2])[:40]


# ---- the packs ----


def run_tests(session: Session, device: str, deadline: float) -> None:
    """Run the pack `tests`."""
    session.run_side_by_side(list_tests(device), deadline)


def run_speed(session: Session, device: str, deadline: float) -> None:
    """Run the pack `speed`."""
    for group in list_speeds(device):
        size = count_runs_at_once(device)
        for first in range(0, len(group), size):
            session.run_in_turns(group[first : first + size], deadline)
    session.run(profile(device), deadline)


def run_learning(session: Session, device: str, deadline: float) -> None:
    """Run the pack `learning`."""
    session.run(prepare_packages(device), deadline)
    runs = list_learning(device)
    session.run_side_by_side(runs, deadline)
    for task in runs:
        curve = task.run / "metrics.jsonl"
        if curve.exists():  # for `report.py curves`
            folder = session.out / task.name.split(",")[0]
            folder.mkdir(exist_ok=True)
            shutil.copy(curve, folder)


class Pack(NamedTuple):
    """A pack, and its time limit in seconds."""

    run: Callable[[Session, str, float], None]
    seconds: int


PACKS = {
    "tests": Pack(run_tests, 300),
    "speed": Pack(run_speed, 480),
    "learning": Pack(run_learning, 540),
}


@dataclass(frozen=True)
class Options:
    """What is measured, and where the figures are stored."""

    packs: tuple[str, ...] = argument("tests, speed or learning")
    out: str = option("figures", "folder to write")
    device: Literal["cuda", "cpu"] = option("cuda", "device; cpu rehearses with tiny models")
    seconds: int | None = option(None, "time limit of each pack (default: its own)", low=1)


def main() -> None:
    args = read_command_line(__doc__, Options)
    out = Path(args.out).resolve()
    for name in set(args.packs) - PACKS.keys():
        raise ValueError(f"no pack {name}{errors.suggest(name, PACKS)}")
    if (out / "figures.json").exists():
        raise ValueError(f"{out} has the figures of an earlier call; give another --out")
    processes.pick_device(args.device)  # refuses a GPU that is not there
    out.mkdir(parents=True, exist_ok=True)
    for folder in (RUNS, CORPUS):
        shutil.rmtree(folder, ignore_errors=True)
    session = Session(out)
    ENVIRONMENT["TRITON_INTERPRET"] = "1" if args.device == "cpu" else "0"
    ENVIRONMENT["GPU_TESTS_DEVICE"] = args.device
    session.add("machine", {**describe_machine(), "commit": current_commit()})
    for name in args.packs:
        pack = PACKS[name]
        pack.run(session, args.device, time.monotonic() + (args.seconds or pack.seconds))


if __name__ == "__main__":
    with errors.one_line_errors():
        main()
