"""Results on disk: results.json holds one entry for every checkpoint, task and setting, written as each is ready."""

import fcntl
import json
from pathlib import Path

from data.shards import read_json, write_json


class Store:
    """The entries of a folder's results.json. An entry is reused where all of `KEY` is as it was.

    ValueError: the file is damaged.
    """

    KEY = ("weights", "task", "shots", "settings")

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "results.json"
        self.entries: list[dict] = read_json(self.path).get("entries", [])

    def find(self, wanted: dict) -> dict | None:
        return next((e for e in self.entries if all(e[key] == wanted[key] for key in self.KEY)), None)

    def add(self, entry: dict) -> None:
        """Write the entry, in the place of one of the same key, beside what other processes have written meanwhile."""
        with open(self.folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries = read_json(self.path).get("entries", [])
            self.entries = [e for e in entries if any(e[key] != entry[key] for key in self.KEY)] + [entry]
            write_json(self.path, {"entries": self.entries})


def write_text(path: Path, text: str) -> None:
    """Complete under its name, or as it was."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_samples(path: Path, samples: list[dict]) -> None:
    """Every item, one JSON object a line: the file that lm-eval's EvaluationTracker makes of them."""
    from lm_eval.utils import handle_non_serializable, sanitize_list

    lines = []
    for sample in samples:
        requests = enumerate(sample["arguments"])
        arguments = {f"gen_args_{i}": {f"arg_{j}": each for j, each in enumerate(args)} for i, args in requests}
        texts = {key: sanitize_list(sample[key]) for key in ("resps", "filtered_resps")}
        record = sample | texts | {"arguments": arguments, "target": str(sample["target"])}
        lines.append(json.dumps(record, default=handle_non_serializable, ensure_ascii=False) + "\n")
    write_text(path, "".join(lines))
