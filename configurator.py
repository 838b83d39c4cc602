"""Typed configuration from Python files and `--key=value`: a misspelled key or a wrong type stops the run.

    python train.py config/ddl_dv4_small.py --learning_rate=6e-4

A schema is one or several dataclasses whose fields are `name: Annotated[type, "help", Key(...)] = default`, the type
one of int, float, bool, str, Literal[...], or one of them `| None`. `Key` (model/keys.py) holds the range and other
facts, and may be left out, as may the help: `name: type = default`. A config file is Python that assigns such names;
`from config.gpt_small import *` begins from another.
"""

import argparse
import contextlib
import dataclasses
import difflib
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
INTERRUPTED = 130  # as a shell has it for a process that SIGINT has ended
OTHERS_WAIT = 3.0  # seconds; torchrun looks at its processes ten times a second


def _end_at_once(*_) -> None:
    """Ctrl+C while packages are imported, where an exception would be taken for a damaged package, or swallowed.

    Of several processes of one run the first alone says so.
    """
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        if os.environ.get("RANK", "0") == "0":
            os.write(2, f"{Path(sys.argv[0]).name}: interrupted\n".encode())
    os._exit(INTERRUPTED)


def _main_is_ours() -> bool:
    """Whether a script of this repository runs, and not a test, a notebook or a program that imports from it."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    return main is not None and Path(main).resolve().parent in (ROOT, ROOT / "research")


# Scripts import this module before all that takes time to import.
if _main_is_ours() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end_at_once)


@dataclass(frozen=True)
class Knob:
    """One key of a schema; choices empty: any value; group: what the class that defines it is about."""

    name: str
    types: tuple[type, ...]
    choices: tuple
    default: object
    help: str
    group: str
    fact: object  # what the schema says of the key beside its help (model/keys.py), None: nothing

    @property
    def kind(self) -> str:
        """What the key takes, in words."""
        names = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
        free = [names[t] for t in self.types if t is not type(None) and not self.chosen(t)]
        options = free + [repr(choice) for choice in self.choices]
        return " or ".join(options + ["None"] * (type(None) in self.types))

    def chosen(self, kind: type) -> bool:
        """Whether values of the type are choices, beside which there may be free values of another."""
        return kind in map(type, self.choices)


def knobs(*schemas: type) -> dict[str, Knob]:
    """Every field of the dataclasses by name, the first of a name; group is its class's first docstring line."""
    result: dict[str, Knob] = {}
    for schema in schemas:
        hints = typing.get_type_hints(schema, include_extras=True)
        for field in dataclasses.fields(schema):
            hint = hints[field.name]
            said = getattr(hint, "__metadata__", ())
            annotated = typing.get_args(hint)[0] if said else hint
            help_text = next((each for each in said if isinstance(each, str)), "")
            fact = next((each for each in said if not isinstance(each, str)), None)
            kinds, choices = kinds_and_choices(annotated)
            if not {int, float, bool, str, type(None)}.issuperset(kinds):
                raise ValueError(
                    f"{schema.__module__}: the key {field.name} is {field.type}: a key is int, float, bool, str, "
                    "Literal[...], or one of them | None"
                )
            owner = [base for base in schema.__mro__ if field.name in base.__dict__.get("__annotations__", {})][-1]
            title = (owner.__doc__ or owner.__name__).partition("\n")[0]
            knob = Knob(field.name, kinds, choices, field.default, help_text, title, fact)
            result.setdefault(field.name, knob)
    return result


def kinds_and_choices(annotated) -> tuple[tuple[type, ...], tuple]:
    """(types of the values, values of a Literal) that an annotation allows."""
    union = typing.get_origin(annotated) in (typing.Union, types.UnionType)
    parts = typing.get_args(annotated) if union else (annotated,)
    literals = [part for part in parts if typing.get_origin(part) is typing.Literal]
    choices = tuple(value for part in literals for value in typing.get_args(part))
    return tuple(str if part in literals else part for part in parts), choices


