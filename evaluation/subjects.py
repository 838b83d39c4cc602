"""Find the models that are evaluated, which are checkpoints or exported folders, and their corpora."""

import hashlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import model_folder
from data import tokenizer
from data.shards import Corpus, MissingCorpus, open_corpus
from data.tokenizer import Tokenizer
from model import weights
from model.gpt import GPT
from training import checkpoint

# The longest list of run names in the name of a folder of results; file systems allow 255 bytes.
MAX_NAMES_LENGTH = 100


@dataclass(frozen=True)
class Subject:
    """A model on disk."""

    label: str
    folder: Path

    # state.json of a checkpoint; None for an exported or released folder
    state: dict | None

    # SHA-256 of the weights and everything that belongs to them
    identity: str

    def load(self, device: torch.device | str) -> tuple[GPT, Tokenizer, str]:
        """Return the model in evaluation mode, its tokenizer, and the name of its variant."""
        model, model_tokenizer, state = model_folder.load_model(self.folder, device)
        return model, model_tokenizer, state["model"]


def find(path: str) -> Subject:
    """Return the latest checkpoint of a run, a checkpoint, or an exported or released folder.

    Raises:
        ValueError: the path is none of these, or damaged
    """
    folder = Path(path)
    if model_folder.is_exported(folder):
        files = [
            folder / "config.json",
            folder / "tokenizer.json",
            *weights.list_weight_files(folder),
        ]
        digests = [hashlib.sha256(file.read_bytes()).digest() for file in files if file.is_file()]
        identity = hashlib.sha256(b"".join(digests)).hexdigest()
        return Subject(folder.resolve().name, folder, None, identity)
    folder = checkpoint.find(folder)
    state = checkpoint.read_state(folder)
    label = f"{find_run_folder(folder.resolve()).name}, step {state['step']:,}"
    checksums_file = folder / checkpoint.CHECKSUMS
    if checksums_file.exists():
        checksums = checksums_file.read_bytes()
    else:
        lines = [checkpoint.compute_checksum_line(folder / name) for name in checkpoint.MODEL_FILES]
        checksums = "".join(lines).encode()
    if folder.name == "ema":
        label = f"{label}, averaged weights"
    identity = hashlib.sha256(checksums).hexdigest()
    return Subject(label, folder, state, identity)


def find_all(paths: list[str]) -> list[Subject]:
    """Return the subject of each path; labels that are equal get the name of the parent folder."""
    subjects = [find(path) for path in paths]
    labels = [subject.label for subject in subjects]
    for index, path in enumerate(paths):
        if labels.count(labels[index]) > 1:
            parent = find_run_folder(Path(path).resolve()).parent.name
            subjects[index] = replace(subjects[index], label=f"{parent}/{labels[index]}")
    return subjects


def find_run_folder(path: Path) -> Path:
    """Return the run folder that a checkpoint folder belongs to; any other folder as it is."""
    folder = path.parent if path.name == "ema" else path  # the averages of a checkpoint
    return folder.parents[1] if folder.parent.name == "checkpoints" else path


def default_out_folder(paths: list[str]) -> Path:
    """Return the folder for results: eval/ in a single run, eval_A+B/ beside the runs A and B.

    The names of several runs are sorted, so that their order in `paths` does not matter. The
    results of an exported folder are beside it, because `export.py --overwrite` replaces it.

    Raises:
        ValueError: only the root folder contains all runs
    """
    run_folders = find_run_folders(paths)
    common_folder = find_common_folder(paths)
    if len(run_folders) == 1:
        if model_folder.is_exported(common_folder):
            return common_folder.parent / f"eval_{common_folder.name}"
        return common_folder / "eval"
    relative_paths = sorted(str(folder.relative_to(common_folder)) for folder in run_folders)
    names = "+".join(relative_paths).replace(os.sep, "-")
    if len(names.encode()) > MAX_NAMES_LENGTH:
        digest = hashlib.sha256("\n".join(relative_paths).encode()).hexdigest()[:8]
        names = f"{len(relative_paths)}_runs_{digest}"
    return common_folder / f"eval_{names}"


def find_run_folders(paths: list[str]) -> set[Path]:
    """Return the run folders of runs, checkpoints and exported models."""
    return {find_run_folder(Path(path).resolve()) for path in paths}


def find_common_folder(paths: list[str]) -> Path:
    """Return the folder of a single run, or the folder that contains all runs.

    Raises:
        ValueError: only the root folder contains all runs
    """
    run_folders = find_run_folders(paths)
    if len(run_folders) == 1:
        common_folder = run_folders.pop()
    else:
        common_folder = Path(os.path.commonpath([folder.parent for folder in run_folders]))
    if common_folder == Path(common_folder.anchor):
        raise ValueError("the runs have no common folder for the results; give --out=FOLDER")
    return common_folder


def check_has_text(subject: Subject) -> None:
    """Raise ValueError if the tokens of a model are ids of a synthetic corpus, and not text."""
    if tokenizer.read(subject.folder).name == "ids":
        raise ValueError(
            f"{subject.folder}: the tokens of this model are ids, not text, so it cannot be "
            "evaluated on tasks; give --val without --tasks"
        )


def open_corpus_of(subject: Subject, dataset: str, option: str = "--val") -> Corpus:
    """Open the corpus `dataset`, or, if that is empty, the one that the run was trained on.

    option: the option of the command that gives `dataset`, for messages

    Raises:
        ValueError: there is no corpus, it was tokenized with another tokenizer than the model's, or
            the run's corpus has been replaced
    """
    if not dataset and subject.state is None:
        raise ValueError(
            f"{subject.folder} does not name the corpus that it was trained on; give "
            f"{option}=DATASET"
        )
    try:
        corpus = open_corpus(dataset or subject.state["run_config"]["dataset"])
    except MissingCorpus as error:
        if dataset:
            raise
        raise MissingCorpus(
            f"{error}, with {option}; {subject.folder} was trained on this dataset"
        ) from error
    if not dataset and corpus.identity != subject.state["corpus"]:
        raise ValueError(
            f"{corpus.path} is no longer the corpus that {subject.folder} was trained on; to "
            f"evaluate on it all the same, give {option}={subject.state['run_config']['dataset']}"
        )
    corpus_tokenizer = tokenizer.read(corpus.path)
    model_tokenizer = tokenizer.read(subject.folder)
    if not tokenizer.same_tokens(corpus_tokenizer, model_tokenizer):
        raise ValueError(
            f"{corpus.path} was tokenized with a different tokenizer than that of "
            f"{subject.folder}; give the corpus of the model, {option}=DATASET"
        )
    return corpus
