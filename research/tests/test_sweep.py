"""sweep.py: the grid, killed and resumed sweeps of real runs, failures, the table, the search for rates."""

import itertools
import json
import math
import multiprocessing
import os
import signal
import sys

import pytest
import torch
from helpers import configure, small_run, wait_for
from in_process import call
from report_helpers import by_hand, write_checkpoint

from configurator import collect_options
from research import sweep
from training import checkpoint, metrics
from training.config import TrainConfig
from utils import files


def grid(corpus, out, **changes) -> list[str]:
    """Return the arguments of a sweep of tiny runs."""
    arguments = []
    for argument in small_run(corpus, out):
        key = argument.partition("=")[0].removeprefix("--")
        if key != "out_dir" and key not in changes:
            arguments.append(argument)
    arguments.append(f"--out={out}")
    return arguments + [f"--{key}={value}" for key, value in changes.items()]


@pytest.fixture
def run(monkeypatch):
    """Return a function that calls sweep.main() with arguments and returns its exit code."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["research/sweep.py", *map(str, arguments)])
        return sweep.main()

    return main


FAKE_TRAIN = """
import json, os, signal, sys, time
keys = dict(argument[2:].split("=", 1) for argument in sys.argv[1:])
steps, out = int(keys["max_steps"]), keys["out_dir"]
os.makedirs(out, exist_ok=True)

def end(code, step=1):
    os.makedirs(out + f"/checkpoints/step_{step:08d}", exist_ok=True)
    sys.exit(code)

def finish(loss=2.0):
    open(out + "/metrics.jsonl", "w").write(json.dumps({"step": steps, "val_loss": loss}) + "\\n")
    end(0, steps)
