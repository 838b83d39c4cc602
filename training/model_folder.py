"""Folders that a model can be read from: runs, checkpoints, exported and released models."""

from pathlib import Path
from typing import Literal, NamedTuple

import torch

from data import tokenizer
from huggingface import released
from model import weights
from model.gpt import GPT
from training import checkpoint

WeightsKind = Literal["trained", "ema"]
# of the option --weights, which is a WeightsKind
WEIGHTS_HELP = "trained weights, or their average (ema), which a run with ema_half_life saves"


class ModelFolder(NamedTuple):
    """A folder that weights can be read from, and what it says of its model."""

    path: Path
    model: str  # name of the variant
    config: dict  # keys of the model
    state: dict  # state.json; {} for an exported or released folder
    file_kind: str = "model"  # of the weight files (`weights.list_weight_files`)


def is_exported(path: Path) -> bool:
    """Return whether a folder is an exported or released model, not a run or checkpoint of ours."""
    return (path / "config.json").is_file() and not (path / "state.json").is_file()


def check_weights(folder: Path, weights_kind: WeightsKind) -> None:
    """Raise ValueError if averaged weights are asked for, and a folder has none, or damaged ones."""
    if weights_kind == "trained":
        return
    if is_exported(folder) or not (folder / checkpoint.EMA_FILE).exists():
        raise ValueError(
            f"{folder} has no averaged weights ({checkpoint.EMA_FILE}); only the checkpoints of a run "
            "with ema_half_life have them"
        )
    checkpoint.verify(folder, names=(checkpoint.EMA_FILE,))


def describe(path: Path, weights_kind: WeightsKind = "trained") -> ModelFolder:
    """Describe a run, a checkpoint, an exported folder, or a folder of the paper's released code.

    Raises:
        ValueError: it is none of these, damaged, or without the weights that are asked for
    """
    if is_exported(path):
        check_weights(path, weights_kind)
        model, config = released.describe(path)
        return ModelFolder(path, model, config, state={})
    folder = checkpoint.find(path, also_accepted=", or a folder of exported or released weights")
    check_weights(folder, weights_kind)
    state = checkpoint.read_state(folder)
    file_kind = "ema" if weights_kind == "ema" else "model"
    return ModelFolder(folder, state["model"], state["model_config"], state, file_kind)


def load_model(
    path: str | Path, device: torch.device | str, weights_kind: WeightsKind = "trained"
) -> tuple[GPT, tokenizer.Tokenizer, dict]:
    """Load the model of any folder that `describe` takes.

    Returns:
        The model in evaluation mode, its tokenizer, and state.json (without one, a dict with
        "model" and "model_config"); with averaged weights, it also has "weights": "ema".

    Raises:
        ValueError: the folder is damaged, hostile, or its files do not fit together
    """
    folder = describe(Path(path), weights_kind)
    encoding = tokenizer.read(folder.path)
    model = weights.read_model(
        folder.path, folder.model, folder.config, released.convert_weights, folder.file_kind
    )
    if encoding.n_vocab > model.config.vocab_size:
        raise ValueError(
            f"{folder.path}: the tokenizer has {encoding.n_vocab} tokens, but the model has only "
            f"vocab_size={model.config.vocab_size}"
        )
    state = {"model": folder.model, "model_config": folder.config, **folder.state}
    if weights_kind == "ema":
        state["weights"] = "ema"
    return model.to(device), encoding, state
