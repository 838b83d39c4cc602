"""Commands as pages show them, held to the scripts that they name."""

import importlib
import re
import shlex
import sys

from helpers import ROOT

import model
from model.options import collect_options
from training.config import TrainConfig
from training.settings import configure


def commands_of(text: str) -> list[str]:
    """Lines of the shell blocks, comments cut off."""
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.S)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    no_scripts = ("#", "pip ", "source ", "git ", "python3 -m venv", "python -m pytest")
    return [line for line in lines if line and not line.startswith(no_scripts)]


def check_command(command: str, monkeypatch) -> None:
    """Fails if a file is not there or an option is unknown."""
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.M)
        schema = collect_options(
            TrainConfig, *(model.model_class(stem).Config for stem in model.MODEL_NAMES)
        )
        assert set(re.findall(r"--(\w+)=", command)) <= schema.keys()
        return
    place = next(i for i, word in enumerate(words) if word.endswith((".py", ".sbatch", ".sh")))
    script, arguments = words[place], words[place + 1 :]
    if script.startswith("research/") and not (ROOT / "research").exists():
        return
    assert (ROOT / script).is_file()
    configs = [word for word in arguments if word.startswith("config/")]
    if script == "train.py":
        for config in configs:
            configure([config])
        schema = collect_options(
            TrainConfig, *(model.model_class(stem).Config for stem in model.MODEL_NAMES)
        )
        options = [word[2:].partition("=")[0] for word in arguments if word.startswith("--")]
        assert set(options) <= schema.keys()
    elif script in ("eval.py", "sample.py", "export.py"):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        module = importlib.import_module(script.removesuffix(".py"))
        args = module.parse_arguments()
        getattr(module, "check", vars)(args)
