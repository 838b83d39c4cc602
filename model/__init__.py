"""The model variants: `build(name, ...)` makes the model of `model/<name>.py`."""

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from configurator import Option, collect_options
from utils import errors

if TYPE_CHECKING:
    from .gpt import GPT, GPTConfig

# The file of a variant has a hyphen in its name, which no helper module can have. A name with a dot
# cannot be imported.
MODEL_NAMES = sorted(
    path.stem for path in Path(__file__).parent.glob("*-*.py") if "." not in path.stem
)


def model_class(name: str) -> "type[GPT]":
    """Import `model/<name>.py`, and none of the other variants, and return its class `Model`.

    Raises:
        ValueError: there is no such variant (the message suggests others), or its file is wrong
            (the message names the line)
    """
    if name not in MODEL_NAMES:
        file = Path(__file__).parent / f"{name}.py"
        if "." in name and file.is_file():
            raise ValueError(
                f"model={name!r}: the file name of a variant must not contain a dot; rename it to "
                f"{name.replace('.', '_')}.py"
            )
        if file.is_file() and b"class Model" in file.read_bytes():
            raise ValueError(
                f"model={name!r}: the file name of a variant must contain a hyphen; rename it to "
                f"{name}-gpt-mha-rope.py"
            )
        suggestion = errors.suggest(name, MODEL_NAMES)
        raise ValueError(
            f"model={name!r} is not a model variant{suggestion or '.'} "
            f"Available: {', '.join(MODEL_NAMES)}"
        )
    with errors_as_value_errors(name):
        variant = getattr(importlib.import_module(f"model.{name}"), "Model", None)
        check_variant(name, variant)
    return variant


def check_variant(name: str, variant: object) -> None:
    """Raise ValueError if `Model` of a variant's file, or its Config, is not what it must be."""
    from .gpt import GPT  # here, because importing torch takes seconds

    if not (isinstance(variant, type) and issubclass(variant, GPT)):
        raise ValueError(
            f"model/{name}.py has no class Model(GPT); end it with one that names the classes of "
            "its stream"
        )
    for base in variant.Config.__mro__:
        if vars(base).get("__annotations__") and "__dataclass_fields__" not in vars(base):
            raise ValueError(
                f"model/{name}.py: {base.__name__} has keys but is not a dataclass; put @dataclass "
                "above it"
            )
    collect_options(variant.Config)


def every_config() -> "list[type[GPTConfig]]":
    """Return the Config of every variant. One whose file is wrong is reported, and left out."""
    configs = []
    for name in MODEL_NAMES:
        try:
            configs.append(model_class(name).Config)
        except ValueError as error:
            print(f"note: {error}; its keys are not listed", file=sys.stderr)
    return configs


@contextlib.contextmanager
def errors_as_value_errors(name: str) -> Iterator[None]:
    """Raise whatever the code of a variant raises inside as a ValueError of one line.

    The message names the file and, where it is known, the line. A ValueError stays as it is,
    because its message says what to do, and so does a failed allocation.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        if errors.describe_out_of_memory(error) is not None:
            raise
        file = importlib.util.find_spec(f"model.{name}").origin
        line = None
        message = str(error).strip().partition("\n")[0]
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == file:
                line = frame.lineno
        if isinstance(error, SyntaxError):
            message = error.msg
            if error.filename:
                file = error.filename
                line = error.lineno
        raise ValueError(
            f"{describe_location(file, line)}: {type(error).__name__}: {message}"
        ) from error


def describe_location(file: str, line: int | None) -> str:
    """Return "model/NAME.py, line N", without the line if it is not known."""
    if line is None:
        return f"model/{Path(file).name}"
    return f"model/{Path(file).name}, line {line}"


def check_settings(settings: dict[str, object], options: dict[str, Option]) -> dict[str, object]:
    """Return the settings, with an int as a float where a float is expected.

    Raises:
        ValueError: an unknown key, a wrong type, or not one of the choices
    """
    for key in settings:
        if key not in options:
            raise ValueError(f"unknown key {key}{errors.suggest(key, options)}")
    return {key: options[key].convert(value) for key, value in settings.items()}


def make_config(name: str, settings: dict[str, object]) -> "GPTConfig":
    """Return the Config of `model/<name>.py` with these settings.

    Raises:
        ValueError: there is no such variant, or a key or value is wrong; the message names the fix
    """
    config_class = model_class(name).Config
    return config_class(**check_settings(settings, collect_options(config_class)))


def build(name: str, config: "GPTConfig | None" = None, **settings: object) -> "GPT":
    """Return the model of `model/<name>.py`, initialized from the seed of torch's global generator.

    Args:
        config: an instance of the variant's Config
        settings: in place of `config`, the fields that differ from its defaults

    Raises:
        ValueError: there is no such variant, or a key or value is wrong; the
            message names the fix
    """
    if config is None:
        config = make_config(name, settings)
    model = model_class(name)(config)
    # its own __init__ may have changed parameters after they were initialized
    model.check_initialized()
    model.check_parameters()
    return model
