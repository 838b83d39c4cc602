"""Training that starts from the weights of a folder: a run of ours, an exported one, or the paper's released code.

The folder settles the variant and its keys; the optimizer, the step and the data begin afresh. A run that goes on
takes them from its own checkpoint, and the folder may be gone.
"""

import contextlib
import hashlib
import sys
from pathlib import Path

import configurator
from data import tokenizer
from model import released, weights
from training import checkpoint, distributed

NANOGPT = {"scratch": "leave it out to start anew", "resume": "give --resume=auto to go on with a run"}


def is_free(key: str) -> bool:
    """Whether a model key may differ from the folder's: no weight depends on it."""
    return key == "block_size" or has_no_effect(key)


def has_no_effect(key: str) -> bool:
    """Keys of an initialisation, which the weights replace."""
    return "_init" in key


def settled(from_file: dict, options: dict, schema: dict) -> dict:
    """{"model": stem, model keys} that the folder `init_from` settles; {} without one.

    from_file, options: what a config file and the command line give. ValueError: no such folder, or it cannot be read.
    """
    keys = ("init_from", "resume", "out_dir")
    asked = configurator.check({key: from_file[key] for key in keys if key in from_file}, schema)
    asked |= {key: configurator.parse(key, options[key], schema) for key in keys if key in options}
    if asked.get("init_from") is None:
        return {}
    if asked["init_from"] in NANOGPT and not Path(asked["init_from"]).exists():
        raise ValueError(f"init_from={asked['init_from']}: {NANOGPT[asked['init_from']]}")
    if asked.get("resume") and (state := own_state(asked["resume"], asked.get("out_dir"))):
        return {"model": state["model"], **state["model_config"]}
    folder, stem, config, _ = checkpoint.described(Path(asked["init_from"]))
    return {"model": stem, **vars(weights.examined(folder, stem, config, released.fold).config)}


def own_state(resume: str, out_dir: str | None) -> dict | None:
    """state.json of the run that goes on; None where it has no checkpoint yet."""
    if resume != "auto":
        return checkpoint.read_state(checkpoint.find(resume))
    for path in reversed(checkpoint.all_of(Path(out_dir)) if out_dir else []):
        with contextlib.suppress(ValueError):  # damaged: the one before it counts, as for the run
            return checkpoint.read_state(path)
    return None


def merged(given: dict, known: dict) -> dict:
    """The keys a user gave over those that the folder settles. ValueError: they contradict it."""
    for key in sorted(given.keys() & known.keys()):
        if given[key] != known[key] and not is_free(key):
            raise ValueError(
                f"{key}={given[key]!r}, but init_from={given['init_from']} has {known[key]!r}: leave the key out"
            )
    idle = sorted(key for key in given.keys() & known.keys() if given[key] != known[key] and has_no_effect(key))
    if idle and distributed.rank() == 0:
        print(f"note: {', '.join(idle)}: no effect with init_from, which brings weights", file=sys.stderr)
    return {**given, **known, **{key: given[key] for key in given.keys() & {"block_size"}}}


def identity(folder: str) -> str:
    """What the folder's weights are, for processes to compare: their names, and SHA-256 of the files."""
    path, *_ = checkpoint.described(Path(folder))
    found = []
    for file in weights.files(path):
        with open(file, "rb") as opened:
            found.append(f"{file.name} {hashlib.file_digest(opened, 'sha256').hexdigest()}")
    return " ".join(found)


def load(model, folder: str, corpus: Path) -> None:
    """Fill the model with the folder's weights. ValueError: they do not fit, or another tokenizer made its tokens."""
    path, *_ = checkpoint.described(Path(folder))
    if (path / "tokenizer.json").exists():  # released folders have none
        theirs, ours = tokenizer.describe(path), tokenizer.describe(corpus)
        if not tokenizer.same_tokens(theirs, ours):
            raise ValueError(
                f"init_from={folder} reads tokens of {theirs['name']}, {corpus} has other ones, of {ours['name']}: "
                "prepare the corpus with that tokenizer"
            )
    weights.fill(model, path, fold=released.fold)
