"""One process at a time works on a folder."""

import contextlib
import fcntl
import os
from pathlib import Path


@contextlib.contextmanager
def only_one(folder: Path):
    """Hold the folder's lock, which ends with the process. ValueError: another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ValueError(
            f"{folder} is being prepared by another process: wait for it, or give another --out"
        ) from error
    finally:
        os.close(descriptor)
