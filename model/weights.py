"""Loading weights from a folder, of this project or of others.

A folder holds model.safetensors, or several safetensors files and an index. Names, shapes and
dtypes are read from the headers of the files and compared with a model on torch's meta device, so
that a wrong folder is refused before memory is allocated. Pickles (pytorch_model.bin) are not read,
because they can execute code.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from utils import files

from . import build, make_config, model_class
from .gpt import GPT
from .parameters import find_aliases
from .precision import at_least_fp32

Tensors = dict[str, torch.Tensor]

EMBEDDING = "transformer.wte.weight"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Blocks that share their weights are stored once, so a config may have more blocks than the file has.
# This is the largest number of blocks that is accepted in that case.
MAX_SHARED_BLOCKS = 1000

# Largest block_size * head_dim of a config in a foreign folder. The RoPE tables have this size, and
# no weight shows whether it is meant.
MAX_ROPE_TABLE = 2**20 * 128


def list_weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a folder.

    Raises:
        ValueError: there are none, or the index names files that are not in the folder
    """
    single_file = folder / "model.safetensors"
    if single_file.is_file():
        return [single_file]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        if any(folder.glob("*.bin")):
            raise ValueError(
                f"{folder} holds no {single_file.name} (pytorch_model.bin is a pickle: save it as "
                "safetensors where it was made)"
            )
        raise ValueError(f"{folder} holds no {single_file.name}")
    weight_map = files.read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{index}: weight_map is {shorten(weight_map)}, but must map each tensor to its file"
        )
    for name in weight_map.values():
        # a name with a folder in it could lead to any file of the machine
        is_in_folder = isinstance(name, str) and Path(name).name == name
        if not is_in_folder or not name.endswith(".safetensors"):
            raise ValueError(
                f"{index}: {shorten(name)} is not the name of a safetensors file in that folder"
            )
    return [folder / name for name in sorted(set(weight_map.values()))]


def shorten(value: object) -> str:
    """Return the repr of a value from a file, short enough for an error message."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def read_headers(folder: Path) -> Tensors:
    """Return the tensors of a folder, on the meta device.

    Raises:
        ValueError: a file is damaged, or a tensor is not one of floating-point numbers
    """
    tensors: Tensors = {}
    for file in list_weight_files(folder):
        for name, tensor in read_header(file):
            if name in tensors:
                raise ValueError(f"{file}: {shorten(name)} is also in another file")
            if tensor is None:
                raise ValueError(
                    f"{file}: {shorten(name)} is not a tensor of floating-point numbers"
                )
            tensors[name] = tensor
    return tensors


def read_header(file: Path) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the name of each tensor, and the tensor on the meta device or None for other dtypes.

    Raises:
        ValueError: the file is damaged
    """
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is not a mapping)
                tensor_slice = opened.get_slice(name)
                dtype = DTYPES.get(tensor_slice.get_dtype())
                tensor = None
                if dtype is not None:
                    tensor = torch.empty(tensor_slice.get_shape(), dtype=dtype, device="meta")
                yield name, tensor
    except (OSError, SafetensorError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{file} is damaged or unreadable: {shorten(error)}") from error


def load_tensors(folder: Path) -> Tensors:
    """Return the tensors of a folder, on the CPU in at least fp32.

    Raises:
        ValueError: a file is damaged, or a number is not finite
    """
    tensors = {}
    for file in list_weight_files(folder):
        try:
            loaded = load_file(file)
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
        raise ValueError(f"{context}: {shorten(name)} is not one of its weights")
    for name, tensor in sorted(tensors.items()):
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{context}: {name} has the shape {tuple(tensor.shape)}, expected "
                f"{tuple(expected[name].shape)}"
            )


def build_on_meta(name: str, config: dict, tensors: Tensors, context: str) -> GPT:
    """Return the model on the meta device.

    Its size is checked before it is built, because modules take time and memory on the meta device
    as well.

    Args:
        name: of the variant
        config: settings that differ from the defaults of the variant
        tensors: the folder's tensors, which bound the size of the model
        context: beginning of an error message

    Raises:
        ValueError: the config is wrong, or far larger than the tensors
    """
    try:
        model_config = make_config(name, config)
    except ValueError as error:
        raise ValueError(f"{context}: {error}") from error
    block_names = [name.split(".") for name in tensors if name.startswith("transformer.h.")]
    num_blocks = len({parts[2] for parts in block_names if len(parts) > 3})
    if model_config.num_hidden_layers > max(num_blocks, MAX_SHARED_BLOCKS):
        raise ValueError(
            f"{context}: transformer.h.{num_blocks} is missing, but the config has "
            f"num_hidden_layers={model_config.num_hidden_layers}"
        )
    if model_config.block_size * model_config.head_dim > MAX_ROPE_TABLE:
        raise ValueError(
            f"{context}: block_size={model_config.block_size} times "
            f"head_dim={model_config.head_dim} exceeds {MAX_ROPE_TABLE:,}, the largest supported "
            "RoPE table"
        )
    try:
        with torch.device("meta"):
            return model_class(name)(model_config)
    except ValueError as error:
        raise ValueError(f"{context}: {error}") from error
    except (RuntimeError, TypeError, OverflowError) as error:
        raise ValueError(
            f"{context}: its config has sizes that no model can have ({shorten(error)})"
        ) from error


def no_conversion(tensors: Tensors, model: GPT) -> Tensors:
    """Return the tensors of a folder whose names and shapes are already those of the model."""
    return tensors


Convert = Callable[[Tensors, GPT], Tensors]


def check_headers(headers: Tensors, model: GPT, convert: Convert, context: str) -> None:
    """Raise ValueError if the tensors of a folder, converted, are not those of the model.

    Args:
        headers: the tensors on the meta device
        context: beginning of the message
    """
    try:
        tensors = convert(headers, model)
    except ValueError as error:
        raise ValueError(f"{context}: {error}") from error
    check_tensors(tensors, model, context)


def load_into(
    model: GPT,
    folder: Path,
    description: str = "the model",
    convert: Convert = no_conversion,
) -> None:
    """Give the model the weights of a folder.

    Args:
        description: of the model, for error messages
        convert: function from the tensors of the folder and the model to the tensors of the model;
            it is called for tensors on the meta device first

    Raises:
        ValueError: the folder is damaged, or of another model
    """
    check_headers(read_headers(folder), model, convert, f"{folder} does not fit {description}")
    tensors = convert(load_tensors(folder), model)
    # Tied weights are stored once here, but some other codes store them twice.
    for name, first_name in find_aliases(model).items():
        duplicate = tensors.pop(name, None)
        if duplicate is not None and not torch.equal(duplicate, tensors[first_name]):
            raise ValueError(
                f"{folder}: {name} differs from {first_name}, but this model ties them"
            )
    model.load_state_dict(tensors, strict=False)


def build_and_check(folder: Path, name: str, config: dict, convert: Convert = no_conversion) -> GPT:
    """Return the model of a folder on the meta device, which has its complete config.

    Raises:
        ValueError: the weights of the folder are not those of this model
    """
    context = f"{folder} does not fit {name}"
    headers = read_headers(folder)
    model = build_on_meta(name, config, headers, context)
    check_headers(headers, model, convert, context)
    return model


def read_model(folder: Path, name: str, config: dict, convert: Convert = no_conversion) -> GPT:
    """Return the model with the weights of a folder, in evaluation mode.

    Raises:
        ValueError: they do not fit
    """
    build_and_check(folder, name, config, convert)
    model = build(name, make_config(name, config))
    load_into(model, folder, name, convert)
    return model.eval()
