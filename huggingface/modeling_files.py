"""Collect the modeling code of an exported folder: copies of a variant's file and of its imports.

Files of model/ import each other relatively, so their copies work side by side in any folder. One
line of them changes: `option` comes from option.py, which is copied from this folder as well.
"""

import ast
import importlib.util
import re
from pathlib import Path

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


def find_source(module: str, variant: str) -> Path | None:
    """Return the file whose copy is module.py in an exported folder; None if there is no such file.

    An exported folder has no subfolders, so a package has no copy.
    """
    if module in (*TRANSFORMERS_FILES, "option"):
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


def collect_modeling_files(variant: str) -> dict[str, str]:
    """Return the Python files of an exported folder: their contents by name.

    The variant is stem.py; the others keep the names that they have in model/.

    Raises:
        ValueError: the variant imports something of this repository that has no copy
    """
    texts: dict[str, str] = {}
    to_copy = list(TRANSFORMERS_FILES)
    while to_copy:
        module = to_copy.pop()
        if module in texts:
            continue
        source = find_source(module, variant)
        text = source.read_text(encoding="utf-8")
        texts[module] = OPTION_IMPORT.sub(r"from .option import \1", text)
        to_copy += list_needed_modules(texts[module], f"model/{source.name}", variant)
    # Versions of transformers before 5.10 only copy what these two files import themselves.
    others = sorted(texts.keys() - set(TRANSFORMERS_FILES))
    import_others = "".join(f"\nfrom .{name} import __name__ as _  # noqa" for name in others)
    for name in TRANSFORMERS_FILES:
        texts[name] += f"{import_others}\n"
    return {f"{name}.py": text for name, text in sorted(texts.items())}
