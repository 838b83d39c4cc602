"""What each of the MGT paper's experiments trains, as commands of sweep.py."""

import dataclasses
import itertools
import math
import os
from fractions import Fraction
from pathlib import Path

from data.shards import open_corpus
from research import sweep
from training.memory import count_parameters
from training.settings import configure

HERE = Path(os.path.relpath(Path(__file__).parent))
PRESETS = "cpu", "paper"
ALL_ARMS = "standard,mhc,ddl,full,additive"

# Keys of train.py, over those of cpu.py or paper.py; what is typed goes over both. `parameters` is
# the size that the widths of experiment 4 are chosen for; `epochs` become max_steps, as the corpus
# has it.
EXPERIMENTS = {
    "rank": "mgt_arm=standard,full,additive num_hidden_layers=12,24,48,100",
    "ablation": f"mgt_arm={ALL_ARMS} num_hidden_layers=48",
    "beta": "mgt_arm=full num_hidden_layers=100",
    "depth": "mgt_arm=standard,full num_hidden_layers=24,48,100,200",
    "language": "mgt_arm=standard,full num_hidden_layers=24",
    "copy": f"mgt_arm={ALL_ARMS} num_hidden_layers=12 dataset=copy_task block_size=64",
}
NARROW = "num_hidden_layers=4 hidden_size=64 head_dim=16"
OF_PRESET = {
    "cpu": {
        "copy": f"{NARROW} global_batch_size=32 micro_batch_size=32 max_steps=150 eval_interval=25 "
        "optimizer=muon learning_rate=1e-2 warmup_steps=30 eval_batches=8",
    },
    "paper": {
        "beta": "epochs=100",
        "depth": "parameters=20000000 num_attention_heads=4 activation_checkpointing=True",
        "language": "dataset=wikitext epochs=100 eval_interval=1000 hidden_size=512 "
        "num_attention_heads=8 head_dim=64",
        "copy": "epochs=5 eval_interval=100",
    },
}
SWEPT = "seed", "mgt_arm", "num_hidden_layers"  # keys that may have several values
QUARTERS = 4  # experiment 3 looks at the start and after each quarter of training


def settings(experiment: str, preset: str, given: dict[str, str]) -> dict[str, str]:
    """Keys of sweep.py and train.py, as text, by what overrides what. A length in one unit replaces that in the other.

    ValueError: a key that the experiment has no use for, or a value that its report has none for.
    """
    if preset == "cpu" and experiment != "copy":
        raise ValueError(
            f"--preset=cpu is a size of the copy task only; train {experiment} with "
            f"research/mgt/study.py {experiment}, or give --preset=paper"
        )
    if "parameters" in given and experiment != "depth":
        what = f"--parameters={given['parameters']} is the size of experiment depth's models"
        raise ValueError(f"{what}: leave it out")
    for key, value in given.items():
        if key not in SWEPT and len(sweep.expand_values(key, value)) > 1:
            fix = f"give one value; a report compares {', '.join(SWEPT)} alone"
            raise ValueError(f"--{key}={value}: {fix}")
    arms = given.get("mgt_arm", "full")
    if experiment == "beta" and (without := {*arms.split(",")} - {"full", "ddl"}):
        fix = f"{', '.join(sorted(without))} has no beta; give full or ddl"
        raise ValueError(f"--mgt_arm={arms}: {fix}")
    length = "epochs=50" if preset == "paper" else ""
    texts = "seed=0..2", length, EXPERIMENTS[experiment], OF_PRESET[preset].get(experiment, "")
    result = dict(pair.split("=") for text in texts for pair in text.split())
    if {"max_steps", "epochs"} & given.keys():
        result = {key: value for key, value in result.items() if key not in ("max_steps", "epochs")}
    return result | given


def commands(experiment: str, preset: str, given: dict[str, str], runs: Path) -> list[list[str]]:
    """Arguments of sweep.py for every grid of the experiment: one, or, where the width depends on arm and depth, many.

    ValueError: train.py would refuse a key.
    """
    keys, config = settings(experiment, preset, given), str(HERE / f"{preset}.py")
    out = runs / f"{experiment}_{preset}"
    if "epochs" in keys:
        keys["max_steps"] = str(steps_of(keys.pop("epochs"), config, keys))
    if experiment == "beta":
        run, _ = configure([config, *one_value_each(keys)], note=lambda line: None)
        keys["checkpoint_interval"] = str(-(-run.max_steps // QUARTERS))
        keys["keep_last"] = str(QUARTERS)
    if experiment != "depth":
        return [[config, *sweep.format_options(keys), f"--out={out}"]]
    size = keys.pop("parameters")
    if not size.isdecimal() or not int(size):
        raise ValueError(f"--parameters={size}: give a whole number from 1 on")
    swept = (sweep.expand_values(key, keys.pop(key)) for key in ("num_hidden_layers", "mgt_arm"))
    result = []
    for depth, arm in itertools.product(*swept):
        own = keys | {"num_hidden_layers": depth, "mgt_arm": arm}
        own |= width_for(int(size), config, own)
        result.append([config, *sweep.format_options(own), f"--out={out / f'{arm}_{depth}'}"])
    return result


def one_value_each(keys: dict[str, str]) -> list[str]:
    """Options of one run of the grid, the first of each key's values."""
    return sweep.format_options(
        {key: sweep.expand_values(key, value)[0] for key, value in keys.items()}
    )


def steps_of(epochs: str, config: str, keys: dict[str, str]) -> int:
    """The least number of steps that take so many times the tokens of the training split. ValueError: no corpus.

    A sequence takes block_size of them, or, of a corpus whose documents have one length, a document.
    """
    own = {key: value for key, value in keys.items() if key != "parameters"}
    run, model = configure([config, *one_value_each(own)], note=lambda line: None)
    corpus = open_corpus(run.dataset)
    a_step = run.global_batch_size * corpus.meta.get("window_tokens", model.block_size)
    tokens = sum(map(len, corpus.train))
    return math.ceil(Fraction(epochs) * tokens / a_step)  # exactly: 0.1 is a tenth


def width_for(parameters: int, config: str, keys: dict[str, str]) -> dict[str, str]:
    """hidden_size and head_dim, with the heads that there are, of the model whose size is nearest to `parameters`."""
    run, model = configure([config, *one_value_each(keys)], note=lambda line: None)
    nearest, found = None, {}
    for multiple in itertools.count(1):  # RoPE takes features in pairs
        width = {"hidden_size": 2 * multiple * model.num_attention_heads, "head_dim": 2 * multiple}
        distance = count_parameters(run.model, dataclasses.replace(model, **width)) - parameters
        if nearest is None or abs(distance) < nearest:
            nearest, found = abs(distance), {key: str(value) for key, value in width.items()}
        if distance > 0:
            return found


def check_corpora(experiment: str, cells: list[sweep.Cell]) -> None:
    """ValueError: the copy task's report needs a corpus whose answers are scored."""
    for dataset in {cell.settings["dataset"] for cell in cells} if experiment == "copy" else ():
        if "window_tokens" not in open_corpus(dataset).meta:
            fix = "it has no answers to score; give one of data/copy_task/prepare.py"
            raise ValueError(f"--dataset={dataset}: {fix}")


def cells_of(command: list[str]) -> list[sweep.Cell]:
    """The cells of a sweep. ValueError: a mistake in a key."""
    return sweep.make_cells(*sweep.read_arguments(command))
