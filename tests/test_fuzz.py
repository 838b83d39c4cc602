"""Random mistakes in the configuration: a run trains, or ends with one clear line; never a
traceback.
"""

import random

import pytest
from helpers import one_line_error, small_run
from in_process import call
from models import PAPER

from model import model_class
from model.options import collect_options
from training.config import TrainConfig

WILD = "0 -1 1 2 3 7 1000000007 10**6 -0.5 0.3 1e-9 1e30 nan inf -inf 1_0 None True False true auto cpu cuda".split()
WILD += "adamw muon wsd fsdp float64 k v write c normal attention ../.. [1] 1,2 --seed=1 %s".split()
WILD += ["", " ", "x" * 300, "ü"]
# What takes long or leaves the machine is not switched on.
HELD = {"compile", "wandb_log", "wandb_project", "wandb_run_name", "max_seconds", "help"}


def mutated(draw: random.Random, base: list[str]) -> list[str]:
    """Another variant, and one to three changes: a key with another value, one without a value, or
    a stray word.
    """
    stem = draw.choice(sorted(PAPER))
    schema = collect_options(TrainConfig, model_class(stem).Config)
    arguments = [*base, f"--model={stem}"]
    for _ in range(draw.randint(1, 3)):
        name = draw.choice([name for name in schema if name not in HELD])
        knob = schema[name]
        near = ["True", "False"] if bool in knob.types else [knob.default, draw.randint(1, 40)]
        value = draw.choice([*(knob.choices or near)] if draw.random() < 0.8 else WILD)
        odd = [f"--{name}", f"--{name}s={value}", draw.choice(["-", "stray", "--", "=1"])]
        arguments.append(f"--{name}={value}" if draw.random() < 0.85 else draw.choice(odd))
    return arguments


@pytest.mark.parametrize("count", [15, pytest.param(300, marks=pytest.mark.slow)])
def test_mutated_configurations_train_or_end_in_one_line(corpus, tmp_path, monkeypatch, count):
    draw, trained, refused = random.Random(count + 1), 0, []
    monkeypatch.chdir(tmp_path)
    short = {
        "max_steps": 2,
        "warmup_steps": 1,
        "checkpoint_interval": 2,
        "eval_interval": 2,
        "eval_full": False,
    }
    for number in range(count):
        out = tmp_path / f"run_{number}"
        arguments = mutated(draw, small_run(corpus, out, **short, max_seconds=10.0))
        print(arguments)  # of the case that fails
        result = call("train.py", *arguments)
        trained += (out / "metrics.jsonl").exists()
        if result.returncode not in (0, 75):
            lines = [
                line
                for line in result.stderr.decode().splitlines()
                if not line.startswith("warning")
            ]
            assert result.returncode in (1, 2)
            assert len(lines) == 1
            assert len(lines[0]) > 20
            refused += lines
    assert trained >= 0.3 * count
    assert len(refused) >= 0.2 * count


@pytest.mark.parametrize(
    "size", [{"num_hidden_layers": 10**9}, {"block_size": 10**8}, {"hidden_size": 10**11}], ids=str
)
def test_absurd_sizes_are_refused_at_once(corpus, tmp_path, size):
    """Before they are run without data, which takes minutes, or overflow."""
    line = one_line_error(call("train.py", *small_run(corpus, tmp_path / "run", **size)))
    assert "needs more than" in line
    assert not (tmp_path / "run").exists()
