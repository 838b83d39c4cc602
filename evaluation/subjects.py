"""What is evaluated: a checkpoint of ours, or an exported or released folder."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from data import tokenizer
from model import weights
from training import checkpoint


@dataclass(frozen=True)
class Subject:
    """A checkpoint that was found whole; `state` is its state.json, None for an exported folder."""

    label: str
    folder: Path
    state: dict | None
    identity: str  # SHA-256 of its weights and all that goes with them

    def load(self, device):
        """(model in evaluation mode, tiktoken encoding, stem)."""
        model, encoding, state = checkpoint.load_model(self.folder, device)
        return model, encoding, state["model"]

    def tokenizer(self) -> dict:
        return tokenizer.describe(self.folder)


def find(path: str) -> Subject:
    """The newest checkpoint of a run, a checkpoint folder, or a folder with a config.json. ValueError: none."""
    folder = Path(path)
    if checkpoint.is_folder_of_weights(folder):
        digest = hashlib.sha256()
        for path in (folder / "config.json", folder / "tokenizer.json", *weights.files(folder)):
            if path.is_file():
                with open(path, "rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
        return Subject(folder.resolve().name, folder, None, digest.hexdigest())
    found = checkpoint.find(folder)
    digest = hashlib.sha256((found / checkpoint.SUMS).read_bytes()).hexdigest()
    state = checkpoint.read_state(found)
    run = found.resolve().parents[1] if found.parent.name == "checkpoints" else found.resolve()
    return Subject(f"{run.name}, step {state['step']:,}", found, state, digest)


def home(paths: list[str]) -> Path:
    """Where results go by default: in the run, or, of several, in the folder that holds them."""
    runs = [p.parents[1] if p.parent.name == "checkpoints" else p for p in (Path(p).resolve() for p in paths)]
    shared = runs[0] if len(set(runs)) == 1 else Path(os.path.commonpath([run.parent for run in runs]))
    return shared / "eval"
