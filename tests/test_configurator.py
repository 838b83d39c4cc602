"""Read keys from files and command lines, and refuse mistakes with a message that helps."""

import errno
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from helpers import ROOT

import configurator
from configurator import argument, check_ranges, collect_options, option
from model import MODEL_NAMES, model_class
from training.config import TrainConfig
from utils import errors, files


@dataclass
class Base:
    """Keys of every run"""

    steps: int = option(10, "how long to run", low=1)
    rate: float = option(0.5, "how fast to learn")


@dataclass
class Run(Base):
    """Keys of one design"""

    fast: bool = option(False, "skip the slow part")
    name: str = option("plain", "what to call it")
    kind: Literal["delta", "write_only"] = option("delta", "which update")
    limit: int | None = option(None, "tokens at most")
    scale: float | None = option(2.0, "gain, if any", above=0)
    graphs: Literal["auto", "on", "off"] = option("auto", "a key that was True or False once")
    # a new default for an inherited key
    rate: float = option(0.25, "how fast to learn, here", low=0, below=1)
    bare: float = 0.5


@dataclass
class Other:
    """Keys of something else"""

    steps: int = option(99, "a second key of that name")
    depth: int = option(3, "layers")


SCHEMA = collect_options(Run)


def test_of_two_classes_with_a_key_the_first_counts():
    options = collect_options(Base, Other)
    assert list(options) == ["steps", "rate", "depth"]
    assert options["steps"].default == 10


def test_a_value_out_of_its_range_is_refused():
    check_ranges(Run(scale=None, rate=0.0))
    with pytest.raises(ValueError, match=r"^rate=1\.0: give a number at least 0 and below 1"):
        check_ranges(Run(rate=1.0))


@pytest.mark.parametrize("model_name", [None, *MODEL_NAMES])
def test_every_config_checks_its_ranges_when_it_is_created(model_name):
    """None stands for TrainConfig."""
    config = TrainConfig if model_name is None else model_class(model_name).Config
    lows = {name: key.low for name, key in collect_options(config).items() if key.low is not None}
    assert len(lows) > 5
    for name, low in lows.items():
        with pytest.raises(ValueError, match=f"^{name}={low - 1}: give "):
            config(**{name: low - 1})


WRONG_VALUES = {
    "steps": [1.0, True, "1", None],
    "rate": [True, "0.1", None, math.nan, math.inf],
    "scale": [-math.inf],
    "fast": [1, "True"],
    "name": [1, None],
    "kind": ["Delta", None],
    "limit": [1.5, False],
    "graphs": ["maybe", 1],
}


@pytest.mark.parametrize("key", WRONG_VALUES)
def test_values_of_another_type_or_choice_are_refused(key):
    for value in WRONG_VALUES[key]:
        with pytest.raises(ValueError, match=f"^{key}=.*: give "):
            SCHEMA[key].convert(value)


PARSED = {
    "steps": {"12": 12, "-1": -1},
    "rate": {"6e-4": 6e-4, "2": 2.0},
    "fast": {"True": True, "true": True, "1": True, "False": False, "0": False, None: True},
    "name": {"12": "12", "a=b": "a=b", "None": "None"},
    "kind": {"write_only": "write_only"},
    "limit": {"7": 7, "None": None},
    "scale": {"7": 7.0, "None": None},
    "graphs": {"True": "on", "0": "off", "off": "off", "auto": "auto", None: "on"},
}
UNPARSABLE = {
    "steps": ["1.0", "True", "None", ""],
    "rate": ["fast", "nan", "1e999"],
    "fast": ["yes"],
    "kind": ["delt"],
    "limit": ["none", "1.5"],
}


@pytest.mark.parametrize("key", PARSED)
def test_parse_reads_text_by_the_type_of_the_key(key):
    for text, value in PARSED[key].items():  # None is a bare key
        parsed = SCHEMA[key].parse(text)
        assert parsed == value
        assert type(parsed) is type(value)


@pytest.mark.parametrize("key", UNPARSABLE)
def test_parse_refuses_text_of_another_type(key):
    for text in UNPARSABLE[key]:
        with pytest.raises(ValueError, match=f"{key}=.*: give "):
            SCHEMA[key].parse(text)


