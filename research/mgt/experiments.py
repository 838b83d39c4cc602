"""The runs of each of the MGT paper's experiments, as commands of sweep.py."""

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

FOLDER = Path(os.path.relpath(Path(__file__).parent))
PRESETS = ("cpu", "paper")
ALL_ARMS = "standard,mhc,ddl,full,additive"
SEEDS = "0..2"

# Keys of train.py, and two more: `parameters` is the size for which the widths of experiment 4 are
# chosen, and `epochs` is converted to max_steps by the size of the corpus. They override the config
# file of the preset, cpu.py or paper.py, and the command line overrides them.
EXPERIMENTS = {
    "rank": {"mgt_arm": "standard,full,additive", "num_hidden_layers": "12,24,48,100"},
    "ablation": {"mgt_arm": ALL_ARMS, "num_hidden_layers": "48"},
    "beta": {"mgt_arm": "full", "num_hidden_layers": "100"},
    "depth": {"mgt_arm": "standard,full", "num_hidden_layers": "24,48,100,200"},
    "language": {"mgt_arm": "standard,full", "num_hidden_layers": "24"},
    "copy": {
        "mgt_arm": ALL_ARMS,
        "num_hidden_layers": "12",
        "dataset": "copy_task",
        "block_size": "64",
    },
}
# keys of an experiment at the size of a preset, which override the keys above
PRESET_SETTINGS = {
    "cpu": {
        "copy": {
            "num_hidden_layers": "4",
            "hidden_size": "64",
            "head_dim": "16",
            "global_batch_size": "32",
            "micro_batch_size": "32",
            "max_steps": "150",
            "eval_interval": "25",
            "optimizer": "muon",
            "learning_rate": "1e-2",
            "warmup_steps": "30",
            "eval_batches": "8",
        },
    },
    "paper": {
        "rank": {"epochs": "50"},
        "ablation": {"epochs": "50"},
        "beta": {"epochs": "100"},
        "depth": {
            "epochs": "50",
            "parameters": "20000000",
            "num_attention_heads": "4",
            "activation_checkpointing": "True",
        },
        "language": {
            "dataset": "wikitext",
            "epochs": "100",
            "eval_interval": "1000",
            "hidden_size": "512",
            "num_attention_heads": "8",
            "head_dim": "64",
        },
        "copy": {"epochs": "5", "eval_interval": "100"},
    },
}
SWEPT_KEYS = ("seed", "mgt_arm", "num_hidden_layers")  # keys that may have several values
NUM_BETA_CHECKPOINTS = 4  # experiment 3 measures gates at the start and after each quarter


def collect_settings(experiment: str, preset: str, options: dict[str, str]) -> dict[str, str]:
    """Return the keys for sweep.py and train.py as text.

    options: keys from the command line. `epochs` or `max_steps` replaces either of them.

    Raises:
        ValueError: the experiment does not use a key, or its report cannot use a value
    """
    check_options(experiment, preset, options)
    settings = {
        # later ones override earlier ones
        "seed": SEEDS,
        **EXPERIMENTS[experiment],
        **PRESET_SETTINGS[preset].get(experiment, {}),
    }
    if "max_steps" in options or "epochs" in options:
        settings.pop("max_steps", None)
        settings.pop("epochs", None)
    return {**settings, **options}


def check_options(experiment: str, preset: str, options: dict[str, str]) -> None:
    """Raise ValueError if the experiment does not use an option, or its report cannot use a value."""
    if preset == "cpu" and experiment != "copy":
        raise ValueError(
            f"--preset=cpu is a size of the copy task only; train {experiment} with "
            f"research/mgt/study.py {experiment}, or give --preset=paper"
        )
    if "parameters" in options and experiment != "depth":
        raise ValueError(
            f"--parameters={options['parameters']} is the size of experiment depth's models; omit "
            "it"
        )
    for key, value in options.items():
        if key not in SWEPT_KEYS and len(sweep.expand_values(key, value)) > 1:
            raise ValueError(
                f"--{key}={value}: give one value; a report compares only {', '.join(SWEPT_KEYS)}"
            )
    check_compared_values(experiment, options)


def check_compared_values(experiment: str, options: dict[str, str]) -> None:
    """Raise ValueError if the report of the experiment cannot tell apart the arms or depths."""
    depths = options.get("num_hidden_layers", "")
    if experiment not in ("rank", "depth") and "," in depths:
        raise ValueError(
            f"--num_hidden_layers={depths}: give one value; only rank and depth compare depths"
        )
    arms = options.get("mgt_arm")
    if arms is None:
        return
    if experiment == "beta" and arms not in ("full", "ddl"):
        raise ValueError(
            f"--mgt_arm={arms}: give full or ddl; beta measures one arm, and only these have the gate"
        )
    unknown_arms = set(arms.split(",")) - set(ALL_ARMS.split(","))
    if unknown_arms:
        raise ValueError(
            f"--mgt_arm={arms}: a report cannot show {', '.join(sorted(unknown_arms))}; give some of "
            f"{ALL_ARMS}"
        )


