"""The plain form of `option` in an exported folder: a field of a dataclass, with a range."""

import dataclasses
import operator
from typing import Any, Literal, get_args, get_origin, get_type_hints

# The bounds that an option may have.
BOUNDS = {
    "low": (operator.ge, "of at least"),
    "high": (operator.le, "of at most"),
    "above": (operator.gt, "above"),
    "below": (operator.lt, "below"),
}


def option(default: object, help: str, **properties: object) -> Any:
    """Return the dataclass field of a key. Only bounds have an effect; the rest is for training."""
    return dataclasses.field(default=default, metadata={"help": help, **properties})


def check_ranges(config: object) -> None:
    """Raise ValueError if a value of a configuration is out of its range or not one of its choices."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, str):
            hint = hints[field.name]
            literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
            choices = [choice for literal in literals for choice in get_args(literal)]
            if choices and value not in choices:
                raise ValueError(f"{field.name}={value!r}: give one of {choices}")
        if value is None or isinstance(value, str):
            continue
        for bound, (is_within, words) in BOUNDS.items():
            limit = field.metadata.get(bound)
            if limit is not None and not is_within(value, limit):
                raise ValueError(f"{field.name}={value}: give a number {words} {limit}")
