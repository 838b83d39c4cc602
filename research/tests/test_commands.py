"""Scripts with commands: reading a command line, and the commands that pages show."""

import re
import shlex
import sys
from dataclasses import dataclass

import pytest
from helpers import ROOT, one_line_error
from in_process import call

from configurator import argument, option, read_command_line
from research import analyze, bench, gpu, report
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


@pytest.mark.parametrize(
    ("argv", "rounds"), [([], 3), (["--rounds=5"], 5), (["count", "--rounds=5"], 5)]
)
def test_a_command_line_without_a_command_is_that_of_the_default(argv, rounds):
    args = read_command("", COMMANDS, default="count", argv=argv)
    assert (args.command, args.rounds) == ("count", rounds)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give a command: draw, count"),
        (["--band"], "no command --band; give one of draw, count"),
        (["drew"], "no command drew, did you mean draw?"),
        (["count", "--round=1"], "unknown key --round, did you mean rounds?"),
        (["draw", "a", "--roudns=1"], "unknown key --roudns"),
        # folders are given without a name
        (["count", "--folder=1"], "unknown key --folder"),
        (["count", "--rounds=0"], "--rounds=0: give a number at least 1"),
        (["draw"], "folders is missing: run folders"),
    ],
)
def test_mistakes_are_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        read_command("", COMMANDS, argv=argv)
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.endswith(message)


def test_a_mistyped_command_is_not_taken_for_the_default(capsys):
    with pytest.raises(SystemExit):
        read_command("", COMMANDS, default="count", argv=["drew"])
    assert "did you mean draw?" in capsys.readouterr().err


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        read_command("Usage.", COMMANDS, default="count", argv=["--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Usage."
    assert lines[-4:] == ["  draw", "        draw curves", "  count", "        count runs"]


def test_help_of_a_command_lists_its_options(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["research/script.py"])
    with pytest.raises(SystemExit) as ended:
        read_command("Usage.", COMMANDS, argv=["draw", "--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("script.py draw: draw curves.\n\nThey show the loss.\n")
    assert "  --band=False" in printed
    assert "--rounds" not in printed


# ---- the scripts of research/ ----


def list_scripts() -> list[tuple[str, str]]:
    """Return each script that has commands, with each of its commands."""
    return [
        (script, name)
        for script, module in (("analyze", analyze), ("bench", bench), ("report", report))
        for name in module.COMMANDS
    ]


@pytest.mark.parametrize(("script", "command"), list_scripts())
def test_every_command_has_help_and_refuses_unknown_keys(script, command):
    helped = call(f"research/{script}.py", command, "--help")
    assert helped.returncode == 0
    assert f"{script}.py {command}: " in helped.stdout.decode()
    refused = call(f"research/{script}.py", command, "--zzz=1")
    assert "unknown key --zzz" in one_line_error(refused)


PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "research").rglob("*.md"),
    *(ROOT / "results").rglob("*.md"),
]


def list_commands() -> list[str]:
    """Return the commands of research/ in the code blocks and the code spans of all pages."""
    commands = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.S | re.M)
        lines = [line.partition(" #")[0] for block in blocks for line in block.splitlines()]
        text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
        spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
        for command in [*lines, *spans]:
            found = re.search(r"python (research/(analyze|bench|gpu|report)\.py.*)", command)
            if found:
                commands.add(found[1].strip())
    return sorted(commands)


@pytest.mark.parametrize("command", list_commands())
def test_a_command_of_a_page_is_understood(command, monkeypatch, tmp_path):
    script, *words = shlex.split(command)
    if script == "research/gpu.py":
        args = read_command_line("", gpu.Options, argv=words)
        assert set(args.packs) <= gpu.SECONDS.keys()
        return
    module = {"analyze": analyze, "bench": bench, "report": report}[script[9:-3]]
    runs = []
    commands = {
        name: command._replace(run=runs.append) for name, command in module.COMMANDS.items()
    }
    monkeypatch.setattr(module, "COMMANDS", commands)
    result = call(script, *words)
    assert result.returncode == 0, result.stderr.decode()
    assert len(runs) == 1


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


def test_both_folders_of_tests_can_be_collected_in_one_call():
    """Pytest imports test modules by their names, without the folder."""
    names = [
        path.name
        for folder in ("tests", "research/tests")
        for path in (ROOT / folder).glob("*.py")
        if path.name != "conftest.py"
    ]
    assert len(names) == len(set(names))
