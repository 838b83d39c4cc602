"""Mutate configurations at random: a run trains or ends with one line, never with a traceback."""

import random

import pytest
from helpers import small_run
from in_process import call
from models import PAPER

from configurator import collect_options
from model import model_class
from training.config import TrainConfig

WILD_VALUES = [
    *"0 -1 1 2 3 7 1000000007 10**6 -0.5 0.3 1e-9 1e30 nan inf -inf 1_0".split(),
    *"None True False true auto cpu cuda".split(),
    *"adamw muon wsd fsdp float64 k v write c normal attention".split(),
    *"../.. [1] 1,2 --seed=1 %s".split(),
    "",
    " ",
    "x" * 300,
    "ü",
]
# keys that take long or need the network, and are not mutated
UNCHANGED_KEYS = {"compile", "tracker", "wandb_project", "wandb_run_name", "max_seconds", "help"}


def mutate(draw: random.Random, arguments: list[str]) -> list[str]:
    """Return the arguments with another model and one to three mutations.

    A mutation is a key with another value, a key without a value, or a stray word.
    """
    model_name = draw.choice(sorted(PAPER))
    options = collect_options(TrainConfig, model_class(model_name).Config)
    mutated = [*arguments, f"--model={model_name}"]
    for _ in range(draw.randint(1, 3)):
        name = draw.choice([name for name in options if name not in UNCHANGED_KEYS])
        declared = options[name]
        if bool in declared.types:
            plausible_values = ["True", "False"]
        else:
            plausible_values = [declared.default, draw.randint(1, 40)]
        if declared.choices:
            plausible_values = list(declared.choices)
        value = draw.choice(plausible_values if draw.random() < 0.8 else WILD_VALUES)
        malformed = [f"--{name}", f"--{name}s={value}", draw.choice(["-", "stray", "--", "=1"])]
        mutated.append(f"--{name}={value}" if draw.random() < 0.85 else draw.choice(malformed))
    return mutated


@pytest.mark.parametrize("num_runs", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_mutated_configurations_train_or_end_in_one_line(corpus, tmp_path, monkeypatch, num_runs):
    draw = random.Random(num_runs + 1)
    num_trained = 0
    num_refused = 0
    monkeypatch.chdir(tmp_path)
    for number in range(num_runs):
        run = tmp_path / f"run_{number}"
        arguments = small_run(
            corpus,
            run,
            max_steps=2,
            warmup_steps=1,
            checkpoint_interval=2,
            eval_interval=2,
            eval_full=False,
            max_seconds=10.0,
        )
        arguments = mutate(draw, arguments)
        print(arguments)  # pytest shows them if the assertions fail
        result = call("train.py", *arguments)
        if (run / "metrics.jsonl").exists():
            num_trained += 1
        if result.returncode not in (0, 75):
            lines = result.stderr.decode().splitlines()
            [line] = [line for line in lines if not line.startswith("warning")]
            assert result.returncode in (1, 2)
            assert len(line) > 20
            num_refused += 1
    assert num_trained >= 0.3 * num_runs
    assert num_refused >= 0.2 * num_runs
