"""Test and measure on a GPU in packs, each of which fits into the minutes that a borrowed GPU has.

    python research/gpu.py                                         # list the packs
    python research/gpu.py tests speed --out=figures               # about eight minutes on an H100 or H200
    python research/gpu.py tests speed --device=cpu --out=figures  # rehearse with tiny models

First, what is not timed runs side by side (tests, runs whose losses or bits count), while the models
whose speed is measured compile. Then nothing else runs: these models take turns, and the other timed
programs follow one by one. A program that fails or hangs is recorded, and the next one starts. Each
figure is written to OUT/figures.json when it is measured, the output of every program to OUT/log.txt,
and a table is printed last. Without the git history, set COMMIT to the output of `git describe`.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils import errors
from utils.tables import format_markdown

ROOT = Path(__file__).resolve().parents[1]
ADDITIVE = "gpt-mha-rope"
CC_EC = "DDL-gpt-mha-rope-CC-EC"
TC = "DDL-gpt-mha-rope"
DV1 = "DDL-vdim1-gpt-mha-rope"
SMALL = {
    "vocab_size": 50304,
    "block_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "head_dim": 128,
    "hidden_size": 768,
    "mup": True,
}
MEDIUM = {**SMALL, "num_hidden_layers": 24, "num_attention_heads": 8, "hidden_size": 1024}
TINY = {
    "vocab_size": 320,
    "block_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "hidden_size": 16,
}
STEPS_PER_TURN = 8
PROFILED_STEPS = 3
LONGEST_KERNELS = 20
# The first steps of train.py compile, and let the allocator grow.
FIRST_TIMED_STEP = 11


@dataclass(frozen=True)
class Contender:
    """A model whose training steps are measured: forward, backward and AdamW, compiled."""

    model: str
    kernels: str = "auto"
    cuda_graphs: bool = False
    size: dict = field(default_factory=lambda: SMALL)

    def name(self) -> str:
        """Return its name in tables."""
        words = [self.model]
        if self.kernels != "auto":
            words.append(f"kernels={self.kernels}")
        if self.cuda_graphs:
            words.append("CUDA graphs")
        for key, value in self.size.items():
            if SMALL.get(key) != value:
                words.append(f"{key}={value}")
        return " ".join(words)


@dataclass(frozen=True)
class Task:
    """Programs that run one after the other, as long as each of them succeeds.

    run: run folder of train.py; the task ends once it has `steps` steps
    """

    what: str
    programs: list[list[str]]
    seconds: float
    run: Path | None = None
    steps: int = 0


@dataclass(frozen=True)
class Pack:
    """What one call measures: `together` is not timed, `alone` is."""

    purpose: str
    contenders: list[Contender] = field(default_factory=list)
    together: list[Task] = field(default_factory=list)
    alone: list[Task] = field(default_factory=list)


# ---- the packs ----


def train_words(args: argparse.Namespace, config: str, run: Path, *more: str) -> list[str]:
    """Return a command that trains on the standard library's source code, 32 sequences a step."""
    words = [
        *("train.py", f"config/{config}.py", "--dataset=python_stdlib", "--vocab_size=50304"),
        *("--global_batch_size=32", "--micro_batch_size=16", "--warmup_steps=20"),
        *("--eval_batches=1", "--eval_full=False", f"--device={args.device}", f"--out_dir={run}"),
    ]
    if args.device == "cpu":
        sizes = [f"--{key}={value}" for key, value in TINY.items() if key != "vocab_size"]
        words += [*sizes, "--compile=False", "--global_batch_size=2"]
        more = [*more, "--micro_batch_size=1"]
    return [*words, *more]


def time_training(args: argparse.Namespace, config: str, steps: int, *more: str) -> Task:
    """Return a task that trains for some steps, and is ended before it evaluates."""
    name = " ".join([config, *(word.removeprefix("--") for word in more)])
    run = args.work / name.replace(" ", "_")
    steps = 3 if args.device == "cpu" else steps
    words = train_words(args, config, run, "--max_steps=1000", *more)
    return Task(f"train.py {name}", [words], seconds=100, run=run, steps=steps)


