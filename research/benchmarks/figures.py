"""Figures in a JSON file that is written after each of them: what is killed loses the figure in hand, no other."""

import json
import sys
from pathlib import Path

import torch

from training.metrics import get_cpu_name
from training.provenance import collect_provenance, compute_digest, store_figures

# Memory bandwidth in TB/s by a word of the device name (vendor data sheets); what is achieved is less.
PEAK_BANDWIDTH = {
    "H200": 4.8,
    "H100 PCIe": 2.0,
    "H100 NVL": 3.9,
    "H100": 3.35,
    "B200": 8.0,
    "A100": 2.0,
    "L40S": 0.864,
}
MODEL = ("model/*.py", "model/kernels/*.py")  # whose code the figures are of
TABLE = ("launch_table.py",)  # but for this: a row says which of the table's launches it is of


def chip(device: torch.device) -> dict:
    """{"chip": its name, "memory_tb_per_s": by its data sheet, where known}: a figure means little without them."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else get_cpu_name()
    bandwidth = next((peak for word, peak in PEAK_BANDWIDTH.items() if word in name), None)
    return {"chip": name} | (
        {"memory_tb_per_s": bandwidth} if bandwidth and device.type == "cuda" else {}
    )


def launches_used() -> dict[str, str]:
    """For a row: the launches of the kernels that have run in this process since the last call; {} where none has.

    So call it before a measurement as well.
    """
    module = sys.modules.get("model.kernels.launch")
    used = {kernel: str(launch) for kernel, launch in sorted(module.USED.items())} if module else {}
    if used:
        module.USED.clear()
    return {"launched": used} if used else {}


def launches_stand(row: dict) -> bool:
    """Whether the table of launches still has those that a row was measured with."""
    if not row.get("launched"):
        return True
    from model.kernels.launch import get_table_launch

    return all(
        str(get_table_launch(kernel)) == launch for kernel, launch in row["launched"].items()
    )


class Figures:
    """Rows of one file, or of none (path None). Each says of which code and chip it is.

    With `resume` the rows that the file has count as measured where code, chip and settings are the same; others go.
    `notes` are stored beside the settings, and may differ.
    """

    def __init__(
        self,
        path: Path | None,
        device,
        settings: dict,
        resume=False,
        code: str = "",
        notes: dict | None = None,
    ):
        self.path, self.settings, self.made = path, json.loads(json.dumps(settings)), chip(device)
        self.notes = notes or {}
        self.made["code"] = code or compute_digest(*MODEL, exclude=TABLE)[:12]
        self.rows: list[dict] = []
        self.origin = collect_provenance()  # of the code that is about to be measured
        if path and resume and path.exists():
            self.keep(json.loads(path.read_text(encoding="utf-8")))
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)

    def keep(self, stored: dict) -> None:
        """Take over the rows that are worth as much as those to come."""
        if changed := [key for key, value in self.settings.items() if stored.get(key) != value]:
            print(
                f"{self.path}: measured with another {', '.join(changed)}: measuring all again",
                flush=True,
            )
            return
        self.notes |= {name: stored[name] for name in self.notes if name in stored}
        self.rows = [
            row
            for row in stored["rows"]
            if self.made.items() <= row.items() and launches_stand(row)
        ]
        if left := len(stored["rows"]) - len(self.rows):
            print(
                f"{self.path}: {left} of {len(stored['rows'])} figures are of other code or another chip",
                flush=True,
            )

    def find(self, **key) -> dict | None:
        return next((row for row in self.rows if key.items() <= row.items()), None)

    def add(self, row: dict, *key: str) -> None:
        """Store the row, in the place of the one that has the same values under the names in `key`."""
        row = row | self.made
        same = {name: row[name] for name in key}
        old = self.find(**same) if key else None
        if old is None:
            self.rows.append(row)
        else:
            self.rows[self.rows.index(old)] = row
        self.store()

    def store(self) -> None:
        """Write the file whole, or leave it as it was."""
        if self.path:
            store_figures(
                self.path, {**self.settings, **self.notes, "rows": self.rows}, self.origin
            )

    def on_what(self) -> str:
        """The chip and its memory's class, for what is printed."""
        bandwidth = self.made.get("memory_tb_per_s")
        return self.made["chip"] + (
            f" (memory {bandwidth:g} TB/s by its data sheet)" if bandwidth else ""
        )
