"""`build(stem, **config)` makes the model of `model/<stem>.py`."""

import contextlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path

import configurator

# A stem's file name has hyphens, which no importable helper module has.
STEMS = sorted(path.stem for path in Path(__file__).parent.glob("*-*.py"))


def model_class(stem: str):
    """The `Model` class of `model/<stem>.py`, whose other files stay unread.

    ValueError: no such stem (the message names the nearest), or its file is wrong (the message
    names the line).
    """
    if stem not in STEMS:
        own = Path(__file__).parent / f"{stem}.py"
        if own.is_file() and "class Model" in own.read_text(encoding="utf-8"):
            fix = f"a variant's file has a hyphen in its name: {stem}-gpt-mha-rope.py"
            raise ValueError(f"model={stem!r}: {fix}")
        what = f"is not a variant{configurator.nearest(stem, STEMS)}"
        raise ValueError(f"model={stem!r} {what}; there are {', '.join(STEMS)}")
    with faults_of(stem):
        cls = getattr(importlib.import_module(f"model.{stem}"), "Model", None)
        from model.gpt import GPT  # which a stem imports as well

        if not (isinstance(cls, type) and issubclass(cls, GPT)):
            fix = "its last lines name the classes of its stream"
            raise ValueError(f"model/{stem}.py has no class Model(GPT): {fix}")
        for part in cls.Config.__mro__:
            if vars(part).get("__annotations__") and "__dataclass_fields__" not in vars(part):
                what = f"{part.__name__} has keys, no @dataclass"
                raise ValueError(f"model/{stem}.py: {what}: put that line above it")
        configurator.knobs(cls.Config)
    return cls


def every_config() -> list[type]:
    """The Config of each stem; one whose file is wrong is named on stderr, and left out."""
    found = []
    for stem in STEMS:
        try:
            found.append(model_class(stem).Config)
        except ValueError as error:
            print(f"note: left out: {error}", file=sys.stderr)
    return found


@contextlib.contextmanager
def faults_of(stem: str):
    """Whatever a stem's code raises inside as a ValueError of one line that names the file and,
    where known, the line.

    A ValueError stays as it is: it says what to do. So does what memory that ran out raises, which
    is nobody's fault.
    """
    try:
        yield
    except ValueError:
        raise
    except Exception as error:
        if configurator.out_of_memory(error):
            raise
        file = importlib.util.find_spec(f"model.{stem}").origin
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == file]
        what = str(error).strip().partition("\n")[0]
        if isinstance(error, SyntaxError):
            what = error.msg
            file, lines = (error.filename, [error.lineno]) if error.filename else (file, lines)
        where = f"model/{Path(file).name}{f', line {lines[-1]}' if lines else ''}"
        raise ValueError(f"{where}: {type(error).__name__}: {what}") from error


def build(stem: str, **config):
    """The model of `model/<stem>.py`, freshly initialised from torch's global generator.

    config: fields of the stem's `Model.Config`, the others at their defaults. ValueError: unknown
    stem or key, wrong type, value out of range; the message names the key and the fix.
    """
    cls = model_class(stem)
    model = cls(cls.Config(**configurator.check(config, configurator.knobs(cls.Config))))
    model.check_parameters()  # its own __init__ may have changed it since they were initialised
    return model