def check_training(args: argparse.Namespace) -> Task:
    """Return a task that resumes a run, which must end with the same bits, and uses its model."""
    middle, last = (2, 4) if args.device == "cpu" else (10, 20)
    whole = args.work / "whole"
    half = args.work / "half"
    exact = [f"--max_steps={last}", "--deterministic=True", f"--checkpoint_interval={middle}"]
    resume = f"--resume={whole}/checkpoints/step_{middle:08d}"
    device = f"--device={args.device}"
    checkpoint = f"checkpoints/step_{last:08d}"
    programs = [
        train_words(args, "ddl_dv4_cc_ec_small", whole, *exact),
        train_words(args, "ddl_dv4_cc_ec_small", half, *exact, resume),
    ]
    for file in ("model", "optimizer"):
        paths = [f"{run}/{checkpoint}/{file}.safetensors" for run in (whole, half)]
        programs.append(["cmp", *paths])
    programs += [
        ["eval.py", str(whole), "--val", device, f"--out={args.work}/eval"],
        ["export.py", str(whole), f"{args.work}/exported"],
        ["sample.py", str(whole), device, "--prompt=def", "--max_new_tokens=20"],
    ]
    return Task("resume to the bit, evaluate, export, sample", programs, seconds=240)


def bench(args: argparse.Namespace, command: str, file: str, *more: str, seconds: float) -> Task:
    """Return a task of research/bench.py, which stores its own figures in OUT."""
    json_file = f"--json={args.out}/{file}.json"
    words = ["research/bench.py", command, f"--device={args.device}", json_file, *more]
    return Task(f"bench.py {command} {' '.join(more)}", [words], seconds)


def make_packs(args: argparse.Namespace) -> dict[str, Pack]:
    """Return the packs by name."""
    tests = ["-m", "pytest", "tests", "research/tests", "-m", "gpu", "-q", "--tb=short"]
    tests += ["-rfE", f"--junitxml={args.out}/tests.xml", "-p", "no:cacheprovider"]
    if args.device == "cuda" and importlib.util.find_spec("xdist") is not None:
        # one process would need nine minutes
        tests += ["-n", "8", "--dist=worksteal"]
    widths = ["--widths=768", "--rounds=10"]
    decode = [f"--models={ADDITIVE},{CC_EC}", "--context=512", "--tokens=32", "--rounds=5"]
    if args.device == "cpu":
        widths = ["--widths=8", "--micro_batch_size=1", "--block_size=1", "--copied=4096"]
        decode += ["--compile=False", *(f"--{key}={value}" for key, value in TINY.items())]
    else:
        decode += [f"--{key}={value}" for key, value in SMALL.items() if key != "mup"]
    graphs = "--cuda_graphs=True"
    return {
        "tests": Pack(
            "whether kernels, training, resuming, evaluation, export and decoding are correct",
            together=[
                Task("GPU tests", [tests], seconds=300),
                check_training(args),
                time_training(args, "ddl_dv4_cc_ec_small", 200),
                time_training(args, "ddl_dv4_cc_ec_small", 200, "--kernels=off"),
                time_training(
                    args,
                    "ddl_dv4_cc_ec_small",
                    200,
                    "--kernels=off",
                    "--dtype=float32",
                    "--micro_batch_size=8",
                ),
            ],
        ),
        "speed": Pack(
            "training steps of 124M parameters, the kernels' bandwidth, train.py",
            contenders=[
                Contender(ADDITIVE),
                Contender(ADDITIVE, cuda_graphs=True),
                Contender(CC_EC),
                Contender(CC_EC, cuda_graphs=True),
                Contender(TC, cuda_graphs=True),
                Contender(DV1, cuda_graphs=True),
                Contender("plain GPT", cuda_graphs=True),
                Contender("transformers GPT-2", cuda_graphs=True),
            ],
            alone=[
                time_training(args, "gpt_small", 60, graphs),
                time_training(args, "ddl_dv4_cc_ec_small", 60, graphs),
                bench(args, "kernels", "kernels_K1", "--match=K=1 v=4", *widths, seconds=45),
                bench(args, "kernels", "kernels_K4", "--match=K=4 v=4", *widths, seconds=45),
                bench(args, "kernels", "kernels_norm", "--match=norm", *widths, seconds=45),
                bench(args, "decode", "decode", *decode, seconds=90),
            ],
        ),
        "plain": Pack(
            "the same steps without fused kernels, which shows what the kernels save",
            contenders=[
                Contender(model, kernels="off", cuda_graphs=True)
                for model in (ADDITIVE, DV1, CC_EC, TC)
            ],
        ),
        "medium": Pack(
            "training steps of 354M parameters",
            contenders=[
                Contender(model, cuda_graphs=True, size=MEDIUM)
                for model in (ADDITIVE, DV1, CC_EC, TC)
            ],
        ),
        "streams": Pack(
            "d_v = 2, float32 state, and other streams beside the additive model",
            contenders=[
                Contender(ADDITIVE, cuda_graphs=True),
                Contender(CC_EC, cuda_graphs=True, size={**SMALL, "ddl_value_channels": 2}),
                Contender(CC_EC, cuda_graphs=True, size={**SMALL, "state_dtype": "float32"}),
                Contender("AttnRes-gpt-mha-rope", cuda_graphs=True),
                Contender("mHC-gpt-mha-rope", cuda_graphs=True),
                Contender("wide-gpt-mha-rope", cuda_graphs=True),
            ],
        ),
    }


