"""Keys from files and command lines: what is accepted, what is refused, and what the refusal says."""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest

import configurator
import train
from model import STEMS, model_class
from model.keys import Key, check_ranges, keys_of


@dataclass
class Base:
    """Keys of every run"""

    steps: Annotated[int, "how long to run", Key(low=1)] = 10
    rate: Annotated[float, "how fast to learn"] = 0.5


@dataclass
class Run(Base):
    """Keys of one design"""

    fast: Annotated[bool, "skip the slow part"] = False
    name: Annotated[str, "what to call it"] = "plain"
    kind: Annotated[Literal["delta", "write_only"], "which update"] = "delta"
    limit: Annotated[int | None, "tokens at most"] = None
    scale: Annotated[float | None, "gain, if any", Key(above=0)] = 2.0
    mode: Annotated[Literal["slow", "quick"] | None, "speed, if any"] = None
    rate: Annotated[float, "how fast to learn, here", Key(low=0, below=1)] = 0.25  # a new default for an inherited key


@dataclass
class Other:
    """Keys of something else"""

    steps: Annotated[int, "a second key of that name"] = 99
    depth: Annotated[int, "layers"] = 3


@pytest.fixture(scope="module")
def schema():
    return configurator.knobs(Run)


def test_knobs_hold_what_the_dataclass_says(schema):
    assert list(schema) == ["steps", "rate", "fast", "name", "kind", "limit", "scale", "mode"]
    assert {key: knob.name for key, knob in schema.items()} == {key: key for key in schema}
    assert [knob.default for knob in schema.values()] == [10, 0.25, False, "plain", "delta", None, 2.0, None]
    assert schema["steps"].help == "how long to run"
    assert schema["rate"].help == "how fast to learn, here"
    assert schema["limit"].types == (int, type(None))
    assert schema["kind"].types == (str,)
    assert schema["kind"].choices == ("delta", "write_only")
    assert schema["mode"].choices == ("slow", "quick")
    assert set(schema["mode"].types) == {str, type(None)}
    assert schema["name"].choices == ()


@dataclass
class Terse:
    """Keys with little said of them."""

    bare: float = 0.5
    ranged: Annotated[int, Key(low=1)] = 2
    helped: Annotated[bool, "only help"] = True


def test_help_and_facts_of_a_key_may_be_left_out():
    knobs = configurator.knobs(Terse)
    assert [(knob.types, knob.help) for knob in knobs.values()] == [
        ((float,), ""),
        ((int,), ""),
        ((bool,), "only help"),
    ]
    assert knobs["ranged"].fact.range == "1 or more"
    assert configurator.check({"bare": 1, "ranged": 3}, knobs) == {"bare": 1.0, "ranged": 3}
    assert "--ranged=2" in configurator.help_text("", knobs)


def test_of_two_schemas_the_first_defines_a_shared_key():
    both = configurator.knobs(Base, Other)
    assert list(both) == ["steps", "rate", "depth"]
    assert both["steps"].default == 10
    assert both["depth"].group == configurator.knobs(Other)["depth"].group


RANGES = [
    (Key(low=1), [1, 2**70], [0, 0.5], "1 or more"),
    (Key(above=1), [1.5], [1, 0], "a number above 1"),
    (Key(low=0, high=2), [0, 2], [-0.1, 2.1], "a number from 0 to 2"),
    (Key(low=0, below=1), [0, 0.99], [-1, 1], "a number from 0 to below 1"),
    (Key(), [-1e30, 1e30], [], ""),
]


@pytest.mark.parametrize(("key", "inside", "outside", "words"), RANGES, ids=[each[-1] for each in RANGES])
def test_ranges_of_keys(key, inside, outside, words):
    assert all(map(key.allows, inside))
    assert not any(map(key.allows, outside))
    assert key.range == words


def test_a_value_out_of_its_range_is_refused_by_name():
    check_ranges(Run(scale=None, rate=0.0))
    for changes, message in (({"steps": 0}, "steps=0: give 1 or more"), ({"rate": 1.0}, "rate=1.0: give a number")):
        with pytest.raises(ValueError, match=f"^{message}"):
            check_ranges(Run(**changes))


def test_every_config_checks_its_ranges():
    """Made directly, too, without a command line."""
    for config in (train.TrainConfig, *(model_class(stem).Config for stem in STEMS)):
        lows = {name: key.low for name, key in keys_of(config).items() if key.low is not None}
        assert len(lows) > 5
        for name, low in lows.items():
            with pytest.raises(ValueError, match=f"^{name}={low - 1}: give "):
                config(**{name: low - 1})