def test_a_command_line_is_split_into_files_and_options(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    words = "a.py --steps=3 --name=x=y --fast b.py --limit= --steps=4 --out_dir=~/runs/a -h"
    positional, options = configurator.split_arguments(words.split())
    assert positional == ["a.py", "b.py"]
    assert options == {
        "steps": "4",
        "name": "x=y",
        "fast": None,
        "limit": "",
        "out_dir": "/home/me/runs/a",
        "help": None,
    }


def test_a_value_after_a_space_is_refused():
    """As train.py splits its command line, before it knows its options."""
    with pytest.raises(ValueError, match=r"^--steps 3: give --steps=3, without a space$"):
        configurator.split_arguments(["--steps", "3"])


def test_an_unknown_key_is_answered_with_the_nearest():
    message = r"^unknown key stpes, did you mean steps\?; unknown key zzzzzz$"
    with pytest.raises(ValueError, match=message):
        configurator.check_names(["stpes", "fast", "zzzzzz"], SCHEMA)


# ---- scripts without a config file ----


@dataclass(frozen=True)
class Script:
    """Options of a script"""

    run: str = argument("run folder")
    files: tuple[str, ...] = argument("files to read")
    prompt: tuple[str, ...] = option((), "text to continue")
    top_k: int | None = option(None, "number of tokens to choose from", low=1)
    data: bool | str = option(False, "also read this dataset, or the run's own")
    serve: bool = option(False, "serve a page")
    port: int = option(8000, "port of the page")


def read_script(*argv: str, **fixed):
    return vars(
        configurator.read_command_line("run.py: generate\n", Script, fixed=fixed, argv=list(argv))
    )


DEFAULTS = {"prompt": (), "top_k": None, "data": False, "serve": False, "port": 8000}
COMMAND_LINES = [
    ("a b c --serve --port=1", {"run": "a", "files": ("b", "c"), "serve": True, "port": 1}),
    ("--serve a b", {"run": "a", "files": ("b",), "serve": True}),
    ("a --top_k 3 b", {"run": "a", "files": ("b",), "top_k": 3}),
    ("a --data b --prompt=--x", {"run": "a", "files": ("b",), "data": True, "prompt": ("--x",)}),
    ("a b --data=mine", {"run": "a", "files": ("b",), "data": "mine"}),
    ("a b --prompt x y --port=1", {"run": "a", "files": ("b",), "prompt": ("x", "y"), "port": 1}),
]


@pytest.mark.parametrize(("words", "values"), COMMAND_LINES)
def test_a_script_reads_arguments_options_and_lists(words, values):
    assert read_script(*words.split()) == {**DEFAULTS, **values}


def test_a_fixed_option_is_none_of_the_script(capsys):
    assert read_script("a", "b", top_k=5)["top_k"] == 5
    with pytest.raises(SystemExit):
        read_script("a", "b", "--top_k=3", top_k=5)
    assert "unknown key --top_k" in capsys.readouterr().err


SCRIPT_MISTAKES = [
    ("a b -top_k=3", "-top_k=3: keys have two dashes, --key=value"),
    ("a b --port", "--port needs a value: give --port=VALUE"),
    ("a b --top=3", "unknown key --top, did you mean top_k?"),  # no abbreviations
    ("a b --top_k=0", "--top_k=0: give a number at least 1"),
    ("a", "files is missing: files to read"),
]


@pytest.mark.parametrize(("words", "message"), SCRIPT_MISTAKES)
def test_a_mistake_ends_a_script_with_one_line(capsys, words, message):
    with pytest.raises(SystemExit) as end:
        read_script(*words.split())
    assert end.value.code == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert error.endswith(f": error: {message}\n")
    assert error.count("\n") == 1


def test_the_help_of_a_script_has_its_usage_arguments_and_options(capsys):
    with pytest.raises(SystemExit) as end:
        read_script("a", "--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith("run.py: generate\n")
    for title in ("files", "--prompt=...", "--top_k=None"):
        assert f"\n  {title}\n" in text


# ---- config files ----


CONFIG_FILE = """
import math
from math import sqrt

_layers = 4

def double(x):
    return 2 * x

width = 3
steps = double(_layers) + sum(width for _ in range(4))
rate = 1 / sqrt(4)
name = "ä"
"""


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    """Return the path of config/ddl_small.py in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config" / "ddl_small.py"
    path.parent.mkdir()
    path.write_text(CONFIG_FILE, encoding="utf-8")
    return path


def read_settings(config_file: Path) -> dict[str, object]:
    values = configurator.read_config_files(str(config_file))
    return {name: value for name, value in values.items() if not configurator.is_definition(value)}


def test_a_config_file_sets_the_values_of_its_public_names(config_file):
    settings = {"width": 3, "steps": 20, "rate": 0.5, "name": "ä"}
    assert read_settings(config_file) == settings


def test_a_config_file_may_extend_the_one_beside_it(config_file, monkeypatch):
    monkeypatch.delitem(sys.modules, "base_of_a_test", raising=False)
    (config_file.parent / "base_of_a_test.py").write_text("steps = 20\nrate = 1.0\n")
    config_file.write_text("from base_of_a_test import *\nrate = 0.5\n")
    path = list(sys.path)
    assert read_settings(config_file) == {"steps": 20, "rate": 0.5}
    assert sys.path == path


def test_numpys_numbers_are_numbers(config_file):
    text = (
        "import numpy as np\nsteps = np.arange(5).max()\nrate = np.float32(0.5)\nfast = np.all([])"
    )
    config_file.write_text(text)
    settings = read_settings(config_file)
    assert settings == {"steps": 4, "rate": 0.5, "fast": True}
    assert [type(value) for value in settings.values()] == [int, float, bool]


def test_a_config_file_that_does_not_exist_is_answered_with_the_nearest(config_file):
    with pytest.raises(ValueError, match=r"config/ddl_smal\.py, did you mean config/ddl_small\.py"):
        configurator.read_config_files("config/ddl_smal.py")


def test_an_error_in_a_config_file_is_named(config_file):
    config_file.write_text("depth = 3\nsteps = 1 / 0")
    message = r"small\.py, line 2: ZeroDivisionError: division by zero"
    with pytest.raises(ValueError, match=message):
        configurator.read_config_files(str(config_file))


def test_help_shows_keys_by_class_with_default_choices_and_range():
    text = configurator.help_text(collect_options(Run, Other))
    assert text.startswith(
        "Keys of one design:\n  --steps=10\n        how long to run; at least 1\n"
    )
    assert "\n\nKeys of something else:\n  --depth=3\n        layers" in text
    assert "  --kind=delta\n        which update; delta | write_only\n" in text


@pytest.mark.parametrize(
    ("error", "rank", "line"),
    [
        (ValueError("steps=0:\n  give 1 or more"), "0", "steps=0: give 1 or more"),
        (ValueError("bad"), "3", "[rank 3] bad"),
        (FileNotFoundError(2, "No such file", "x.bin"), "0", "x.bin: No such file"),
    ],
)
def test_mistakes_end_the_script_with_one_line_and_code_2(monkeypatch, capsys, error, rank, line):
    monkeypatch.setattr("sys.argv", ["/some/where/run.py", "--steps=0"])
    monkeypatch.setattr(errors, "OTHER_RANKS_WAIT", 0)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(SystemExit) as end, errors.one_line_errors():
        raise error
    assert end.value.code == 2
    assert capsys.readouterr() == ("", f"run.py: error: {line}\n")


def test_help_that_nobody_reads_to_its_end_is_no_error():
    """The reading end of the pipe is closed, as in `--help | head`."""
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    command = [sys.executable, "data/text/prepare.py", "--help"]
    result = subprocess.run(
        command, cwd=ROOT, stdout=writing_end, stderr=subprocess.PIPE, check=False
    )
    os.close(writing_end)
    assert result.returncode == -signal.SIGPIPE
    assert result.stderr == b""


def test_a_write_to_a_full_disk_leaves_the_old_file_and_names_it(tmp_path, monkeypatch):
    def fail(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a.json"
    files.write_text(path, "first")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space") as raised:
        files.write_text(path, "second")
    assert errors.describe_error(raised.value) == (
        f"{path}: No space left on device; free disk space and run the same command again"
    )
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() == "first"


def test_the_beginning_of_a_name_suggests_the_name():
    assert errors.suggest("MUDD", MODEL_NAMES) == ", did you mean MUDD-gpt-mha-rope?"
    assert errors.suggest("", MODEL_NAMES) == errors.suggest("xyz", MODEL_NAMES) == ""


def test_two_writers_of_a_file_do_not_share_their_temporary_files(tmp_path):
    path = tmp_path / "results.json"
    with files.atomic_path(path, is_shared=True) as first:
        first.write_text("first")
        with files.atomic_path(path, is_shared=True) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
