"""Keys from Python files and `--key=value`: a misspelled key or a wrong value stops the run.

    python train.py config/ddl_dv4_small.py --learning_rate=6e-4

A schema is one or several dataclasses whose fields are `name: Annotated[type, "help", Key(...)] =
default`, the type one of int, float, bool, str, Literal[...], or one of them `| None`; help and Key
may be left out. A config file is Python that assigns such names; `from config.gpt_small import *`
begins from another.
"""

import argparse
import contextlib
import dataclasses
import difflib
import errno
import functools
import importlib
import itertools
import json
import math
import os
import re
import signal
import sys
import time
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from model.keys import Key

OTHERS_WAIT = 3.0  # seconds; torchrun looks at its processes ten times a second

# Scripts import this module before all that is slow to import. Until `one_line_errors` Ctrl+C ends
# them without a word: packages that are being imported make other errors of an exception.
_MAIN = Path(getattr(sys.modules["__main__"], "__file__", None) or "/").resolve()
_ROOT = Path(__file__).parent
_OURS = _MAIN.parent in (_ROOT, _ROOT / "research") or _MAIN.name == "prepare.py"
if _OURS and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if _OURS and "--help" in sys.argv:  # `--help | head` closes the pipe: no traceback for that
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


# ---- what a schema says of its keys ----


@dataclass(frozen=True)
class Knob:
    """A key of a schema; choices empty: any value; group: the title of the class that defines
    it.
    """

    types: tuple[type, ...]
    choices: tuple
    default: object
    help: str
    group: str
    key: Key

    @property
    def kind(self) -> str:
        """What the key takes, in words."""
        names = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
        free = [names[kind] for kind in self.types if kind in names and not self.chosen(kind)]
        options = free + [repr(choice) for choice in self.choices]
        return " or ".join(options + ["None"] * (type(None) in self.types))

    def chosen(self, kind: type) -> bool:
        """Whether values of the type are choices; beside them there may be free ones of another."""
        return kind in map(type, self.choices)

    def check(self, name: str, value):
        """The value, an int as a float where one is due. ValueError: wrong type, no such choice."""
        if type(value) is int and float in self.types:
            value = float(value)
        chosen = self.chosen(type(value))
        if type(value) not in self.types or (chosen and value not in self.choices):
            raise ValueError(f"{name}={value!r}: give {self.kind}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}={value!r}: give a finite number")
        return value

    def parse(self, name: str, text: str):
        """The value of `--name=text`, by the key's types. ValueError: text of another type."""
        if type(None) in self.types and text == "None":
            return None
        if bool in self.types and text.lower() in ("true", "false", "1", "0"):
            return text.lower() in ("true", "1")
        for kind in (int, float, str):
            if kind in self.types:
                with contextlib.suppress(ValueError):
                    value = kind(text)
                    break
        else:
            raise ValueError(f"--{name}={text}: give {self.kind}")
        return self.check(name, value)


@functools.cache
def knobs(*schemas: type) -> dict[str, Knob]:
    """Every field of the dataclasses by name, the first of a name. ValueError: not such a type."""
    result: dict[str, Knob] = {}
    for schema in schemas:
        hints = typing.get_type_hints(schema, include_extras=True)
        for field in dataclasses.fields(schema):
            hint = hints[field.name]
            facts = getattr(hint, "__metadata__", ())
            annotated = typing.get_args(hint)[0] if facts else hint
            union = typing.get_origin(annotated) in (typing.Union, types.UnionType)
            parts = typing.get_args(annotated) if union else (annotated,)
            literals = [part for part in parts if typing.get_origin(part) is typing.Literal]
            kinds = tuple(str if part in literals else part for part in parts)
            if not {int, float, bool, str, type(None)}.issuperset(kinds):
                raise ValueError(
                    f"{schema.__module__}: the key {field.name} is {field.type}: a key is int, "
                    "float, bool, str, Literal[...], or one of them | None"
                )
            bases = [
                base
                for base in schema.__mro__
                if field.name in vars(base).get("__annotations__", {})
            ]
            knob = Knob(
                types=kinds,
                choices=tuple(value for part in literals for value in typing.get_args(part)),
                default=field.default,
                help=next((fact for fact in facts if isinstance(fact, str)), ""),
                group=(bases[-1].__doc__ or bases[-1].__name__).partition("\n")[0],
                key=next((fact for fact in facts if isinstance(fact, Key)), Key()),
            )
            result.setdefault(field.name, knob)
    return result


