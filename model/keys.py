"""Facts about a key of a configuration: `Annotated[type, "help", Key(low=1)]`."""

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """The range of a key's numbers, and what becomes of it in a run that goes on or has weights."""

    low: float | None = None  # the smallest value
    above: float | None = None  # values are greater
    high: float | None = None  # the largest value
    below: float | None = None  # values are smaller
    changeable: bool = False  # may change when a run goes on
    initial: bool = False  # sets initial values: no effect with init_from, which brings weights
    free: bool = False  # no weight depends on it: may differ from the folder of init_from
    # What a saved configuration that is older than the key meant; Ellipsis: the key's default.
    before: object = ...
    # (another key, whether this one has an effect beside its value): typed without, it is refused.
    counts_with: tuple[str, Callable[[object], bool]] | None = None

    @property
    def range(self) -> str:
        """The range in words; empty where every value will do."""
        if self.low is not None and self.above == self.high == self.below:  # all None
            return f"{self.low} or more"
        bounds = {"above": self.above, "from": self.low, "to": self.high, "to below": self.below}
        words = [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
        return f"a number {' '.join(words)}" if words else ""

    def allows(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
            and (self.below is None or value < self.below)
        )


@functools.cache
def keys_of(schema: type) -> dict[str, Key]:
    """The facts about every field of a dataclass; those of a field that gives none are defaults."""
    hints = typing.get_type_hints(schema, include_extras=True)
    fields = {
        field.name: getattr(hints[field.name], "__metadata__", ())
        for field in dataclasses.fields(schema)
    }
    return {n: next((f for f in facts if isinstance(f, Key)), Key()) for n, facts in fields.items()}


def values_before(*schemas: type) -> dict:
    """Values of the keys that declare what a saved configuration without them meant."""
    keys = {name: key for schema in schemas for name, key in keys_of(schema).items()}
    return {name: key.before for name, key in keys.items() if key.before is not ...}


def check_ranges(config) -> None:
    """ValueError: a value of the dataclass is out of its key's range; None and words never are."""
    for name, key in keys_of(type(config)).items():
        value = getattr(config, name)
        if value is not None and not isinstance(value, str) and not key.allows(value):
            raise ValueError(f"{name}={value}: give {key.range}")


def refuse_idle(typed: Iterable[str], settings: dict, keys: dict[str, Key]) -> None:
    """ValueError: a key that somebody typed has no effect beside the other settings."""
    for name in sorted(name for name in typed if name in keys and keys[name].counts_with):
        other, has_effect = keys[name].counts_with
        if settings[name] is not None and not has_effect(settings[other]):
            what = f"{name}={settings[name]} has no effect with {other}={settings[other]}"
            raise ValueError(f"{what}: leave one of them out")
