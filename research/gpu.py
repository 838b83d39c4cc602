"""Test and measure on a GPU in packs, each of which fits into the minutes that a borrowed GPU has.

    python research/gpu.py                                         # list the packs
    python research/gpu.py tests speed --out=figures               # at most 13 minutes
    python research/gpu.py tests speed --device=cpu --out=figures  # rehearse with tiny models

Packs run one after the other. In each, what the others need comes first. What is not timed then runs side by
side, while the models whose speed is measured compile. Then nothing else runs: these models take turns, and
the other timed programs follow one by one. A program that fails or hangs is recorded, and the next one
starts. Each figure is written to OUT/figures.json when it is measured, the output of every program to
OUT/log.txt, and a table is printed last.
results/gpu/README.md says which packs come next.
Without the git history, set COMMIT to the output of `git describe --always`.
"""

import contextlib
import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from configurator import argument, option, read_command_line
from research.benchmarks import peers, suites, timing
from utils import errors
from utils.provenance import current_commit, describe_machine
from utils.tables import format_markdown

ROOT = Path(__file__).resolve().parents[1]
ADDITIVE = suites.BASELINE
CC_EC = suites.CC_EC
TC = "DDL-gpt-mha-rope"
DV1 = "DDL-vdim1-gpt-mha-rope"
# The first steps of train.py compile, and let the allocator grow.
FIRST_TIMED_STEP = 11
LEAST_SECONDS = 10  # with less time left, no program is started
NUM_ROUNDS = 5  # of turns


@dataclass(frozen=True)
class Options:
    """What is measured, and where the figures are stored."""

    packs: tuple[str, ...] = argument("names of packs; without any argument, they are listed")
    out: str = option("figures", "folder to write")
    device: Literal["cuda", "cpu"] = option(
        "cuda",
        "device to measure on; cpu rehearses with tiny models",
    )


@dataclass(frozen=True)
class Entry:
    """A model whose training steps are measured (research/benchmarks/turns.py)."""

    model: str  # as in bench.py --models, or the name of a peer
    cuda_graphs: bool = False
    size: str = "small"
    switches: tuple[str, ...] = ()  # of torch.compile: variables of the environment, which are 1

    def name(self) -> str:
        """Return its name among the figures."""
        words = [suites.make_row_name(self.model)]
        if self.cuda_graphs:
            words.append("CUDA graphs")
        if self.size != "small":
            words.append(self.size)
        return " ".join([*words, *self.switches])


@dataclass(frozen=True)
class Task:
    """Programs that run one after the other, as long as each of them succeeds."""

    name: str
    programs: list[
        list[str]
    ]  # a script and its arguments, or the arguments of Python, cmp, cp or rm
    seconds: float  # time limit
    run: Path | None = None  # the run folder of train.py
    num_steps: int | None = None  # train.py is ended after so many steps


@dataclass(frozen=True)
class Pack:
    """What is measured together."""

    purpose: str
    seconds: float  # time limit
    first: list[Task] = field(default_factory=list)  # what the others need
    entries: list[Entry] = field(default_factory=list)
    side_by_side: list[Task] = field(default_factory=list)  # not timed
    at_once: int = 8  # how many of these run side by side
    one_by_one: list[Task] = field(default_factory=list)  # timed


# ---- the packs ----


def make_train_command(args: SimpleNamespace, config: str, run: Path, *options: str) -> list:
    """Return a command that trains on the standard library's source code, 32 sequences a step."""
    command = [
        "train.py",
        f"config/{config}.py",
        "--dataset=python_stdlib",
        "--vocab_size=50304",
        "--global_batch_size=32",
        "--micro_batch_size=16",
        "--warmup_steps=20",
        "--eval_batches=1",
        "--eval_full=False",
        f"--device={args.device}",
        f"--out_dir={run}",
        *options,
    ]
    return shrink_for_rehearsal(args, command)


def shrink_for_rehearsal(args: SimpleNamespace, command: list[str]) -> list[str]:
    """Return a command of train.py, on a CPU with the options of a tiny model."""
    if args.device == "cuda":
        return command
    size = [
        f"--{key}={value}" for key, value in suites.TINY.items() if key not in ("vocab_size", "mup")
    ]
    # the corpora have no more tokens; longer sequences, so that the validation split has few
    size += ["--vocab_size=4096", "--block_size=128", "--compile=False"]
    size += ["--global_batch_size=2", "--micro_batch_size=1"]
    return [*command, *size]


