"""Measured figures in a JSON file, which is written after each row: a kill loses only the current one."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from utils.provenance import collect_provenance, compute_digest, get_cpu_name, store_figures

# Memory bandwidth in TB/s by a word of the device name (vendor data sheets); programs reach less.
PEAK_BANDWIDTH = {
    "H200": 4.8,
    "H100 PCIe": 2.0,
    "H100 NVL": 3.9,
    "H100": 3.35,
    "B200": 8.0,
    "A100": 2.0,
    "L40S": 0.864,
}
MODEL_FILES = (
    "model/*.py",
    "model/streams/*.py",
    "model/kernels/*.py",
)  # the code that figures depend on
# The table of launches is excluded, because each row stores which of its launches it used.
LAUNCH_TABLE_FILES = ("launch_table.py",)


def describe_chip(device: torch.device) -> dict[str, Any]:
    """Return "chip", the name of the device, and of a known GPU "memory_tb_per_s"."""
    if device.type != "cuda":
        return {"chip": get_cpu_name()}
    chip = {"chip": torch.cuda.get_device_name(device)}
    for word, bandwidth in PEAK_BANDWIDTH.items():
        if word in chip["chip"]:
            chip["memory_tb_per_s"] = bandwidth
            break
    return chip


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


def has_current_launches(row: dict[str, Any]) -> bool:
    """Return whether the table of launches still has those that a row was measured with."""
    if not row.get("launched"):
        return True
    from model.kernels.launch import get_table_launch

    return all(
        str(get_table_launch(kernel)) == launch for kernel, launch in row["launched"].items()
    )


class Figures:
    """The rows of one file, each with the code and the chip that it was measured with.

    Args:
        path: the file, or None to store nothing
        settings: of the measurement, stored once
        resume: keep the rows of an existing file that were measured with the same code, chip and
            settings, and drop the others
        code: a digest of the code (default: that of MODEL_FILES)
        notes: are stored beside the settings, and may differ from those in the file
    """

    def __init__(
        self,
        path: str | Path | None,
        device: torch.device,
        settings: dict[str, Any],
        resume: bool = False,
        code: str = "",
        notes: dict[str, Any] | None = None,
    ):
        self.path = Path(path) if path else None
        self.settings = json.loads(json.dumps(settings))  # as they will be read again
        self.measured_on = describe_chip(device)
        self.measured_on["code"] = (
            code or compute_digest(*MODEL_FILES, exclude=LAUNCH_TABLE_FILES)[:12]
        )
        self.notes = notes or {}
        self.rows: list[dict[str, Any]] = []
        self.origin = collect_provenance()  # before the measurement, while the files are unchanged
        if self.path and resume and self.path.exists():
            self.keep_valid_rows(json.loads(self.path.read_text(encoding="utf-8")))
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def keep_valid_rows(self, stored: dict[str, Any]) -> None:
        """Keep the rows of a file that were measured with the same settings, code and chip."""
        changed = [key for key, value in self.settings.items() if stored.get(key) != value]
        if changed:
            print(
                f"{self.path} was measured with a different {', '.join(changed)}; measuring "
                "everything again",
                flush=True,
            )
            return
        for name in self.notes:
            if name in stored:
                self.notes[name] = stored[name]
        for row in stored["rows"]:
            if self.measured_on.items() <= row.items() and has_current_launches(row):
                self.rows.append(row)
        num_dropped = len(stored["rows"]) - len(self.rows)
        if num_dropped:
            print(
                f"{self.path}: {num_dropped} of {len(stored['rows'])} figures were measured with "
                "other code or on another chip",
                flush=True,
            )

    def find(self, **values) -> dict[str, Any] | None:
        """Return the first row with these values, or None."""
        return next((row for row in self.rows if values.items() <= row.items()), None)

    def add(self, row: dict[str, Any], *key: str) -> None:
        """Store a row; it replaces the row that has the same values for the names in `key`."""
        row = {**row, **self.measured_on}
        old_row = None
        if key:
            old_row = self.find(**{name: row[name] for name in key})
        if old_row is None:
            self.rows.append(row)
        else:
            self.rows[self.rows.index(old_row)] = row
        self.store()

    def store(self) -> None:
        """Write the file; if that fails, the old file stays as it was."""
        if self.path:
            figures = {**self.settings, **self.notes, "rows": self.rows}
            store_figures(self.path, figures, self.origin)

    def format_chip(self) -> str:
        """Return the chip and the bandwidth of its memory, to print them."""
        bandwidth = self.measured_on.get("memory_tb_per_s")
        if bandwidth is None:
            return self.measured_on["chip"]
        return f"{self.measured_on['chip']} (memory {bandwidth:g} TB/s by its data sheet)"
