"""Test and measure on a GPU in packs, each of which fits into the minutes that a borrowed GPU has.

    python research/gpu.py tests speed --out=figures               # at most 13 minutes
    python research/gpu.py tests speed --device=cpu --out=figures  # rehearse with tiny models

    tests     is what runs on a GPU correct? has it the same losses without kernels?
    speed     train.py with 124M parameters, a float32 and a bfloat16 state, and graphs of a step
    learning  the losses of the additive model and CC-EC over 98 million tokens, with the same batches

What is not timed runs side by side; then the timed programs follow one by one. A program that fails or hangs
is recorded. Each figure is printed and written to OUT/figures.json when it is measured, and the output of
programs to OUT/log.txt. Without the git history, set COMMIT to the output of `git describe --always`.
"""

import dataclasses
import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configurator import argument, option, read_command_line
from training import metrics, settings
from utils import errors
from utils.provenance import ROOT, current_commit, describe_machine

WORK = Path(tempfile.gettempdir()) / "deep_delta_learning_gpu"
SECONDS = {"tests": 300, "speed": 450, "learning": 540}  # time limits of the packs
FIRST_TIMED_STEP = 11  # the first steps of train.py compile, and let the allocator grow
TRAIN = (
    "$PYTHON train.py config/{config}.py --dataset=python_stdlib --vocab_size=50304 --global_batch_size=32 "
    "--micro_batch_size=16 --warmup_steps=20 --eval_batches=1 --eval_full=False --device={device} "
    "--out_dir={run} {options}"
)
TINY = (  # for a rehearsal; with shorter sequences, the validation split would have many
    " --num_hidden_layers=1 --num_attention_heads=2 --head_dim=8 --hidden_size=16 --vocab_size=4096 "
    "--block_size=128 --global_batch_size=2 --micro_batch_size=1 --compile=False"
)
PYTEST = "$PYTHON -m pytest tests research/tests -m gpu -v --tb=short -k"
CC_EC = "ddl_dv4_cc_ec_small"
CONFIGS = ("gpt_small", CC_EC, "ddl_dv1_small", "ddl_dv4_small", "ddl_dv4_cc_small")
# the settings of a run that the table names, as far as its model has them
FORM_KEYS = ("state_dtype", "kernels", "cuda_graphs", "ddl_v_sigmoid", "ddl_v_bias", "ddl_cc_read")
ENVIRONMENT = {
    "PYTHON": sys.executable,
    "PYTHONUNBUFFERED": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for deterministic matrix products
    "TORCHINDUCTOR_CACHE_DIR": f"{WORK}/compiled",
    "TRITON_CACHE_DIR": f"{WORK}/compiled/triton",
    "TORCHINDUCTOR_COMPILE_THREADS": "3",  # many programs compile side by side
    "OMP_NUM_THREADS": "1",
}
POPEN_OPTIONS = {"cwd": ROOT, "stderr": subprocess.STDOUT, "start_new_session": True}


@dataclass(frozen=True)
class Options:
    """What is measured, and where the figures are stored."""

    packs: tuple[str, ...] = argument("tests, speed or learning")
    out: str = option("figures", "folder to write")
    device: Literal["cuda", "cpu"] = option("cuda", "device; cpu rehearses with tiny models")


@dataclass(frozen=True)
class Task:
    """A script of bash, which is ended after num_steps of the run of train.py in the folder `run`."""

    name: str
    script: str
    run: Path | None = None
    num_steps: int | None = None


def make_command(device: str, config: str, run: Path, options: str) -> str:
    """Return a command that trains on the standard library's source code, 32 sequences a step."""
    command = TRAIN.format(config=config, device=device, run=run, options=options)
    return command + TINY if device == "cpu" else command


def train(device: str, config: str, num_steps: int, options: str, label: str = "") -> Task:
    """Return a task that trains for some steps, and is ended before it evaluates."""
    name = f"{label}{config} {options}".replace("--", "").strip()
    run = WORK / name.replace(" ", "_")
    command = make_command(device, config, run, f"--max_steps=3000 {options}")
    return Task(name, command, run, num_steps)


def check_training(device: str) -> list[Task]:
    """Return a task that resumes a run, which must end with the same bits, and one of DDP."""
    last_step = 4 if device == "cpu" else 20
    steps = f"--max_steps={last_step} --checkpoint_interval={last_step // 2} --deterministic=True"
    last = f"checkpoints/step_{last_step:08d}"
    # from the middle, as if the run had been killed after it
    resume = f"""
        {make_command(device, CC_EC, WORK / "run", steps)}
        cp -r {WORK}/run {WORK}/resumed
        rm -r {WORK}/resumed/{last}
        {make_command(device, CC_EC, WORK / "resumed", f"{steps} --resume=auto")}
        cmp {WORK}/run/{last}/model.safetensors {WORK}/resumed/{last}/model.safetensors
        cmp {WORK}/run/{last}/optimizer.safetensors {WORK}/resumed/{last}/optimizer.safetensors
        $PYTHON eval.py {WORK}/run --val --device={device} --out={WORK}/eval
        $PYTHON export.py {WORK}/run {WORK}/exported
        $PYTHON sample.py {WORK}/run --device={device} --prompt=def --max_new_tokens=20
    """
    ddp = make_command(device, "gpt_small", WORK / "ddp", f"--max_steps={last_step}")
    ddp = ddp.replace("$PYTHON", "$PYTHON -m torch.distributed.run --standalone --nproc_per_node=1")
    return [
        Task("resume to the bit, evaluate, export, sample", resume),
        Task("DDP with one rank", ddp, WORK / "ddp"),
    ]


