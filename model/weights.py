"""Loading weights from a folder, of this project or of others.

A folder holds model.safetensors, or several safetensors files and an index. Pickles
(pytorch_model.bin) are not read, because they can execute code.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from utils import files

from . import build, make_config
from .gpt import GPT
from .parameters import find_aliases
from .precision import at_least_fp32

Tensors = dict[str, torch.Tensor]

EMBEDDING = "transformer.wte.weight"


def list_weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a folder.

    Raises:
        ValueError: the index names none
    """
    single_file = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single_file.is_file() or not index.is_file():
        return [single_file]
    names = sorted(set(files.read_json(index).get("weight_map", {}).values()))
    if not names:
        raise ValueError(f"{index} does not map tensors to files")
    return [folder / name for name in names]


def load_tensors(folder: Path) -> Tensors:
    """Return the tensors of a folder, on the CPU in at least fp32.

    Raises:
        ValueError: a file is missing or damaged, or a number is not finite
    """
    tensors: Tensors = {}
    for file in list_weight_files(folder):
        try:
            loaded = load_file(file)
        except FileNotFoundError as error:
            raise ValueError(f"{folder} holds no {file.name}; pickles are not read") from error
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} is damaged or unreadable: {error}") from error
        for name, tensor in loaded.items():
            if not tensor.isfinite().all():
                raise ValueError(f"{file}: {name} holds NaN or infinite numbers")
            tensors[name] = tensor.to(at_least_fp32(tensor.dtype))
    return tensors


def check_tensors(tensors: Tensors, model: GPT, context: str) -> None:
    """Raise ValueError if the names or shapes of the tensors are not those of the model.

    context: beginning of the message
    """
    expected = model.state_dict()
    for name in sorted(expected.keys() - tensors.keys() - find_aliases(model).keys()):
        raise ValueError(f"{context}: {name} is missing")
    for name in sorted(tensors.keys() - expected.keys()):
        raise ValueError(f"{context}: {name} is not one of its weights")
    for name, tensor in sorted(tensors.items()):
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{context}: {name} has the shape {tuple(tensor.shape)}, expected "
                f"{tuple(expected[name].shape)}"
            )


Convert = Callable[[Tensors, GPT], Tensors]


def load_into(
    model: GPT,
    folder: Path,
    description: str = "the model",
    convert: Convert | None = None,
) -> None:
    """Give the model the weights of a folder.

    Args:
        description: of the model, for error messages
        convert: function from the tensors of the folder and the model to the tensors of the model

    Raises:
        ValueError: the folder is damaged, or of another model
    """
    tensors = load_tensors(folder)
    if convert is not None:
        tensors = convert(tensors, model)
    check_tensors(tensors, model, f"{folder} does not fit {description}")
    # Tied weights are stored once here, but some other codes store them twice.
    for name, first_name in find_aliases(model).items():
        duplicate = tensors.pop(name, None)
        if duplicate is not None and not torch.equal(duplicate, tensors[first_name]):
            raise ValueError(
                f"{folder}: {name} differs from {first_name}, but this model ties them"
            )
    model.load_state_dict(tensors, strict=False)  # without the aliases


def read_model(folder: Path, name: str, config: dict, convert: Convert | None = None) -> GPT:
    """Return the model with the weights of a folder, in evaluation mode.

    Raises:
        ValueError: they do not fit
    """
    try:
        model = build(name, make_config(name, config))
    except ValueError as error:
        raise ValueError(f"{folder} does not fit {name}: {error}") from error
    load_into(model, folder, name, convert)
    return model.eval()
