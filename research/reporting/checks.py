"""What records from files must look like: statistics of the stream, accuracies."""

import math
import sys

NONE = type(None)
NUMBER = int, float
# Of an accuracy of tasks, and of its settings.
ENTRY = {"task": str, "shots": int, "settings": dict, "shown": dict}
SETTINGS = {"dtype": str, "add_bos_token": (bool, int, NONE), "limit": (*NUMBER, NONE)}


def fault_of(record: dict, types: dict) -> str:
    """The first key that is missing, or whose value is of another type; "" for none."""
    for key, kinds in types.items():
        if key not in record:
            return f"{key} is missing"
        if not isinstance(record[key], kinds):
            return f"{key}={str(record[key])[:40]!r} is no {name_of(kinds)}"
    return ""


def name_of(kinds) -> str:
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    return " or ".join(kind.__name__ for kind in kinds)


def is_number(value) -> bool:
    """Whether it is a finite one."""
    return type(value) in NUMBER and abs(value) <= sys.float_info.max and not math.isnan(value)


def is_residual(value) -> bool:
    """{name: a finite number per block}."""
    rows = list(value.values()) if isinstance(value, dict) else [None]
    return all(isinstance(row, list) and row and all(map(is_number, row)) for row in rows)


def is_accuracy(entry) -> bool:
    """An entry of eval.py: of tasks, {task: (metric, value, standard error or None)}; or of the validation split."""
    if not isinstance(entry, dict) or entry.get("task") == "validation":
        return isinstance(entry, dict)
    if fault_of(entry, ENTRY) or fault_of(entry["settings"], SETTINGS):
        return False
    return all(is_shown(row) for row in entry["shown"].values())


def is_shown(row) -> bool:
    if not isinstance(row, list) or len(row) != 3:
        return False
    metric, value, error = row
    return isinstance(metric, str) and is_number(value) and (error is None or is_number(error))
