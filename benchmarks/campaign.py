"""What only a GPU can show, in stages that each fit into one command of at most nine minutes, the most worth first.

    benchmarks/gpu.sh STAGE [FOLDER]           one stage, by number or name; figures go to FOLDER (default: results)
    benchmarks/gpu.sh --rehearse [FOLDER]      every stage on the CPU at tiny sizes, to see that all of it runs

A stage goes on from the figures in FOLDER, or else in results/, that are of the same code and chip; a figure is stored
as soon as it is there. So the same command again does what is left, and --again measures anew. What compiling left is
in the folder deep_delta_learning_compiled beside other temporary files: a machine that begins bare compiles again.
"""

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import configurator
from benchmarks.figures import Figures
from training import distributed
from training.provenance import digest

ROOT = Path(__file__).parents[1]
RESULTS, LOGS = ROOT / "results", ROOT / "runs" / "campaign"
COMPILED = Path(tempfile.gettempdir()) / "deep_delta_learning_compiled"  # the same path on every machine
TESTS = ("tests/test_gpu_kernels.py", "tests/test_gpu.py", "tests/test_decoding.py", "tests/test_bench.py")
TESTED = ("train.py", "benchmarks/*.py", "model/*.py", "model/kernels/*.py", "training/*.py", "tests/*.py")
DELTA = ("DDL-gpt-mha-rope-CC-EC", "DDL-gpt-mha-rope", "DDL-vdim1-gpt-mha-rope")
MORE = ("DDL-gpt-mha-rope-CC-EC:2", "DDL-gpt-mha-rope-CC-EC+state_interval=4")
CONFIGS = ("gpt_small", "ddl_dv4_cc_ec_small", "ddl_dv1_small")
SIZE = "--vocab_size=50304 --block_size=1024 --num_hidden_layers=12 --num_attention_heads=6 --head_dim=128".split()
SIZE += ["--hidden_size=768"]


@dataclass(frozen=True)
class Command:
    """`python ARGUMENTS`, and the file of figures it writes."""

    arguments: tuple[str, ...]
    writes: str


@dataclass(frozen=True)
class Stage:
    name: str
    shows: str
    minutes: float  # after which it is stopped
    takes: str  # expected on an H200, with nothing compiled before
    commands: tuple[Command, ...]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(command.writes for command in self.commands))


def tests() -> tuple[Command, ...]:
    several = ("-n", "8") if importlib.util.find_spec("xdist") else ()
    return tuple(Command(("-m", "pytest", file, "-m", "gpu", *several), "gpu_tests.json") for file in TESTS)


def targets(writes: str, size: str, models: tuple[str, ...]) -> Command:
    chosen = (f"--sizes={size}", f"--models={','.join(models)}", "--peers=none")
    return Command(("bench.py", "step", "--device=cuda", "--suite=targets", *chosen), writes)


def tune(match: str, width: int) -> Command:
    name = match.replace("=", "").replace(" ", "_")
    arguments = ("bench.py", "kernels", "--device=cuda", "--tune", f"--match={match}", f"--widths={width}")
    return Command((*arguments, "--rounds=5"), f"bench_tune_{width}_{name}_cuda.json")


def train(what: str, configs: tuple[str, ...]) -> Command:
    arguments = ("bench.py", "train", "--device=cuda", f"--what={what}", f"--configs={','.join(configs)}", "--steps=50")
    return Command(arguments, "bench_train_cuda.json")


def kernels() -> Command:
    return Command(("bench.py", "kernels", "--device=cuda", "--rounds=10"), "bench_kernels_cuda.json")


def decode() -> Command:
    chosen = ("--device=cuda", *SIZE, "--context=960", f"--models=gpt-mha-rope,{DELTA[0]}")
    return Command(("bench.py", "decode", *chosen), "bench_decode_cuda.json")


def peers() -> Command:
    chosen = ("--device=cuda", "--suite=paper", "--sizes=small", f"--models={DELTA[0]}", "--peers=transcription")
    return Command(("bench.py", "step", *chosen), "bench_peers_small_cuda.json")


