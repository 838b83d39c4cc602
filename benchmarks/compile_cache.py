"""What compiling left on one machine, carried to the next: lowering a graph takes 12 to 142 s, a kernel some seconds.

The folder in which Inductor and Triton keep their results travels, not what torch.compiler.save_cache_artifacts()
returns: that belongs to one process, is lost with a killed one, and has the graphs without our own kernels. Left out
are the kernels that Inductor made, of which its graphs hold a copy. Results of another version or chip are never looked
up, so nothing needs to fit: what is missing, foreign or damaged is made again.
"""

import io
import os
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(tempfile.gettempdir()) / "deep_delta_learning_compiled"  # the same path on every machine
PART = 15 * 2**20  # bytes of a file; some ways off a machine end at 16 MiB
MOST_PARTS = 3


def environment(folder: Path = FOLDER) -> dict[str, str]:
    """For processes that shall use the folder."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}


def files(folder: Path) -> set[Path]:
    """What is worth carrying: all but the kernels that are in Inductor's graphs too, and what is only being written."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    kept = (path for path in found if not path.name.startswith(".") and path.suffix not in (".lock", ".tmp"))
    return {path for path in kept if not path.name.removeprefix("__grp__").startswith("triton_")}


def save(where: Path, name: str, but: set[Path], folder: Path = FOLDER) -> set[Path]:
    """Write `compile_<name>.0` and so on into `where`: all of the folder's files without `but`. Returns those."""
    new, packed = files(folder) - but, io.BytesIO()
    if not new:
        return new
    with tarfile.open(fileobj=packed, mode="w:xz", preset=1) as archive:
        for path in sorted(new):
            archive.add(folder / path, path, recursive=False)
    content = packed.getvalue()
    parts = [content[start : start + PART] for start in range(0, len(content), PART)]
    if len(parts) > MOST_PARTS:
        print(f"compile cache {name}: {len(content) >> 20} MiB are too many to carry: not stored", flush=True)
        return new
    for number, part in enumerate(parts):
        (where / f"compile_{name}.{number}").write_bytes(part)
    print(f"compile cache {name}: {len(new)} files, {len(content) / 2**20:.1f} MiB", flush=True)
    return new


def load(where: Path, folder: Path = FOLDER) -> None:
    """Put what `save` wrote there into the folder. Nothing in it is trusted to be complete."""
    for first in sorted(where.glob("compile_*.0")):
        parts = sorted(where.glob(f"{first.stem}.*"), key=lambda path: int(path.suffix[1:]))
        try:
            with tarfile.open(
                fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts)), mode="r:xz"
            ) as archive:
                archive.extractall(folder, filter="data")
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            print(f"{first}: {type(error).__name__}: compiling again what it held", flush=True)


def workers(processes: int) -> dict[str, str]:
    """The processor's cores shared by so many processes that compile at once."""
    cores = len(os.sched_getaffinity(0))
    return {"TORCHINDUCTOR_COMPILE_THREADS": str(max(cores // processes, 1))}