# What nanoGPT calls by other names, by a name that only the script has to which it is said.
HABITS = {
    "max_steps": {
        "lr": "give learning_rate",
        "n_layer": "give num_hidden_layers",
        "n_head": "give num_attention_heads",
        "n_embd": "give hidden_size",
        "batch_size": "give global_batch_size for a step's sequences, micro_batch_size for those of a forward pass",
        "gradient_accumulation_steps": "it is global_batch_size over micro_batch_size and the number of processes",
        "max_iters": "give max_steps",
        "max_epochs": "give max_steps: an epoch is the training tokens over global_batch_size times block_size",
        "tensorboard": "give wandb_log, or draw metrics.jsonl by research/report.py curves",
        "warmup_iters": "give warmup_steps",
        "lr_decay_iters": "the learning rate falls until max_steps",
        "decay_lr": "the learning rate falls to min_lr: for a constant one give min_lr the value of learning_rate",
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
    """', did you mean X?', or nothing where nothing is near; the dashes of options make none near."""
    bare = {other.lstrip("-"): other for other in names}
    close = difflib.get_close_matches(name.lstrip("-"), list(bare), n=1)
    return f", did you mean {bare[close[0]]}?" if close else ""


def instead(name: str, names) -> str:
    """What to give in the place of an unknown name, as the end of a message."""
    for script, habits in HABITS.items():
        if script in names and name in habits:
            return f": {habits[name]}"
    return nearest(name, names)


def refuse_unknown(names, schema: dict[str, Knob], dashes: str = "") -> None:
    """ValueError: names that are no keys, each with what to give instead."""
    unknown = [f"unknown key {dashes}{name}{instead(name, schema)}" for name in names if name not in schema]
    if unknown:
        raise ValueError("; ".join(unknown))


def check(values: dict, schema: dict[str, Knob]) -> dict:
    """The values with ints made floats where a float is due. ValueError: unknown key, wrong type, no such choice."""
    refuse_unknown(values, schema)
    return {name: _check_one(name, value, schema) for name, value in values.items()}


def _check_one(name, value, schema):
    knob = schema[name]
    if type(value) is int and float in knob.types:
        value = float(value)
    if type(value) not in knob.types or (knob.chosen(type(value)) and value not in knob.choices):
        raise ValueError(f"{name}={value!r}: give {knob.kind}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: give a finite number")
    return value


def given(from_file: dict, options: dict[str, str], schema: dict[str, Knob]) -> dict:
    """The keys of the schema that a config file or the command line gives, which overrides it. ValueError: as above."""
    values = check({key: value for key, value in from_file.items() if key in schema}, schema)
    return values | {key: parse(key, text, schema) for key, text in options.items() if key in schema}


def parse(name: str, text: str, schema: dict[str, Knob]):
    """The value of `--name=text`, by the key's type. ValueError: unknown key or text of another type."""
    refuse_unknown([name], schema, dashes="--")
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
    """The JSON object that a file holds. ValueError: missing, unreadable, not JSON, or not an object."""
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
    """Write a text file that is whole at any moment, before, after a kill and after a power cut."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def optional(module: str, use: str):
    """A module that is imported only where it is used. ValueError: its package is missing; `use`: what needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.rpartition(".")[2] if module.startswith("torch.") else module.partition(".")[0]
        raise ValueError(f"{use} needs the {package} package: pip install {package}") from error


def split_arguments(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """Positional arguments, and `--key=value` as a dict; a bare `--key` means True. ValueError: a single dash."""
    argv = ["--help" if argument == "-h" else argument for argument in argv]
    files = [argument for argument in argv if not argument.startswith("--")]
    for argument in files:
        if argument.startswith("-"):
            raise ValueError(f"{argument}: keys have two dashes, --key=value")
    pairs = [argument[2:].partition("=") for argument in argv if argument.startswith("--")]
    return files, {key: value if equals else "True" for key, equals, value in pairs}


def help_text(usage: str, schema: dict[str, Knob]) -> str:
    """The usage, then every key with its default, help, and choices or range, by the class that defines it."""
    groups: dict[str, list[str]] = {}
    for knob in schema.values():
        values = " | ".join(map(str, knob.choices)) or getattr(knob.fact, "range", "")
        line = f"  --{knob.name}={knob.default}".ljust(44) + f" {knob.help}{f' ({values})' if values else ''}"
        groups.setdefault(knob.group, []).append(line)
    return "\n".join([usage.strip(), *(line for title, lines in groups.items() for line in ["", title, *lines])])


class Parser(argparse.ArgumentParser):
    """argparse's, for itself and its subcommands: a mistake is one line, a mistyped option is told the nearest."""

    def __init__(self, **keys):
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **keys})

    def error(self, message: str):
        end(f"error: {message}; --help lists the options", program=self.prog)

    def parse_known_args(self, args=None, namespace=None):
        args = sys.argv[1:] if args is None else list(args)
        if not self._subparsers:  # argparse would name a missing argument first
            self._refuse([word for word in itertools.takewhile("--".__ne__, args) if word.startswith("--")])
        parsed, unknown = super().parse_known_args(args, namespace)
        self._refuse(unknown)
        return parsed, []

    def _refuse(self, words: list[str]) -> None:
        for option in [word.partition("=")[0] for word in words]:
            if option not in self._option_string_actions:
                what = f"unknown option {option}" if option.startswith("-") else f"unexpected argument {option}"
                self.error(what + instead(option, self._option_string_actions))


@contextlib.contextmanager
def one_line_errors(*kinds: type[Exception], memory: str = ""):
    """End the script with one line: exit code 2 on what a user can get wrong, which is `kinds`, or ValueError and
    OSError, and, with `memory` for advice, on memory that ran out; 130 on Ctrl+C, once all inside has cleaned up."""
    expected, at_once = kinds or (ValueError, OSError), signal.getsignal(signal.SIGINT) is _end_at_once
    if at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except SystemExit:
        raise
    except BaseException as error:
        if _is_interruption(error):
            if not at_once:  # of an outer one, or a program's own
                raise
            _end_at_once()
        if memory and (lack := out_of_memory(error)):
            end(f"error: {lack}: {memory}")
        if isinstance(error, expected):
            end(f"error: {error}")
        raise
    finally:
        if at_once:
            signal.signal(signal.SIGINT, _end_at_once)


def end(text: str, code: int = 2, program: str | None = None):
    """End this process with a line on stderr.

    Of several processes that make the same mistake the first of a machine says it: torchrun ends the others when that
    one ends. torchrun's own report, which is long, then ends with the line as well.
    """
    line = f"{program or Path(sys.argv[0]).name}: {' '.join(text.split())}"
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(OTHERS_WAIT)
        line = line.replace("error: ", f"error: [rank {os.environ.get('RANK', '?')}] ", 1)
    print(line, file=sys.stderr)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            Path(report).write_text(json.dumps({"message": f"\n\n{line}", "timestamp": int(time.time())}))
    sys.exit(code)


def out_of_memory(error: BaseException) -> str:
    """What an allocation that failed says of itself, in short; empty for other errors."""
    text = str(error)
    if not isinstance(error, MemoryError) and "ut of memory" not in text and "can't allocate memory" not in text:
        return ""
    wanted = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
    return f"out of memory (tried to allocate {wanted[1]})" if wanted else "out of memory"


def _is_interruption(error: BaseException | None) -> bool:
    """Whether Ctrl+C is behind an error; packages make others of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
