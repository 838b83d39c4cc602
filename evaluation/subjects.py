"""What is evaluated: a checkpoint of ours, or an exported or released folder."""

import hashlib
import os
from dataclasses import dataclass, replace
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
    """The newest checkpoint of a run, a checkpoint folder, or a folder with a config.json.

    ValueError: none.
    """
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
    run = run_of(found.resolve())
    return Subject(f"{run.name}, step {state['step']:,}", found, state, digest)


def find_all(paths: list[str]) -> list[Subject]:
    """Each path's subject; labels that would be the same have the folder before as well.

    ValueError: as `find`.
    """
    found = [find(path) for path in paths]
    labels = [subject.label for subject in found]
    for index, (path, subject) in enumerate(zip(paths, found)):
        if labels.count(subject.label) > 1:
            found[index] = replace(
                subject, label=f"{run_of(Path(path).resolve()).parent.name}/{subject.label}"
            )
    return found


def run_of(path: Path) -> Path:
    """The run folder of a checkpoint folder; any other folder itself."""
    return path.parents[1] if path.parent.name == "checkpoints" else path


def home(paths: list[str]) -> Path:
    """Where results go by default: in the run, or, of several, in the folder that holds them.

    ValueError: none does.
    """
    runs = [run_of(Path(path).resolve()) for path in paths]
    shared = (
        runs[0] if len(set(runs)) == 1 else Path(os.path.commonpath([run.parent for run in runs]))
    )
    if shared == Path(shared.anchor):
        raise ValueError("the runs have no folder in common: give --out=FOLDER")
    return shared / "eval"
