"""Folders that a model can be read from: runs, checkpoints, exported and released models."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from data import tokenizer
from data.shards import Corpus, MissingCorpus, open_corpus
from data.tokenizer import Tokenizer
from huggingface import released
from model import weights
from model.gpt import GPT
from training import checkpoint


@dataclass(frozen=True)
class ModelFolder:
    """A folder that weights can be read from, and what it says of its model."""

    path: Path
    model: str  # name of the variant
    config: dict  # keys of the model
    state: dict  # state.json; {} for an exported or released folder

    @property
    def label(self) -> str:
        """The name of the model in tables: the run and the step, or the exported folder."""
        if not self.state:
            return self.path.resolve().name
        averaged = ", averaged weights" if self.path.name == "ema" else ""
        return f"{find_run_folder(self.path).name}, step {self.state['step']:,}{averaged}"

    @cached_property
    def identity(self) -> str:
        """The SHA-256 of the weights and everything that belongs to them."""
        files = [self.path / name for name in checkpoint.MODEL_FILES]
        if not self.state:
            names = ("config.json", "tokenizer.json")
            files = [self.path / name for name in names if (self.path / name).is_file()]
            files += weights.list_weight_files(self.path)
        elif (self.path / checkpoint.CHECKSUMS).exists():
            files = [self.path / checkpoint.CHECKSUMS]
        digest = hashlib.sha256()
        for file in files:
            with open(file, "rb") as content:
                while block := content.read(2**24):
                    digest.update(block)
        return digest.hexdigest()

    def results_folder(self) -> Path:
        """Return eval/ in the run folder, or eval_NAME/ beside an exported folder."""
        run = find_run_folder(self.path)
        return run / "eval" if self.state else run.parent / f"eval_{run.name}"

    def load(self, device: torch.device | str) -> tuple[GPT, Tokenizer]:
        """Return the model in evaluation mode, and its tokenizer.

        Raises:
            ValueError: the folder is damaged, or its files do not fit together
        """
        encoding = tokenizer.read(self.path)
        model = weights.read_model(self.path, self.model, self.config, released.convert_weights)
        if encoding.n_vocab > model.config.vocab_size:
            raise ValueError(
                f"{self.path}: the tokenizer has {encoding.n_vocab} tokens, but the model has only "
                f"vocab_size={model.config.vocab_size}"
            )
        return model.to(device), encoding

    def open_corpus(self, dataset: str = "", option: str = "--val") -> Corpus:
        """Open the corpus `dataset`, or, if that is empty, the one that the run was trained on.

        option: the option of the command that gives `dataset`, for messages

        Raises:
            ValueError: there is no corpus, it was tokenized with another tokenizer than the
                model's, or the run's corpus has been replaced
        """
        if not dataset and not self.state:
            raise ValueError(
                f"{self.path} does not name the corpus that it was trained on; give "
                f"{option}=DATASET"
            )
        try:
            corpus = open_corpus(dataset or self.state["run_config"]["dataset"])
        except MissingCorpus as error:
            if dataset:
                raise
            raise MissingCorpus(
                f"{error}, with {option}; {self.path} was trained on this dataset"
            ) from error
        if not dataset and corpus.identity != self.state["corpus"]:
            raise ValueError(
                f"{corpus.path} is no longer the corpus that {self.path} was trained on; to "
                f"evaluate on it all the same, give {option}={self.state['run_config']['dataset']}"
            )
        if not tokenizer.same_tokens(tokenizer.read(corpus.path), tokenizer.read(self.path)):
            raise ValueError(
                f"{corpus.path} was tokenized with a different tokenizer than that of "
                f"{self.path}; give the corpus of the model, {option}=DATASET"
            )
        return corpus


def is_exported(path: Path) -> bool:
    """Return whether a folder is an exported or released model, not a run or checkpoint of ours."""
    return (path / "config.json").is_file() and not (path / "state.json").is_file()


def find_run_folder(path: Path) -> Path:
    """Return the run folder that a checkpoint folder belongs to; any other folder as it is."""
    path = path.resolve()
    folder = path.parent if path.name == "ema" else path  # the averages of a checkpoint
    return folder.parents[1] if folder.parent.name == "checkpoints" else path


def describe(path: str | Path) -> ModelFolder:
    """Describe a run, a checkpoint, an exported folder, or a folder of the paper's released code.

    Raises:
        ValueError: it is none of these, or damaged
    """
    path = Path(path)
    if is_exported(path):
        model, config = released.describe(path)
        return ModelFolder(path, model, config, state={})
    folder = checkpoint.find(path, also_accepted=", or a folder of exported or released weights")
    state = checkpoint.read_state(folder)
    return ModelFolder(folder, state["model"], state["model_config"], state)


def load_model(path: str | Path, device: torch.device | str) -> tuple[GPT, Tokenizer, dict]:
    """Load the model of any folder that `describe` takes.

    Returns:
        The model in evaluation mode, its tokenizer, and state.json (without one, a dict with
        "model" and "model_config").

    Raises:
        ValueError: the folder is damaged, or its files do not fit together
    """
    folder = describe(path)
    model, encoding = folder.load(device)
    state = {"model": folder.model, "model_config": folder.config, **folder.state}
    return model, encoding, state