# ---- a contender, in a process of its own ----


def compete(contender: Contender, device_type: str) -> None:
    """Compile the model, then measure a turn for every line of standard input.

    Prints a line of JSON when the model is compiled, and one for each turn.
    """
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever else is printed goes to the log
    import torch

    is_cpu = device_type == "cpu"
    size = {**TINY} if is_cpu else contender.size
    model = build_contender(contender, size, device_type).to(device_type)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    torch.set_float32_matmul_precision("high")  # as in training
    mode = "reduce-overhead" if contender.cuda_graphs else None
    call = model if is_cpu else torch.compile(model, mode=mode)
    shape = (2, 1 if is_cpu else 16, size["block_size"])
    ids, targets = torch.randint(size["vocab_size"], shape, device=device_type)

    def synchronize() -> None:
        if not is_cpu:
            torch.cuda.synchronize()

    def step() -> None:
        with torch.autocast(device_type, torch.bfloat16):
            _, loss = call(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    num_steps = 1 if is_cpu else STEPS_PER_TURN

    def time_turn() -> dict[str, float]:
        start = time.perf_counter()
        for _ in range(num_steps):
            step()
        synchronize()
        seconds = (time.perf_counter() - start) / num_steps
        # a step alone, whose launches do not wait for earlier ones
        start = time.perf_counter()
        step()
        launch_seconds = time.perf_counter() - start
        synchronize()
        return {"step_ms": seconds * 1e3, "launch_ms": launch_seconds * 1e3}

    def profile() -> dict:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if not is_cpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(PROFILED_STEPS):
                step()
            synchronize()
        kernels = []
        for event in profiler.key_averages():
            on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
            if on_gpu and not event.is_user_annotation:
                microseconds = event.self_device_time_total / PROFILED_STEPS
                kernels.append([event.key[:90], event.count / PROFILED_STEPS, microseconds])
        kernels.sort(key=lambda kernel: kernel[2], reverse=True)
        return {
            "gpu_ms": sum(microseconds for _, _, microseconds in kernels) / 1e3,
            "launches": sum(count for _, count, _ in kernels),
            "kernels": kernels[:LONGEST_KERNELS],
        }

    start = time.perf_counter()
    for _ in range(4):
        step()
    synchronize()
    if not is_cpu:
        # the models wait together; only the memory of CUDA graphs must stay
        torch.cuda.empty_cache()
    print(json.dumps({"compiled_s": time.perf_counter() - start}), file=answers, flush=True)
    is_first_turn = True
    for _ in sys.stdin:
        repeats = [time_turn() for _ in range(4)][1:]  # the clocks rise in the first one
        row = {key: statistics.median(turn[key] for turn in repeats) for key in repeats[0]}
        row["tokens_per_second"] = ids.numel() / row["step_ms"] * 1e3
        if not is_cpu:
            row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        if is_first_turn:
            row |= profile()
        is_first_turn = False
        print(json.dumps(row), file=answers, flush=True)


def build_contender(contender: Contender, size: dict, device_type: str):
    """Return a model that takes ids and targets and returns (logits or None, loss)."""
    import torch

    from research.benchmarks import peers

    torch.manual_seed(0)
    if contender.model == peers.PLAIN:
        return peers.PlainGPT(size)
    if contender.model != peers.TRANSFORMERS:
        from model import build, kernels

        model = build(contender.model, **size)
        kernels.use(model, contender.kernels, device_type)
        return model
    import transformers

    class GPT2(torch.nn.Module):
        def __init__(self):
            super().__init__()
            config = transformers.GPT2Config(
                vocab_size=size["vocab_size"],
                n_positions=size["block_size"],
                n_embd=size["hidden_size"],
                n_layer=size["num_hidden_layers"],
                n_head=size["num_attention_heads"],
                resid_pdrop=0,
                embd_pdrop=0,
                attn_pdrop=0,
                use_cache=False,
                bos_token_id=0,
                eos_token_id=0,
            )
            self.model = transformers.GPT2LMHeadModel(config)

        def forward(self, ids, targets):
            logits = self.model(ids).logits.flatten(0, 1).float()
            return None, torch.nn.functional.cross_entropy(logits, targets.flatten())

    return GPT2()


# ---- running programs ----


class Session:
    """The figures of a call, its log, and the time that it has left."""

    def __init__(self, args: argparse.Namespace):
        self.out = args.out
        self.device = args.device
        self.start = time.monotonic()
        self.budget = args.budget
        self.figures = {}
        self.lock = threading.Lock()
        self.log = (args.out / "log.txt").open("wb", buffering=0)
        caches = args.work / "compiled"
        self.environment = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            # torch refuses deterministic matrix products without it
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "TORCHINDUCTOR_CACHE_DIR": str(caches),
            "TRITON_CACHE_DIR": str(caches / "triton"),
            # many programs compile side by side
            "TORCHINDUCTOR_COMPILE_THREADS": "3",
            "OMP_NUM_THREADS": "2",
        }
        if args.device == "cpu":
            self.environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

    def seconds_left(self) -> float:
        """Return the seconds until the budget is used up."""
        return self.budget - (time.monotonic() - self.start)

    def add(self, name: str, value: object) -> None:
        """Store a figure, and print it."""
        with self.lock:
            self.figures[name] = value
            text = json.dumps(self.figures, indent=1)
            (self.out / "figures.json").write_text(text + "\n", encoding="utf-8")
        print(f"[{time.monotonic() - self.start:4.0f} s] {name}: {describe(value)}", flush=True)

    def launch(self, words: list[str], **streams) -> subprocess.Popen:
        """Start a program; words[0] is a script, an option of Python, or `cmp`."""
        self.log.write(f"\n+ {' '.join(words)}\n".encode())
        command = words if words[0] == "cmp" else [sys.executable, *words]
        streams = {"stdout": self.log, "stderr": self.log, **streams}
        return subprocess.Popen(
            command, cwd=ROOT, env=self.environment, start_new_session=True, **streams
        )

    def run(self, task: Task, deadline: float) -> None:
        """Run the programs of a task until they end, fail, or have taken the task's seconds."""
        start = time.monotonic()
        end = min(start + task.seconds, deadline)
        outcome = {}
        for words in task.programs:
            process = self.launch(words)
            while process.poll() is None and time.monotonic() < end:
                if task.run is not None and len(read_steps(task.run)) >= task.steps:
                    break
                time.sleep(0.1)
            code = "stopped" if process.poll() is None else process.returncode
            stop(process)
            outcome[Path(words[0]).name if len(task.programs) == 1 else " ".join(words)[:60]] = code
            if code not in (0, "stopped") or time.monotonic() > end:
                break
        figure = {"seconds": round(time.monotonic() - start, 1), "exit codes": outcome}
        if task.run is not None:
            figure |= summarize_run(task.run)
        self.add(task.what, figure)