REFUSED = {"steps": [1.0, True, "1", None], "rate": [True, "0.1", None, float("nan"), float("inf")]}
REFUSED |= {"scale": [float("-inf")], "fast": [1, "True"], "name": [1, None], "kind": ["Delta", None]}
REFUSED |= {"limit": [1.5, False], "mode": ["fast", 1]}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in REFUSED.items() for value in values])
def test_check_refuses_wrong_types_choices_and_numbers(schema, key, value):
    with pytest.raises(ValueError, match=f"^{key}=.*: give "):
        configurator.check({"steps": 1, key: value}, schema)


# The settings of nanoGPT's train.py, its configurator.py's examples and its sample.py.
NANOGPT = """out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from wandb_log
wandb_project wandb_run_name dataset gradient_accumulation_steps batch_size block_size n_layer n_head n_embd dropout
bias learning_rate max_iters weight_decay beta1 beta2 grad_clip decay_lr warmup_iters lr_decay_iters min_lr backend
device dtype compile start""".split()


def test_every_name_of_nanogpt_is_a_key_or_answered_with_ours():
    schema = train.every_key()
    unknown = [name for name in [*NANOGPT, "lr"] if name not in schema]
    with pytest.raises(ValueError, match="unknown key") as refused:
        configurator.refuse_unknown(unknown, schema, dashes="--")
    answers = str(refused.value).split("; ")
    assert len(answers) == len(unknown) == 17
    for name, answer in zip(unknown, answers):
        assert answer.startswith(f"unknown key --{name}: ")
        named = re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", answer.partition(": ")[2])
        assert set(named) <= schema.keys()
    assert "unknown key --lr: give learning_rate" in answers


def test_all_mistyped_keys_are_named_at_once_with_the_nearest(schema):
    with pytest.raises(ValueError, match=r"^unknown key stpes, did you mean steps\?; unknown key zzzzzz$"):
        configurator.check({"stpes": 1, "fast": True, "zzzzzz": 2}, schema)
    with pytest.raises(ValueError, match=r"unknown key --stpes, did you mean steps\?$"):
        configurator.parse("stpes", "1", schema)


def test_a_single_dash_asks_for_help_or_is_refused():
    assert configurator.split_arguments(["-h"]) == ([], {"help": "True"})
    with pytest.raises(ValueError, match=r"^-steps=3: keys have two dashes, --key=value$"):
        configurator.split_arguments(["-steps=3"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "--top-k=3"], "run.py: error: unknown option --top-k, did you mean --top_k?; "),
        (["--topk", "3"], "run.py: error: unknown option --topk, did you mean --top_k?; "),
        (["run", "-top_k=3"], "run.py: error: unknown option -top_k, did you mean --top_k?; "),
        (["run", "--top=3"], "run.py: error: unknown option --top, did you mean --top_k?; "),  # no abbreviations
        (["run", "--start=a"], "run.py: error: unknown option --start: give --prompt; "),
        (["run", "more"], "run.py: error: unexpected argument more; "),
        (["run", "--top_k=x"], "run.py: error: argument --top_k: invalid int value: 'x'; "),
        ([], "run.py: error: the following arguments are required: run; "),
    ],
)
def test_a_mistyped_option_is_one_line_with_the_nearest(capsys, argv, message):
    parser = configurator.Parser(prog="run.py")
    parser.add_argument("run")
    parser.add_argument("--top_k", type=int)
    parser.add_argument("--prompt")
    with pytest.raises(SystemExit) as end:
        parser.parse_args(argv)
    assert end.value.code == 2
    assert capsys.readouterr() == ("", message + "--help lists the options\n")


def test_options_of_a_subcommand_and_values_that_look_like_options(capsys):
    parser = configurator.Parser(prog="run.py")
    draw = parser.add_subparsers(dest="command").add_parser("draw")
    draw.add_argument("--out")
    draw.add_argument("words", nargs="*")
    found = parser.parse_args(["draw", "--out=--x", "--", "--unknown"])
    assert (found.out, found.words) == ("--x", ["--unknown"])
    with pytest.raises(SystemExit):
        parser.parse_args(["draw", "--ou=x"])
    assert capsys.readouterr().err.startswith("run.py draw: error: unknown option --ou, did you mean --out?")


PARSED = {
    "steps": {"12": 12, "-1": -1},
    "rate": {"6e-4": 6e-4, "2": 2.0},
    "fast": {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False},
    "name": {"12": "12", "a=b": "a=b", "None": "None"},
    "kind": {"write_only": "write_only"},
    "limit": {"7": 7, "None": None},
    "scale": {"7": 7.0, "None": None},
    "mode": {"quick": "quick", "None": None},
}


@pytest.mark.parametrize("key", PARSED)
def test_parse_reads_text_by_the_type_of_the_key(schema, key):
    for text, value in PARSED[key].items():
        parsed = configurator.parse(key, text, schema)
        assert parsed == value
        assert type(parsed) is type(value)


UNPARSABLE = {"steps": "1.0 1e3 True None ", "rate": "fast nan -inf 1e999 None", "fast": "yes 2 None"}
UNPARSABLE |= {"kind": "delt None", "limit": "none 1.5", "mode": "fast"}


