"""`build(stem, **config)` makes the model of `model/<stem>.py`."""

import importlib
from pathlib import Path

import configurator

# A stem's file name has hyphens, which no importable helper module has.
STEMS = sorted(path.stem for path in Path(__file__).parent.glob("*-*.py"))


def model_class(stem: str):
    """The `Model` class of `model/<stem>.py`. ValueError: no such stem (the message names the nearest)."""
    if stem not in STEMS:
        raise ValueError(
            f"model={stem!r} is not a variant{configurator.nearest(stem, STEMS)}; there are {', '.join(STEMS)}"
        )
    return importlib.import_module(f"model.{stem}").Model


def build(stem: str, **config):
    """The model of `model/<stem>.py`, freshly initialised from torch's global generator.

    config: fields of the stem's `Model.Config`, the others at their defaults.
    ValueError: unknown stem or key, wrong type, value out of range; the message names the key and the fix.
    """
    cls = model_class(stem)
    return cls(cls.Config(**configurator.check(config, configurator.knobs(cls.Config))))