def time_training(args: SimpleNamespace, config: str, num_steps: int, *options: str) -> Task:
    """Return a task that trains for some steps, and is ended before it evaluates."""
    name = " ".join([config, *(option.removeprefix("--") for option in options)])
    run = args.work / re.sub("[ /]", "_", name)
    return Task(
        f"train.py {name}",
        [make_train_command(args, config, run, "--max_steps=1000", *options)],
        seconds=200,
        run=run,
        num_steps=10 if args.device == "cpu" else num_steps,
    )


def check_training(args: SimpleNamespace) -> Task:
    """Return a task that resumes a run, which must end with the same bits, and uses its model."""
    last_step = 4 if args.device == "cpu" else 20
    original = args.work / "original"
    resumed = args.work / "resumed"
    options = [
        f"--max_steps={last_step}",
        f"--checkpoint_interval={last_step // 2}",
        "--deterministic=True",
    ]
    model_file = f"checkpoints/step_{last_step:08d}/model.safetensors"
    optimizer_file = f"checkpoints/step_{last_step:08d}/optimizer.safetensors"
    device = f"--device={args.device}"
    config = "ddl_dv4_cc_ec_small"
    return Task(
        "resume to the bit, evaluate, export, sample",
        [
            make_train_command(args, config, original, *options),
            # from the middle, as if the run had been killed after it
            ["cp", "-r", str(original), str(resumed)],
            ["rm", "-r", str(resumed / f"checkpoints/step_{last_step:08d}")],
            make_train_command(args, config, resumed, *options, "--resume=auto"),
            ["cmp", str(original / model_file), str(resumed / model_file)],
            ["cmp", str(original / optimizer_file), str(resumed / optimizer_file)],
            ["eval.py", str(original), "--val", device, f"--out={args.work / 'eval'}"],
            ["export.py", str(original), str(args.work / "exported")],
            ["sample.py", str(original), device, "--prompt=def", "--max_new_tokens=20"],
        ],
        seconds=290,
    )


def prepare_packages(args: SimpleNamespace) -> Task:
    """Return a task that prepares the source of the installed packages, for the models that learn."""
    command = ["-m", "research.benchmarks.packages", f"--out={args.work / 'packages'}"]
    if args.device == "cpu":
        command += ["--tokenizer_bytes=1000000", "--val_share=0.0001", "--max_tokens=100000"]
    else:
        command += ["--vocab_size=16384", "--tokenizer_bytes=20000000"]
    return Task("prepare the packages", [command], seconds=150)


def learn(args: SimpleNamespace, model: str, learning_rate: float) -> Task:
    """Return a task that trains a model of compare_gpu.py on 60 million tokens."""
    name = f"{model}, Muon's rate {learning_rate:g}"
    run = args.work / f"{model}_{learning_rate:g}"
    max_steps = 3 if args.device == "cpu" else 1831
    command = [
        "train.py",
        "config/compare_gpu.py",
        f"--model={model}",
        f"--muon_learning_rate={learning_rate}",
        f"--dataset={args.work / 'packages'}",
        "--vocab_size=16384",
        "--block_size=512",
        "--global_batch_size=64",
        "--micro_batch_size=64",
        f"--max_steps={max_steps}",
        f"--warmup_steps={max_steps // 10}",
        f"--device={args.device}",
        f"--out_dir={run}",
    ]
    return Task(name, [shrink_for_rehearsal(args, command)], seconds=300, run=run)


def run_gpu_tests(args: SimpleNamespace) -> list[Task]:
    """Return tasks that run the tests that need a GPU.

    Those of the graph of a step have a process of their own, because a capture that fails leaves its
    process on the capture stream, so that later tests fail too.
    """
    tasks = []
    # one process would need nine minutes for all
    for name, selection, num_workers in (
        ("GPU tests", "not graph_of_a_step", 8),
        ("GPU tests of the graph of a step", "graph_of_a_step", 1),
    ):
        command = ["-m", "pytest", "tests", "research/tests", "-m", "gpu", "-k", selection]
        command += [
            "-q",
            "--tb=short",
            "-rfE",
            f"--junitxml={args.out / name.replace(' ', '_')}.xml",
        ]
        if args.device == "cuda" and importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(num_workers), "--dist=worksteal"]
        tasks.append(Task(name, [command], seconds=290))
    return tasks


