"""Raw files of studies, which are too large for git: what they were stays in a manifest, results/archive.csv.

    python research/archive.py pack sweeps/demo results/demo/*.json --out=demo.tar.gz   an archive; rows of the manifest
    python research/archive.py check demo.tar.gz                                        whether it is what was packed
    python research/archive.py get results/demo/runs.jsonl --out=raw                    from this repository's history

The manifest has a row for each file: path, bytes, SHA-256, and where it can be had: the archive's name, or the commit
that had it. `get` takes paths or patterns (quoted); of a clone with --depth 1 fetch the history first: `git fetch
--unshallow`. Run folders are packed without their weights: metrics, settings and logs are what reports read.
"""

import csv
import fnmatch
import gzip
import hashlib
import io
import subprocess
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import configurator
from evaluation import tables

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "results" / "archive.csv"
COLUMNS = "path", "bytes", "sha256", "from"
WEIGHTS = ".safetensors"


def rows_of(manifest: Path = MANIFEST) -> dict[str, dict]:
    """{path: its row}."""
    if not manifest.exists():
        return {}
    with open(manifest, encoding="utf-8", newline="") as file:
        return {row["path"]: row for row in csv.DictReader(file)}


def row_of(path: str, data: bytes, source: str) -> dict:
    return {
        "path": path,
        "bytes": str(len(data)),
        "sha256": hashlib.sha256(data).hexdigest(),
        "from": source,
    }


def store(rows: dict[str, dict], manifest: Path = MANIFEST) -> None:
    text = tables.comma_separated(
        list(COLUMNS), [[row[key] for key in COLUMNS] for _, row in sorted(rows.items())]
    )
    configurator.replace_text(manifest, text)


def files_of(paths: list[Path]) -> list[Path]:
    """The files, and all below the folders, without weights. ValueError: one is not there."""
    if missing := [path for path in paths if not path.exists()]:
        raise ValueError(f"{missing[0]} is not there")
    below = [
        file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])
    ]
    return [file for file in below if file.is_file() and file.suffix != WEIGHTS]


def pack(args) -> None:
    """The same files give the same bytes."""
    rows, temporary = {}, args.out.with_name(args.out.name + ".tmp")
    try:
        with (
            open(temporary, "wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w") as archive,
        ):
            for path in files_of(args.paths):
                about = tarfile.TarInfo(path.as_posix())
                data = path.read_bytes()
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))
                rows[about.name] = row_of(about.name, data, args.out.name)
        temporary.replace(args.out)
    finally:
        temporary.unlink(missing_ok=True)
    store(rows_of() | rows)
    print(f"{args.out}: {len(rows)} files; their rows are in {MANIFEST.relative_to(ROOT)}")


def check(args) -> None:
    """ValueError: the archive lacks a file of the manifest, or has another one under its name."""
    wanted = {path: row for path, row in rows_of().items() if row["from"] == args.archive.name}
    if not wanted:
        raise ValueError(
            f"{args.archive.name} is not in {MANIFEST.relative_to(ROOT)}: pack it there"
        )
    found = {}
    with tarfile.open(args.archive) as archive:
        for each in archive:
            found[each.name] = row_of(
                each.name, archive.extractfile(each).read(), args.archive.name
            )
    wrong = [path for path in wanted if found.get(path) != wanted[path]]
    if wrong:
        raise ValueError(
            f"{args.archive}: {wrong[0]} is missing or another file; {len(wrong)} in all"
        )
    print(f"{args.archive}: all {len(wanted)} files are those of the manifest")


def get(args) -> None:
    """Files that a commit of this repository had, into a folder. ValueError: one is unknown, or not in the history."""
    rows = rows_of()
    chosen = [
        path for path in rows if any(fnmatch.fnmatch(path, pattern) for pattern in args.paths)
    ]
    if not chosen:
        raise ValueError(f"{args.paths[0]}: no such path in {MANIFEST.relative_to(ROOT)}")
    for path in chosen:
        source = f"{rows[path]['from']}:{path}"
        shown = subprocess.run(["git", "show", source], cwd=ROOT, capture_output=True, check=False)
        if row_of(path, shown.stdout, rows[path]["from"]) != rows[path]:
            raise ValueError(
                f"git show {source} has no such file: git fetch --unshallow, or unpack the archive"
            )
        (args.out / path).parent.mkdir(parents=True, exist_ok=True)
        (args.out / path).write_bytes(shown.stdout)
    print(f"{len(chosen)} files, as they were, are in {args.out}")


def main():
    parser = configurator.Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "pack", help="files and folders into an archive; their rows into the manifest"
    )
    command.add_argument("paths", nargs="+", type=Path, help="as the manifest will name them")
    command.add_argument("--out", type=Path, required=True, help="a .tar.gz")
    command.set_defaults(run=pack)
    command = commands.add_parser("check", help="whether an archive has what the manifest says")
    command.add_argument("archive", type=Path)
    command.set_defaults(run=check)
    command = commands.add_parser("get", help="files that left this repository, from its history")
    command.add_argument("paths", nargs="+", help="paths or patterns, as in 'results/demo/*'")
    command.add_argument("--out", type=Path, required=True, help="a folder")
    command.set_defaults(run=get)
    args = parser.parse_args()
    with configurator.one_line_errors():
        args.run(args)


if __name__ == "__main__":
    main()
