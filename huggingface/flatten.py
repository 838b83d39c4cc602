"""Collect the modeling code of an exported folder: the file of a variant, and all that it imports.

The files lie side by side, with relative imports between them. transformers copies the files that
relative imports name, but only follows imports of the form `from .x import y`.
"""

import ast
import importlib.util
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
# The modules and packages of this repository.
OWN_MODULES = {path.stem for path in ROOT.glob("*.py")} | {
    path.parent.name for path in ROOT.glob("*/*.py")
}
# The two files that transformers itself loads; they are not part of model/.
TRANSFORMERS_FILES = ("configuration_ddl", "modeling_ddl")
# What modeling_ddl.py and configuration_ddl.py import from model/, besides the variant.
MODULES_OF_WRAPPER = ("gpt", "decoding")


class RelativeCode(NamedTuple):
    """Python code with relative imports of this repository's modules."""

    text: str
    modules: list[str]  # the modules of model/ that it imports


def read_source(module: str) -> str:
    """Return the source code of a module by its dotted name.

    Raises:
        ValueError: there is no such file, or the module is a package
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.submodule_search_locations is not None:
        raise ValueError(
            f"{module} is not one file, and an exported folder has no subfolders; import from files "
            "of model/ only"
        )
    return Path(spec.origin).read_text(encoding="utf-8")


def make_import_relative(node: ast.Import | ast.ImportFrom, file: str) -> RelativeCode:
    """Return the relative form of an import of this repository.

    Args:
        file: the file that has the import, for the message

    Raises:
        ValueError: the import has no relative form
    """
    if isinstance(node, ast.ImportFrom) and node.module.startswith("model."):
        # from model.gpt import GPT
        module = node.module.removeprefix("model.")
        if module.isidentifier():
            names = ", ".join(ast.unparse(alias) for alias in node.names)
            return RelativeCode(f"from .{module} import {names}", [module])
    elif isinstance(node, ast.Import) or node.module == "model":
        # import model.gpt as gpt, or from model import gpt
        imports = []  # (module, the name that it gets)
        for alias in node.names:
            module = alias.name.removeprefix("model.")
            # `import model.gpt` without a name would be used as `model.gpt`
            name = alias.asname
            if name is None and isinstance(node, ast.ImportFrom):
                name = module
            imports.append((module, name))
        if all(module.isidentifier() and module != "model" and name for module, name in imports):
            # transformers does not follow `from . import x`, so each module is imported from as well
            lines = [f"from .{module} import __name__ as _" for module, _ in imports]
            lines += [f"from . import {module} as {name}" for module, name in imports]
            indent = " " * node.col_offset
            return RelativeCode(f"\n{indent}".join(lines), [module for module, _ in imports])
    raise ValueError(
        f"{file} has `{ast.unparse(node)}`, which cannot be exported; write `from model.FILE import "
        "NAME`"
    )


def find_own_imports(text: str) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports of this repository's modules in source code, last first."""
    imports = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = {node.module.partition(".")[0]}
        else:
            continue
        if names & OWN_MODULES:
            imports.append(node)
    return sorted(imports, key=lambda node: (-node.lineno, -node.col_offset))


def make_imports_relative(text: str, file: str) -> RelativeCode:
    """Replace the imports of this repository's modules by relative ones.

    Args:
        file: the file with this source code, for the message

    Raises:
        ValueError: it imports something of this repository that is not a file of model/
    """
    lines = text.split("\n")  # as ast counts lines
    modules = []
    # last first, so that the line numbers of the remaining imports stay valid
    for node in find_own_imports(text):
        replacement = make_import_relative(node, file)
        modules += replacement.modules
        first = node.lineno - 1
        last = node.end_lineno - 1
        prefix = lines[first][: node.col_offset]
        suffix = lines[last][node.end_col_offset :]
        lines[first : last + 1] = [f"{prefix}{replacement.text}{suffix}"]
    return RelativeCode("\n".join(lines), modules)


def collect_modeling_files(variant: str) -> dict[str, str]:
    """Return the Python files of an exported folder: their contents by name.

    The variant is stem.py; the others keep the names that they have in model/.

    Raises:
        ValueError: the code does not work outside this repository
    """
    code = make_imports_relative(read_source(f"model.{variant}"), f"model/{variant}.py")
    texts = {"stem": code.text}
    to_collect = [*code.modules, *MODULES_OF_WRAPPER]
    while to_collect:
        module = to_collect.pop()
        if module in texts:
            continue
        code = make_imports_relative(read_source(f"model.{module}"), f"model/{module}.py")
        texts[module] = code.text
        to_collect += code.modules
    # Versions of transformers before 5.10 only copy what these two files import themselves.
    import_all = "".join(f"\nfrom .{name} import __name__ as _  # noqa" for name in sorted(texts))
    for name in TRANSFORMERS_FILES:
        text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        texts[name] = f"{text}{import_all}\n"
    return {f"{name}.py": text for name, text in sorted(texts.items())}