def make_commands(
    experiment: str, preset: str, options: dict[str, str], runs: Path
) -> list[list[str]]:
    """Return the arguments of sweep.py for every grid of the experiment.

    There is one grid, except in experiment 4, whose width depends on the arm and the depth.

    Raises:
        ValueError: an option is wrong, also one that train.py would refuse
    """
    settings = collect_settings(experiment, preset, options)
    config = str(FOLDER / f"{preset}.py")
    out = runs / f"{experiment}_{preset}"
    if "epochs" in settings:
        epochs = settings.pop("epochs")
        settings["max_steps"] = str(count_steps(epochs, config, settings))
    if experiment == "beta":
        run_config, _ = configure([config, *format_first_run(settings)], note=ignore_note)
        settings["checkpoint_interval"] = str(-(-run_config.max_steps // NUM_BETA_CHECKPOINTS))
        settings["keep_last"] = str(NUM_BETA_CHECKPOINTS)
    if experiment != "depth":
        return [[config, *sweep.format_options(settings), f"--out={out}"]]

    size = settings.pop("parameters")
    if not size.isdecimal() or not int(size):
        raise ValueError(f"--parameters={size}: give a whole number, 1 or more")
    depths = sweep.expand_values("num_hidden_layers", settings.pop("num_hidden_layers"))
    arms = sweep.expand_values("mgt_arm", settings.pop("mgt_arm"))
    commands = []
    for depth, arm in itertools.product(depths, arms):
        grid_settings = {**settings, "num_hidden_layers": depth, "mgt_arm": arm}
        grid_settings.update(find_width(int(size), config, grid_settings))
        commands.append(
            [config, *sweep.format_options(grid_settings), f"--out={out / f'{arm}_{depth}'}"]
        )
    return commands


def ignore_note(note: str) -> None:
    """Print nothing of what `configure` has to say."""


def format_first_run(settings: dict[str, str]) -> list[str]:
    """Return the options of the first run of the grid: the first value of each key."""
    return sweep.format_options(
        {key: sweep.expand_values(key, value)[0] for key, value in settings.items()}
    )


def count_steps(epochs: str, config: str, settings: dict[str, str]) -> int:
    """Return the number of steps, rounded up, that use the training split `epochs` times.

    A sequence uses block_size tokens of it, or a document if all documents have one length.

    Raises:
        MissingCorpus: the corpus is not prepared
    """
    train_settings = {key: value for key, value in settings.items() if key != "parameters"}
    run_config, model_config = configure(
        [config, *format_first_run(train_settings)], note=ignore_note
    )
    corpus = open_corpus(run_config.dataset)
    tokens_per_sequence = corpus.meta.get("window_tokens", model_config.block_size)
    tokens_per_step = run_config.global_batch_size * tokens_per_sequence
    num_tokens = sum(len(shard) for shard in corpus.train)
    # a fraction, because the float 0.1 is not a tenth
    return math.ceil(Fraction(epochs) * num_tokens / tokens_per_step)


def find_width(num_parameters: int, config: str, settings: dict[str, str]) -> dict[str, str]:
    """Return hidden_size and head_dim of the model whose size is nearest to num_parameters.

    The number of heads stays the same.
    """
    run_config, model_config = configure([config, *format_first_run(settings)], note=ignore_note)
    smallest_distance = None
    nearest_width = {}
    for multiple in itertools.count(1):
        head_dim = 2 * multiple  # RoPE rotates features in pairs
        hidden_size = head_dim * model_config.num_attention_heads
        candidate = dataclasses.replace(model_config, hidden_size=hidden_size, head_dim=head_dim)
        distance = count_parameters(run_config.model, candidate) - num_parameters
        if smallest_distance is None or abs(distance) < smallest_distance:
            smallest_distance = abs(distance)
            nearest_width = {"hidden_size": str(hidden_size), "head_dim": str(head_dim)}
        if distance > 0:
            return nearest_width


def check_corpora(experiment: str, cells: list[sweep.Cell]) -> None:
    """Raise ValueError if the copy task would be trained on a corpus without answers to score."""
    if experiment != "copy":
        return
    for dataset in {cell.settings["dataset"] for cell in cells}:
        if "window_tokens" not in open_corpus(dataset).meta:
            raise ValueError(
                f"--dataset={dataset}: it has no answers to score; give a dataset that "
                "data/copy_task/prepare.py prepared"
            )


def make_cells(command: list[str]) -> list[sweep.Cell]:
    """Return the cells of a sweep.

    Raises:
        ValueError: an option is wrong
    """
    arguments = sweep.read_arguments(command)
    return sweep.make_cells(arguments.sweep, arguments.files, arguments.swept, arguments.fixed)
