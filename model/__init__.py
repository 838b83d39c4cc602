"""The model variants: `build(name, ...)` makes the model of the file `<name>.py`.

The file is in model/ (Deep Delta Learning, and what it is compared with) or in model/streams/ (the
streams of other papers, and the controls).
"""

import contextlib
import importlib
import importlib.util
import traceback
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING

from configurator import Option, collect_options
from utils import errors

if TYPE_CHECKING:
    from .gpt import GPT, GPTConfig

# The file of a variant has a hyphen in its name, which no helper module can have. A name with a dot
# cannot be imported.
FOLDER = Path(__file__).parent
FILES = (*FOLDER.glob("*-*.py"), *FOLDER.glob("streams/*-*.py"))
MODEL_NAMES = sorted({path.stem for path in FILES if "." not in path.stem})


def find_variant(name: str) -> ModuleSpec:
    """Return the module of a variant, which is in model/ or in model/streams/.

    Raises:
        ValueError: both folders have a file of this name
    """
    beside_ddl = importlib.util.find_spec(f"model.{name}")
    in_streams = importlib.util.find_spec(f"model.streams.{name}")
    if beside_ddl is not None and in_streams is not None:
        raise ValueError(
            f"model={name!r}: {beside_ddl.origin} and {in_streams.origin} have the same name; rename "
            "one of them"
        )
    return beside_ddl or in_streams


def describe_file(name: str) -> str:
    """Return "model/NAME.py" or "model/streams/NAME.py"."""
    return f"{find_variant(name).name.replace('.', '/')}.py"


def model_class(name: str) -> "type[GPT]":
    """Import the file of a variant, and none of the other variants, and return its class `Model`.

    Raises:
        ValueError: there is no such variant (the message suggests others), or its file is wrong
            (the message names the line)
    """
    if name not in MODEL_NAMES:
        suggestion = errors.suggest(name, MODEL_NAMES)
        raise ValueError(
            f"model={name!r} is not a model variant{suggestion or '.'} "
            f"Available: {', '.join(MODEL_NAMES)}"
        )
    with errors_as_value_errors(name):
        return importlib.import_module(find_variant(name).name).Model


@contextlib.contextmanager
def errors_as_value_errors(name: str) -> Iterator[None]:
    """Raise an error of the code of a variant as a ValueError of one line, with its file and line.

    A ValueError stays as it is, because its message says what to do, and so does a failed allocation.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        if errors.describe_out_of_memory(error) is not None:
            raise
        file = find_variant(name).origin
        location = describe_file(name)
        message = str(error).strip().partition("\n")[0]
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == file:
                location = f"{describe_file(name)}, line {frame.lineno}"
        if isinstance(error, SyntaxError):
            location = f"{error.filename}, line {error.lineno}"
            message = error.msg
        raise ValueError(f"{location}: {type(error).__name__}: {message}") from error


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
    """Return the Config of a variant with these settings.

    Raises:
        ValueError: there is no such variant, or a key or value is wrong; the message names the fix
    """
    config_class = model_class(name).Config
    return config_class(**check_settings(settings, collect_options(config_class)))


def build(name: str, config: "GPTConfig | None" = None, **settings: object) -> "GPT":
    """Return the model of a variant, initialized from the seed of torch's global generator.

    Args:
        config: an instance of the variant's Config
        settings: in place of `config`, the fields that differ from its defaults

    Raises:
        ValueError: there is no such variant, or a key or value is wrong; the
            message names the fix
    """
    if config is None:
        config = make_config(name, settings)
    return model_class(name)(config)
