"""Measured figures in a JSON file, which is written after each row: a kill loses only the current one."""

import sys
from pathlib import Path
from typing import Any

import torch

from research.storage import store_figures
from utils.provenance import collect_provenance, get_cpu_name

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


def describe_chip(device: torch.device) -> str:
    """Return the name of the device, and of a known GPU the bandwidth of its memory."""
    if device.type != "cuda":
        return get_cpu_name()
    name = torch.cuda.get_device_name(device)
    for word, bandwidth in PEAK_BANDWIDTH.items():
        if word in name:
            return f"{name} (memory {bandwidth:g} TB/s by its data sheet)"
    return name


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

    def __init__(self, path: str | None, device: torch.device, settings: dict[str, Any]):
        self.path = Path(path) if path else None
        self.settings = {"chip": describe_chip(device), **settings}
        self.rows: list[dict[str, Any]] = []
        self.origin = collect_provenance()  # before the measurement, while the files are unchanged
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, row: dict[str, Any]) -> None:
        """Add a row and write the file; if that fails, the old file stays as it was."""
        self.rows.append(row)
        if self.path:
            store_figures(self.path, {**self.settings, "rows": self.rows}, self.origin)
