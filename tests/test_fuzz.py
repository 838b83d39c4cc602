"""Random mistakes in the configuration: a run trains, or ends with one clear line; never a traceback."""

import random
import signal

import pytest
from conftest import small_run
from in_process import call

import train
from configurator import knobs
from model import STEMS, model_class
from training import metrics

WILD = "0 -1 1 2 3 7 1000000007 10**6 -0.5 0.3 1e-9 1e30 nan inf -inf 1_0 None True False true auto cpu cuda".split()
WILD += "adamw muon wsd fsdp float64 k v write c normal attention ../.. [1] 1,2 --seed=1 %s".split()
WILD += ["", " ", "x" * 300, "ü"]
# What takes long or leaves the machine is not switched on.
HELD = {"compile", "wandb_log", "wandb_project", "wandb_run_name", "max_seconds", "help"}


def mutated(draw: random.Random, base: list[str]) -> list[str]:
    """One to three changes: another value, another key, a key without a value, a key twice or gone, a stray word."""
    stem = draw.choice(STEMS)
    schema = knobs(train.TrainConfig, model_class(stem).Config)
    arguments = [argument for argument in base if not argument.startswith("--model=")] + [f"--model={stem}"]
    for _ in range(draw.randint(1, 3)):
        key = draw.choice([name for name in schema if name not in HELD])
        kind = draw.random()
        if kind < 0.8:
            knob = schema[key]
            near = [str(choice) for choice in knob.choices] or [str(knob.default), str(draw.randint(1, 40))]
            near = ["True", "False"] if bool in knob.types else near
            value = draw.choice(near) if draw.random() < 0.8 else draw.choice(WILD)
            arguments.append(f"--{key}={value}")
        elif kind < 0.86:
            place = draw.randrange(len(key))
            arguments.append(
                f"--{key[:place]}{draw.choice(['', 'x', key[place] * 2])}{key[place + 1 :]}={draw.choice(WILD)}"
            )
        elif kind < 0.9:
            arguments.append(f"--{key}")
        elif kind < 0.95:
            arguments.remove(
                draw.choice([a for a in arguments if a.split("=")[0] not in ("--compile", "--out_dir", "--device")])
            )
        else:
            arguments.insert(
                draw.randrange(len(arguments)), draw.choice(["-h", "-", "stray", "config/nowhere.py", "--", "=1"])
            )
    return arguments


def run_of(arguments: list[str]):
    """(exit code, lines of stderr) of train.py in this process."""
    result = call("train.py", *arguments)
    return result.returncode, result.stderr.decode().splitlines()


@pytest.mark.parametrize("count", [15, pytest.param(300, marks=pytest.mark.slow)])
def test_mutated_configurations_train_or_end_in_one_line(corpus, tmp_path, monkeypatch, count):
    draw, trained, refused, wrong = random.Random(count), 0, [], []

    def too_long(_number, _frame):
        raise TimeoutError("a case took longer than a minute")

    signal.signal(signal.SIGALRM, too_long)
    monkeypatch.chdir(tmp_path)
    for number in range(count):
        out = tmp_path / f"run_{number}"
        base = small_run(
            corpus, out, max_steps=2, warmup_steps=1, checkpoint_interval=2, eval_interval=2, eval_full=False
        )
        arguments = mutated(draw, [*base, "--max_seconds=10.0"])
        signal.alarm(60)
        try:
            code, lines = run_of(arguments)
        except Exception as error:
            code, lines = repr(error), []
        signal.alarm(0)
        path = out / "metrics.jsonl"
        steps = [r["step"] for r in metrics.read(path) if "loss" in r] if path.exists() else []
        if code in (0, 75) and steps[:2] == [1, 2][: len(steps)] and (steps or any("--resume" in a for a in arguments)):
            trained += 1
        elif (
            code in (1, 2)
            and len([line for line in lines if not line.startswith("warning")]) == 1
            and len(lines[-1]) > 20
        ):
            refused.append(lines[-1])
        elif not (code == 0 and any(a.startswith(("--dry_run", "--out_dir")) for a in arguments if a not in base)):
            wrong.append((arguments[len(base) :], code, lines))
    print(f"{trained} trained, {len(refused)} refused, {len(set(refused))} different messages", *refused, sep="\n")
    assert not wrong, wrong
    assert trained >= 0.3 * count
    assert len(refused) >= 0.2 * count
