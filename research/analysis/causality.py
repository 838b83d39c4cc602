"""`analyze.py causality`: whether any output of a model depends on tokens that come after it.

Each of a sequence's tokens is changed in turn, and what every read, sublayer and write returns is
compared at the positions before it (model/causality.py), in float64 on the CPU. The exit code is 1
if something changes there. RUN_OR_FILE is a run, checkpoint or exported folder, or the file of a
variant, such as your own. From a file, a tiny, untrained model is built. Its parameters are moved
off their initial values, so that a parameter that starts at zero cannot hide a leak.
"""

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch

import configurator
import model
from configurator import argument, collect_options, option
from model.causality import find_leak, move_parameters
from model.gpt import GPT
from model_folder import describe

# of the model of a file; everything else is the default of its stream
TINY = {
    "vocab_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 8,
    "hidden_size": 16,
}


@dataclass(frozen=True)
class Options:
    """What is checked."""

    models: tuple[str, ...] = argument(
        "run, checkpoint or exported folders, or files of variants; FILE.py+key=value+... sets keys "
        "of the variant"
    )
    tokens: int = option(
        24,
        "number of random tokens in the sequence; the block_size of the model if that is smaller",
        low=2,
    )


def build_from_file(path: Path, key_values: list[str]) -> GPT:
    """Build the stream of a file, tiny and untrained.

    Args:
        key_values: "key=value" of keys of the stream

    Raises:
        ValueError: there is no such file, it holds no stream, or a key or value is wrong
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give the file of a variant, or a run folder")
    model_name = path.stem
    folder = str(path.resolve().parent)
    # searched after model/ itself, as if the file were there
    if folder not in map(str, model.__path__):
        model.__path__.append(folder)
    if model_name not in model.MODEL_NAMES:
        model.MODEL_NAMES.append(model_name)
    importlib.invalidate_caches()
    imported_file = Path(model.find_variant(model_name).origin)
    if imported_file.resolve() != path.resolve():
        raise ValueError(
            f"{path} has the same name as {imported_file}; rename it so that it can be imported"
        )
    cls = model.model_class(model_name)
    options = collect_options(cls.Config)
    texts = dict(key_value.partition("=")[::2] for key_value in key_values)
    configurator.check_names(texts, options)
    # the user's keys count over the sizes of the tiny model
    config = cls.Config(**{**TINY, **configurator.read_settings({}, texts, options)})
    torch.manual_seed(0)
    with model.errors_as_value_errors(model_name):
        return move_parameters(model.build(model_name, config))


def load_model(text: str) -> GPT:
    """Return the model of RUN_OR_FILE on the CPU.

    Raises:
        ValueError: there is none
    """
    path, *key_values = text.split("+")
    if path.endswith(".py"):
        return build_from_file(Path(path), key_values)
    loaded, _ = describe(text).load("cpu")
    return loaded


def run(args: SimpleNamespace) -> None:
    """Print what moves in each model, or that nothing does; exit with 1 if something does."""
    has_leak = False
    for text in args.models:
        loaded = load_model(text).double().eval()
        num_tokens = min(args.tokens, loaded.config.block_size)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, loaded.config.vocab_size, (1, num_tokens), generator=generator)
        leak = find_leak(loaded, ids)
        if leak is None:
            print(
                f"{text}: no leak. Of {num_tokens} tokens, the last {num_tokens - 1} were changed "
                "in turn, and nothing before them changed.",
                flush=True,
            )
        else:
            has_leak = True
            print(f"{text}: later tokens leak. {str(leak)[0].upper()}{str(leak)[1:]}.", flush=True)
    if has_leak:
        sys.exit(1)
