"""The modeling code of an exported folder: copies of the shared files of model/, side by side.

Files of model/ import each other relatively, so their copies work in any folder. Two kinds of lines
change: `option` comes from option.py, which is copied from this folder as well, and what a file of
model/streams/ imports from model/ lies beside it. The fused kernels and the files that work on whole
models of this repository are left out.
"""

import re
from pathlib import Path

import torch

from model import build
from model.block import Block
from model.gpt import GPT

FOLDER = Path(__file__).parent
MODEL_FOLDER = FOLDER.parent / "model"
STREAMS_FOLDER = MODEL_FOLDER / "streams"
# The import that is not relative in model/, and becomes `from .option import ...` in a copy.
OPTION_IMPORT = re.compile(r"^from configurator import (option|check_ranges, option)$", re.M)
# transformers follows the imports of files in the same folder alone.
IMPORT_ACROSS_FOLDERS = re.compile(r"^from \.(?:\.|streams\.)(?=\w)", re.M)
STREAM_IMPORT = re.compile(r"^from \.(?:streams\.)?(\w+) import ", re.M)
# An import of this repository's other folders, which a copy does not have.
REPOSITORY_IMPORT = re.compile(
    r"^(?:from|import) (?:configurator|data|evaluation|model|model_folder|research|training|utils)\b.*",
    re.M,
)
# What a model does not need.
LEFT_OUT = ("__init__", "causality", "cost", "generation", "weights")
# The two files that transformers itself loads. They import the variant as `stem`.
TRANSFORMERS_FILES = ("configuration_ddl.py", "modeling_ddl.py")


def copy_model_files(variant_file: Path) -> dict[str, str]:
    """Return the files of a variant, which is stem.py, and of all that variants share, by name.

    Raises:
        ValueError: the variant imports what a copy would not find
    """
    # the name of a variant has a hyphen, so that no other file can import it
    shared = [
        path
        for path in sorted(MODEL_FOLDER.glob("*.py"))
        if "-" not in path.stem and path.stem not in LEFT_OUT
    ]
    files = {"stem.py": variant_file, "option.py": FOLDER / "option.py"}
    files.update({path.name: path for path in [*shared, *find_stream_helpers(variant_file)]})
    copies = {name: copy_code(path.read_text(encoding="utf-8")) for name, path in files.items()}
    unavailable = REPOSITORY_IMPORT.search(copies["stem.py"])
    if unavailable:
        raise ValueError(
            f"{variant_file.name} cannot be exported with `{unavailable[0]}`: of this repository, "
            "import only `option` from configurator and, relatively, files of model/"
        )
    return copies


def find_stream_helpers(file: Path) -> list[Path]:
    """Return the modules of model/streams/ that a file imports, such as hyper_connections.py."""
    names = STREAM_IMPORT.findall(file.read_text(encoding="utf-8"))
    helpers = [STREAMS_FOLDER / f"{name}.py" for name in names]
    return [helper for helper in helpers if helper.is_file()]


def copy_code(code: str) -> str:
    """Return the code of a file as its copy in one folder with all others has it."""
    code = IMPORT_ACROSS_FOLDERS.sub("from .", code)
    return OPTION_IMPORT.sub(r"from .option import \1", code)


def collect_modeling_files(variant_file: Path) -> dict[str, str]:
    """Return the Python files of a folder for transformers: their contents by name."""
    own = {name: (FOLDER / name).read_text(encoding="utf-8") for name in TRANSFORMERS_FILES}
    return {**copy_model_files(variant_file), **own}


def check_stream(variant: str) -> None:
    """Raise ValueError if the stream of a variant cannot run the sublayers of another model."""
    with torch.device("meta"):
        model = build(variant, num_hidden_layers=4)
    has_plain_sites = [site.name for site in model.sites] == ["attn", "mlp"] * 4 and not any(
        site.inputs for site in model.sites
    )
    is_run_plainly = type(model).hidden is GPT.hidden and all(
        type(block).forward is Block.forward for block in model.transformer.h
    )
    if not (has_plain_sites and is_run_plainly):
        raise ValueError(
            f"{variant} has no stream that can be used alone: its sites need more of attention and "
            "the MLP than h = F(c), or its model runs them in a way of its own"
        )


def collect_package_files(variant: str, variant_file: Path) -> dict[str, str]:
    """Return the Python files of a package that runs a variant's stream: their contents by name."""
    check_stream(variant)
    return {
        **copy_model_files(variant_file),
        "example.py": (FOLDER / "example.py").read_text(encoding="utf-8"),
        "__init__.py": "from .example import ResidualStream as ResidualStream\n",
    }