def measure_bandwidth(args: SimpleNamespace, match: str) -> Task:
    """Return a task that measures the kernels with some text in their names."""
    file = args.out / f"kernels_{match.replace(' ', '_').replace('=', '')}.json"
    command = ["research/bench.py", "kernels", f"--match={match}", f"--json={file}"]
    command.append(f"--device={args.device}")
    if args.device == "cpu":
        command += ["--widths=8", "--micro_batch_size=1", "--block_size=1", "--copied=4096"]
    else:
        command += ["--widths=768", "--rounds=10"]
    return Task(f"bandwidth of {match}", [command], seconds=45)


def measure_decoding(args: SimpleNamespace, batch_size: int) -> Task:
    """Return a task that measures generation."""
    file = args.out / f"decode_{batch_size}.json"
    command = ["research/bench.py", "decode", f"--models={ADDITIVE},{CC_EC}", f"--json={file}"]
    command += [f"--batch_size={batch_size}", f"--device={args.device}"]
    size = suites.SMALL
    if args.device == "cpu":
        size = {**suites.TINY, "vocab_size": 320, "block_size": 16}
        command += ["--context=4", "--tokens=2", "--rounds=1"]
    else:
        command += ["--context=512", "--tokens=32", "--rounds=5"]
    command += [f"--{key}={size[key]}" for key in suites.SIZE_KEYS]
    return Task(f"decoding, batches of {batch_size}", [command], seconds=90)


def make_packs(args: SimpleNamespace) -> dict[str, Pack]:
    """Return the packs by name."""
    cc_ec_config = "ddl_dv4_cc_ec_small"
    return {
        "tests": Pack(
            "kernels, training, resuming, evaluation, export: correct? the same losses without kernels?",
            seconds=300,
            side_by_side=[
                *run_gpu_tests(args),
                check_training(args),
                time_training(args, cc_ec_config, 200, "--kernels=auto"),
                time_training(args, cc_ec_config, 200, "--kernels=off"),
                # a smaller micro-batch, because float32 needs more memory
                time_training(
                    args,
                    cc_ec_config,
                    200,
                    "--kernels=off",
                    "--dtype=float32",
                    "--micro_batch_size=8",
                ),
            ],
        ),
        "speed": Pack(
            "training steps of 124M parameters, and train.py with and without CUDA graphs",
            seconds=450,
            entries=[
                Entry(ADDITIVE, cuda_graphs=True),
                Entry(CC_EC, cuda_graphs=True),
                Entry(f"{CC_EC}+state_dtype=float32", cuda_graphs=True),
                Entry(f"{ADDITIVE}+kernels=on", cuda_graphs=True),
                Entry(TC, cuda_graphs=True),
                Entry(DV1, cuda_graphs=True),
                Entry(peers.PLAIN, cuda_graphs=True),
                Entry(peers.TRANSFORMERS, cuda_graphs=True),
            ],
            one_by_one=[
                # steps 6 to 8 are traced, and the speed is that of the steps from 11 on
                time_training(args, "gpt_small", 60, "--profile_steps=3"),
                time_training(args, "gpt_small", 60, "--cuda_graphs=step", "--profile_steps=3"),
                time_training(args, "gpt_small", 30, "--cuda_graphs=off"),
                time_training(args, cc_ec_config, 60),
                # the state and the form of earlier measurements
                time_training(args, "gpt_small", 60, "--state_dtype=bfloat16"),
                time_training(
                    args, cc_ec_config, 60, "config/authors.py", "--state_dtype=bfloat16"
                ),
            ],
        ),
        "kernels": Pack(
            "the kernels' bandwidth",
            seconds=200,
            one_by_one=[
                measure_bandwidth(args, "K=1 v=4"),
                measure_bandwidth(args, "K=4 v=4"),
                measure_bandwidth(args, "K=1 v=1"),
                measure_bandwidth(args, "rope_norm"),
            ],
        ),
        "plain": Pack(
            "training steps without fused kernels, which show what the kernels save",
            seconds=200,
            entries=[
                Entry(f"{model}+kernels=off", cuda_graphs=True)
                for model in (ADDITIVE, DV1, CC_EC, TC)
            ],
        ),
        "compiler": Pack(
            "training steps whose launches overlap, or whose matrix products torch.compile chooses",
            seconds=400,
            entries=[
                Entry(ADDITIVE, cuda_graphs=True, switches=switches)
                for switches in (
                    (),
                    ("TORCHINDUCTOR_ENABLE_PDL",),
                    ("TORCHINDUCTOR_MAX_AUTOTUNE_GEMM", "ENABLE_PERSISTENT_TMA_MATMUL"),
                )
            ],
        ),
        "medium": Pack(
            "training steps of 354M parameters",
            seconds=240,
            entries=[
                Entry(model, cuda_graphs=True, size="medium")
                for model in (ADDITIVE, DV1, CC_EC, TC)
            ],
        ),
        "streams": Pack(
            "d_v = 2 and other streams beside the additive model",
            seconds=240,
            entries=[
                Entry(ADDITIVE, cuda_graphs=True),
                Entry(f"{CC_EC}:2", cuda_graphs=True),
                Entry("AttnRes-gpt-mha-rope", cuda_graphs=True),
                Entry("mHC-gpt-mha-rope", cuda_graphs=True),
                Entry("wide-gpt-mha-rope", cuda_graphs=True),
            ],
        ),
        "decoding": Pack(
            "generation of one sequence, and of 64",
            seconds=180,
            one_by_one=[measure_decoding(args, 1), measure_decoding(args, 64)],
        ),
        "memory": Pack(
            "peak memory of train.py with large micro-batches",
            seconds=240,
            one_by_one=[
                time_training(
                    args, config, 12, f"--global_batch_size={size}", f"--micro_batch_size={size}"
                )
                for size in (128, 256)
                for config in ("gpt_small", cc_ec_config)
            ],
        ),
        "learning": Pack(
            "losses after 60 million tokens of Python source, with learning rates that have not run",
            seconds=540,
            first=[prepare_packages(args)],
            # the rates 0.01, 0.02 and 0.04 of the first two have run; the lowest was best
            side_by_side=[
                *(
                    learn(args, model, rate)
                    for rate in (5e-3, 2.5e-3)
                    for model in (ADDITIVE, CC_EC)
                ),
                learn(args, "wide-gpt-mha-rope", 1e-2),
                learn(args, TC, 1e-2),
            ],
            at_once=3,
        ),
    }


