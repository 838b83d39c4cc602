"""All Python source of the running environment: its packages and the standard library. No network.

    python research/residual_streams/python_packages.py                                       4,096 byte pairs, for CPUs
    python research/residual_streams/python_packages.py --vocab_size=16384 --out=data/python_packages_16k

Left out are files that are not UTF-8; those whose lines have more than 100 characters on average or 1000 at most, which
are tables and generated code (the rule of Codex, arXiv 2107.03374); and those that repeat an earlier one exactly or
nearly: 0.8 or more of the 5-word shingles that the two have together are in both (near_duplicates.py).

Validation is of packages that training does not see: whole distributions, chosen by a hash of their names, up to
--val_share of the bytes; the standard library is for training. Where a file of training repeats one of validation, as
in a vendored copy of a package, validation keeps it and training loses it. What is copied in part or changed beyond the
threshold, stays.

What is left out is found anew at each start; the tokens go on where they stopped. `meta.json` lists the packages with
their versions and bytes, and the duplicates.
"""

import hashlib
import importlib.metadata
import platform
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tqdm import tqdm

from data import preparation
from data.preparation import PreparationOptions, Stage
from data.sources import Texts
from model.options import option
from research.residual_streams.near_duplicates import THRESHOLD, NearDuplicates
from utils import errors, units

OUT = (
    Path(__file__).parents[2] / "data" / "python_packages"
)  # where --dataset=python_packages looks
STANDARD_LIBRARY = f"Python=={platform.python_version()}"


@dataclass(frozen=True)
class Document:
    package: str  # name==version
    path: str  # in its library
    text: str

    @property
    def bytes(self) -> int:
        return len(self.text.encode())


def owners(library: Path) -> dict[Path, str]:
    """name==version by file of the distributions that are installed in a folder, as far as they list their files."""
    found = {}
    for distribution in importlib.metadata.distributions(path=[str(library)]):
        package = f"{distribution.metadata['Name']}=={distribution.version}"
        for file in distribution.files or ():
            if file.suffix == ".py":
                found[library / file] = package
    return found


def documents(library: Path, packages: dict[Path, str] | None) -> list[Document]:
    """Every file of a folder that is wanted, by path; of `packages`, or, where that is None, of the standard library.

    A file that no distribution lists belongs to the folder or module that is imported by its name.
    """
    found = []
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if packages is None and {"site-packages", "dist-packages"}.intersection(inside.parts):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip() and written_by_hand(text):
            of_folder = (
                STANDARD_LIBRARY if packages is None else packages.get(path, inside.parts[0])
            )
            found.append(Document(of_folder, inside.as_posix(), text))
    return found


def written_by_hand(text: str) -> bool:
    lengths = [len(line) for line in text.splitlines()]
    return max(lengths) <= 1000 and sum(lengths) <= 100 * len(lengths)


def by_hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def validation_packages(sizes: dict[str, int], share: float) -> set[str]:
    """Packages by the hash of their names without versions, each taken that keeps the whole within the share."""
    chosen, left = set(), share * sum(sizes.values())
    for package in sorted(sizes, key=lambda package: by_hash(package.partition("==")[0].lower())):
        if package != STANDARD_LIBRARY and sizes[package] <= left:
            chosen.add(package)
            left -= sizes[package]
    return chosen


def bytes_by_package(found: list[Document]) -> dict[str, int]:
    sizes = {}
    for document in found:
        sizes[document.package] = sizes.get(document.package, 0) + document.bytes
    return dict(sorted(sizes.items()))


def split(found: list[Document], share: float) -> tuple[dict[str, list[Document]], dict]:
    """Documents without duplicates by split, in the order of their paths' hashes, and what was left out as such."""
    chosen = validation_packages(bytes_by_package(found), share)
    # Validation comes first, and what came first is kept.
    order = sorted(
        found, key=lambda document: (document.package not in chosen, by_hash(document.path))
    )
    splits, seen, near = {"val": [], "train": []}, set(), NearDuplicates()
    left_out = {kind: {"documents": 0, "bytes": 0} for kind in ("exact", "near")}
    for document in tqdm(
        order, "looking for duplicates", unit="file", disable=None, dynamic_ncols=True
    ):
        kind = "exact" if document.text in seen else "near" if near.repeats(document.text) else None
        seen.add(document.text)
        if kind:
            left_out[kind]["documents"] += 1
            left_out[kind]["bytes"] += document.bytes
        else:
            splits["val" if document.package in chosen else "train"].append(document)
    return splits, {"threshold": THRESHOLD, **left_out}


@dataclass(frozen=True)
class Options(PreparationOptions):
    """Options of the installed Python packages."""

    tokenizer: str = option("bpe", preparation.TOKENIZER_HELP)
    shard_tokens: int = option(
        10_000_000,
        "number of tokens per shard",
        low=1,
        high=2**31 - 1,
    )
    val_share: float = option(
        0.04,
        "largest fraction of the bytes to use for validation",
        above=0,
        below=1,
    )


def main():
    fixed = {"val_tokens": None, "tokenizer_bytes": 30_000_000, "max_tokens": None}
    args = preparation.make_parser(__doc__, OUT, Options, fixed=fixed).parse_args()
    with errors.one_line_errors():
        if args.verify:
            return preparation.prepare(args, "packages", [])
        packages, library = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib"))
        found = documents(packages, owners(packages)) + documents(library, None)
        print(
            f"{len(found):,} files, {units.format_bytes(sum(document.bytes for document in found))}",
            flush=True,
        )
        splits, duplicates = split(found, args.val_share)
        for name, of_split in splits.items():
            if not of_split:
                raise ValueError(
                    f"{packages} has no packages for {name}: run this with those of requirements.txt"
                )
        for kind in ("exact", "near"):
            count, size = (
                duplicates[kind]["documents"],
                units.format_bytes(duplicates[kind]["bytes"]),
            )
            print(
                f"{count:,} files ({size}) repeat others {'exactly' if kind == 'exact' else kind + 'ly'}: left out"
            )
        about = {
            "packages": {name: bytes_by_package(of_split) for name, of_split in splits.items()}
        }
        plan = [
            Stage(name, Texts([each.text for each in splits[name]], "Python packages"), None)
            for name in splits
        ]
        preparation.prepare(args, "packages", plan, {**about, "duplicates": duplicates})


if __name__ == "__main__":
    main()
