"""Measured figures in a JSON file, which is written after each row: a kill loses only the current one."""

import sys
from pathlib import Path
from typing import Any

from research.storage import store_figures
from utils.provenance import collect_provenance


def pop_used_launches() -> dict[str, dict[str, str]]:
    """Return "launched", the launches of the kernels that ran in this process since the last call.

    The result is {} if no kernel ran. Call it before a measurement as well, to forget earlier kernels.
    """
    module = sys.modules.get("model.kernels.launch")
    if module is None or not module.USED:
        return {}
    launches = {kernel: str(launch) for kernel, launch in sorted(module.USED.items())}
    module.USED.clear()
    return {"launched": launches}


class Figures:
    """The rows of one measurement, and the file that stores them.

    Args:
        path: the file, or None to store nothing
        settings: of the measurement, stored once
    """

    def __init__(self, path: str | None, settings: dict[str, Any]):
        self.path = Path(path) if path else None
        self.settings = settings
        self.rows: list[dict[str, Any]] = []
        self.origin = collect_provenance()  # before the measurement, while the files are unchanged
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row and write the file; if that fails, the old file stays as it was."""
        self.rows.append(row)
        if self.path:
            store_figures(self.path, {**self.settings, "rows": self.rows}, self.origin)
