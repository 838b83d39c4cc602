"""sweep.py: the grid, killed and continued sweeps of real runs, failures, Slurm arrays, and the table's statistics."""

import itertools
import json
import math
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, small_run, wait_for
from in_process import call

import configurator
import train
from model.keys import keys_of
from research import sweep
from research.plots import pyplot
from training import checkpoint, metrics, stopping

# Two-sided 95% points of Student's t for n - 1 degrees of freedom (Abramowitz & Stegun, table 26.10).
T = {2: 12.70620, 3: 4.30265}


def grid(corpus, out, **changes) -> list[str]:
    """Arguments of a sweep of tiny runs."""
    run = [
        argument
        for argument in small_run(corpus, out)
        if argument.partition("=")[0][2:] not in ("out_dir", *changes)
    ]
    return [*run, *(f"--{key}={value}" for key, value in {"out": out, **changes}.items())]


@pytest.fixture
def run(monkeypatch):
    """sweep.main() in this process; returns its exit code."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["research/sweep.py", *map(str, arguments)])
        return sweep.main()

    return main


FAKE = """
import json, os, signal, sys, time
keys = dict(argument[2:].split("=", 1) for argument in sys.argv[1:])
steps = int(keys["max_steps"])

def end(ended, code=0):
    os.makedirs(keys["out_dir"], exist_ok=True)
    status = {"step": steps if ended == "finished" else 1, "of": steps, "ended": ended, "reason": ""}
    open(keys["out_dir"] + "/status.json", "w").write(json.dumps(status))
    sys.exit(code)

def finish(loss=2.0):
    os.makedirs(keys["out_dir"], exist_ok=True)
    open(keys["out_dir"] + "/metrics.jsonl", "w").write(json.dumps({"step": steps, "val_loss": loss}) + "\\n")
    end("finished")
"""


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Puts a few lines of Python in the place of train.py; `keys` holds its arguments, `finish()` ends the run."""

    def put(source: str) -> None:
        (tmp_path / "train.py").write_text(FAKE + source)
        monkeypatch.setattr(sweep, "TRAIN", tmp_path / "train.py")

    return put


def cells_of(*arguments):
    config, files, swept, fixed = sweep.read_arguments(list(map(str, arguments)))
    return sweep.make_cells(config, files, swept, fixed)


def finished(cells) -> list[bool]:
    return [sweep.final_evaluation(cell) is not None for cell in cells]