# ---- what a user gives ----

# What nanoGPT calls by other names, by a name that only the script has to which it is given.
HABITS = {
    "max_steps": {
        "lr": "give learning_rate",
        "n_layer": "give num_hidden_layers",
        "n_head": "give num_attention_heads",
        "n_embd": "give hidden_size",
        "batch_size": "give global_batch_size for a step, micro_batch_size for a forward pass",
        "gradient_accumulation_steps": "it follows from global_batch_size and micro_batch_size",
        "max_iters": "give max_steps",
        "max_epochs": "give max_steps",
        "tensorboard": "give wandb_log, or draw metrics.jsonl by research/report.py curves",
        "warmup_iters": "give warmup_steps",
        "lr_decay_iters": "the learning rate falls until max_steps",
        "decay_lr": "it falls to min_lr: for a constant one give min_lr that of learning_rate",
        "eval_iters": "give eval_batches",
        "eval_only": "run eval.py RUN --val",
        "always_save_checkpoint": "give checkpoint_interval, keep_last and keep_every",
        "dropout": "there is no dropout: leave it out",
        "bias": "linear layers and norms of the backbone have no bias: leave it out",
        "backend": "it is nccl on GPUs and gloo on CPUs: leave it out",
        "start": "give --prompt to sample.py",
    },
    "--prompt": {
        "--start": "give --prompt",
        "--out_dir": "give the run folder by itself",
        "--init_from": "give the folder by itself",
    },
}


def nearest(name: str, names) -> str:
    """', did you mean X?', or nothing where nothing is near; the dashes of options do not count."""
    bare = {other.lstrip("-"): other for other in names}
    own = name.lstrip("-")
    close = difflib.get_close_matches(own, list(bare), n=1)
    close = close or [other for other in bare if other.lower().startswith(own.lower() or " ")]
    return f", did you mean {bare[close[0]]}?" if close else ""


def instead(name: str, names) -> str:
    """What to give in the place of an unknown name, as the end of a message."""
    for script, habits in HABITS.items():
        if script in names and name in habits:
            return f": {habits[name]}"
    return nearest(name, names)


def refuse_unknown(names, schema: dict[str, Knob], dashes: str = "") -> None:
    """ValueError: names that are no keys, each with what to give instead."""
    unknown = [name for name in names if name not in schema]
    if unknown:
        lines = [f"unknown key {dashes}{name}{instead(name, schema)}" for name in unknown]
        raise ValueError("; ".join(lines))


def check(values: dict, schema: dict[str, Knob]) -> dict:
    """The values, ints as floats where a float is due. ValueError: unknown key or wrong value."""
    refuse_unknown(values, schema)
    return {name: schema[name].check(name, value) for name, value in values.items()}


def given(from_file: dict, options: dict[str, str], schema: dict[str, Knob]) -> dict:
    """The keys of the schema that a file or the command line, which overrides it, gives."""
    values = check({key: value for key, value in from_file.items() if key in schema}, schema)
    typed = {key: text for key, text in options.items() if key in schema}
    return values | {key: schema[key].parse(key, text) for key, text in typed.items()}


def read_file(path: str) -> dict:
    """The names that a config file assigns. ValueError: no file, or it fails."""
    if not Path(path).is_file():
        near = nearest(path, map(str, Path("config").glob("*.py")))
        raise ValueError(f"no config file {path}{near or '; config/ holds them'}")
    names: dict = {"__name__": "config"}
    try:
        exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), names)
    except Exception as error:  # whatever a user's file raises is reported as that file's error
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    other = (types.ModuleType, Callable)  # what it imports and defines for itself
    return {k: v for k, v in names.items() if k[0] != "_" and not isinstance(v, other)}