def describe(value: object) -> str:
    """Return a figure in one line, without its long lists."""
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if not isinstance(item, list)}
    return json.dumps(value)


def stop(process: subprocess.Popen) -> None:
    """End a program and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_steps(run: Path) -> list[dict]:
    """Return the training steps in the metrics.jsonl of a run that may still be writing it."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    complete_lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [record for record in map(json.loads, complete_lines) if "loss" in record]


def summarize_run(run: Path) -> dict:
    """Return the losses of a run, and the median speed of its later steps."""
    records = read_steps(run)
    figures = {"steps": len(records), "losses": [round(record["loss"], 5) for record in records]}
    timed = records[FIRST_TIMED_STEP - 1 :]
    for key in ("tokens_per_second", "mfu", "memory"):
        values = [record[key] for record in timed if key in record]
        if values:
            figures[key] = statistics.median(values)
    return figures


class Turns:
    """The process of a contender, which measures a turn whenever it is asked to."""

    def __init__(self, session: Session, contender: Contender):
        self.name = contender.name()
        text = json.dumps(dataclasses.asdict(contender))
        words = ["research/gpu.py", f"--compete={text}", f"--device={session.device}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = session.launch(words, **pipes)
        self.answers: queue.Queue = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put(None)  # the process has ended

    def wait(self, seconds: float) -> dict | None:
        """Return the next answer, or None if there is none in time."""
        with contextlib.suppress(queue.Empty):
            return self.answers.get(timeout=max(seconds, 0.1))
        return None

    def take(self, seconds: float) -> dict | None:
        """Measure a turn; return None if it fails or takes too long."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"turn\n")
            self.process.stdin.flush()
        return self.wait(seconds)


def measure(session: Session, packs: list[Pack]) -> None:
    """Run what is not timed while the contenders compile, then their turns, then what runs alone."""
    contenders = {c.name(): c for pack in packs for c in pack.contenders}
    if session.device == "cpu":  # a rehearsal; without a GPU they are the same but for their names
        contenders = {name: c for name, c in contenders.items() if name in (ADDITIVE, CC_EC)}
    turns = [Turns(session, contender) for contender in contenders.values()]
    together = [task for pack in packs for task in pack.together]
    num_workers = len(together) if session.device == "cuda" else os.cpu_count()
    alone = [task for pack in packs for task in pack.alone]
    # what follows needs about half of the time
    share = 0.5 if turns or alone else 0.95
    deadline = time.monotonic() + share * session.seconds_left()
    try:
        with ThreadPoolExecutor(max(num_workers, 1)) as pool:
            for task in together:
                pool.submit(session.run, task, deadline)
        ready = []
        for contender in turns:
            answer = contender.wait(deadline - time.monotonic())
            if answer is None:
                session.add(contender.name, "did not compile in time, or failed")
                stop(contender.process)
            else:
                ready.append(contender)
        for number in (1, 2):
            for contender in ready:
                row = contender.take(min(40, session.seconds_left()))
                if row is None:
                    row = "failed, or no time was left"
                session.add(f"{contender.name}, turn {number}", row)
    finally:
        for contender in turns:
            stop(contender.process)
    for task in alone:
        if session.seconds_left() > 10:
            session.run(task, time.monotonic() + session.seconds_left())
        else:
            session.add(task.what, "no time was left")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packs", nargs="*", help="tests, speed, plain, medium, streams")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder of the figures")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--budget", type=float, default=470, help="seconds in all (default: 470)")
    parser.add_argument("--compete", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compete:
        compete(Contender(**json.loads(args.compete)), args.device)
        return
    args.out = args.out.resolve()
    args.work = Path(tempfile.gettempdir()) / "deep_delta_learning_gpu"
    packs = make_packs(args)
    for name in args.packs:
        if name not in packs:
            raise ValueError(f"no pack {name}{errors.suggest(name, packs)}; see --help")
    if not args.packs:
        print(
            format_markdown(["pack", "what it shows"], [[n, p.purpose] for n, p in packs.items()])
        )
        return
    import torch

    from training.provenance import current_commit, describe_machine

    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU; rehearse without one with --device=cpu")
    if not (ROOT / "data/python_stdlib/meta.json").exists():
        raise ValueError("first run `python data/python_stdlib/prepare.py`")
    args.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(args.work, ignore_errors=True)
    session = Session(args)
    session.add(
        "on", {**describe_machine(), "commit": os.environ.get("COMMIT") or current_commit()}
    )
    measure(session, [packs[name] for name in args.packs])
    rows = [[name, describe(value)] for name, value in session.figures.items()]
    print(format_markdown(["figure", "value"], rows))


if __name__ == "__main__":
    with errors.one_line_errors():
        main()