@pytest.mark.parametrize(("key", "text"), [(key, text) for key in UNPARSABLE for text in UNPARSABLE[key].split(" ")])
def test_parse_refuses_text_of_another_type(schema, key, text):
    with pytest.raises(ValueError, match=f"{key}=.*: give "):
        configurator.parse(key, text, schema)


def test_the_command_line_overrides_the_file(schema):
    given = configurator.given({"steps": 3, "rate": 1, "depth": 5}, {"steps": "4", "other": "x"}, schema)
    assert given == {"steps": 4, "rate": 1.0}
    with pytest.raises(ValueError, match="steps='3': give a whole number"):
        configurator.given({"steps": "3"}, {}, schema)


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


def test_read_file_gives_the_assigned_names_only(tmp_path):
    path = tmp_path / "run.py"
    path.write_text(CONFIG_FILE, encoding="utf-8")
    assert configurator.read_file(str(path)) == {"width": 3, "steps": 20, "rate": 0.5, "name": "ä"}
    path.write_text("steps = 1 / 0")
    with pytest.raises(ValueError, match=r"run\.py: ZeroDivisionError: division by zero"):
        configurator.read_file(str(path))


def test_read_file_names_the_nearest_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "ddl_small.py").write_text("steps = 1")
    with pytest.raises(ValueError, match=r"no config file config/ddl_smal\.py, did you mean config/ddl_small\.py\?"):
        configurator.read_file("config/ddl_smal.py")
    with pytest.raises(ValueError, match=r"no config file zzzz; config/ holds them"):
        configurator.read_file("zzzz")


def test_split_arguments():
    files, options = configurator.split_arguments(["a.py", "--steps=3", "--name=x=y", "--fast", "--limit=", "b.py"])
    assert files == ["a.py", "b.py"]
    assert options == {"steps": "3", "name": "x=y", "fast": "True", "limit": ""}
    assert configurator.split_arguments(["--steps=1", "--steps=2"]) == ([], {"steps": "2"})


def test_help_text_shows_every_key_with_its_default_help_and_choices():
    text = configurator.help_text("usage: run it", configurator.knobs(Run, Other))
    lines = text.splitlines()
    titles = [line for line in lines if line and not line.startswith(" ")]
    assert titles == ["usage: run it", "Keys of every run", "Keys of one design", "Keys of something else"]
    for start, *words in [
        ("--steps=10 ", "how long to run (1 or more)"),
        ("--rate=0.25 ", "how fast to learn, here (a number from 0 to below 1)"),
        ("--fast=False ", "skip the slow part"),
        ("--name=plain ", "what to call it"),
        ("--kind=delta ", "which update", "delta", "write_only"),
        ("--limit=None ", "tokens at most"),
        ("--scale=2.0 ", "gain, if any (a number above 0)"),
        ("--mode=None ", "speed, if any", "slow", "quick"),
        ("--depth=3 ", "layers"),
    ]:
        (line,) = (line for line in lines if line.strip().startswith(start))
        assert all(word in line for word in words)


@pytest.mark.parametrize(
    ("error", "rank", "line"),
    [
        (ValueError("steps=0:\n  give 1 or more"), None, "run.py: error: steps=0: give 1 or more\n"),
        (ValueError("bad"), "0", "run.py: error: bad\n"),
        (ValueError("bad"), "3", "run.py: error: [rank 3] bad\n"),
        (FileNotFoundError(2, "No such file", "x.bin"), None, "run.py: error: [Errno 2] No such file: 'x.bin'\n"),
    ],
)
def test_mistakes_end_the_script_with_one_line_and_code_2(monkeypatch, capsys, error, rank, line):
    monkeypatch.setattr("sys.argv", ["/some/where/run.py", "--steps=0"])
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(configurator, "OTHERS_WAIT", 0)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(SystemExit) as end, configurator.one_line_errors():
        raise error
    assert end.value.code == 2
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize(
    ("key", "words", "allowed", "refused"),
    [
        (Key(low=1), "1 or more", (1, 2), (0, math.nan)),
        (Key(above=0), "a number above 0", (0.1,), (0, -1)),
        (Key(low=0, high=2), "a number from 0 to 2", (0, 2), (-1, 2.1)),
        (Key(low=0, below=1), "a number from 0 to below 1", (0, 0.9), (1,)),
        (Key(high=3), "a number to 3", (-9, 3), (4,)),
        (Key(above=0, high=1), "a number above 0 to 1", (1,), (0, 2)),
        (Key(), "", (-1e9,), ()),
    ],
)
def test_a_range_is_said_as_it_is_checked(key, words, allowed, refused):
    assert key.range == words
    assert all(map(key.allows, allowed))
    assert not any(map(key.allows, refused))
