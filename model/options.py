"""Options: the keys of a configuration with their types, defaults, help texts and ranges.

A configuration is a dataclass. Its fields declare options in one of two ways:

    name: type = option(default, "help text", low=1)
    name: type = default

The type is int, float, bool, str, Literal[...], or one of these `| None`. This file imports nothing
of the repository, because every exported model carries a copy of it.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """What is known of one key of a configuration."""

    name: str

    # the types that a value may have, among int, float, bool, str and NoneType
    types: tuple[type, ...]

    # the values that it may have; () if every value of these types will do
    choices: tuple

    default: object

    # a phrase for --help
    help: str = ""

    # the heading under which --help lists it
    group: str = ""

    # low <= value <= high and above < value < below, where they are given
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    # may differ from the run that is resumed
    changeable: bool = False

    # sets initial values, and so has no effect with init_from, which brings trained weights
    only_initializes: bool = False

    # no weight depends on it, so that it may differ from the model that init_from names
    changes_no_weight: bool = False

    # (another key, the value of it, or a test of its value, with which this one has an effect)
    counts_with: tuple[str, object] | None = None

    @property
    def kind(self) -> str:
        """The values that it takes, in words."""
        words = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
        choice_types = {type(choice) for choice in self.choices}
        descriptions = [
            words[accepted_type]
            for accepted_type in self.types
            if accepted_type in words and accepted_type not in choice_types
        ]
        descriptions.extend(repr(choice) for choice in self.choices)
        if type(None) in self.types:
            descriptions.append("None")
        return " or ".join(descriptions)

    @property
    def range(self) -> str:
        """The range of its numbers, in words; "" without a range."""
        if self.low is not None and self.high is not None:
            return f"a number from {self.low} to {self.high}"
        bounds = []
        if self.low is not None:
            bounds.append(f"at least {self.low}")
        if self.above is not None:
            bounds.append(f"above {self.above}")
        if self.high is not None:
            bounds.append(f"at most {self.high}")
        if self.below is not None:
            bounds.append(f"below {self.below}")
        if self.low is not None and len(bounds) == 1:
            return f"{self.low} or more"
        words = " and ".join(bounds)
        if words.startswith("at "):
            words = f"of {words}"
        return f"a number {words}" if words else ""

    def is_in_range(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def check_range(self, value: object) -> None:
        """Raise ValueError if a number is out of range; None and words never are."""
        is_number = value is not None and not isinstance(value, str)
        if is_number and not self.is_in_range(value):
            raise ValueError(f"{self.name}={value}: give {self.range}")

    def convert(self, value: object) -> object:
        """Return the value, as a float if it is an int where a float is expected.

        Raises:
            ValueError: a wrong type, or not one of the choices
        """
        if type(value) is int and float in self.types:
            value = float(value)
        # a key may take choices of one type and any value of another: float | Literal["1/L"]
        must_be_choice = any(type(choice) is type(value) for choice in self.choices)
        if type(value) not in self.types or (must_be_choice and value not in self.choices):
            raise ValueError(f"{self.name}={value!r}: give {self.kind}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{self.name}={value!r}: give a finite number")
        return value

    def has_effect(self, settings: dict) -> bool:
        """Return whether the key has an effect beside the other settings."""
        if self.counts_with is None:
            return True
        other_key, expected = self.counts_with
        if callable(expected):
            return expected(settings[other_key])
        return settings[other_key] == expected


def option(
    default: object,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    changeable: bool = False,
    only_initializes: bool = False,
    changes_no_weight: bool = False,
    counts_with: tuple[str, object | Callable[[Any], bool]] | None = None,
    group: str | None = None,
) -> Any:
    """Return the dataclass field of an option. The arguments are explained at `Option`.

    group: begins a new group of --help, to which the fields below belong as well. Without any, the
        fields of a class are one group, whose heading is the first paragraph of its docstring.
    """
    metadata = {
        "help": help,
        "low": low,
        "high": high,
        "above": above,
        "below": below,
        "changeable": changeable,
        "only_initializes": only_initializes,
        "changes_no_weight": changes_no_weight,
        "counts_with": counts_with,
        "group": group,
    }
    return dataclasses.field(default=default, metadata=metadata)


@functools.cache
def collect_options(*config_classes: type) -> dict[str, Option]:
    """Return the options of dataclasses by name; the first class that has a name counts.

    Raises:
        ValueError: a field has a type that options do not support
    """
    options: dict[str, Option] = {}
    for config_class in config_classes:
        hints = typing.get_type_hints(config_class)
        groups: dict[type, str] = {}  # the current one of each class that declares fields
        for field in dataclasses.fields(config_class):
            declaring_class = find_declaring_class(config_class, field.name)
            if field.metadata.get("group") is not None:
                groups[declaring_class] = field.metadata["group"]
            group = groups.setdefault(declaring_class, summarize(declaring_class))
            if field.name not in options:
                hint = hints[field.name]
                options[field.name] = read_option(config_class, field, hint, group)
    return options


def find_declaring_class(config_class: type, name: str) -> type:
    """Return the class furthest up the inheritance of a dataclass that declares a field."""
    declaring_classes = [
        base for base in config_class.__mro__ if name in vars(base).get("__annotations__", {})
    ]
    return declaring_classes[-1]


def read_option(config_class: type, field: dataclasses.Field, hint: object, group: str) -> Option:
    """Return the option that a field of a dataclass declares."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else (hint,)
    accepted_types = []
    choices = []
    for part in parts:
        if typing.get_origin(part) is typing.Literal:
            choices_of_part = typing.get_args(part)
            accepted_types.extend({type(choice) for choice in choices_of_part})
            choices.extend(choices_of_part)
        else:
            accepted_types.append(part)
    if not {int, float, bool, str, type(None)}.issuperset(accepted_types):
        raise ValueError(
            f"{config_class.__module__}: the key {field.name} has the type {field.type}: a key "
            "must be int, float, bool, str, Literal[...], or one of them | None"
        )
    return Option(
        name=field.name,
        types=tuple(accepted_types),
        choices=tuple(choices),
        default=field.default,
        group=group,
        **{name: value for name, value in field.metadata.items() if name != "group"},
    )


def summarize(documented_class: type) -> str:
    """Return the first paragraph of a class's docstring as one line, or its name without one."""
    paragraph = (documented_class.__doc__ or documented_class.__name__).partition("\n\n")[0]
    return " ".join(paragraph.split()).removesuffix(".")


def check_ranges(config: object) -> None:
    """Raise ValueError if a value of a configuration is out of its range."""
    for name, declared in collect_options(type(config)).items():
        declared.check_range(getattr(config, name))


def check_effects(typed_keys: Iterable[str], settings: dict, options: dict[str, Option]) -> None:
    """Raise ValueError if a key that a user typed has no effect beside the other settings."""
    for name in sorted(set(typed_keys) & options.keys()):
        if settings[name] is None:
            continue
        # the key that it counts with may itself count with a third one
        key = name
        while options[key].counts_with is not None:
            other_key, needed_value = options[key].counts_with
            if not options[key].has_effect(settings):
                advice = f"omit {name}"
                if not callable(needed_value):
                    advice = f"{advice}, or give --{other_key}={needed_value}"
                raise ValueError(
                    f"{name}={settings[name]} has no effect with "
                    f"{other_key}={settings[other_key]}; {advice}"
                )
            key = other_key
