"""What is evaluated: a checkpoint of a run, or an exported or released folder; and its corpus."""

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from data import tokenizer
from data.shards import open_corpus
from model import weights
from training import checkpoint


@dataclass(frozen=True)
class Subject:
    """A model on disk; `state` is its state.json, None for an exported folder."""

    label: str
    folder: Path
    state: dict | None
    identity: str  # SHA-256 of its weights and all that goes with them

    def load(self, device):
        """(model in evaluation mode, tiktoken encoding, stem)."""
        model, encoding, state = checkpoint.load_model(self.folder, device)
        return model, encoding, state["model"]


def find(path: str) -> Subject:
    """The newest checkpoint of a run, a checkpoint folder, or a folder with a config.json.

    ValueError: it is none of these, or damaged.
    """
    folder = Path(path)
    if checkpoint.is_exported(folder):
        files = (
            folder / "config.json",
            folder / "tokenizer.json",
            *weights.list_weight_files(folder),
        )
        digests = [hashlib.sha256(file.read_bytes()).digest() for file in files if file.is_file()]
        return Subject(
            folder.resolve().name, folder, None, hashlib.sha256(b"".join(digests)).hexdigest()
        )
    folder = checkpoint.find(folder)
    state = checkpoint.read_state(folder)
    label = f"{run_of(folder.resolve()).name}, step {state['step']:,}"
    digest = hashlib.sha256((folder / checkpoint.CHECKSUMS).read_bytes()).hexdigest()
    return Subject(label, folder, state, digest)


def find_all(paths: list[str]) -> list[Subject]:
    """Each path's subject. Equal labels have the name of the folder above in front."""
    subjects = [find(path) for path in paths]
    labels = [subject.label for subject in subjects]
    for i, path in enumerate(paths):
        if labels.count(labels[i]) > 1:
            above = run_of(Path(path).resolve()).parent.name
            subjects[i] = replace(subjects[i], label=f"{above}/{labels[i]}")
    return subjects


def run_of(path: Path) -> Path:
    """The run folder of a checkpoint folder; any other folder itself."""
    return path.parents[1] if path.parent.name == "checkpoints" else path


def home(paths: list[str]) -> Path:
    """Where results go by default: into the run, or, of several, into the folder above them all.

    ValueError: they have none in common.
    """
    runs = {run_of(Path(path).resolve()) for path in paths}
    shared = runs.pop() if len(runs) == 1 else Path(os.path.commonpath([r.parent for r in runs]))
    if shared == Path(shared.anchor):
        raise ValueError("the runs have no folder in common: give --out=FOLDER")
    return shared / "eval"


def refuse_ids(subject: Subject) -> None:
    """ValueError: its tokens are ids of a synthetic corpus, for which no task has a text."""
    if tokenizer.describe(subject.folder)["name"] == "ids":
        raise ValueError(
            f"{subject.folder}: its tokens are ids, not text, and --tasks are of text: give "
            "--val alone"
        )


def open_corpus_of(subject: Subject, dataset: str):
    """The corpus `dataset`, or, where that is empty, the one that the run was trained on.

    ValueError: there is none, or its tokens are not the model's.
    """
    if not dataset and subject.state is None:
        raise ValueError(f"{subject.folder} does not know its corpus: give --val=DATASET")
    corpus = open_corpus(dataset or subject.state["run_config"]["dataset"])
    described = tokenizer.describe(corpus.path), tokenizer.describe(subject.folder)
    if not tokenizer.same_tokens(*described):
        raise ValueError(
            f"{corpus.path} has other tokens than {subject.folder}: give its own corpus, "
            "--val=DATASET"
        )
    return corpus
