"""Store measured figures with their provenance."""

from pathlib import Path
from typing import Any

from utils import files
from utils.provenance import collect_provenance


def store_figures(path: Path, figures: dict, origin: dict | None = None) -> None:
    """Write figures and their provenance to a JSON file, which is complete or absent.

    Args:
        origin: the provenance of the figures, if they were not measured by this process
    """
    # the provenance comes first, where a reader of the file looks for it
    files.write_json(path, {**(origin or collect_provenance()), **figures})


class Figures:
    """The rows of a measurement, stored after each of them: a kill loses only the current one.

    Args:
        path: the file, or None to store nothing
        settings: of the measurement, stored once
    """

    def __init__(self, path: str | Path | None, settings: dict[str, Any] | None = None):
        self.path = Path(path) if path else None
        self.settings = settings or {}
        self.rows: list[dict[str, Any]] = []
        self.origin = collect_provenance()  # before the measurement, while the files are unchanged
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row and write the file; if that fails, the old file stays as it was."""
        self.rows.append(row)
        if self.path:
            store_figures(self.path, {**self.settings, "rows": self.rows}, self.origin)
