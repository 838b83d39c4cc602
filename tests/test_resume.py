"""A run that is disturbed and then resumed ends with the bits of an undisturbed run.

TABLE lists what is trained and how it is disturbed. Cases of the same settings are compared with one
undisturbed run.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from faults import Fault, FaultyTraining
from helpers import ROOT, small_run
from in_process import call, start_in_fork, torchrun, train_in_processes
from torch.multiprocessing.spawn import ProcessException
from training_runs import completed_steps, read_final_tensors, read_records, read_state

from training import distributed, validation
from utils.machine import can_compile

# At step 5, the checkpoint of step 3 is resumed: steps 4 and 5 and the evaluation of step 4 are
# repeated.
SETTINGS = {
    "global_batch_size": 12,
    "max_steps": 10,
    "checkpoint_interval": 3,
    "keep_last": 9,
    "eval_interval": 2,
    "statistics_interval": 4,
    "resume": "auto",
}
# phases that last long enough to be found
LONG = {
    "hidden_size": 96,
    "global_batch_size": 4,
    "micro_batch_size": 2,
    "max_steps": 24,
    "eval_interval": 4,
    "eval_batches": 30,
    "keep_last": 2,
    "statistics_interval": 0,
}
EMA = {"ema_half_life": 3}
MUON = {"optimizer": "muon"}
MUON_RATES = {
    **MUON,
    "muon_learning_rate": 2e-3,
    "embedding_learning_rate": 0.05,
    "weight_decay_rate": 0.03,
}
RECOMPUTED = {"activation_checkpointing": True}
ONE_LAYER = {"num_hidden_layers": 1}
OVERFLOWING = {**ONE_LAYER, "embedding_init_std": 1}
# 6 MB of gradients, so that DDP has several buckets, of which the first has 1 MB
LARGE = {"hidden_size": 192, "num_hidden_layers": 3}
# 7 MB of gradients, so that DDP splits the compiled graph
SPLIT = {"hidden_size": 384, "num_hidden_layers": 1}
# many tokens of few kinds: threads add to the same rows of the embedding's gradient
THREADS = {
    **MUON,
    "num_hidden_layers": 1,
    "block_size": 64,
    "hidden_size": 32,
    "head_dim": 16,
    "global_batch_size": 16,
    "micro_batch_size": 16,
    "max_steps": 12,
    "checkpoint_interval": 3,
    "eval_interval": 12,
    "eval_batches": 1,
    "statistics_interval": 0,
}
ADDITIVE = {**THREADS, "model": "gpt-mha-rope"}
CC_EC = {**THREADS, "model": "DDL-gpt-mha-rope-CC-EC"}
MUDD = {**THREADS, "model": "MUDD-gpt-mha-rope"}
VALUE_EMBEDDINGS = {
    **THREADS,
    "model": "Lambdas-gpt-mha-rope",
    "lambda_value_embeddings": True,
    "num_hidden_layers": 4,
}

# fmt: off
TABLE = [
    # when  ranks  engine  compiled  threads  dtype       settings       disturbance
    ("core", 1,    "ddp",  False,    1,       "float32",  LONG | EMA,    "killed twice in every phase"),
    ("slow", 1,    "ddp",  False,    1,       "bfloat16", LONG,          "killed twice in every phase"),
    ("core", 1,    "ddp",  False,    1,       "float32",  EMA,           "stopped in an evaluation"),
    ("core", 1,    "ddp",  False,    1,       "float32",  EMA,           "stopped in an evaluation of averages"),
    ("core", 1,    "ddp",  False,    1,       "float32",  EMA,           "error in an evaluation"),
    ("core", 1,    "ddp",  False,    1,       "float32",  EMA,           "latest files lost"),
    ("core", 1,    "ddp",  False,    1,       "float32",  MUON,          "latest files lost"),
    ("core", 1,    "ddp",  False,    1,       "float32",  MUON_RATES,    "latest files lost"),
    ("core", 1,    "ddp",  True,     2,       "float32",  ADDITIVE | EMA, "latest files lost"),
    ("slow", 1,    "ddp",  True,     2,       "float32",  CC_EC,         "killed"),
    ("slow", 1,    "ddp",  True,     2,       "float32",  MUDD,          "killed"),
    ("slow", 1,    "ddp",  True,     2,       "float32",  VALUE_EMBEDDINGS, "killed"),
    # the first steps overflow, before the checkpoint that is resumed
    ("core", 1,    "ddp",  False,    1,       "float16",  OVERFLOWING,   "latest files lost"),
    ("slow", 2,    "fsdp", False,    1,       "float16",  OVERFLOWING,   "killed"),
    # with three or more ranks, the order in which gradients are summed must not change
    ("core", 3,    "ddp",  False,    1,       "float32",  ONE_LAYER | EMA, "killed"),
    ("core", 3,    "fsdp", False,    1,       "float32",  ONE_LAYER | EMA, "killed"),
    ("slow", 4,    "fsdp", False,    1,       "float32",  {},            "killed, then one rank killed"),
    ("slow", 4,    "ddp",  False,    1,       "float32",  LARGE,         "killed, then one rank killed"),
    ("slow", 3,    "ddp",  False,    1,       "float32",  MUON,          "killed, then one rank killed"),
    ("slow", 3,    "ddp",  False,    1,       "float32",  RECOMPUTED,    "killed, then one rank killed"),
    ("slow", 3,    "fsdp", False,    1,       "float32",  RECOMPUTED,    "killed, then one rank killed"),
    ("slow", 3,    "ddp",  False,    1,       "bfloat16", {},            "killed, then one rank killed"),
    # the resumed run begins with the evaluation, in which nothing would tell torch.compile where to
    # split the graph
    ("core", 2,    "ddp",  False,    1,       "float32",  {},            "restarted by torchrun and stopped"),
    ("slow", 3,    "ddp",  True,     1,       "float32",  SPLIT,         "restarted by torchrun and stopped"),
    ("slow", 3,    "fsdp", False,    1,       "float32",  SPLIT, "restarted by torchrun and stopped"),
    ("slow", 4,    "ddp",  False,    1,       "float32",  {},            "restarted after a hang"),
    ("slow", 4,    "fsdp", False,    1,       "float32",  {},            "restarted after a hang"),
    ("slow", 4,    "hsdp", False,    1,       "float32",  {},            "restarted after a hang"),
    ("slow", 4,    "fsdp", False,    1,       "float32",  {},            "restarted after a kill"),
    ("slow", 4,    "ddp",  False,    1,       "float32",  {},            "restarted after a memory error"),
]
# fmt: on


class Job(NamedTuple):
    """A run of one row of the table."""

    folder: Path
    arguments: list[str]
    ranks: int
    compiled: bool
    threads: int
    undisturbed: Path | None  # the run to compare with

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def log(self) -> Path:
        return self.folder / "log"


def make_job(
    folder: Path,
    corpus: Path,
    ranks: int,
    engine: str,
    compiled: bool,
    threads: int,
    dtype: str,
    settings: dict,
    undisturbed: Path | None = None,
) -> Job:
    engine_settings = {"engine": engine}
    if engine == "hsdp":
        # the model is replicated, and each replica sharded over two ranks
        engine_settings = {"engine": "fsdp", "shard_size": 2}
    settings = {
        **SETTINGS,
        "micro_batch_size": 6 // ranks,
        "compile": compiled,
        "dtype": dtype,
        **engine_settings,
        **settings,
    }
    arguments = small_run(corpus, folder / "run", **settings)
    return Job(folder, arguments, ranks, compiled, threads, undisturbed)


# ---- training ----


def train(job: Job, *faults: Fault) -> bool:
    """Train to the end, or until a fault ends the run; return whether the run has ended well.

    Eager runs are this process or forks of it, because Python and torch take seconds to start.
    """
    if job.compiled:
        return run_in_processes(job, *faults).returncode == 0
    faulty = FaultyTraining(faults, job.folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "seed_step", faulty.seed_step)
        patch.setattr(validation, "prefetched", faulty.prefetched)
        try:
            if job.ranks == 1:
                return call("train.py", *job.arguments).returncode == 0
            train_in_processes(job.ranks, job.arguments, job.log)
        except (ProcessException, ZeroDivisionError):
            return False
    return True


def faulty_program(job: Job, *faults: Fault) -> list[str]:
    return ["tests/faults.py", str(job.folder), json.dumps(faults), *job.arguments]


def run_in_processes(
    job: Job, *faults: Fault, max_restarts: int = 0
) -> subprocess.CompletedProcess:
    """Train in a process of its own, or in several under torchrun, which may restart the job."""
    launcher = [sys.executable]
    if job.ranks > 1:
        launcher = torchrun(job.ranks, f"--max-restarts={max_restarts}")
    program = faulty_program(job, *faults) if faults else ["train.py", *job.arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(job.threads),
        # threads that wait leave their core to the others; on a busy machine this takes a quarter
        # of the time
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": str(ROOT),
        # how long torchrun waits for a process to end after SIGTERM; one that hangs cannot
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2",
    }
    return subprocess.run(
        [*launcher, *program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


# ---- disturbances ----


def kill_in_every_phase(job: Job) -> None:
    """Kill a run at random moments of training, of evaluation and of saving."""
    generator = random.Random(0)
    phases = ["training", "evaluation", "saving"] * 2
    generator.shuffle(phases)
    kills = Counter()
    for phase in phases:
        if kill_in_phase(job, phase, generator):
            kills[phase] += 1
    assert all(kills[phase] for phase in phases), kills


def kill_in_phase(job: Job, phase: str, generator: random.Random) -> bool:
    """Start a run and kill it at a random moment of new work in a phase; return whether it was."""
    process = start_in_fork(job.arguments)
    initial_size = metrics_size(job.run)
    killed = False
    while process.is_alive():
        if metrics_size(job.run) != initial_size and current_phase(job.run) == phase:
            time.sleep(generator.random() * 0.01)
            # stop it first, to see whether it is still in that phase
            os.kill(process.pid, signal.SIGSTOP)
            if current_phase(job.run) == phase:
                killed = True
                process.kill()
                break
            os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.0005)
    process.join()
    return killed


def current_phase(run: Path) -> str:
    """Return what a run is doing, judged by what it has written."""
    if list(run.glob("checkpoints/*.tmp")):
        return "saving"
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    if not lines:
        return "starting"
    last = lines[-1]
    # LONG evaluates every fourth step
    is_due = last.startswith(b'{"step": ') and int(last[9:].partition(b",")[0]) % 4 == 0
    return "evaluation" if is_due and b"val_loss" not in last else "training"


def metrics_size(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


def assert_unevaluated(job: Job, step: int) -> None:
    """Assert that a step is saved, and that its evaluation is still to come."""
    state = read_state(job.run)
    assert (state["step"], state["evaluated"]) == (step, False)


def stop_in_evaluation(job: Job, evaluation: int) -> None:
    """Ask a run to stop in an evaluation after step 4, which is not a step with a checkpoint."""
    assert not train(job, Fault("terminate", step=4, evaluation=evaluation))
    assert_unevaluated(job, 4)


def fail_in_evaluation(job: Job) -> None:
    """Let the evaluation after step 6 fail, whose checkpoint is saved before."""
    assert not train(job, Fault("error", step=6, evaluation=1))
    assert_unevaluated(job, 6)


def lose_latest_files(job: Job) -> None:
    """Lose the checkpoints after step 6, and leave what a kill cuts short while it is written."""
    shutil.copytree(job.undisturbed, job.run)
    for path in job.run.glob("checkpoints/step_*"):
        if path.name > "step_00000006":
            shutil.rmtree(path)
    (job.run / "checkpoints" / "step_00000009.tmp").mkdir()
    with open(job.run / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "lo')


def kill_ranks(job: Job, *faults: Fault) -> None:
    """Kill the ranks of each fault in turn, and resume the run in between."""
    for fault in faults:
        assert not train(job, fault)
        assert fault.marker(job.folder, fault.rank or 0).exists()
        assert completed_steps(job.run)[-1] == fault.step - 1


def restart_and_stop(job: Job) -> None:
    """Let torchrun restart a job whose rank 1 is killed, and stop it in an evaluation."""
    result = run_in_processes(
        job,
        Fault("kill", step=5, rank=1),
        Fault("terminate launcher", step=8, rank=0, evaluation=1),
        max_restarts=1,
    )
    assert result.returncode in (0, 1), result.stderr
    assert completed_steps(job.run) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert_unevaluated(job, 8)


# what the faulty rank says in one line, or those that wait for it in a traceback
LINES = {
    "hang": "Timed out waiting 5000ms",
    "memory error": "out of memory: resume with --resume=auto and a smaller --micro_batch_size",
}


def restart_after(job: Job, kind: str) -> None:
    """Let torchrun restart a job whose last rank has a fault, and train to the end."""
    job = job._replace(arguments=[*job.arguments, "--collective_timeout=5"])
    fault = Fault(kind, step=5, rank=job.ranks - 1)
    result = run_in_processes(job, fault, max_restarts=2)
    assert result.returncode == 0, result.stderr
    assert fault.marker(job.folder, fault.rank).exists()
    if kind in LINES:  # torchrun may end the other ranks of a killed one before they notice
        assert LINES[kind] in result.stderr
    if kind == "memory error":
        assert "Traceback" not in result.stderr


DISTURBANCES: dict[str, Callable[[Job], None]] = {
    "killed twice in every phase": kill_in_every_phase,
    "stopped in an evaluation": partial(stop_in_evaluation, evaluation=1),
    "stopped in an evaluation of averages": partial(stop_in_evaluation, evaluation=2),
    "error in an evaluation": fail_in_evaluation,
    "latest files lost": lose_latest_files,
    "killed": lambda job: kill_ranks(job, Fault("kill", step=5)),
    "killed, then one rank killed": lambda job: kill_ranks(
        job, Fault("kill", step=3), Fault("kill", step=7, rank=1)
    ),
    "restarted by torchrun and stopped": restart_and_stop,
    "restarted after a hang": partial(restart_after, kind="hang"),
    "restarted after a kill": partial(restart_after, kind="kill"),
    "restarted after a memory error": partial(restart_after, kind="memory error"),
}


# ---- the property ----


def as_parameters(row: tuple) -> pytest.param:
    """Return the arguments of the test for a row of the table."""
    when, *setup, disturbance = row
    compiled = setup[2]
    marks = []
    if when == "slow":
        marks.append(pytest.mark.slow)
    if compiled:
        marks.append(pytest.mark.skipif(not can_compile(), reason="no C++ compiler"))
    ranks, engine, _, _, dtype, _ = setup
    how = "compiled" if compiled else "eager"
    name = f"{disturbance}: {ranks} {engine} {how} {dtype}"
    return pytest.param(setup, disturbance, marks=marks, id=name)


@pytest.fixture(scope="module")
def train_undisturbed(corpus, tmp_path_factory) -> Callable[[list], Path]:
    """Return a function that trains an undisturbed run, unless it has done so before."""
    runs = {}

    def find_or_train(setup: list) -> Path:
        if str(setup) not in runs:
            job = make_job(tmp_path_factory.mktemp("undisturbed"), corpus, *setup)
            assert train(job)
            runs[str(setup)] = job.run
        return runs[str(setup)]

    return find_or_train


@pytest.mark.parametrize(("setup", "disturbance"), [as_parameters(row) for row in TABLE])
def test_a_disturbed_run_ends_with_the_bits_of_an_undisturbed_one(
    corpus, tmp_path, train_undisturbed, setup, disturbance
):
    expected = train_undisturbed(setup)
    job = make_job(tmp_path, corpus, *setup, undisturbed=expected)
    DISTURBANCES[disturbance](job)
    assert train(job)
    assert read_final_tensors(job.run) == read_final_tensors(expected)
    assert read_records(job.run) == read_records(expected)
