"""Check the commands that pages show against the scripts that they name."""

import importlib
import re
import shlex
import sys

import pytest
from helpers import ROOT, configure, every_option
from in_process import call

import sample
from configurator import read_command_line


def commands_of(text: str) -> list[str]:
    """Return the commands in the shell blocks of a page, without comments."""
    text = text.replace("\\\n", " ")  # a command may have several lines
    text = re.sub(r"(?ms)^for .*?^done$", "", text)  # the files in a loop have no fixed names
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.S)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    no_scripts = ("#", "export ", "pip ", "source ", "git ", "python3 -m venv", "python -m pytest")
    return [line for line in lines if line and not line.startswith(no_scripts)]


def check_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a file of a command does not exist, or an option is unknown."""
    words = shlex.split(command)
    if words[0] == "cp":
        assert (ROOT / words[1]).is_file()
        return
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.M)
        assert set(re.findall(r"--(\w+)=", command)) <= every_option().keys()
        return
    script_index = next(
        i for i, word in enumerate(words) if word.endswith((".py", ".sbatch", ".sh"))
    )
    script = words[script_index]
    arguments = words[script_index + 1 :]
    if script.startswith("research/") and not (ROOT / "research").exists():
        return
    assert (ROOT / script).is_file()
    configs = [word for word in arguments if word.startswith("config/")]
    if script == "train.py":
        configure(configs)
        options = [word[2:].partition("=")[0] for word in arguments if word.startswith("--")]
        assert set(options) - {"help"} <= every_option().keys()
    elif script == "sample.py":
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        sample.read_options()
    elif script in ("eval.py", "export.py"):
        module = importlib.import_module(script.removesuffix(".py"))
        read_command_line("", module.Options, argv=arguments)
    elif script.startswith("data/"):
        help_text = call(script, "--help").stdout.decode()
        for word in arguments:
            if word.startswith("--"):
                assert word.partition("=")[0] in help_text, word