# ---- running programs ----


class Session:
    """The figures of a call, its log, and the programs that it starts."""

    def __init__(self, args: SimpleNamespace):
        self.out = args.out
        self.device = args.device
        self.start = time.monotonic()
        self.figures = {}
        self.lock = threading.Lock()  # tasks that run side by side add figures
        self.log = (args.out / "log.txt").open("wb", buffering=0)
        compiled_code = args.work / "compiled"
        self.environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            # torch refuses deterministic matrix products without it
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "TORCHINDUCTOR_CACHE_DIR": str(compiled_code),
            "TRITON_CACHE_DIR": str(compiled_code / "triton"),
            # many programs compile side by side
            "TORCHINDUCTOR_COMPILE_THREADS": "3",
            "OMP_NUM_THREADS": "1",
        }
        if args.device == "cpu":
            self.environment["TRITON_INTERPRET"] = "1"

    def add(self, name: str, value: object) -> None:
        """Store a figure, and print it."""
        with self.lock:
            # an earlier pack may have measured the same
            while name in self.figures:
                name += " again"
            self.figures[name] = value
            text = json.dumps(self.figures, indent=1)
            (self.out / "figures.json").write_text(text + "\n", encoding="utf-8")
        print(f"[{time.monotonic() - self.start:4.0f} s] {name}: {summarize(value)}", flush=True)

    def launch(
        self, arguments: list[str], switches: tuple[str, ...] = (), **pipes: int
    ) -> subprocess.Popen:
        """Start a program, whose output goes to the log unless `pipes` says otherwise."""
        self.log.write(f"\n+ {' '.join(arguments)}\n".encode())
        streams = {"stdout": self.log, "stderr": self.log, **pipes}
        return subprocess.Popen(
            arguments if arguments[0] in ("cmp", "cp", "rm") else [sys.executable, *arguments],
            cwd=ROOT,
            env={**self.environment, **dict.fromkeys(switches, "1")},
            start_new_session=True,
            **streams,
        )

    def run(self, task: Task, deadline: float) -> None:
        """Run a task until it ends, or until its time limit or the deadline."""
        start = time.monotonic()
        if deadline - start < LEAST_SECONDS:
            self.add(task.name, "out of time")
            return
        deadline = min(start + task.seconds, deadline)
        exit_codes = []
        for arguments in task.programs:
            process = self.launch(arguments)
            while process.poll() is None and time.monotonic() < deadline:
                if task.num_steps is not None and len(read_steps(task.run)) >= task.num_steps:
                    break
                time.sleep(0.1)
            exit_codes.append("stopped" if process.poll() is None else process.returncode)
            # train.py would save a checkpoint first
            stop(process, at_once=task.run is not None)
            if exit_codes[-1] != 0:
                break
        if task.run is not None:
            for trace in task.run.glob("profile/*.json.gz"):
                name = f"{task.run.name}_{trace.name}".replace("=", "_")
                shutil.copy(trace, self.out / name)
        figures = {"seconds": round(time.monotonic() - start, 1), "exit_codes": str(exit_codes)}
        if task.run is not None:
            figures.update(summarize_run(task.run))
        self.add(task.name, figures)


