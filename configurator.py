"""Typed configuration from Python files and `--key=value`: a misspelled key or a wrong type stops the run.

    python train.py config/ddl_dv4_small.py --learning_rate=6e-4

A schema is one or several dataclasses whose fields are `name: Annotated[type, "help"] = default`, the type one of int,
float, bool, str, Literal[...], or one of them `| None`. A config file is Python that assigns such names.
"""

import contextlib
import dataclasses
import difflib
import json
import os
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Knob:
    """One key of a schema; choices empty: any value; group: what the class that defines it is about."""

    name: str
    types: tuple[type, ...]
    choices: tuple
    default: object
    help: str
    group: str

    @property
    def kind(self) -> str:
        """What the key takes, in words."""
        names = {
            int: "a whole number",
            float: "a number",
            bool: "True or False",
            str: "text",
            type(None): "None",
        }
        options = [repr(choice) for choice in self.choices] or [names[t] for t in self.types if t is not type(None)]
        return " or ".join(options + ["None"] * (type(None) in self.types))


def knobs(*schemas: type) -> dict[str, Knob]:
    """Every field of the dataclasses by name, the first of a name; group is its class's first docstring line."""
    result = {}
    for schema in schemas:
        hints = typing.get_type_hints(schema, include_extras=True)
        for field in dataclasses.fields(schema):
            annotated, help_text = typing.get_args(hints[field.name])
            union = typing.get_origin(annotated) in (typing.Union, types.UnionType)
            parts = typing.get_args(annotated) if union else (annotated,)
            literals = [part for part in parts if typing.get_origin(part) is typing.Literal]
            choices = tuple(value for part in literals for value in typing.get_args(part))
            kinds = tuple(str if part in literals else part for part in parts)
            owner = [base for base in schema.__mro__ if field.name in base.__dict__.get("__annotations__", {})][-1]
            title = (owner.__doc__ or owner.__name__).partition("\n")[0]
            result.setdefault(field.name, Knob(field.name, kinds, choices, field.default, help_text, title))
    return result


def nearest(name: str, names) -> str:
    """', did you mean X?', or nothing where nothing is near."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f", did you mean {close[0]}?" if close else ""


def check(values: dict, schema: dict[str, Knob]) -> dict:
    """The values with ints made floats where a float is due. ValueError: unknown key, wrong type, no such choice."""
    return {name: _check_one(name, value, schema) for name, value in values.items()}


def _check_one(name, value, schema):
    if name not in schema:
        raise ValueError(f"unknown key {name}{nearest(name, schema)}")
    knob = schema[name]
    if type(value) is int and float in knob.types and abs(value) < 2**1000:
        value = float(value)
    if type(value) not in knob.types or (knob.choices and value is not None and value not in knob.choices):
        raise ValueError(f"{name}={value!r}: give {knob.kind}")
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise ValueError(f"{name}={value!r}: give a finite number")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{name} has more than 63 bits: give a smaller number")
    return value


def parse(name: str, text: str, schema: dict[str, Knob]):
    """The value of `--name=text`, by the key's type. ValueError: unknown key or text of another type."""
    if name not in schema:
        raise ValueError(f"unknown key --{name}{nearest(name, schema)}")
    knob = schema[name]
    if type(None) in knob.types and text == "None":
        return None
    for kind in knob.types:
        if kind is bool and text.lower() in ("true", "false", "1", "0"):
            return text.lower() in ("true", "1")
        if kind is str:
            return _check_one(name, text, schema)
        if kind in (int, float):
            try:
                value = kind(text)
            except ValueError:
                continue
            return _check_one(name, value, schema)
    raise ValueError(f"--{name}={text}: give {knob.kind}")


def read_file(path: str) -> dict:
    """The names that a config file assigns; modules, functions and _names aside. ValueError: no file, or it fails."""
    if not Path(path).is_file():
        near = nearest(path, map(str, Path("config").glob("*.py")))
        raise ValueError(f"no config file {path}{near or '; config/ holds them'}")
    names: dict = {"__name__": "config"}
    try:
        exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), names)
    except Exception as error:  # whatever a user's file raises is reported as that file's error
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    return {k: v for k, v in names.items() if not (k.startswith("_") or callable(v) or isinstance(v, types.ModuleType))}


def read_json(path: Path) -> dict:
    """The JSON object that a file holds. ValueError: missing, unreadable, no JSON, or no object."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError("no file")  # a device can be read for ever
        if path.stat().st_size > 2**27:
            raise ValueError("more than 128 MiB")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} is missing or unreadable ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return found


def split_arguments(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Positional arguments, and `--key=value` as a dict; a bare `--key` means True."""
    files = [argument for argument in argv if not argument.startswith("--")]
    pairs = [argument[2:].partition("=") for argument in argv if argument.startswith("--")]
    return files, {key: value if equals else "True" for key, equals, value in pairs}


def help_text(usage: str, schema: dict[str, Knob]) -> str:
    """The usage, then every key with its default and help, by the class that defines it."""
    groups: dict[str, list[str]] = {}
    for knob in schema.values():
        choices = f" ({' | '.join(map(str, knob.choices))})" if knob.choices else ""
        line = f"  --{knob.name}={knob.default}".ljust(44) + f" {knob.help}{choices}"
        groups.setdefault(knob.group, []).append(line)
    return "\n".join([usage.strip(), *(line for title, lines in groups.items() for line in ["", title, *lines])])


@contextlib.contextmanager
def one_line_errors(*kinds: type[Exception]):
    """End the script with one line and exit code 2 on what a user can get wrong: `kinds`, or ValueError and OSError."""
    expected = kinds or (ValueError, OSError)
    try:
        yield
    except expected as error:
        rank = f" [rank {os.environ['RANK']}]" if os.environ.get("RANK", "0") != "0" else ""
        print(f"{Path(sys.argv[0]).name}: error:{rank} {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
