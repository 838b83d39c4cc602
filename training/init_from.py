"""Starting a new run from trained weights (`init_from`).

The weights are those of a run, of an exported folder, or of the paper's released code. The folder
decides the model variant and its keys; optimizer, step and data order start afresh. When such a
run is resumed, everything comes from its own checkpoint, and the folder may be gone.
"""

from collections.abc import Collection
from pathlib import Path

import model_folder
from configurator import Option
from data import tokenizer
from huggingface import released
from model import make_config, weights
from model.gpt import GPT

# A config file's recipe may be applied to weights of any size.
SIZE_KEYS = ("vocab_size", "num_hidden_layers", "num_attention_heads", "hidden_size", "head_dim")
NANOGPT_VALUES = {
    "scratch": "omit the key to start a new run",
    "resume": "resume a run with --resume=auto",
}


def read_init_settings(folder: str, weights_kind: str = "trained") -> dict[str, object]:
    """Return the settings that the folder decides: "model", and the keys of the model.

    Args:
        weights_kind: "trained" or "ema"

    Raises:
        ValueError: the folder is missing or damaged
    """
    if folder in NANOGPT_VALUES and not Path(folder).exists():
        raise ValueError(f"init_from={folder}: {NANOGPT_VALUES[folder]}")
    try:
        described = model_folder.describe(Path(folder), weights_kind)
        config = make_config(described.model, described.config)
    except ValueError as error:
        raise ValueError(f"init_from={folder}: {error}") from error
    return {"model": described.model, **vars(config)}


def find_ignored_keys(
    settings: dict[str, object],
    trained: dict[str, object],
    options: dict[str, Option],
    typed_keys: Collection[str],
) -> list[str]:
    """Return the keys that a user gives in vain, because the weights are already trained.

    They are those that set initial values and, in a config file, the sizes of the model.

    Args:
        settings: those that the user gives
        trained: the settings of the trained weights; {} for a run with weights of its own
        typed_keys: the keys that are on the command line, not in a config file
    """
    return sorted(
        name
        for name in settings.keys() & trained.keys()
        if settings[name] != trained[name]
        and (options[name].only_initializes or (name in SIZE_KEYS and name not in typed_keys))
    )


def check_not_contradicted(
    settings: dict[str, object], init_settings: dict[str, object], options: dict[str, Option]
) -> None:
    """Raise ValueError if a key on which the weights depend differs from the folder's.

    Args:
        settings: those that the user gives, without the ignored ones
        init_settings: those that the folder decides; {} for a run with weights of its own
    """
    for name in sorted(settings.keys() & init_settings.keys()):
        if settings[name] != init_settings[name] and not options[name].changes_no_weight:
            raise ValueError(
                f"{name}={settings[name]!r}, but init_from={settings['init_from']} has "
                f"{init_settings[name]!r}; give --{name}={init_settings[name]}"
            )


def load_weights(
    model: GPT, init_folder: str, corpus: Path | None, weights_kind: str = "trained"
) -> None:
    """Fill the model with the weights of the folder.

    Args:
        corpus: folder of the data; None if they have not been prepared yet
        weights_kind: "trained" or "ema"

    Raises:
        ValueError: the weights do not fit, or another tokenizer made the tokens of the corpus
    """
    folder = model_folder.describe(Path(init_folder), weights_kind)
    # released folders have no tokenizer
    if corpus is not None and (folder.path / "tokenizer.json").exists():
        check_tokenizer(folder.path, init_folder, corpus)
    weights.load_into(model, folder.path, convert=released.convert_weights, kind=folder.file_kind)


def check_tokenizer(path: Path, init_folder: str, corpus: Path) -> None:
    """Raise ValueError if the corpus was tokenized with another tokenizer than the model's."""
    model_tokenizer = tokenizer.read(path)
    corpus_tokenizer = tokenizer.read(corpus)
    if not tokenizer.same_tokens(model_tokenizer, corpus_tokenizer):
        raise ValueError(
            f"init_from={init_folder} was trained with the tokenizer {model_tokenizer.name}, but "
            f"{corpus} was tokenized with {corpus_tokenizer.name}; prepare the corpus with the "
            "model's tokenizer"
        )
