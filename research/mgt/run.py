"""The experiments of the MGT paper (Geometric and Dynamic Scaling in Deep Transformers, section 4), a command each.

    python research/mgt/run.py rank                     1: effective rank over depth of three arms
    python research/mgt/run.py ablation                 2: five arms at 48 layers, the synergy coefficient
    python research/mgt/run.py beta                     3: distribution of the gate over depth and training
    python research/mgt/run.py depth                    4: depth at a fixed number of parameters
    python research/mgt/run.py language                 5: language modelling
    python research/mgt/run.py copy                     the copy task of section 4.1 (data/copy_task/prepare.py)
    python research/mgt/run.py copy --preset=cpu        the same, small enough for one CPU core
    python research/mgt/run.py rank --mode=report       from the runs that are there, train nothing
    python research/mgt/run.py rank --mode=show         print the commands of sweep.py, which has --mode=slurm

The sizes are the paper's, for a GPU; study.py has the five experiments at a size for a CPU.

Runs go to sweeps/mgt/, the report to results/mgt/ (--runs, --results: other folders): EXPERIMENT_PRESET.json, .md and
.png. A run that is finished is not trained again; the same command goes on where it was stopped. Any other --key=value
is sweep.py's or train.py's: --seed=0..9, --dataset=openwebtext, --num_hidden_layers=24,48. --epochs=1 sets max_steps to
so many times the tokens of the training split.
"""

import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import configurator
from research.mgt import experiments, report

ROOT = Path(__file__).resolve().parents[2]
OWN = {"preset": "paper", "runs": "sweeps/mgt", "results": "results/mgt", "mode": "local"}


def arguments(argv: list[str]) -> tuple[str, dict[str, str], dict[str, str]]:
    """(experiment, this script's own options, keys for sweep.py). ValueError: a mistake in them."""
    names, options = configurator.split_arguments(argv)
    if "help" in options:
        print(__doc__.strip())
        sys.exit(0)
    if len(names) != 1 or names[0] not in experiments.EXPERIMENTS:
        given = " ".join(names) or "no experiment"
        raise ValueError(f"{given}: give one of {', '.join(experiments.EXPERIMENTS)}")
    own = OWN | {key: value for key, value in options.items() if key in OWN}
    for key, allowed in (("preset", experiments.PRESETS), ("mode", ("local", "report", "show"))):
        if own[key] not in allowed:
            raise ValueError(f"--{key}={own[key]}: give {' or '.join(allowed)}")
    return names[0], own, {key: value for key, value in options.items() if key not in OWN}


def train_all(commands: list[list[str]]) -> None:
    """Every sweep in turn; one that was stopped ends this script with its exit code, a run that failed does not."""
    for number, command in enumerate(commands, 1):
        shown = shlex.join(["python", "research/sweep.py", *command])
        print(f"sweep {number} of {len(commands)}: {shown}", flush=True)
        script = [sys.executable, str(ROOT / "research/sweep.py")]
        code = subprocess.run([*script, *command], check=False).returncode
        if code not in (0, 1):
            sys.exit(code)


def main():
    with errors.one_line_errors():
        experiment, own, given = arguments(sys.argv[1:])
        commands = experiments.commands(experiment, own["preset"], given, Path(own["runs"]))
        cells = [cell for command in commands for cell in experiments.cells_of(command)]
        experiments.check_corpora(experiment, cells)
        if own["mode"] == "show":
            for command in commands:
                print(shlex.join(["python", "research/sweep.py", *command]))
            return
        report.check()
    if own["mode"] == "local":
        train_all(commands)
    with errors.one_line_errors():
        report.write(experiment, own["preset"], cells, Path(own["results"]))


if __name__ == "__main__":
    main()
