"""Scripts with commands: reading a command line; and every stored result is named on a page."""

import re
from dataclasses import dataclass

import pytest
from helpers import ROOT

from configurator import argument, option
from research.commands import Command, read_command

# ---- reading a command line ----


@dataclass(frozen=True)
class DrawOptions:
    """What is drawn."""

    folders: tuple[str, ...] = argument("run folders")
    band: bool = option(False, "draw a band")
    where: tuple[str, ...] = option((), "conditions")


@dataclass(frozen=True)
class CountOptions:
    """What is counted."""

    rounds: int = option(3, "number of rounds", low=1)


COMMANDS = {
    "draw": Command("draw curves.\n\nThey show the loss.", DrawOptions, print),
    "count": Command("count runs", CountOptions, print),
}


def test_a_command_has_options_of_its_own():
    args = read_command("", COMMANDS, argv=["draw", "a", "--where=x=1", "b", "--band", "c"])
    assert vars(args) == {
        "command": "draw",
        "folders": ("a", "b", "c"),
        "band": True,
        "where": ("x=1",),
    }


@pytest.mark.parametrize("argv", [["--rounds=5"], ["count", "--rounds=5"]])
def test_a_command_line_without_a_command_is_that_of_the_default(argv):
    args = read_command("", COMMANDS, default="count", argv=argv)
    assert (args.command, args.rounds) == ("count", 5)


@pytest.mark.parametrize(
    ("argv", "default", "message"),
    [
        ([], None, "give a command: draw, count"),
        (["--band"], None, "no command --band; give one of draw, count"),
        (["drew"], "count", "no command drew, did you mean draw?"),
        (["count", "--round=1"], None, "unknown key --round, did you mean rounds?"),
        (["count", "--rounds=0"], None, "--rounds=0: give a number at least 1"),
        (["draw"], None, "folders is missing: run folders"),
    ],
)
def test_mistakes_are_one_line(argv, default, message, capsys):
    with pytest.raises(SystemExit) as ended:
        read_command("", COMMANDS, default=default, argv=argv)
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.endswith(message)


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        read_command("Usage.", COMMANDS, default="count", argv=["--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Usage."
    assert lines[-4:] == ["  draw", "        draw curves", "  count", "        count runs"]


# ---- the results of research/ ----

PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "research").rglob("*.md"),
    *(ROOT / "results").rglob("*.md"),
]


def test_every_stored_result_is_named_on_a_page_and_what_pages_name_exists():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    stored = {
        path.relative_to(ROOT / "results").as_posix()
        for path in (ROOT / "results").rglob("*.*")
        if path.suffix != ".md" and path.parent.name != "cpu-1"  # the track's table names entries
    }
    assert [name for name in stored if name.rpartition("/")[2] not in text] == []
    # what a commit has is shown by `git show COMMIT:FILE`
    named = set(re.findall(r"(?<!:)results/((?:[\w-]+/)*[\w-]+\.(?:json|jsonl|csv|png))\b", text))
    assert named - stored - {"track/cpu-1.png"} == set()
