"""The tests that need a GPU, a file at a time, each in a process that a limit ends: `bench.py tests`."""

import importlib.util
import sys
import time

from research.benchmarks.apart import ROOT, run_python
from research.benchmarks.figures import Figures
from training import distributed
from training.provenance import digest

CODE = (
    "train.py",
    "research/benchmarks/*.py",
    "model/*.py",
    "model/kernels/*.py",
    "training/*.py",
    "tests/*.py",
    "research/tests/*.py",
)


def files() -> list[str]:
    """Those with a test that is marked `gpu`; the kernels' own first."""
    every = [
        *sorted((ROOT / "tests").glob("test_*.py")),
        *sorted((ROOT / "research/tests").glob("test_*.py")),
    ]
    marked = [path for path in every if "mark.gpu" in path.read_text()]
    names = [path.relative_to(ROOT).as_posix() for path in marked]
    return sorted(names, key=lambda name: "kernels" not in name)


def run(args) -> None:
    """Run what has not passed on this chip with this code, what failed in an earlier call last; store each result."""
    figures = Figures(
        args.json, distributed.pick_device(args.device), {}, args.resume, code=digest(*CODE)[:12]
    )
    workers = (
        ["-n", str(args.workers)] if args.workers > 1 and importlib.util.find_spec("xdist") else []
    )
    for name in sorted(files(), key=lambda name: figures.find(tests=name) is not None):
        if figures.find(tests=name, failed=""):
            continue
        began = time.monotonic()
        why = run_python(["-m", "pytest", name, "-m", "gpu", *workers], args.limit)
        took = round(time.monotonic() - began)
        figures.add({"tests": name, "failed": why, "seconds": took}, "tests")
        print(f"{name}: {why or 'passed'} ({took} s)", flush=True)
    if any(row["failed"] for row in figures.rows):
        sys.exit(1)