REST = ("K=1 v=1", "K=4 v=4", "add_norm")
STAGES = (
    Stage("tests", "whether kernels, training and decoding are right on a GPU", 7, "4 to 6", tests()),
    Stage("tune_v4", "launches of the kernels of CC and CC-EC, d = 768", 8, "one or two calls",
        (tune("K=1 v=4", 768),)),
    Stage("small", "CC-EC, TC and d_v = 1 against additive: targets 1 to 3", 9, "7 to 9, or two calls",
        (targets("bench_targets_small_cuda.json", "small", DELTA),)),
    Stage("medium", "the same at the medium size", 9, "7 to 9, or two calls",
        (targets("bench_targets_medium_cuda.json", "medium", DELTA),)),
    Stage("train", "train.py: MFU and memory of three configs' steps, resuming to the bit", 9, "7 to 9, or two calls",
        (train("speed", CONFIGS), train("resume", CONFIGS[1:2]))),
    Stage("decode", "generation with and without cache, graph and kernels", 9, "4 to 9", (decode(),)),
    Stage("peers", "CC-EC against its transcription, compiled", 9, "5 to 9", (peers(),)),
    Stage("targets", "two columns, and the memory option", 9, "7 to 9, or two calls",
        (targets("bench_targets_more_cuda.json", "small", MORE),)),
    Stage("tune_768", "launches of the other kernels, d = 768", 9, "three calls or more",
        tuple(tune(match, 768) for match in REST)),
    Stage("tune_1024", "launches of all kernels, d = 1024", 9, "four calls or more",
        tuple(tune(match, 1024) for match in ("K=1 v=4", *REST))),
    Stage("kernels", "bandwidth of every kernel against a copy", 9, "5 to 9, or two calls", (kernels(),)),
    Stage("paper", "speed and memory of every variant and its peers at both sizes", 9, "five or more calls",
        (Command(("bench.py", "step", "--device=cuda", "--suite=paper"), "bench_paper_cuda.json"),)),
)  # fmt: skip

# In a rehearsal: other values for arguments, and more arguments for each of bench.py's commands.
INSTEAD = {
    "--device=cuda": "--device=cpu",
    "--suite=targets": "--suite=rehearsal",
    "--suite=paper": "--suite=rehearsal",
}
SMALLEST = "--vocab_size=320 --block_size=16 --num_hidden_layers=1 --num_attention_heads=2 --head_dim=8".split()
SMALLEST += ["--hidden_size=16"]
BESIDES = {
    "step": ["--compile=False", "--rounds=1", "--warmup=1", "--steps=1"],
    "kernels": ["--widths=8", "--micro_batch_size=1", "--block_size=1", "--rounds=1", "--copied=4096"],
    "pytest": ["-n", "0"] if importlib.util.find_spec("xdist") else [],
    "train": [*SMALLEST, "--compile=False", "--steps=2", "--global_batch_size=2", "--micro_batch_size=1",
        "--corpus_tokens=2000", "--vocabulary=300"],
    "decode": [*SMALLEST, "--compile=False", "--rounds=1", "--context=4", "--tokens=2"],
}  # fmt: skip
FEWER = ["--launches=1"]


class Campaign:
    """One call: where figures go, what they may go on from, and how processes are run."""

    def __init__(self, folder: Path, again: bool, rehearsal: bool):
        self.folder, self.again, self.rehearsal = folder, again, rehearsal
        self.logs = LOGS if folder == RESULTS else folder  # which are no results
        for each in (folder, self.logs):
            each.mkdir(parents=True, exist_ok=True)
        self.env = {"TORCHINDUCTOR_CACHE_DIR": str(COMPILED), "TRITON_CACHE_DIR": str(COMPILED / "triton")}
        if rehearsal:
            self.env = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

    def run(self, stage: Stage) -> bool:
        """Whether all of it was done and went well."""
        started, good = time.monotonic(), True
        deadline = started + 60 * stage.minutes
        print(f"{stage.name}: {stage.shows}; at most {stage.minutes:g} minutes", flush=True)
        for name in stage.files:
            self.begin_with(name)
        for command in stage.commands:
            good = self.carry_out(stage, command, deadline) and good
            if not (self.folder / command.writes).exists():
                print(f"{self.folder / command.writes} was not written", flush=True)
                good = False
        took = f"{time.monotonic() - started:.0f} s"
        print(f"{stage.name}: {'done' if good else 'not done: the same command goes on'} in {took}", flush=True)
        return good

    def begin_with(self, name: str) -> None:
        """Let the folder have the figures of an earlier call, or none of them."""
        if self.again:
            (self.folder / name).unlink(missing_ok=True)
        elif not (self.folder / name).exists() and (RESULTS / name).exists() and not self.rehearsal:
            shutil.copy(RESULTS / name, self.folder / name)

    def carry_out(self, stage: Stage, command: Command, deadline: float) -> bool:
        if command.arguments[:2] == ("-m", "pytest"):
            return self.test(stage, command, deadline)
        arguments = [*map(self.here, command.arguments), *self.besides(command)]
        return self.start(stage, [*arguments, f"--json={self.folder / command.writes}", "--resume"], deadline) == 0

    def here(self, argument: str) -> str:
        return INSTEAD.get(argument, argument) if self.rehearsal else argument

    def besides(self, command: Command) -> list[str]:
        return BESIDES[command.arguments[1]] + FEWER * ("--tune" in command.arguments) if self.rehearsal else []

    def start(self, stage: Stage, arguments: list[str], deadline: float) -> int | None:
        """The exit code of `python ARGUMENTS`, whose output goes to the stage's log; then the log's end is printed."""
        log = self.logs / f"log_{stage.name}.txt"
        with open(log, "a") as file:
            code = run_python(arguments, self.env, file, deadline - time.monotonic())
        ended = "stopped: the stage's time is over" if code is None else f"exit code {code}"
        tail = log.read_text(errors="replace").strip().splitlines()[-12 if code == 0 else -30 :]
        print(f"  python {' '.join(arguments)}: {ended} ({log})", *tail, sep="\n    ", flush=True)
        return code

    def test(self, stage: Stage, command: Command, deadline: float) -> bool:
        """Run a file of tests, unless it has passed on this chip with this code."""
        device = distributed.pick_device(self.here("--device=cuda").partition("=")[2])
        figures = Figures(self.folder / command.writes, device, {}, resume=True, code=digest(*TESTED)[:12])
        file = command.arguments[2]
        if figures.find(tests=file, exit=0):
            return True
        began = time.monotonic()
        code = self.start(stage, [*command.arguments, *self.besides(command)], deadline)
        figures.add({"tests": file, "exit": code, "seconds": round(time.monotonic() - began)}, "tests")
        return code == 0


