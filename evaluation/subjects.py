"""Find the models that are evaluated, which are checkpoints or exported folders, and their corpora."""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

import model_folder
from data import tokenizer
from data.shards import Corpus, MissingCorpus, open_corpus
from data.tokenizer import Tokenizer
from model import weights
from model.gpt import GPT
from training import checkpoint


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

    def results_folder(self) -> Path:
        """Return eval/ in the run folder, or eval_NAME/ beside an exported folder.

        `export.py --overwrite` replaces an exported folder as a whole.
        """
        run = find_run_folder(self.folder.resolve())
        return run.parent / f"eval_{run.name}" if self.state is None else run / "eval"


def find(path: str) -> Subject:
    """Return the latest checkpoint of a run, a checkpoint, or an exported or released folder.

    Raises:
        ValueError: the path is none of these, or damaged
    """
    folder = Path(path)
    if model_folder.is_exported(folder):
        names = ("config.json", "tokenizer.json")
        files = [folder / name for name in names if (folder / name).is_file()]
        identity = compute_digest([*files, *weights.list_weight_files(folder)])
        return Subject(folder.resolve().name, folder, None, identity)
    folder = checkpoint.find(folder)
    state = checkpoint.read_state(folder)
    label = f"{find_run_folder(folder.resolve()).name}, step {state['step']:,}"
    if folder.name == "ema":
        label += ", averaged weights"
    names = [checkpoint.CHECKSUMS]
    if not (folder / checkpoint.CHECKSUMS).exists():
        names = list(checkpoint.MODEL_FILES)
    return Subject(label, folder, state, compute_digest(folder / name for name in names))


def compute_digest(files: Iterable[Path]) -> str:
    """Return the SHA-256 of the contents of files."""
    digest = hashlib.sha256()
    for path in files:
        with open(path, "rb") as file:
            while block := file.read(2**24):
                digest.update(block)
    return digest.hexdigest()


def find_run_folder(path: Path) -> Path:
    """Return the run folder that a checkpoint folder belongs to; any other folder as it is."""
    folder = path.parent if path.name == "ema" else path  # the averages of a checkpoint
    return folder.parents[1] if folder.parent.name == "checkpoints" else path


def find_common_folder(paths: list[str]) -> Path:
    """Return the folder of a single run, or the folder that contains all runs."""
    runs = {find_run_folder(Path(path).resolve()) for path in paths}
    if len(runs) == 1:
        return runs.pop()
    return Path(os.path.commonpath([run.parent for run in runs]))


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
