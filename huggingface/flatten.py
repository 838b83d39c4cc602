"""The modelling code of an exported folder: a variant's file and all that it imports, side by side.

transformers copies the files that relative imports name, and follows `from .x import y` alone.
"""

import ast
import importlib.util
from pathlib import Path

HERE = Path(__file__).parent
OWN = {path.stem for path in HERE.parent.glob("*.py")}
OWN |= {path.parent.name for path in HERE.parent.glob("*/*.py")}
ADDED = ("configuration_ddl", "modeling_ddl")


def source_of(module: str) -> str:
    """The text of a module by its dotted name. ValueError: no such file, or a package."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.submodule_search_locations is not None:
        fix = "an exported folder is flat, so import from files of model/ alone"
        raise ValueError(f"{module} is not one file: {fix}")
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
            lines = [f"from .{name} import __name__ as _" for name, _ in whole]
            lines += [f"from . import {name} as {asname}" for name, asname in whole]
            return f"\n{indent}".join(lines), [name for name, _ in whole]
    fix = "write `from model.FILE import NAME`"
    raise ValueError(f"{where} has `{ast.unparse(node)}`, which cannot be exported: {fix}")


def own_imports(text: str) -> list[ast.stmt]:
    """The imports of this repository in a text, last first."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = {node.module.partition(".")[0]}
        else:
            continue
        if names & OWN:
            found.append(node)
    return sorted(found, key=lambda node: (-node.lineno, -node.col_offset))


def rewritten(text: str, where: str) -> tuple[str, list[str]]:
    """(the text with relative imports for those of this repository, the modules of model/ that they
    name). ValueError: it imports something else of this repository.
    """
    lines, needed = text.split("\n"), []  # as ast counts lines
    for node in own_imports(text):
        replacement, modules = relative(node, where)
        needed += modules
        first, last = node.lineno - 1, node.end_lineno - 1
        before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
        lines[first : last + 1] = [before + replacement + after]
    return "\n".join(lines), needed


def modelling_files(stem: str) -> dict[str, str]:
    """File name -> text: the variant as stem.py, all that it imports, and the wrapper for
    transformers.

    ValueError: code that does not work outside this repository.
    """
    texts = {}
    texts["stem"], waiting = rewritten(source_of(f"model.{stem}"), f"model/{stem}.py")
    waiting += ["gpt", "decoding"]  # the wrapper's own
    while waiting:
        name = waiting.pop()
        if name not in texts:
            texts[name], more = rewritten(source_of(f"model.{name}"), f"model/{name}.py")
            waiting += more
    # Before 5.10, transformers copies what these two files import themselves, and no further.
    follow = "".join(f"\nfrom .{name} import __name__ as _  # noqa" for name in sorted(texts))
    for name in ADDED:
        texts[name] = (HERE / f"{name}.py").read_text(encoding="utf-8") + follow + "\n"
    return {f"{name}.py": text for name, text in sorted(texts.items())}
