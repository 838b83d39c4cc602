"""Collect the modeling code of an exported folder: copies of a variant's file and of its imports.

For transformers it has two files besides; a package for a model of your own has the README's example.
Files of model/ import each other relatively, so their copies work side by side in any folder. One
line of them changes: `option` comes from option.py, which is copied from this folder as well.
"""

import ast
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from model import build
from model.block import Block
from model.gpt import GPT

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
# The import that is not relative in model/, and becomes `from .option import ...` in a copy.
OPTION_IMPORT = re.compile(r"^from configurator import (option|check_ranges, option)$", re.M)
# The modules and packages of this repository.
OWN_MODULES = {path.stem for path in ROOT.glob("*.py")} | {
    path.parent.name for path in ROOT.glob("*/*.py")
}
# The two files that transformers itself loads. They import the variant as `stem`.
TRANSFORMERS_FILES = ("configuration_ddl", "modeling_ddl")
# The file of a package for a model of one's own; it imports the variant as `stem`, too.
EXAMPLE = "example"
PACKAGE_INIT = "from .example import ResidualStream as ResidualStream\n"


def find_source(module: str, variant: str) -> Path | None:
    """Return the file whose copy is module.py in an exported folder; None if there is no such file.

    An exported folder has no subfolders, so a package has no copy.
    """
    if module in (*TRANSFORMERS_FILES, EXAMPLE, "option"):
        return FOLDER / f"{module}.py"
    if "." in module:
        return None
    spec = importlib.util.find_spec(f"model.{variant if module == 'stem' else module}")
    if spec is None or spec.submodule_search_locations is not None:
        return None
    return Path(spec.origin)


def list_imports(statement: ast.AST) -> list[str]:
    """Return the modules that a statement imports, a relative one with its dot: `.gpt`."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if not isinstance(statement, ast.ImportFrom):
        return []
    dots = "." * statement.level
    if statement.module is None:  # from . import gpt
        return [f"{dots}{alias.name}" for alias in statement.names]
    return [f"{dots}{statement.module}"]


def list_needed_modules(text: str, file: str, variant: str) -> list[str]:
    """Return the modules that the code of a file imports relatively.

    Raises:
        ValueError: it imports something else of this repository
    """
    modules = []
    for statement in ast.walk(ast.parse(text)):
        for name in list_imports(statement):
            module = name.removeprefix(".")
            is_relative = module != name
            if is_relative and find_source(module, variant) is not None:
                modules.append(module)
            elif is_relative or name.partition(".")[0] in OWN_MODULES:
                raise ValueError(
                    f"{file} has `{ast.unparse(statement)}`, which cannot be exported; import "
                    "`option` in a line of its own, and all else relatively from files of model/, "
                    "as in `from .gpt import GPT`"
                )
    return modules


def copy_modules(modules: Iterable[str], variant: str) -> dict[str, str]:
    """Return the texts of modules and of all that they import from this repository, by name.

    The variant is stem; the others keep the names that they have in model/.

    Raises:
        ValueError: the variant imports something of this repository that has no copy
    """
    texts: dict[str, str] = {}
    to_copy = list(modules)
    while to_copy:
        module = to_copy.pop()
        if module in texts:
            continue
        source = find_source(module, variant)
        text = source.read_text(encoding="utf-8")
        texts[module] = OPTION_IMPORT.sub(r"from .option import \1", text)
        to_copy += list_needed_modules(texts[module], f"model/{source.name}", variant)
    return texts


def collect_modeling_files(variant: str) -> dict[str, str]:
    """Return the Python files of a folder for transformers: their contents by name."""
    texts = copy_modules(TRANSFORMERS_FILES, variant)
    # Versions of transformers before 5.10 only copy what these two files import themselves.
    others = sorted(texts.keys() - set(TRANSFORMERS_FILES))
    import_others = "".join(f"\nfrom .{name} import __name__ as _  # noqa" for name in others)
    for name in TRANSFORMERS_FILES:
        texts[name] += f"{import_others}\n"
    return {f"{name}.py": text for name, text in sorted(texts.items())}


def check_stream(variant: str) -> None:
    """Raise ValueError if the stream of a variant cannot run the sublayers of another model."""
    with torch.device("meta"):
        model = build(variant, num_hidden_layers=4)
    has_plain_sites = [site.name for site in model.sites] == ["attn", "mlp"] * 4 and not any(
        site.inputs or site.read_positions or hasattr(site.write, "extra_loss")
        for site in model.sites
    )
    is_run_plainly = type(model).hidden_and_extra_loss is GPT.hidden_and_extra_loss and all(
        type(block).forward is Block.forward for block in model.transformer.h
    )
    if not (has_plain_sites and is_run_plainly):
        raise ValueError(
            f"{variant} has no stream that can be used alone: its sites need more of attention and "
            "the MLP than h = F(c), or its model runs them in a way of its own"
        )


def collect_package_files(variant: str) -> dict[str, str]:
    """Return the Python files of a package that runs a variant's stream: their contents by name."""
    check_stream(variant)
    texts = {f"{name}.py": text for name, text in copy_modules([EXAMPLE], variant).items()}
    return {**texts, "__init__.py": PACKAGE_INIT}