def summarize(value: object) -> str:
    """Return a figure in one line, without its lists."""
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if not isinstance(item, list)}
    return json.dumps(value)


def stop(process: subprocess.Popen, at_once: bool = False) -> None:
    """End a program and what it has started; unless `at_once`, pytest still says what has failed."""
    with contextlib.suppress(ProcessLookupError):
        if not at_once:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_records(run: Path) -> list[dict]:
    """Return the records in the metrics.jsonl of a run that may still be writing it."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    complete_lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in complete_lines]


def read_steps(run: Path) -> list[dict]:
    """Return the training steps among the records of a run."""
    return [record for record in read_records(run) if "loss" in record]


def summarize_run(run: Path) -> dict:
    """Return the losses of a run, its last evaluation, and the medians of its later steps."""
    records = read_steps(run)
    figures = {"steps": len(records), "losses": [round(record["loss"], 5) for record in records]}
    for record in read_records(run):
        if "val_loss" in record:
            figures["val_loss"] = record["val_loss"]
    timed_records = records[FIRST_TIMED_STEP - 1 :]
    for key in ("tokens_per_second", "mfu", "memory"):
        values = [record[key] for record in timed_records if key in record]
        if values:
            figures[key] = statistics.median(values)
    return figures


class Competitor:
    """The process of an entry, which measures a turn whenever it is asked to."""

    def __init__(self, session: Session, entry: Entry):
        self.name = entry.name()
        arguments = ["-m", "research.benchmarks.turns", entry.model, f"--device={session.device}"]
        arguments.append(f"--size={'tiny' if session.device == 'cpu' else entry.size}")
        if entry.cuda_graphs:
            arguments.append("--cuda_graphs")
        self.process = session.launch(
            arguments, entry.switches, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.answers: queue.Queue = queue.Queue()
        threading.Thread(target=self._read_answers, daemon=True).start()

    def _read_answers(self) -> None:
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put(None)  # the process has ended

    def wait(self, seconds: float) -> dict | None:
        """Return the next answer, or None if there is none in time."""
        with contextlib.suppress(queue.Empty):
            return self.answers.get(timeout=max(seconds, 0.1))
        return None

    def measure_turn(self, seconds: float) -> dict | None:
        """Return the figures of a turn, or None if it fails or takes too long."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"turn\n")
            self.process.stdin.flush()
        return self.wait(seconds)