def write_evaluation(folder: Path, step: int = 6, **values) -> None:
    """What train.py leaves of a run that finished after this step."""
    folder.mkdir(parents=True)
    records = [{"step": 3, "val_loss": 9.0, "val_perplexity": 99.0}, {"step": step, "loss": 1.0}]
    records += [{"step": step, "seconds": 1.5, **values}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    stopping.write_status(folder, step, step, "finished")


# The grid.


def test_the_grid_is_the_product(corpus, tmp_path):
    lists = {"ddl_value_channels": (1, 2), "ddl_beta_init": (0.5, 1.0), "seed": (3, 4, 5)}
    texts = {"ddl_value_channels": "1,2", "ddl_beta_init": "0.5,1", "seed": "3..5"}
    cells = cells_of(*grid(corpus, tmp_path / "out", **texts, learning_rate=0.02))
    assert [cell.values for cell in cells] == [
        dict(zip(lists, each)) for each in itertools.product(*lists.values())
    ]
    assert [cell.index for cell in cells] == list(range(12))
    for cell in cells:
        config, model_config = train.configure(cell.arguments)
        settings = {**vars(config), **vars(model_config)}
        assert {key: settings[key] for key in cell.values} == cell.values
        assert settings["learning_rate"] == 0.02
        assert (settings["out_dir"], settings["resume"]) == (str(cell.folder), "auto")
    assert len({cell.folder for cell in cells}) == 12
    assert not (tmp_path / "out").exists()


def test_rates_apart_are_swept_as_any_key(corpus, tmp_path):
    rates = {"muon_learning_rate": "None,0.01", "embedding_learning_rate": "0.02,0.08"}
    cells = cells_of(*grid(corpus, tmp_path / "out", **rates, optimizer="muon"))
    assert [tuple(cell.settings[key] for key in rates) for cell in cells] == [
        (muon, embedding) for muon in (None, 0.01) for embedding in (0.02, 0.08)
    ]
    assert cells[2].title == "muon_learning_rate=0.01 embedding_learning_rate=0.02"
    with pytest.raises(
        ValueError, match=r"cell 1 \(--muon_learning_rate=0.01\): .* no effect with optimizer=adamw"
    ):
        cells_of(*grid(corpus, tmp_path / "out", muon_learning_rate="None,0.01"))


def test_values_and_ranges():
    assert sweep.expand("seed", "-2..1") == ["-2", "-1", "0", "1"]
    assert sweep.expand("seed", "0..2,9,20..21") == ["0", "1", "2", "9", "20", "21"]
    assert sweep.expand("x", "1e-3,None") == ["1e-3", "None"]
    for text, message in (("4..0", "gives no value"), ("0,,1", "nothing between")):
        with pytest.raises(ValueError, match=message):
            sweep.expand("seed", text)


def test_one_value_is_passed_on_as_it_is():
    _, files, swept, fixed = sweep.read_arguments(
        ["a.py", "--dataset=../shards", "--compile", "--seed=0,1", "--out=x"]
    )
    assert files == ["a.py"]
    assert swept == {"seed": ["0", "1"]}
    assert fixed == {"dataset": "../shards", "compile": "True"}


def test_names_are_stable_safe_and_distinct():
    assert sweep.cell_name({"ddl_beta_init": 0.5, "seed": 3}) == "ddl_beta_init=0.5,seed=3"
    assert sweep.cell_name({"seed": 3, "b": 1, "a": None}) == sweep.cell_name(
        {"b": 1, "a": None, "seed": 3}
    )
    assert sweep.cell_name({"seed": 3, "z": 1}) == "z=1,seed=3"
    odd = ["a/b", "a b", "a%2Fb", "..", "a,b=c", "ä", "a\nb"]
    names = [sweep.cell_name({"dataset": value}) for value in odd]
    assert len(set(names)) == len(odd)
    assert all(
        name.isascii() and not set(name) & set("/ \n\\*?") and name not in (".", "..")
        for name in names
    )


def test_help_lists_every_key():
    printed = call("research/sweep.py", "--help").stdout.decode()
    for key in (*configurator.knobs(sweep.SweepConfig), "learning_rate", "ddl_beta_init"):
        assert f"\n  --{key}=" in printed
    assert "comma is not supported" in printed


# Mistakes.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"seed": "0,1", "learning_rat": 1},
            "unknown key --learning_rat, did you mean learning_rate",
        ),
        ({"seed": "0,x"}, r"cell 1 \(--seed=x\): --seed=x: give a whole number"),
        ({"seed": "0,1", "min_lr": "0.001,5"}, r"cell 1 \(--seed=0 --min_lr=5\): min_lr=5"),
        ({"seed": "0,1,0"}, "cells 0 and 2 are both seed=0"),
        ({"ddl_beta_init": "1,2,1.0"}, "cells 0 and 2 are both ddl_beta_init=1.0"),
        ({"seed": "0"}, "nothing to sweep"),
        ({"seed": "0,1", "out_dir": "runs/a"}, "--out_dir is set by sweep.py"),
        ({"seed": "0,1", "dry_run": True}, "--dry_run is set by sweep.py"),
        ({"seed": "0,1", "mode": "remote"}, "mode='remote': give"),
        ({"seed": "0,1", "index": 1}, "--index=N and --mode=cell go together"),
        ({"seed": "0,1", "mode": "cell", "index": 2}, "index=2: there are 2 cells, give 0 to 1"),
        ({"seed": "0,1", "nproc_per_node": 0}, "nproc_per_node=0"),
        (
            {"seed": "0,1", "nproc_per_node": 3},
            "global_batch_size=4 does not divide over 3 processes",
        ),
        ({"seed": "0,1", "mode": "table"}, "nothing has run"),
    ],
)
def test_mistakes_are_found_before_anything_is_written(corpus, tmp_path, run, changes, message):
    with pytest.raises(ValueError, match=message):
        run(*grid(corpus, tmp_path / "out", **changes))
    assert not list(tmp_path.iterdir())