"""


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """Return a function that replaces train.py by a script.

    In the script, `keys` are the arguments, `finish()` ends a run and `end(code)` stops it.
    """

    def replace_train(source: str) -> None:
        (tmp_path / "train.py").write_text(FAKE_TRAIN + source)
        monkeypatch.setattr(sweep, "TRAIN", tmp_path / "train.py")

    return replace_train


def make_cells(*arguments):
    """Make the cells of a command line."""
    return sweep.make_cells(*sweep.read_arguments(list(map(str, arguments))))


def are_finished(cells) -> list[bool]:
    """Return for each cell whether it is finished."""
    return [sweep.read_final_evaluation(cell) is not None for cell in cells]


def finish(cell, step=6, **evaluation) -> None:
    """Write what train.py writes for a cell that finished after this step."""
    run_keys = collect_options(TrainConfig).keys()
    write_checkpoint(
        cell.folder,
        step,
        model=cell.settings["model"],
        corpus={},
        seconds=1.0,
        run_config={key: value for key, value in cell.settings.items() if key in run_keys},
        model_config={key: value for key, value in cell.settings.items() if key not in run_keys},
    )
    records = [
        {"step": 3, "val_loss": 9.0},
        {"step": step, "loss": 1.0},
        {"step": step, **evaluation},
    ]
    lines = [json.dumps(record) + "\n" for record in records]
    (cell.folder / "metrics.jsonl").write_text("".join(lines))


# ---- the grid ----


def test_the_grid_is_the_product(corpus, tmp_path):
    cells = make_cells(
        *grid(
            corpus,
            tmp_path / "out",
            ddl_value_channels="1,2",
            ddl_beta_init="0.5,1",
            seed="3..5",
            learning_rate=0.02,
        )
    )
    expected = []
    for value_channels, beta_init, seed in itertools.product((1, 2), (0.5, 1.0), (3, 4, 5)):
        expected.append(
            {"ddl_value_channels": value_channels, "ddl_beta_init": beta_init, "seed": seed}
        )
    assert [cell.values for cell in cells] == expected
    assert [cell.index for cell in cells] == list(range(12))
    for cell in cells:
        config, model_config = configure(cell.arguments)
        settings = {**vars(config), **vars(model_config)}
        assert {key: settings[key] for key in cell.values} == cell.values
        assert settings["learning_rate"] == 0.02
        assert (settings["out_dir"], settings["resume"]) == (str(cell.folder), "auto")
    assert len({cell.folder for cell in cells}) == 12
    assert not (tmp_path / "out").exists()


def test_values_and_ranges():
    assert sweep.expand_values("seed", "-2..1") == ["-2", "-1", "0", "1"]
    assert sweep.expand_values("seed", "0..2,9,20..21") == ["0", "1", "2", "9", "20", "21"]
    assert sweep.expand_values("x", "1e-3,None") == ["1e-3", "None"]
    _, train, swept = sweep.read_arguments(
        ["config/demo_cpu.py", "--dataset=../shards", "--compile", "--seed=0,1", "--out=x"]
    )
    assert swept == {"seed": ["0", "1"]}
    assert train.files == ("config/demo_cpu.py",)
    assert train.from_command_line == {"dataset": "../shards", "compile": "True"}


def test_names_are_stable_safe_and_distinct():
    assert sweep.make_cell_name({"seed": 3, "b": 1, "a": None}) == "a=None,b=1,seed=3"
    odd = ["a/b", "a b", "a%2Fb", "..", "a,b=c", "ä", "a\nb"]
    names = [sweep.make_cell_name({"dataset": value}) for value in odd]
    assert len(set(names)) == len(odd)
    assert all(name.isascii() and not set(name) & set("/ \n\\*?") for name in names)


TOO_LARGE = r"cell 1 \(--seed=0 --min_lr=5\): min_lr=5"
MISTAKES = [
    ({"seed": "0,1", "learning_rat": 1}, "unknown key --learning_rat, did you mean learning_rate"),
    ({"seed": "0,x"}, r"cell 1 \(--seed=x\): --seed=x: give a whole number"),
    ({"seed": "4..0"}, "a value or a range is empty"),
    ({"seed": "0,1", "min_lr": "0.001,5"}, TOO_LARGE),
    ({"ddl_beta_init": "1,2,1.0"}, "two cells are ddl_beta_init=1.0: give every value once"),
    ({"seed": "0"}, "nothing to sweep"),
    ({"seed": "0,1", "out_dir": "runs/a"}, "--out_dir is set by sweep.py"),
    ({"tune": "learning_rate,learning_rate"}, "give one or two different keys"),
    ({"tune": "learning_rate", "seed": "0,1"}, "--seed has several values: a search starts"),
    ({"tune": "min_lr"}, "set a number above 0 to start from"),
    ({"seed": "0,1", "nproc_per_node": 3}, "is not divisible by the number of processes"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=str)
def test_mistakes_are_found_before_anything_is_written(corpus, tmp_path, run, changes, message):
    with pytest.raises(ValueError, match=message):
        run(*grid(corpus, tmp_path / "out", **changes))
    assert not list(tmp_path.iterdir())


# ---- real runs ----

LONGER = {
    "seed": "0..1",
    "max_steps": 80,
    "checkpoint_interval": 10,
    "eval_interval": 80,
    "eval_full": False,
}


def run_in_process_group(arguments) -> None:
    """Run sweep.py as the leader of a process group, which can be killed with its runs."""
    os.setpgid(0, 0)
    call("research/sweep.py", *arguments)


def test_a_killed_sweep_is_resumed(corpus, tmp_path, run, capsys):
    out = tmp_path / "out"
    arguments = grid(corpus, out, **LONGER)
    cells = make_cells(*arguments)
    finish(cells[0], step=80, val_loss=2.0)
    process = multiprocessing.get_context("fork").Process(
        target=run_in_process_group, args=(arguments,)
    )
    process.start()
    wait_for(lambda: checkpoint.list_checkpoints(cells[1].folder))
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    assert 10 <= sweep.find_saved_step(cells[1]) < 80
    assert are_finished(cells) == [True, False]
    capsys.readouterr()
    wait_for(lambda: not is_locked(cells[1].folder))
    assert run(*arguments) == 0
    printed = capsys.readouterr().out
    assert "2 cells (2 seed), 1 finished: 1 runs left" in printed
    assert "cell 1 of 2 | seed=0 | val_loss 2.0000 | finished before\n" in printed
    assert not cells[0].log.exists()
    records = metrics.read(cells[1].folder / "metrics.jsonl")
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 81))
    assert f"val_loss {records[-1]['val_loss']:.4f}" in printed
    attempts = cells[1].log.read_text().split("$ ")[1:]
    steps = [("step 10/80" in text, "step 80/80" in text) for text in attempts]
    assert steps == [(True, False), (False, True)]  # resumed, not restarted
    assert (out / "table.md").read_text() in printed


def is_locked(folder) -> bool:
    """Return whether a run trains in a folder."""
    try:
        files.lock_file(folder / "lock").close()
    except BlockingIOError:
        return True
    return False


# ---- exit codes and signals, with a script in place of train.py ----


def test_a_failed_cell_is_reported_and_the_others_run(corpus, tmp_path, run, fake, capsys):
    fake("finish() if keys['seed'] != '1' else sys.exit('train.py: seed 1')")
    arguments = grid(corpus, tmp_path / "out", seed="0..2")
    assert run(*arguments) == 1
    assert are_finished(make_cells(*arguments)) == [True, False, True]
    printed = capsys.readouterr()
    failed = f"failed: {tmp_path}/out/seed=1.log: train.py: seed 1"
    assert printed.err.splitlines()[0] == failed
    assert "| FAILED (exit code 1) |" in printed.out
    assert "not finished: `seed=1`, 0 of 6 steps saved" in printed.out
    fake("finish(3.0)")
    assert run(*arguments) == 0
    assert capsys.readouterr().out.count("finished before") == 2
    assert sweep.read_final_evaluation(make_cells(*arguments)[0])["val_loss"] == 2.0
    log = (tmp_path / "out" / "seed=0.log").read_text()
    assert len(log.split("$ ")) == 2  # no process for a finished cell


def test_cells_at_a_time_share_the_cores_and_have_gpus_of_their_own(
    corpus, tmp_path, run, fake, capsys, monkeypatch
):
    """Each of two cells waits until the other runs as well; a third starts when one has ended."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    fake(
        "here = os.path.dirname(sys.argv[0])\n"
        "began = [os.environ['OMP_NUM_THREADS'], os.environ['CUDA_VISIBLE_DEVICES']]\n"
        "open(f'{here}/began_' + keys['seed'], 'w').write(' '.join(began))\n"
        "other = f'{here}/began_' + {'0': '1', '1': '0', '2': '0'}[keys['seed']]\n"
        "while not os.path.exists(other):\n"
        "    time.sleep(0.01)\n"
        "finish(float(keys['seed']))\n"
    )
    assert run(*grid(corpus, tmp_path / "out", seed="0..2"), "--jobs=2") == 0
    began = [(tmp_path / f"began_{seed}").read_text().split() for seed in range(3)]
    num_threads = str(max(len(os.sched_getaffinity(0)) // 2, 1))
    assert {threads for threads, _ in began} == {num_threads}
    assert sorted(gpu for _, gpu in began[:2]) == ["3", "5"]
    assert began[2][1] in ("3", "5")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cell ")]
    expected = [[f"cell {s + 1} of 3", f"seed={s}", f"val_loss {s}.0000"] for s in range(3)]
    assert sorted(line.split(" | ")[:3] for line in lines) == expected


@pytest.mark.parametrize(
    ("jobs", "gpus_per_cell", "expected"),
    [
        (1, 1, [None]),
        (2, 1, ["0", "1"]),
        # too few: each GPU has about the same number of cells
        (3, 4, ["0,1,2,3", "4,5,6,7", "0,1,2,3"]),
        (2, 6, ["0,1,2,3,4,5", "6,7,0,1,2,3"]),
        # too few for one cell
        (2, 9, [None, None]),
    ],
)
def test_gpus_are_divided_among_cells(jobs, gpus_per_cell, expected, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert sweep.divide_gpus(jobs, gpus_per_cell) == expected


STOP = """
def stop(number, frame):
    open(out + '.saved', 'w').write(str(number))
    end(75)
signal.signal(signal.SIGTERM, stop)
"""


@pytest.mark.parametrize(
    ("number", "code", "jobs"), [(signal.SIGINT, 130, 1), (signal.SIGTERM, 143, 2)]
)
def test_a_signal_is_passed_on_as_sigterm_to_all_cells_that_run(
    corpus, tmp_path, run, fake, capsys, number, code, jobs
):
    fake(
        f"{STOP}open(out + '.began', 'w').close()\n"
        f"if keys['seed'] == '{jobs - 1}':\n"
        "    while not os.path.exists(os.path.dirname(out) + '/seed=0.began'):\n"
        "        time.sleep(0.01)\n"
        f"    os.kill(os.getppid(), {int(number)})\n"
        "time.sleep(60)\n"
    )
    out = tmp_path / "out"
    assert run(*grid(corpus, out, seed="0..3"), f"--jobs={jobs}") == code
    saved = {path.name: path.read_text() for path in out.glob("*.saved")}
    assert saved == {f"seed={seed}.saved": str(int(signal.SIGTERM)) for seed in range(jobs)}
    assert len(list(out.glob("*.log"))) == jobs
    assert capsys.readouterr().out.count(f"stopped by {number.name}; to resume: ") == 1


def test_exit_codes(corpus, tmp_path, run, fake, capsys):
    fake("end(75) if keys['seed'] == '1' else finish()")
    arguments = grid(corpus, tmp_path / "out", seed="0..2")
    assert run(*arguments) == 75
    assert "stopped; to resume: python research/sweep.py --model=" in capsys.readouterr().out
    assert not (tmp_path / "out" / "seed=2.log").exists()
    for source, message in (
        ("sys.exit(7)", "FAILED (exit code 7)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", f"FAILED (exit code {128 + signal.SIGKILL})"),
        ("pass", "FAILED (exit code 1)"),
    ):
        fake(f"print('the last line', flush=True)\n{source}")
        assert run(*arguments) == 1
        assert message in capsys.readouterr().out


def test_torchrun_says_what_train_said_and_is_stopped_with_it(corpus, tmp_path, run, fake, capsys):
    arguments = grid(corpus, tmp_path / "out", seed="0,1", nproc_per_node=2)
    fake(
        f"{STOP}place = [os.environ['WORLD_SIZE'], str(os.getpgid(os.getppid()))]\n"
        "open(sys.argv[0] + '.place', 'w').write(' '.join(place))\n"
        f"os.kill({os.getpid()}, signal.SIGTERM) if os.environ['RANK'] == '0' else None\n"
        "time.sleep(60)\n"
    )
    assert run(*arguments) == 143
    assert (tmp_path / "out/seed=0.saved").exists()
    processes, group = (tmp_path / "train.py.place").read_text().split()
    assert processes == "2"
    assert int(group) != os.getpgrp()  # Ctrl-C must not reach torchrun beside our SIGTERM
    fake("end(0)\n")  # with exit code 0, as torchrun would begin again at any other
    assert run(*arguments) == 75
    capsys.readouterr()
    fake("sys.exit('train.py: boom')")  # after an attempt that was stopped, in the same folder
    assert run(*arguments) == 1
    printed = capsys.readouterr()
    assert "FAILED (exit code 1)" in printed.out
    assert "seed=0.log: train.py: boom" in printed.err
    fake("finish()")
    assert run(*arguments) == 0


# ---- finished or not ----


def test_finished_is_what_train_says(corpus, tmp_path):
    cell, other = make_cells(*grid(corpus, tmp_path, seed="0,1"))
    assert are_finished([cell]) == [False]
    finish(cell, step=5, val_loss=2.0)  # of a sweep with fewer steps
    assert are_finished([cell]) == [False]
    finish(other, val_loss=2.5)
    assert sweep.read_final_evaluation(other)["val_loss"] == 2.5
    (other.folder / "metrics.jsonl").unlink()  # saved, but not evaluated yet
    assert are_finished([other]) == [False]


def test_a_folder_with_other_settings_is_refused(corpus, tmp_path, run):
    """Also with settings that may change when a run is resumed, but give the cell another result."""
    arguments = grid(corpus, tmp_path / "out", seed="0,1")
    for cell in make_cells(*arguments):
        finish(cell, val_loss=2.0)
    assert len(make_cells(*arguments, "--log_interval=5")) == 2
    for changed in ("learning_rate=0.5", "max_steps=3", "eval_part=second", "skip_nonfinite=2"):
        key = changed.partition("=")[0]
        with pytest.raises(
            ValueError, match=f"seed=0 was trained with {key}=.* give another --out"
        ):
            run(*arguments, f"--{changed}")


# ---- the table ----

LOSSES = {(4, "adamw"): [3.1, 3.25, 3.02], (4, "muon"): [2.5, 2.75], (1, "adamw"): [4.125]}


@pytest.fixture
def partly_finished(corpus, tmp_path):
    """Return the arguments of 2 x 2 settings, of which three, two, one and no seed are finished."""
    arguments = grid(
        corpus, tmp_path, ddl_value_channels="4,1", optimizer="adamw,muon", seed="0..2"
    )
    for cell in make_cells(*arguments):
        setting = (cell.values["ddl_value_channels"], cell.values["optimizer"])
        losses = LOSSES.get(setting, [])
        seed = cell.values["seed"]
        if seed < len(losses):
            finish(cell, val_loss=losses[seed], val_bits_per_byte=losses[seed] / 2)
    return arguments


def test_the_table_has_the_finished_cells_and_names_the_others(partly_finished, tmp_path, capsys):
    sweep.write_table(make_cells(*partly_finished), tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert capsys.readouterr().out == text
    for losses in (LOSSES[4, "adamw"], LOSSES[4, "muon"]):
        mean, half_width = by_hand(losses)
        assert f"| {mean:.4f} ± {half_width:.4f} ({len(losses)}) |" in text
    assert "| 4.1250 " in text
    assert text.count("not finished: `ddl_value_channels=1,optimizer=muon,seed=") == 3
    assert "`ddl_value_channels=4,optimizer=muon,seed=2`, 0 of 6 steps saved" in text


def test_a_diverged_cell_is_named_and_in_no_mean(partly_finished, tmp_path):
    cells = make_cells(*partly_finished)
    finish(cells[0], val_loss=math.nan)
    sweep.write_table(cells, tmp_path)
    text = (tmp_path / "table.md").read_text()
    assert f"diverged: `{cells[0].folder.name}`, its loss is not finite" in text
    mean, half_width = by_hand(LOSSES[4, "adamw"][1:])
    assert f"| {mean:.4f} ± {half_width:.4f} (2) |" in text


# ---- the search for learning rates ----

BOWL = """
import math
powers = [math.log2(float(keys[key]) / 0.01) for key in ("learning_rate", "muon_learning_rate")]
if keys["ddl_value_channels"] == "1" and powers[0] > 0:
    os.makedirs(out + "/nonfinite")
    end(1, 0)
finish(sum((power - 1) ** 2 for power in powers))
"""
SEARCH = {
    "optimizer": "muon",
    "learning_rate": 0.01,
    "muon_learning_rate": 0.01,
    "ddl_value_channels": "1,2",
    "tune": "learning_rate,muon_learning_rate",
}


def test_the_best_rates_of_every_setting_are_named(corpus, tmp_path, run, fake, capsys):
    fake(BOWL)
    out = tmp_path / "out"
    assert run(*grid(corpus, out, **SEARCH), "--jobs=2") == 0
    text = (out / "tuning.md").read_text()
    # the cross moves twice, and once where half of the runs diverge
    assert text.count("\n| ddl_value_channels=1 |") == 8
    assert text.count("\n| ddl_value_channels=2 |") == 10
    assert text in capsys.readouterr().out
    rates = "--learning_rate=0.02 --muon_learning_rate=0.02"
    assert f"ddl_value_channels=2: best after 10 tries: {rates}\n" in text
    assert "| ddl_value_channels=1 | 0.02          | 0.01               | diverged" in text
    assert "| **0.0000** " in text


def test_a_search_runs_only_what_is_missing(corpus, tmp_path, run, fake, capsys):
    fake(BOWL)
    arguments = grid(corpus, tmp_path / "out", **{**SEARCH, "ddl_value_channels": "2"})
    run(*arguments, "--tries=5")
    assert "this is at the edge of what was tried" in capsys.readouterr().out
    fake("sys.exit('no run')")
    assert run(*arguments, "--tries=5") == 0
    assert run(*arguments, "--tries=12") == 1
    assert "no run" in capsys.readouterr().err


def test_a_search_in_which_every_try_diverges_fails(corpus, tmp_path, run, fake):
    fake('os.makedirs(out + "/nonfinite")\nend(1, 0)')
    arguments = grid(corpus, tmp_path / "out", tune="learning_rate", learning_rate=0.64)
    tried = "--learning_rate=0.64, --learning_rate=0.32, --learning_rate=1.28"
    with pytest.raises(ValueError, match=rf"all 3 tries diverged \({tried}\)"):
        run(*arguments)
    assert "**" not in (tmp_path / "out" / "tuning.md").read_text()


def test_a_search_trains_one_seed_and_evaluates_the_first_half(corpus, tmp_path, run, fake, capsys):
    """A loss that is not a number is never the best, although the start has it."""
    fake(
        "open(out + '/keys', 'w').write(json.dumps(keys))\n"
        "finish(float('nan') if keys['learning_rate'] == '0.01' else 2.0)"
    )
    arguments = grid(corpus, tmp_path / "out", tune="learning_rate")
    assert run(*arguments, "--tries=3") == 0
    assert "best after 3 tries: --learning_rate=0.005" in capsys.readouterr().out
    all_keys = [json.loads(path.read_text()) for path in tmp_path.glob("out/*/keys")]
    assert len(all_keys) == 3
    assert {(keys["seed"], keys["eval_part"]) for keys in all_keys} == {("1000", "first")}