class GpuSensor:
    """Samples the clock and the power of a GPU, where nvidia-smi exists."""

    def __init__(self):
        self.samples: list[tuple[float, float, float]] = []  # time, MHz, watts
        self.process = None
        command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--loop-ms=100"]
        if shutil.which(command[0]) is not None:
            command.append("--format=csv,noheader,nounits")
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._read_samples, daemon=True).start()

    def _read_samples(self) -> None:
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):  # a GPU that does not measure it
                clock, power = map(float, line.split(","))
                self.samples.append((time.monotonic(), clock, power))

    def medians_since(self, start: float) -> dict[str, float]:
        """Return the median clock and power since a time; {} without samples."""
        samples = [sample for sample in self.samples if sample[0] >= start]
        if not samples:
            return {}
        _, clocks, powers = zip(*samples)
        return {"clock_mhz": statistics.median(clocks), "watts": statistics.median(powers)}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def take_turns(session: Session, competitors: list[Competitor], end: float) -> None:
    """Measure rounds of turns, and how each entry compares with the first in the same rounds."""
    step_ms: dict[str, list[float]] = {competitor.name: [] for competitor in competitors}
    remaining = list(competitors)
    sensor = GpuSensor()
    try:
        for number in range(1, NUM_ROUNDS + 1):
            for competitor in list(remaining):
                start = time.monotonic()
                figures = competitor.measure_turn(min(40, end - start))
                name = f"{competitor.name}, turn {number}"
                if figures is None:
                    session.add(name, "failed, or out of time")
                    remaining.remove(competitor)
                    continue
                step_ms[competitor.name].append(figures["step_ms"])
                session.add(name, {**figures, **sensor.medians_since(start)})
    finally:
        sensor.stop()
    for name, own_ms in step_ms.items():
        baseline = competitors[0].name
        if own_ms and step_ms[baseline]:
            summary = {
                "turns": len(own_ms),
                **timing.compute_percentiles("step_ms", own_ms),
                **timing.compute_speed_ratios("ratio", step_ms[baseline], own_ms),
            }
            session.add(f"{name} relative to {baseline}", summary)


def run_pack(session: Session, pack: Pack) -> None:
    """Run what is not timed while the entries compile, then their turns, then what is timed."""
    start = time.monotonic()
    end = start + pack.seconds
    deadline = end
    if pack.entries or pack.one_by_one:
        # the turns and what follows take about half of the time
        deadline = start + pack.seconds / 2
    for task in pack.first:
        session.run(task, deadline)
    num_workers = pack.at_once
    entries = pack.entries
    if session.device == "cpu":
        num_workers = os.cpu_count()
        # a rehearsal of two entries, in which CUDA graphs do not exist
        entries = [
            replace(entry, cuda_graphs=False)
            for entry in entries
            if entry.model in (ADDITIVE, CC_EC)
        ]
    competitors = [Competitor(session, entry) for entry in entries]
    try:
        with ThreadPoolExecutor(num_workers) as pool:
            for task in pack.side_by_side:
                pool.submit(session.run, task, deadline)
        ready = []
        for competitor in competitors:
            figures = competitor.wait(deadline - time.monotonic())
            if figures is None:
                session.add(competitor.name, "did not compile in time, or failed")
                stop(competitor.process, at_once=True)
            else:
                session.add(competitor.name, figures)
                ready.append(competitor)
        take_turns(session, ready, end)
    finally:
        for competitor in competitors:
            stop(competitor.process, at_once=True)
    for task in pack.one_by_one:
        session.run(task, end)


def parse_arguments(argv: list[str]) -> SimpleNamespace:
    """Parse the command line; an empty one names no packs, and lists them."""
    fixed = {} if argv else {"packs": ()}
    return read_command_line(__doc__, Options, fixed=fixed, argv=argv)


def main() -> None:
    args = parse_arguments(sys.argv[1:])
    args.out = Path(args.out).resolve()
    args.work = Path(tempfile.gettempdir()) / "deep_delta_learning_gpu"
    packs = make_packs(args)
    for name in args.packs:
        if name not in packs:
            raise ValueError(
                f"no pack {name}{errors.suggest(name, packs)}; packs: {', '.join(packs)}"
            )
    if not args.packs:
        rows = [[name, f"{pack.seconds:.0f} s", pack.purpose] for name, pack in packs.items()]
        print(format_markdown(["pack", "at most", "what it shows"], rows))
        return
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch finds no GPU; rehearse without one with --device=cpu")
    if not (ROOT / "data/python_stdlib/meta.json").exists():
        raise ValueError("first run `python data/python_stdlib/prepare.py`")
    if (args.out / "figures.json").exists():
        raise ValueError(f"{args.out} has the figures of an earlier call; give another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(args.work, ignore_errors=True)
    session = Session(args)
    commit = os.environ.get("COMMIT") or current_commit()
    session.add("machine", {**describe_machine(), "commit": commit})
    for name in args.packs:
        run_pack(session, packs[name])
    prepared = args.work / "packages/meta.json"
    if prepared.exists():
        session.add("packages", json.loads(prepared.read_text(encoding="utf-8")))
    rows = [[name, summarize(value)] for name, value in session.figures.items()]
    print(format_markdown(["figure", "value"], rows))


if __name__ == "__main__":
    with errors.one_line_errors():
        main()