def list_speeds(device: str, num_steps: int, label: str = "") -> list[Task]:
    """Return runs of each model in the form of its config, with both states, and graphs of a step."""
    states = ("--state_dtype=float32", "--state_dtype=bfloat16")
    runs = [(config, state) for state in states for config in CONFIGS]
    graphs = [(config, f"{state} --cuda_graphs=step") for config, state in runs]
    # all of the kernels, that of SwiGLU among them
    runs += [(config, f"{states[1]} --kernels=on") for config in CONFIGS[:2]] + graphs
    if device == "cpu":  # which has no graphs
        runs = [("gpt_small", states[0]), (CC_EC, states[1])]
    return [train(device, config, num_steps, options, label) for config, options in runs]


def list_tasks(pack: str, device: str) -> tuple[list[Task], list[Task]]:
    """Return the tasks of a pack that run side by side, and those that run one by one."""
    if pack == "learning":
        return [], [train(device, config, 2999, "--warmup_steps=300") for config in CONFIGS[:2]]
    if pack == "speed":
        # compiles first, so that the timed runs find their code in the cache
        return list_speeds(device, 3, label="compile "), list_speeds(device, 50)
    parallel = "-n 8" if device == "cuda" else ""  # one process would need nine minutes
    tests = [
        Task("GPU tests", f"{PYTEST} 'not graph_of_a_step' {parallel}"),
        # a capture that fails leaves its process on the capture stream, so that later tests fail
        Task("GPU tests of the graph of a step", f"{PYTEST} graph_of_a_step"),
        *check_training(device),
        train(device, CC_EC, 200, "--kernels=auto"),
        train(device, CC_EC, 200, "--kernels=off"),
        # a smaller micro-batch, because float32 needs more memory
        train(device, CC_EC, 200, "--kernels=off --dtype=float32 --micro_batch_size=8"),
    ]
    return tests, []


class Session:
    """The figures of a call, and its log."""

    def __init__(self, out: Path):
        self.out = out
        self.figures = {}
        self.lock = threading.Lock()  # tasks that run side by side add figures
        self.log = (out / "log.txt").open("wb", buffering=0)

    def add(self, name: str, value: dict) -> None:
        """Store a figure, and print it."""
        with self.lock:
            self.figures[name] = value
            (self.out / "figures.json").write_text(json.dumps(self.figures, indent=1) + "\n")
        numbers = {key: item for key, item in value.items() if not isinstance(item, list)}
        print(f"{name}: {json.dumps(numbers)}", flush=True)

    def run(self, task: Task, deadline: float) -> None:
        """Run a task until it ends, or until the deadline."""
        start = time.monotonic()
        # -e ends the script at the first failure, and -x writes its commands to the log
        words = ["bash", "-ex", "-c", task.script]
        process = subprocess.Popen(
            words, env={**os.environ, **ENVIRONMENT}, stdout=self.log, **POPEN_OPTIONS
        )
        while process.poll() is None and time.monotonic() < deadline:
            if task.num_steps is not None and len(read_steps(task.run)) >= task.num_steps:
                break
            time.sleep(0.1)
        exit_code = process.poll()
        if exit_code is None:
            exit_code = "stopped"
            os.killpg(process.pid, signal.SIGKILL)  # also what it has started
            process.wait()
        figures = {"seconds": round(time.monotonic() - start, 1), "exit_code": exit_code}
        if task.run is not None:
            steps = summarize_steps(read_steps(task.run))
            figures = {**figures, **describe_form(task.script), **steps}
        self.add(task.name, figures)


def describe_form(script: str) -> dict[str, object]:
    """Return the settings of FORM_KEYS with which a command of train.py trains."""
    _, _, options = script.partition("train.py ")
    run = settings.merge(settings.read_arguments(shlex.split(options)), "", resume_checkpoint=None)
    values = {**dataclasses.asdict(run.config), **dataclasses.asdict(run.model_config)}
    return {key: values[key] for key in FORM_KEYS if key in values}


def read_steps(run: Path) -> list[dict]:
    """Return the training steps in the metrics.jsonl of a run that may still be writing it."""
    path = run / "metrics.jsonl"
    records = metrics.read(path) if path.exists() else []
    return [record for record in records if "loss" in record]


def summarize_steps(records: list[dict]) -> dict:
    """Return the losses of training steps, and the medians of the later steps."""
    figures = {"steps": len(records), "losses": [round(record["loss"], 5) for record in records]}
    for key in ("tokens_per_second", "mfu", "memory"):
        values = [record[key] for record in records[FIRST_TIMED_STEP - 1 :] if key in record]
        if values:
            figures[key] = statistics.median(values)
    return figures


def main() -> None:
    args = read_command_line(__doc__, Options)
    out = Path(args.out).resolve()
    for name in set(args.packs) - SECONDS.keys():
        raise ValueError(f"no pack {name}{errors.suggest(name, SECONDS)}")
    if (out / "figures.json").exists():
        raise ValueError(f"{out} has the figures of an earlier call; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(WORK, ignore_errors=True)
    session = Session(out)
    ENVIRONMENT["TRITON_INTERPRET"] = "1" if args.device == "cpu" else "0"
    session.add("machine", {**describe_machine(), "commit": current_commit()})
    for name in args.packs:
        side_by_side, one_by_one = list_tasks(name, args.device)
        end = time.monotonic() + SECONDS[name]
        deadline = end - SECONDS[name] / 2 if one_by_one else end
        with ThreadPoolExecutor(8) as pool:  # in half of the time if others follow
            for task in side_by_side:
                pool.submit(session.run, task, deadline)
        for task in one_by_one:
            session.run(task, end)


if __name__ == "__main__":
    with errors.one_line_errors():
        main()