def run_python(arguments: list[str], env: dict[str, str], log, seconds: float) -> int | None:
    """Exit code of `python ARGUMENTS` in the repository's root; None: it took longer, and was ended with its children.

    Its output goes to the file `log`.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
        stdout=log,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    try:
        return process.wait(max(seconds, 0))
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL) if process.returncode is None else ():
            with contextlib.suppress(ProcessLookupError):  # all of the group have ended
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


def listing() -> str:
    """The stages as a table, for --help."""
    lines = ["stages, and the minutes that each is expected to take on an H200 (it is stopped after the most):", ""]
    for number, stage in enumerate(STAGES, 1):
        lines.append(f"  {number:2} {stage.name:10} {stage.shows}")
        lines.append(
            f"     {'':10} minutes: {stage.takes} (at most {stage.minutes:g}); writes {', '.join(stage.files)}"
        )
    return "\n".join(lines)


def find(name: str) -> Stage:
    for number, stage in enumerate(STAGES, 1):
        if name in (str(number), stage.name):
            return stage
    raise ValueError(f"no stage {name}: give 1 to {len(STAGES)}, or a name (see --help)")


def arguments(argv: list[str]):
    parser = argparse.ArgumentParser(
        "benchmarks/gpu.sh", description=__doc__, epilog=listing(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", nargs="?", help="a number or name")
    parser.add_argument("folder", nargs="?", type=Path, help="figures go there (default: results)")
    parser.add_argument("--again", action="store_true", help="measure again what is stored")
    parser.add_argument("--minutes", type=float, help="stop the stage then (default: its own)")
    parser.add_argument("--rehearse", action="store_true", help="every stage on the CPU at tiny sizes")
    args = parser.parse_args(argv)
    if args.rehearse and args.folder is None:
        args.stage, args.folder = None, Path(args.stage) if args.stage else None
    if not args.rehearse and args.stage is None:
        parser.error("give a stage, or --rehearse (see --help)")
    return args


def rehearse(folder: Path, stages=STAGES) -> bool:
    """Whether every stage ran through and wrote its files."""
    campaign = Campaign(folder, again=False, rehearsal=True)
    return all([campaign.run(stage) for stage in stages])


def main() -> None:
    args = arguments(sys.argv[1:])
    os.chdir(ROOT)
    if args.rehearse:
        folder = args.folder or Path(tempfile.mkdtemp(prefix="rehearsal_"))
        with configurator.one_line_errors():
            good = rehearse(folder.resolve(), (find(args.stage),) if args.stage else STAGES)
        print(f"rehearsal in {folder}: {'green' if good else 'failed'}")
        sys.exit(0 if good else 1)
    with configurator.one_line_errors():
        stage = find(args.stage)
        distributed.pick_device("cuda")
        campaign = Campaign((args.folder or RESULTS).resolve(), args.again, rehearsal=False)
        good = campaign.run(replace(stage, minutes=args.minutes or stage.minutes))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
