"""The experiments of the MGT paper (Geometric and Dynamic Scaling in Deep Transformers, section 4).

    python research/mgt/run.py rank                  # 1: effective rank over depth of three arms
    python research/mgt/run.py ablation              # 2: five arms at 48 layers, the synergy coefficient
    python research/mgt/run.py beta                  # 3: distribution of the gate over depth and training
    python research/mgt/run.py depth                 # 4: depth at a fixed number of parameters
    python research/mgt/run.py language              # 5: language modeling
    python research/mgt/run.py copy                  # the copy task of section 4.1
                                                     (prepare it with data/copy_task/prepare.py)
    python research/mgt/run.py copy --preset=cpu     # the same, small enough for one CPU core
    python research/mgt/run.py rank --mode=report    # report the runs that are finished, without training
    python research/mgt/run.py rank --mode=show      # print the commands of sweep.py, to which you can
                                                     # add --mode=slurm

The sizes are the paper's, for a GPU; study.py runs the five experiments at a size for a CPU.

Runs go to sweeps/mgt/ and the report to results/mgt/ (--runs=FOLDER and --results=FOLDER change
these), as EXPERIMENT_PRESET.json, .md and .png. Finished runs are skipped: rerun a stopped command
to resume it. Any other --key=value is an option of sweep.py or train.py: --seed=0..9,
--dataset=openwebtext, --num_hidden_layers=24. --epochs=1 sets max_steps to the number of steps
that use the training split once.
"""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import configurator
from research.mgt import experiments, report

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = {
    "preset": "paper",
    "runs": "sweeps/mgt",
    "results": "results/mgt",
    "mode": "local",
}
MODES = ("local", "report", "show")


class Arguments(NamedTuple):
    """The command line: the experiment, the options of this script, and those of sweep.py."""

    experiment: str
    options: dict[str, str]
    sweep_options: dict[str, str]


def read_arguments(argv: list[str]) -> Arguments:
    """Read the command line.

    Raises:
        ValueError: the experiment or an option of this script is wrong
    """
    names, options = configurator.split_arguments(argv)
    if "help" in options:
        print(__doc__.strip())
        sys.exit(0)
    if len(names) != 1 or names[0] not in experiments.EXPERIMENTS:
        raise ValueError(
            f"{' '.join(names) or 'no experiment'}: give one of {', '.join(experiments.EXPERIMENTS)}"
        )
    own_options = {key: options.get(key, default) for key, default in DEFAULTS.items()}
    for key, choices in (("preset", experiments.PRESETS), ("mode", MODES)):
        if own_options[key] not in choices:
            raise ValueError(f"--{key}={own_options[key]}: give {' or '.join(choices)}")
    sweep_options = {key: value for key, value in options.items() if key not in DEFAULTS}
    return Arguments(names[0], own_options, sweep_options)


def run_sweeps(commands: list[list[str]]) -> None:
    """Run all sweeps in turn, and end the script with the exit code of one that was stopped.

    A sweep in which a run failed has the exit code 1, and the next sweep is run all the same.
    """
    for number, command in enumerate(commands, 1):
        command_line = shlex.join(["python", "research/sweep.py", *command])
        print(f"sweep {number} of {len(commands)}: {command_line}", flush=True)
        script = [sys.executable, str(ROOT / "research/sweep.py")]
        exit_code = subprocess.run([*script, *command], check=False).returncode
        if exit_code not in (0, 1):
            sys.exit(exit_code)


def main() -> None:
    with errors.one_line_errors():
        experiment, options, sweep_options = read_arguments(sys.argv[1:])
        commands = experiments.make_commands(
            experiment, options["preset"], sweep_options, Path(options["runs"])
        )
        cells = [cell for command in commands for cell in experiments.make_cells(command)]
        experiments.check_corpora(experiment, cells)
        if options["mode"] == "show":
            for command in commands:
                print(shlex.join(["python", "research/sweep.py", *command]))
            return
        report.check_packages()
    if options["mode"] == "local":
        run_sweeps(commands)
    with errors.one_line_errors():
        report.write(experiment, options["preset"], cells, Path(options["results"]))


if __name__ == "__main__":
    main()
