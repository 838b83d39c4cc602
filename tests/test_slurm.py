"""docs/slurm.sbatch, with programs that stand in for those of Slurm."""

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import ROOT, small_run, wait_for
from training_runs import CONSTANT_RATE, completed_steps, read_state

SCRIPT = ROOT / "docs" / "slurm.sbatch"
JOB_ID = "1234567"

# It starts the command once per node, all on this machine, each in a process group of its own.
SRUN = """#!/bin/bash
printf '%q ' "$@" > "$RECORDS/srun"
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
  setsid "$@" &
  echo $! >> "$RECORDS/steps"
done
code=0
for step in $(cat "$RECORDS/steps"); do wait "$step" || code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
echo "$*" >> "$RECORDS/scontrol"
if [ "$2" = hostnames ]; then printf 'localhost\\nother\\n'; fi
"""
SCANCEL = """#!/bin/bash
echo "$*" > "$RECORDS/scancel"
for step in $(cat "$RECORDS/steps"); do kill -TERM -- "-$step"; done
"""


class Job:
    """A job of the script, in a cluster of this machine alone."""

    def __init__(self, folder: Path, num_nodes: int, gpus_per_node: int):
        self.records = folder / "records"
        self.records.mkdir()
        programs = folder / "programs"
        programs.mkdir()
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "RECORDS": str(self.records),
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": JOB_ID,
            "SLURM_JOB_NODELIST": "node[01-02]",
            "SLURM_JOB_NUM_NODES": str(num_nodes),
            "SLURM_GPUS_ON_NODE": str(gpus_per_node),
            "SLURM_CPUS_PER_TASK": "4",
        }

    def replace_torchrun(self, program: str) -> Path:
        """Let a program stand in for torchrun, so that nothing is trained; return torchrun's path."""
        environment = self.records / "environment"
        (environment / "bin").mkdir(parents=True)
        (environment / "bin" / "torchrun").symlink_to(program)
        self.environment["DDL_ENVIRONMENT"] = str(environment)
        return environment / "bin" / "torchrun"

    def start(self, arguments: list[str]) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", str(SCRIPT), *arguments],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def read(self, program: str) -> str:
        """Return the arguments with which the script has called a program."""
        path = self.records / program
        return path.read_text().strip() if path.exists() else ""


def split_at(words: list[str], separator: str) -> tuple[list[str], list[str]]:
    """Return the words before and after the first separator."""
    index = words.index(separator)
    return words[:index], words[index + 1 :]


def test_the_options_of_sbatch_requeue_and_signal():
    options = [
        line.removeprefix("#SBATCH ")
        for line in SCRIPT.read_text().splitlines()
        if line.startswith("#SBATCH ")
    ]
    assert "--requeue" in options
    assert "--signal=B:TERM@300" in options
    assert "--ntasks-per-node=1" in options
    # the run must end before Slurm kills it
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280" in SCRIPT.read_text()
    # restarted ranks must not meet the dead (test_restarts.py)
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in SCRIPT.read_text()


def test_the_command_names_the_first_node_and_a_port_of_the_job(tmp_path):
    job = Job(tmp_path, num_nodes=2, gpus_per_node=8)
    torchrun = job.replace_torchrun("/bin/true")
    assert job.start(["config/gpt_1b.py", "--engine=fsdp"]).wait(timeout=20) == 0
    srun_options, command = split_at(shlex.split(job.read("srun")), "step")
    assert srun_options[:2] == ["--kill-on-bad-exit=1", "--cpus-per-task=4"]
    assert command == [
        str(torchrun),
        "--nnodes=2",
        "--nproc_per_node=8",
        "--max-restarts=3",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:24567",
        f"--rdzv-id={JOB_ID}",
        "train.py",
        "--resume=auto",
        "config/gpt_1b.py",
        "--engine=fsdp",
    ]
    assert job.read("scontrol") == "show hostnames node[01-02]"


def test_a_failure_is_that_of_the_job(tmp_path):
    job = Job(tmp_path, num_nodes=1, gpus_per_node=1)
    job.replace_torchrun("/bin/false")
    assert job.start([]).wait(timeout=20) == 1


@pytest.mark.slow
@pytest.mark.parametrize("signaled", ["the job", "its steps"])
def test_a_job_on_two_nodes_is_saved_and_requeued_and_resumes(corpus, tmp_path, signaled):
    """Slurm signals the script before the time limit, and a preempted job perhaps its steps alone."""
    run = tmp_path / "run"
    keys = {**CONSTANT_RATE, "checkpoint_interval": 10_000, "max_steps": 100_000}
    arguments = small_run(corpus, run, **keys)
    job = Job(tmp_path, num_nodes=2, gpus_per_node=1)
    process = job.start(arguments)
    wait_for(lambda: len(completed_steps(run)) > 3, 120)
    if signaled == "the job":
        process.send_signal(signal.SIGTERM)
    else:
        for pid in job.read("steps").split():
            os.killpg(int(pid), signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    assert job.read("scancel") == (f"--signal=TERM {JOB_ID}" if signaled == "the job" else "")
    assert job.read("scontrol").endswith(f"requeue {JOB_ID}")
    last_step = completed_steps(run)[-1]
    assert read_state(run)["step"] == last_step
    assert not list(ROOT.glob(".stopped-*"))

    # the requeued job
    (job.records / "steps").unlink()
    process = job.start([*arguments, f"--max_steps={last_step + 2}"])
    assert process.wait(timeout=120) == 0
    assert completed_steps(run) == list(range(1, last_step + 3))
