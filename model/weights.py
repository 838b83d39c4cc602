"""Weights from folders of any origin: compared with the model before anything is allocated, nothing
in them executed.

A folder holds model.safetensors, or several such files and an index. Names, shapes and dtypes come
from the files' headers and meet a model on torch's meta device. Pickles (pytorch_model.bin) are not
read: they can run anything.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from model import build, check_settings, model_class
from model.layers import at_least_fp32
from model.options import collect_options
from model.parameters import aliases
from utils import files

EMBEDDING = "transformer.wte.weight"
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INDEX = "model.safetensors.index.json"
DEEPEST = 1000  # blocks of a model whose blocks share weights, which are stored once
# tokens, at 128 features a head: no weight bears out block_size, for which RoPE tables are made
LONGEST = 2**20


def list_weight_files(folder: Path) -> list[Path]:
    """The files that hold the folder's weights. ValueError: none, or an index that names others."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not (folder / INDEX).is_file():
        fix = " (pytorch_model.bin is a pickle: save it as safetensors where it was made)"
        fix = fix if any(folder.glob("*.bin")) else ""
        raise ValueError(f"{folder} holds no model.safetensors{fix}")
    parts = files.read_json(folder / INDEX).get("weight_map")
    names = list(parts.values()) if isinstance(parts, dict) else []
    for name in names or [parts]:
        inside = isinstance(name, str) and Path(name).name == name  # no path that leads elsewhere
        if not inside or not name.endswith(".safetensors"):
            reason = f"{clipped(name)} is not the name of a safetensors file in that folder"
            raise ValueError(f"{folder / INDEX}: {reason}")
    return [folder / name for name in sorted(set(names))]


def clipped(value) -> str:
    """What a file says, short enough for an error line."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def header(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's tensors on the meta device. ValueError: damaged, or no floating-point."""
    found: dict[str, torch.Tensor] = {}
    for file in list_weight_files(folder):
        for name, tensor in safe_header(file):
            if name in found:
                raise ValueError(f"{file}: {clipped(name)} is in another file as well")
            if tensor is None:
                reason = "is not a tensor of floating-point numbers"
                raise ValueError(f"{file}: {clipped(name)} {reason}")
            found[name] = tensor
    return found


def safe_header(file: Path):
    """Pairs of a name and a meta tensor, None for another dtype than FLOATS."""
    try:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                part = opened.get_slice(name)
                dtype = FLOATS.get(part.get_dtype())
                yield name, dtype and torch.empty(part.get_shape(), dtype=dtype, device="meta")
    except (OSError, SafetensorError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{file} is damaged or unreadable: {clipped(error)}") from error


def load(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's tensors, on the CPU in at least fp32. ValueError: damaged, or not finite."""
    loaded = {}
    for file in list_weight_files(folder):
        try:
            pairs = load_file(file).items()
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} is damaged or unreadable: {error}") from error
        for name, value in pairs:
            if not value.isfinite().all():
                raise ValueError(f"{file}: {name} holds NaN or infinite numbers")
            loaded[name] = value.to(at_least_fp32(value.dtype))
    return loaded


def compare(found: dict, model, where: str) -> None:
    """ValueError, after `where`: the tensors found are not the model's, by name and shape."""
    expected = model.state_dict()
    for name in sorted(expected.keys() - found.keys() - aliases(model).keys()):
        raise ValueError(f"{where}: {name} is missing")
    for name in sorted(found.keys() - expected.keys()):
        raise ValueError(f"{where}: {clipped(name)} is not one of its weights")
    for name, tensor in sorted(found.items()):
        if tensor.shape != expected[name].shape:
            needed = tuple(expected[name].shape)
            raise ValueError(f"{where}: {name} is {tuple(tensor.shape)}, needed {needed}")


def skeleton(stem: str, config: dict, found, where: str):
    """The model on the meta device, uninitialised. ValueError: the weights found refute the config.

    A model's size is checked before it is built: modules take time and memory on that device, too.
    """
    cls = model_class(stem)
    try:
        checked = cls.Config(**check_settings(config, collect_options(cls.Config)))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    places = [name.split(".") for name in found if name.startswith("transformer.h.")]
    blocks = len({place[2] for place in places if len(place) > 3})
    if checked.num_hidden_layers > max(blocks, DEEPEST):
        layers = f"num_hidden_layers={checked.num_hidden_layers}"
        raise ValueError(f"{where}: transformer.h.{blocks} is missing, the config has {layers}")
    if checked.block_size * checked.head_dim > LONGEST * 128:
        reason = f"block_size={checked.block_size} is more than RoPE tables are made for here"
        raise ValueError(f"{where}: {reason}")
    bare = type("Skeleton", (cls,), {"init_weights": lambda self: None})
    try:
        with torch.device("meta"):
            return bare(checked)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    except (RuntimeError, TypeError, OverflowError) as error:
        reason = f"its config has sizes that no model can have ({clipped(error)})"
        raise ValueError(f"{where}: {reason}") from error


def as_they_are(tensors: dict, model) -> dict:
    """The tensors of a folder whose names and shapes are the model's."""
    return tensors


def converted(tensors: dict, model, fold, where: str) -> dict:
    """What `fold` makes of a folder's tensors for the model. ValueError: begins with `where`."""
    try:
        return fold(tensors, model)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def fill(model, folder: Path, what: str = "the model", fold=as_they_are) -> None:
    """Give the model the folder's weights. ValueError: damaged, or of another model.

    fold(tensors, model): makes the model's tensors of the folder's, on the meta device first.
    """
    where = f"{folder} does not fit {what}"
    compare(converted(header(folder), model, fold, where), model, where)
    tensors = fold(load(folder), model)
    for name, first in aliases(model).items():  # stored once, or by other codes twice
        again = tensors.pop(name, None)
        if again is not None and not torch.equal(again, tensors[first]):
            raise ValueError(f"{folder}: {name} differs from {first}: this model ties them")
    model.load_state_dict(tensors, strict=False)


def examined(folder: Path, stem: str, config: dict, fold=as_they_are):
    """The model on the meta device, its config complete. ValueError: not of these weights."""
    where = f"{folder} does not fit {stem}"
    found = header(folder)
    bare = skeleton(stem, config, found, where)
    compare(converted(found, bare, fold, where), bare, where)
    return bare


def read_model(folder: Path, stem: str, config: dict, fold=as_they_are):
    """The model with the folder's weights, in evaluation mode. ValueError: they do not fit."""
    examined(folder, stem, config, fold)
    model = build(stem, **config)
    fill(model, folder, stem, fold)
    return model.eval()
