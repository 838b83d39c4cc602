"""The modelling code of an exported folder: a variant's file and all that it imports, side by side.

transformers copies the files that relative imports name, and follows `from .x import y` alone.
"""

import ast
import importlib.util
from pathlib import Path

HERE = Path(__file__).parent
OWN = {path.stem for path in HERE.parent.glob("*.py")} | {
    path.parent.name for path in HERE.parent.glob("*/*.py")
}
ADDED = ("configuration_ddl", "modeling_ddl")


def source_of(module: str) -> str:
    """The text of a module by its dotted name.

    ValueError: there is no such file, or it is a package.
    """
    spec = importlib.util.find_spec(module)
    if spec is None or spec.submodule_search_locations is not None:
        raise ValueError(
            f"{module} is not one file: an exported folder is flat, so import from files of model/ "
            "alone"
        )
    return Path(spec.origin).read_text(encoding="utf-8")


def relative(node: ast.stmt, where: str) -> tuple[str, list[str]]:
    """(an import of this repository with relative names, the modules of model/ it needs).

    ValueError: an import that has no relative form.
    """
    indent = " " * node.col_offset
    if isinstance(node, ast.ImportFrom) and node.module.startswith("model."):
        module = node.module.removeprefix("model.")
        names = ", ".join(ast.unparse(alias) for alias in node.names)
        if module.isidentifier():
            return f"from .{module} import {names}", [module]
    elif isinstance(node, ast.Import) or node.module == "model":
        whole = [(alias.name.removeprefix("model."), alias.asname) for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            whole = [(name, asname or name) for name, asname in whole]
        if all(name.isidentifier() and name != "model" and asname for name, asname in whole):
            # The first line is for transformers, which does not follow the second.
            pairs = [
                f"from .{name} import __name__ as _\n{indent}from . import {name} as {to}"
                for name, to in whole
            ]
            return f"\n{indent}".join(pairs), [name for name, _ in whole]
    raise ValueError(
        f"{where} has `{ast.unparse(node)}`, which cannot be exported: write `from model.FILE "
        "import NAME`"
    )


def imports(tree: ast.AST):
    """(statement, top-level names it imports) of every import but relative ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield node, {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node, {node.module.partition(".")[0]}


def rewritten(text: str, where: str) -> tuple[str, list[str]]:
    """(the text with relative imports for those of this repository, the modules of model/ that they
    name).

    ValueError: it imports something else of this repository.
    """
    # as ast counts lines
    lines, needed, tree = [line + "\n" for line in text.split("\n")], [], ast.parse(text)
    for node, tops in sorted(
        imports(tree), key=lambda found: (-found[0].lineno, -found[0].col_offset)
    ):
        if not tops & OWN:
            continue
        replacement, modules = relative(node, where)
        needed += modules
        first, last = node.lineno - 1, node.end_lineno
        lines[first:last] = [
            lines[first][: node.col_offset] + replacement + lines[last - 1][node.end_col_offset :]
        ]
    return "".join(lines).removesuffix("\n"), needed


def modelling_files(stem: str) -> dict[str, str]:
    """File name -> text: the variant as stem.py, all that it imports, and the wrapper for
    transformers.

    ValueError: code that does not work outside this repository.
    """
    files = {f"{name}.py": (HERE / f"{name}.py").read_text(encoding="utf-8") for name in ADDED}
    files["stem.py"], waiting = rewritten(source_of(f"model.{stem}"), f"model/{stem}.py")
    waiting += ["gpt", "decoding"]  # the wrapper's own
    while waiting:
        name = waiting.pop()
        if f"{name}.py" not in files:
            files[f"{name}.py"], more = rewritten(source_of(f"model.{name}"), f"model/{name}.py")
            waiting += more
    # Before 5.10, transformers copies what these two files import themselves, and no further.
    others = sorted(
        file.removesuffix(".py") for file in files if file.removesuffix(".py") not in ADDED
    )
    for name in ADDED:
        files[f"{name}.py"] += (
            "".join(f"\nfrom .{other} import __name__ as _  # noqa" for other in others) + "\n"
        )
    return dict(sorted(files.items()))