def split_arguments(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Positional arguments, and `--key=value` as a dict; a bare `--key` means True."""
    argv = ["--help" if argument == "-h" else argument for argument in argv]
    files = [argument for argument in argv if not argument.startswith("--")]
    for argument in files:
        if argument.startswith("-"):
            raise ValueError(f"{argument}: keys have two dashes, --key=value")
    pairs = [argument[2:].partition("=") for argument in argv if argument.startswith("--")]
    return files, {key: value if equals else "True" for key, equals, value in pairs}


def help_text(usage: str, schema: dict[str, Knob]) -> str:
    """The usage, then every key with its default, help, and choices or range, by group."""
    groups: dict[str, list[str]] = {}
    for name, knob in schema.items():
        values = " | ".join(map(str, knob.choices)) or knob.key.range
        line = f"  --{name}={knob.default}".ljust(44) + f" {knob.help}"
        groups.setdefault(knob.group, []).append(line + (f" ({values})" if values else ""))
    sections = [line for title, lines in groups.items() for line in ["", title, *lines]]
    return "\n".join([usage.strip(), *sections])


class Parser(argparse.ArgumentParser):
    """argparse's: a mistake is one line, and a mistyped option is told the nearest."""

    def __init__(self, **keys):
        style = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"formatter_class": style, "allow_abbrev": False, **keys})

    def error(self, message: str):
        end(f"error: {message}; --help lists the options", program=self.prog)

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else list(args)
        if not self._subparsers:  # argparse would name a missing argument first
            words = itertools.takewhile("--".__ne__, args)
            self._refuse([word for word in words if word.startswith("--")])
        parsed, unknown = super().parse_known_args(args, namespace)
        self._refuse(unknown)
        return parsed, []

    def _refuse(self, words: list[str]) -> None:
        for option in [word.partition("=")[0] for word in words]:
            if option not in self._option_string_actions:
                what = "unknown option" if option.startswith("-") else "unexpected argument"
                self.error(f"{what} {option}{instead(option, self._option_string_actions)}")


# ---- files and packages ----


def read_json(path: Path) -> dict:
    """The JSON object that a file holds. ValueError: missing, unreadable, or something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} is missing or unreadable ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return content


def replace_text(path: Path, text: str) -> None:
    """Write a text file that is whole at any moment, also after a kill or a power cut."""
    with whole(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def whole(path: Path):
    """A temporary path, whose file becomes `path` at the end. Where that fails (a full disk) it is
    removed, and an OSError names `path`."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def optional(module: str, use: str):
    """A module that is imported only where it is used, by `use`. ValueError: it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(f"{use} needs the {package} package: pip install {package}") from error


# ---- how a script ends ----


@contextlib.contextmanager
def one_line_errors(*kinds: type[Exception], memory: str = ""):
    """End the script with one line: exit code 2 on what a user can get wrong, 130 on Ctrl+C.

    kinds: what a user can get wrong, ValueError and OSError unless given. With `memory`, advice, it
    is also memory that ran out.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        end("interrupted", 130)
    except Exception as error:
        if memory and (lack := out_of_memory(error)):
            end(f"error: {lack}: {memory}")
        if isinstance(error, kinds or (ValueError, OSError)):
            end(f"error: {text_of(error)}")
        raise


def text_of(error: Exception) -> str:
    """The error's message; of the system's errors the file and the reason, without a number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    where = f"{error.filename}: " if error.filename else ""
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return f"{where}a file is where a folder is needed"
    full = "; free disk space and run the same command again" * (error.errno == errno.ENOSPC)
    return f"{where}{error.strerror}{full}"


def end(text: str, code: int = 2, program: str | None = None):
    """End this process with a line on stderr.

    Of several processes that make the same mistake the first of a machine says it: torchrun ends
    the others when that one ends. torchrun's own report, which is long, ends with the line as well.
    """
    line = f"{program or Path(sys.argv[0]).name}: {' '.join(text.split())}"
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(OTHERS_WAIT)
        line = line.replace("error: ", f"error: [rank {os.environ.get('RANK', '?')}] ", 1)
    print(line, file=sys.stderr)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": f"\n\n{line}", "timestamp": int(time.time())}
        with contextlib.suppress(OSError):
            Path(report).write_text(json.dumps(message))
    sys.exit(code)


def out_of_memory(error: BaseException) -> str:
    """What an allocation that failed says of itself, in short; empty for other errors."""
    text = str(error)
    if not isinstance(error, MemoryError) and not re.search(
        "out of memory|can't allocate", text, re.I
    ):
        return ""
    wanted = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
    return f"out of memory (tried to allocate {wanted[1]})" if wanted else "out of memory"
