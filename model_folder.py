"""Folders that a model can be read from: runs, checkpoints, exported and released models."""

from pathlib import Path
from typing import NamedTuple

import torch

from data import tokenizer
from huggingface import released
from model import weights
from model.gpt import GPT
from training import checkpoint


class ModelFolder(NamedTuple):
    """A folder that weights can be read from, and what it says of its model."""

    path: Path
    model: str  # name of the variant
    config: dict  # keys of the model
    state: dict  # state.json; {} for an exported or released folder


def is_exported(path: Path) -> bool:
    """Return whether a folder is an exported or released model, not a run or checkpoint of ours."""
    return (path / "config.json").is_file() and not (path / "state.json").is_file()


def describe(path: Path) -> ModelFolder:
    """Describe a run, a checkpoint, an exported folder, or a folder of the paper's released code.

    Raises:
        ValueError: it is none of these, or damaged
    """
    if is_exported(path):
        model, config = released.describe(path)
        return ModelFolder(path, model, config, state={})
    folder = checkpoint.find(path, also_accepted=", or a folder of exported or released weights")
    state = checkpoint.read_state(folder)
    return ModelFolder(folder, state["model"], state["model_config"], state)


def load_model(
    path: str | Path, device: torch.device | str
) -> tuple[GPT, tokenizer.Tokenizer, dict]:
    """Load the model of any folder that `describe` takes.

    Returns:
        The model in evaluation mode, its tokenizer, and state.json (without one, a dict with
        "model" and "model_config").

    Raises:
        ValueError: the folder is damaged, hostile, or its files do not fit together
    """
    folder = describe(Path(path))
    encoding = tokenizer.read(folder.path)
    model = weights.read_model(folder.path, folder.model, folder.config, released.convert_weights)
    if encoding.n_vocab > model.config.vocab_size:
        raise ValueError(
            f"{folder.path}: the tokenizer has {encoding.n_vocab} tokens, but the model has only "
            f"vocab_size={model.config.vocab_size}"
        )
    state = {"model": folder.model, "model_config": folder.config, **folder.state}
    return model.to(device), encoding, state