# Real runs.

LONGER = {
    "seed": "0..1",
    "max_steps": 80,
    "checkpoint_interval": 10,
    "eval_interval": 80,
    "eval_full": False,
}


def in_a_group(arguments) -> None:
    """sweep.py as the leader of a process group, which may be killed with its runs."""
    os.setpgid(0, 0)
    call("research/sweep.py", *arguments)


def test_a_killed_sweep_goes_on(corpus, tmp_path, run, capsys):
    out, arguments = tmp_path / "out", grid(corpus, tmp_path / "out", **LONGER)
    cells = cells_of(*arguments)
    write_evaluation(cells[0].folder, step=80, val_loss=2.0)
    process = multiprocessing.get_context("fork").Process(target=in_a_group, args=(arguments,))
    process.start()
    wait_for(lambda: checkpoint.all_of(cells[1].folder))
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert 10 <= sweep.saved_step(cells[1]) < 80
    assert finished(cells) == [True, False]

    assert run(*arguments) == 0
    printed = capsys.readouterr().out
    assert "2 cells (2 seed), 1 finished: 1 runs to do" in printed
    assert "cell 1 of 2 | seed=0 | val_loss 2.0000 | finished before\n" in printed
    assert printed.count("| ETA ") == 1
    assert not cells[0].log.exists()
    records = metrics.read(cells[1].folder / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 81))
    assert f"val_loss {records[-1]['val_loss']:.4f}" in printed
    state = checkpoint.read_state(checkpoint.find(cells[1].folder))
    assert {**state["model_config"], **state["run_config"]}.items() >= cells[1].values.items()
    attempts = cells[1].log.read_text().split("$ ")[1:]
    assert len(attempts) == 2
    assert "step 10/80" in attempts[0]
    assert "step 10/80" not in attempts[1]  # continued, not begun again
    assert "step 80/80" in attempts[1]
    stored = json.loads((out / "table.json").read_text())
    assert [(row["settings"], row["finished"]) for row in stored["rows"]] == [({}, 2)]
    assert stored["unfinished"] == []
    assert (out / "table.md").read_text() in printed
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")


def run_array(tmp_path, index: str, srun: str) -> subprocess.CompletedProcess:
    """The batch script as Slurm's batch step runs it, from another folder, with a shell line for srun."""
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for name, line in (
        ("srun", srun),
        ("scontrol", f'echo "$@" > {shlex.quote(str(tmp_path / "requeued"))}'),
    ):
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    slurm = {
        "SLURM_ARRAY_TASK_ID": index,
        "SLURM_JOB_ID": "77",
        "PATH": f"{tools}:{os.environ['PATH']}",
    }
    command = ["bash", str(next(tmp_path.glob("*/array.sbatch")))]
    return subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **slurm},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


# What train.py may answer, by a script in its place.


def test_a_failed_cell_is_reported_and_the_others_run(corpus, tmp_path, run, fake, capsys):
    fake(
        "print('train.py: seed', keys['seed']); finish() if keys['seed'] != '1' else sys.exit('boom')"
    )
    arguments = grid(corpus, tmp_path / "out", seed="0..2")
    assert run(*arguments, "--stop_on_failure") == 1
    assert finished(cells_of(*arguments)) == [True, False, False]
    capsys.readouterr()
    assert run(*arguments) == 1
    assert finished(cells_of(*arguments)) == [True, False, True]
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [f"failed: {tmp_path}/out/seed=1.log: train.py: seed 1"]
    assert printed.out.count("finished before") == 1
    assert "| FAILED (exit code 1) |" in printed.out
    assert "not finished: `seed=1`, 0 of 6 steps saved" in printed.out
    assert (
        len((tmp_path / "out" / "seed=0.log").read_text().split("$ ")) == 2
    )  # no process for a finished cell
    fake("finish(3.0)")
    assert run(*arguments) == 0
    assert sweep.final_evaluation(cells_of(*arguments)[0])["val_loss"] == 2.0


def test_cells_at_a_time(corpus, tmp_path, run, fake, capsys, monkeypatch):
    """Two cells end only where both are there at once; a third comes when one has ended."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    fake(
        "here = os.path.dirname(sys.argv[0])\n"
        "open(f'{here}/began_' + keys['seed'], 'w').write(os.environ['OMP_NUM_THREADS'])\n"
        "other = {'0': '1', '1': '0', '2': '0'}[keys['seed']]\n"
        "while not os.path.exists(f'{here}/began_{other}'):\n"
        "    time.sleep(0.01)\n"
        "finish(float(keys['seed']))\n"
    )
    arguments = grid(corpus, tmp_path / "out", seed="0..2")
    assert run(*arguments, "--jobs=2") == 0
    assert finished(cells_of(*arguments)) == [True] * 3
    share = str(max(len(os.sched_getaffinity(0)) // 2, 1))
    assert {(tmp_path / f"began_{seed}").read_text() for seed in range(3)} == {share}
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cell ")]
    assert sorted(line.split(" | ")[:3] for line in lines) == [
        [f"cell {seed + 1} of 3", f"seed={seed}", f"val_loss {seed}.0000"] for seed in range(3)
    ]


def test_cells_at_a_time_are_all_told_to_stop(corpus, tmp_path, run, fake, capsys):
    fake(
        "def stop(number, frame):\n"
        "    open(keys['out_dir'] + '.saved', 'w').close()\n"
        "    end('stopped', 75)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "folder = os.path.dirname(keys['out_dir'])\n"
        "open(keys['out_dir'] + '.began', 'w').close()\n"
        "if keys['seed'] == '1':\n"
        "    while not os.path.exists(f'{folder}/seed=0.began'):\n"
        "        time.sleep(0.01)\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )
    assert run(*grid(corpus, tmp_path / "out", seed="0..3"), "--jobs=2") == 143
    assert sorted(path.name for path in (tmp_path / "out").glob("*.saved")) == [
        "seed=0.saved",
        "seed=1.saved",
    ]
    assert len(list((tmp_path / "out").glob("*.log"))) == 2
    assert capsys.readouterr().out.count("stopped by SIGTERM; to go on: ") == 1


def test_code_75_stops_the_sweep(corpus, tmp_path, run, fake, capsys):
    fake("end('stopped', 75) if keys['seed'] == '1' else finish()")
    arguments = grid(corpus, tmp_path / "out", seed="0..2")
    assert run(*arguments) == 75
    assert "| stopped; to go on: python research/sweep.py --model=" in capsys.readouterr().out
    assert not (tmp_path / "out" / "seed=2.log").exists()
    assert run(*arguments, "--mode=cell", "--index=1") == 75
    assert run(*arguments, "--mode=cell", "--index=0") == 0
    assert run(*arguments, "--mode=cell", "--index=2") == 0
    assert (tmp_path / "out" / "seed=2" / "metrics.jsonl").exists()


def test_exit_codes_of_a_cell(corpus, tmp_path, run, fake, capsys):
    arguments = grid(corpus, tmp_path / "out", seed="0,1", mode="cell", index=1)
    fake("sys.exit(7)")
    assert run(*arguments) == 7
    fake("os.kill(os.getpid(), signal.SIGKILL)")
    assert run(*arguments) == 137
    fake("pass")  # success without a result is none
    assert run(*arguments) == 1
    assert "without the final evaluation" in capsys.readouterr().out
    assert not (tmp_path / "out" / "seed=0.log").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_and_waited_for(corpus, tmp_path, run, fake, capsys, number, code):
    fake(
        "def stop(number, frame):\n"
        "    time.sleep(0.5)\n"  # saving takes a while
        "    open(sys.argv[0] + '.saved', 'w').write(str(number))\n"
        "    end('stopped', 75)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        f"os.kill(os.getppid(), {int(number)})\n"
        "time.sleep(60)\n"
    )
    assert run(*grid(corpus, tmp_path / "out", seed="0..2")) == code
    assert (tmp_path / "train.py.saved").read_text() == str(int(signal.SIGTERM))
    assert f"stopped by {number.name}; to go on: " in capsys.readouterr().out
    assert not (tmp_path / "out" / "seed=1.log").exists()


def test_torchrun_says_what_train_said(corpus, tmp_path, run, fake, capsys):
    arguments = grid(corpus, tmp_path / "out", seed="0,1", nproc_per_node=2)
    fake(
        "place = [os.environ['WORLD_SIZE'], str(os.getpgid(os.getppid()))]\n"
        "open(sys.argv[0] + '.place', 'w').write(' '.join(place))\n"
        "end('stopped')\n"  # with exit code 0, as torchrun would begin again at any other
    )
    assert run(*arguments) == 75
    assert "stopped" in capsys.readouterr().out
    processes, group = (tmp_path / "train.py.place").read_text().split()
    assert processes == "2"
    assert int(group) != os.getpgrp()  # Ctrl-C must not reach torchrun beside our SIGTERM
    fake("sys.exit('train.py: boom')")  # after an attempt that was stopped, in the same folder
    assert run(*arguments, "--stop_on_failure") == 1
    [said, *notes] = capsys.readouterr().err.splitlines()
    assert said == f"failed: {tmp_path}/out/seed=0.log: train.py: boom"
    assert all(
        "not committed" in note for note in notes
    )  # of the table, in a tree that is being changed


def test_torchrun_is_stopped_with_its_processes(corpus, tmp_path, run, fake):
    fake(
        "def stop(number, frame):\n"
        "    open(sys.argv[0] + '.saved', 'w')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        f"os.kill({os.getpid()}, signal.SIGTERM) if os.environ['RANK'] == '0' else None\n"
        "time.sleep(60)\n"
    )
    assert (
        run(*grid(corpus, tmp_path / "out", seed="0,1", nproc_per_node=2, mode="cell", index=0))
        == 75
    )
    assert (tmp_path / "train.py.saved").exists()


# Finished or not.


def test_finished_is_what_train_says(corpus, tmp_path):
    cell, other = cells_of(*grid(corpus, tmp_path, seed="0,1"))
    assert finished([cell]) == [False]
    write_evaluation(cell.folder, step=5, val_loss=2.0)  # of a sweep with fewer steps
    assert finished([cell]) == [False]
    write_evaluation(other.folder, val_loss=2.5)
    assert sweep.final_evaluation(other)["val_loss"] == 2.5
    for ended in ("stopped", "failed", None):
        stopping.write_status(other.folder, 6, 6, ended)
        assert finished([other]) == [False]


def test_other_settings_in_the_folder_are_refused(corpus, tmp_path, run):
    arguments = grid(corpus, tmp_path / "out", seed="0,1")
    for cell in cells_of(*arguments):
        write_evaluation(cell.folder, val_loss=2.0)
        folder = cell.folder / "checkpoints" / "step_00000006"
        folder.mkdir(parents=True)
        state = {"step": 6, "seconds": 1.0, "model": cell.settings["model"], "corpus": {}}
        of_run = {
            key: value for key, value in cell.settings.items() if key in keys_of(train.TrainConfig)
        }
        of_model = {key: value for key, value in cell.settings.items() if key not in of_run}
        state |= {"run_config": of_run, "model_config": of_model}
        (folder / "state.json").write_text(json.dumps(state))
    assert len(cells_of(*arguments, "--log_interval=5")) == 2
    with pytest.raises(
        ValueError, match=r"learning_rate=0.5, but .*seed=0 was trained with 0.01: give that value"
    ):
        run(*arguments, "--learning_rate=0.5")
    with pytest.raises(ValueError, match=r"max_steps=3, but .*seed=0 has 6 steps"):
        run(*arguments, "--max_steps=3", "--mode=table")


# Slurm.


def test_the_array_has_a_task_per_unfinished_cell(corpus, tmp_path, run, capsys):
    out = tmp_path / "a sweep's"
    arguments = grid(corpus, out, ddl_value_channels="1,2,4", seed="0..1")
    cells = cells_of(*arguments)
    for index in (0, 3, 4):
        write_evaluation(cells[index].folder, val_loss=2.0)
    assert run(*arguments, "--mode=slurm", "--nproc_per_node=2") == 0
    printed = capsys.readouterr().out
    path = Path(shlex.split(printed.partition("sbatch ")[2])[0])
    assert path == out / "array.sbatch"
    text = path.read_text()
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in text.splitlines()
        if "#SBATCH" in line
    )
    assert options["array"] == "1,2,5"
    assert options["gpus-per-node"] == "2"
    assert options["signal"] == "TERM@120"
    assert "requeue" in options
    assert run(*arguments, "--mode=slurm", "--gpus_per_node=8") == 0
    assert "#SBATCH --gpus-per-node=8\n" in path.read_text()
    assert run(*arguments, "--mode=slurm", "--gpus_per_node=0") == 0
    assert "gpus" not in path.read_text()

    # What a task runs is the cell of that number in the full grid.
    result = run_array(
        tmp_path, "2", f'printf "%s\\n" "$@" > {shlex.quote(str(tmp_path / "argv"))}'
    )
    assert (result.returncode, result.stderr) == (0, "")
    python, file, *argv = (tmp_path / "argv").read_text().splitlines()
    assert (python, file) == (sys.executable, str(ROOT / "research/sweep.py"))
    config, files, swept, fixed = sweep.read_arguments(argv)
    assert (config.mode, config.index) == ("cell", 2)
    assert sweep.make_cells(config, files, swept, fixed)[2] == cells[2]

    for code, requeued in (("7", None), ("75", "requeue 77\n")):
        result = run_array(tmp_path, "2", f"exit {code}")
        assert result.returncode == int(code)
        note = tmp_path / "requeued"
        assert (note.read_text() if note.exists() else None) == requeued
    for cell in cells:
        shutil.rmtree(cell.folder, ignore_errors=True)
        write_evaluation(cell.folder, val_loss=2.0)
    assert run(*arguments, "--mode=slurm") == 0
    assert "nothing to submit" in capsys.readouterr().out


# The table.


@pytest.fixture
def partly_finished(corpus, tmp_path):
    """A grid of 2 x 2 settings and three seeds: three, two, one and no seed finished. (arguments, losses)."""
    arguments = grid(
        corpus, tmp_path, ddl_value_channels="4,1", optimizer="adamw,muon", seed="0..2"
    )
    losses = {
        (4, "adamw"): [3.1, 3.25, 3.02],
        (4, "muon"): [2.5, 2.75],
        (1, "adamw"): [4.125],
        (1, "muon"): [],
    }
    for cell in cells_of(*arguments):
        values = losses[cell.values["ddl_value_channels"], cell.values["optimizer"]]
        if cell.values["seed"] < len(values):
            loss = values[cell.values["seed"]]
            write_evaluation(
                cell.folder,
                val_loss=loss,
                val_perplexity=math.exp(loss),
                val_bits_per_byte=loss / 2,
            )
    return arguments, losses


def test_means_and_intervals(partly_finished, tmp_path, run, capsys):
    arguments, losses = partly_finished
    assert run(*arguments, "--mode=table", "--metric=val_bits_per_byte") == 0
    stored = json.loads((tmp_path / "table.json").read_text())
    assert stored.keys() >= {"command", "commit", "date", "metric"}
    rows = {
        (row["settings"]["ddl_value_channels"], row["settings"]["optimizer"]): row
        for row in stored["rows"]
    }
    assert list(rows) == list(losses)
    for setting, values in losses.items():
        row, n = rows[setting], len(values)
        assert (row["runs"], row["finished"]) == (3, n)
        for key, scores in (
            ("val_loss", values),
            ("val_bits_per_byte", np.array(values) / 2),
            ("val_perplexity", np.exp(values)),
        ):
            if n:
                assert row["metrics"][key]["mean"] == pytest.approx(np.mean(scores))
            if n > 1:
                half = T[n] * np.std(scores, ddof=1) / np.sqrt(n)
                assert row["metrics"][key]["ci95"] == pytest.approx(half, rel=1e-5)
        if n == 1:
            assert row["metrics"]["val_loss"]["ci95"] is None
        if n == 0:
            assert row["metrics"] == {}
    cells = [
        (4, "muon", 2),
        (1, "adamw", 1),
        (1, "adamw", 2),
        *((1, "muon", seed) for seed in (0, 1, 2)),
    ]
    names = [f"ddl_value_channels={v},optimizer={name},seed={seed}" for v, name, seed in cells]
    assert [cell["cell"] for cell in stored["unfinished"]] == names
    text = (tmp_path / "table.md").read_text()
    assert capsys.readouterr().out == text
    for name in names:
        assert f"not finished: `{name}`, 0 of 6 steps saved" in text
    lines = text.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    header = "ddl_value_channels optimizer finished val_bits_per_byte ± 95% val_loss ± 95% val_perplexity ± 95%"
    assert " ".join(cells[0]) == header
    assert cells[2][:4] == ["4", "adamw", "3 of 3", "1.5617"]
    assert cells[4][:7] == ["1", "adamw", "1 of 3", "2.0625", "-", "4.1250", "-"]
    assert cells[5] == ["1", "muon", "0 of 3", *["-"] * 6]


def drawn(monkeypatch, cells, metric, path):
    """(x, means, half intervals, label) of every line, and the axes."""
    plt, calls = pyplot(), []
    original = plt.Axes.errorbar

    def errorbar(axes, x, y, yerr, **keywords):
        calls.append((list(x), list(y), list(yerr), keywords["label"], axes))
        return original(axes, x, y, yerr=yerr, **keywords)

    monkeypatch.setattr(plt.Axes, "errorbar", errorbar)
    sweep.draw(sweep.summarise(cells, metric), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert plt.imread(path).std() > 0.05
    return calls


def test_the_plot_has_a_line_for_each_setting_of_the_other_keys(
    partly_finished, tmp_path, monkeypatch
):
    arguments, losses = partly_finished
    first, second = drawn(monkeypatch, cells_of(*arguments), "val_loss", tmp_path / "plot.png")
    assert (first[0], second[0]) == ([1, 4], [4])
    assert first[1] == pytest.approx([4.125, np.mean(losses[4, "adamw"])])
    assert math.isnan(first[2][0])
    assert first[2][1] == pytest.approx(
        T[3] * np.std(losses[4, "adamw"], ddof=1) / 3**0.5, rel=1e-5
    )
    assert (first[3], second[3]) == ("optimizer=adamw", "optimizer=muon")
    assert first[4].get_xlabel() == "ddl_value_channels"


@pytest.mark.parametrize(
    ("swept", "x", "scale"),
    [
        ({"mup": "True,False"}, ["True", "False"], "linear"),
        ({"seed": "0,1"}, ["all"], "linear"),
        ({"learning_rate": "1e-2,1e-4"}, [1e-4, 1e-2], "log"),
        (
            {"optimizer": "muon,adamw", "ddl_beta_init": "0.5,1"},
            [0.5, 1],
            "linear",
        ),  # the first key of numbers
    ],
)
def test_the_plots_axis(corpus, tmp_path, monkeypatch, swept, x, scale):
    cells = cells_of(*grid(corpus, tmp_path, **swept, min_lr=0))
    for cell in cells:
        write_evaluation(cell.folder, val_loss=2.0 + cell.index)
    for positions, *_, axes in drawn(monkeypatch, cells, "val_loss", tmp_path / "plot.png"):
        assert (positions, axes.get_xscale()) == (x, scale)


def test_an_unknown_metric(partly_finished, run):
    arguments, _ = partly_finished
    with pytest.raises(
        ValueError, match=r"metric=val_los is in no final evaluation, which have .*val_loss"
    ):
        run(*arguments, "--mode=table", "--metric=val_los")


def test_a_table_without_matplotlib(partly_finished, tmp_path, run, monkeypatch, capsys):
    arguments, _ = partly_finished
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(*arguments, "--mode=table") == 0
    assert (
        "no plot: a figure needs the matplotlib package: pip install matplotlib"
        in capsys.readouterr().out
    )
    assert (tmp_path / "table.md").exists()
