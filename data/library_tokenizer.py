"""Your own tokenizer: any tokenizer.json that the `tokenizers` library reads.

Only what turns text into ids is used: no special tokens are added to a text (the preparation of a
corpus puts its own end-of-text token in front of each document), nothing is truncated or padded,
and special tokens that are written in a document are plain text.
"""

import hashlib
import json
import os
import threading
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data import tokenizer_json
from data.tokenizer_base import AllowedSpecial, Tokenizer
from utils import errors, files

NAME_PREFIX = "hf:"
# files that may name the end-of-text token
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library, which is imported when the first text is encoded.

    Args:
        name: what meta.json and messages call it
        description: the content of its tokenizer.json
        eot_text: its end-of-text token

    Raises:
        ValueError: the description is not of a tokenizer, or has no such end-of-text token
    """

    def __init__(self, name: str, description: dict, eot_text: str):
        self.name = name
        self.name_or_path = name.removeprefix(NAME_PREFIX)
        self.description = remove_unused_settings(description)
        self.eot_text = eot_text
        self.ids = tokenizer_json.read_vocabulary(description)
        if eot_text not in self.ids:
            raise ValueError(f"the end-of-text token {eot_text} is not in its vocabulary")
        self.n_vocab = max(self.ids.values()) + 1
        self.eot_token = self.ids[eot_text]
        self.special_tokens_set = {eot_text, *tokenizer_json.find_special_tokens(description)}
        self._thread = threading.local()

    def _build(self, encode_special_tokens: bool) -> Any:
        """Build the library's tokenizer.

        Args:
            encode_special_tokens: whether it reads special tokens in a text as plain text
        """
        # A preparation has threads of its own, and --workers says how many.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        library = errors.import_optional("tokenizers", f"the tokenizer {self.name}")
        try:
            encoder = library.Tokenizer.from_str(json.dumps(self.description))
        except Exception as error:  # the library raises no narrower class
            raise ValueError(
                f"the tokenizer.json of {self.name} cannot be read by the tokenizers library "
                f"({error}); give a valid one"
            ) from error
        encoder.encode_special_tokens = encode_special_tokens
        return encoder

    @cached_property
    def _plain_encoder(self) -> Any:
        return self._build(encode_special_tokens=True)

    @cached_property
    def _special_encoder(self) -> Any:
        return self._build(encode_special_tokens=False)

    @cached_property
    def _bytes_of(self) -> dict[int, bytes]:
        """The bytes of every token."""
        decoders = tokenizer_json.list_decoders(self.description)
        added = {entry["content"] for entry in self.description.get("added_tokens") or []}
        return {
            token_id: token.encode()
            if token in added
            else tokenizer_json.decode_token(token, decoders)
            for token, token_id in self.ids.items()
        }

    def encode(self, text: str, *, allowed_special: AllowedSpecial = frozenset()) -> list[int]:
        encoder = self._special_encoder if allowed_special else self._plain_encoder
        return encoder.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        # One tokenizer per thread: threads that share one wait for the lock of its cache, so that
        # two of them are no faster than one.
        if not hasattr(self._thread, "encoder"):
            self._thread.encoder = self._build(encode_special_tokens=True)
        # "fast" leaves out the positions of tokens in the text
        encodings = self._thread.encoder.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        return self._plain_encoder.decode(ids, skip_special_tokens=False)

    def decode_single_token_bytes(self, token: int) -> bytes:
        return self._bytes_of.get(token, b"")

    def bytes_by_token(self) -> np.ndarray:
        lengths = np.zeros(self.n_vocab, dtype=np.int64)
        for token_id, content in self._bytes_of.items():
            lengths[token_id] = len(content)
        for special_token in self.special_tokens_set:
            lengths[self.ids[special_token]] = 0
        return lengths

    def to_json(self) -> dict:
        return {
            "name": self.name,
            "eot_text": self.eot_text,
            "tokenizer_json": self.description,
        }

    def to_hugging_face(self) -> dict:
        return self.description


def remove_unused_settings(description: dict) -> dict:
    """Return a tokenizer.json without the settings that add or drop tokens."""
    model = dict(description["model"])
    if "dropout" in model:
        model["dropout"] = None
    return {
        **description,
        "truncation": None,
        "padding": None,
        "post_processor": None,  # adds special tokens
        "model": model,
    }


def read_config(folder: Path) -> dict:
    """Return the name_or_path and the eos_token that the config files of a folder tell."""
    return merge_configs([path for name in CONFIG_FILES if (path := folder / name).exists()])


def merge_configs(paths: list[Path]) -> dict:
    """Return the first name_or_path and the first eos_token of config files."""
    merged: dict[str, str] = {}
    for path in paths:
        config = files.read_json(path)
        eos_token = config.get("eos_token")
        if isinstance(eos_token, dict):
            eos_token = eos_token.get("content")
        for key, value in (("name_or_path", config.get("name_or_path")), ("eos_token", eos_token)):
            if isinstance(value, str) and value:
                merged.setdefault(key, value)
    return merged


class TokenizerFiles(NamedTuple):
    """The tokenizer that --tokenizer names."""

    name: str

    # of tokenizer.json, byte for byte
    content: bytes

    # None for a tokenizer that this repository wrote, whose end-of-text token is known
    eot_text: str | None

    @property
    def sha256(self) -> str:
        """The SHA-256 of tokenizer.json."""
        return hashlib.sha256(self.content).hexdigest()

    def describe(self) -> dict:
        """Return the description of the tokenizer."""
        description = json.loads(self.content)
        if self.eot_text is None:
            return description
        return LibraryTokenizer(NAME_PREFIX + self.name, description, self.eot_text).to_json()

    def write(self, folder: Path) -> None:
        """Write the files into the folder of a corpus, as Hugging Face names them."""
        if self.eot_text is not None:
            config = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "name_or_path": self.name,
                "eos_token": self.eot_text,
            }
            files.write_text(
                folder / "tokenizer_config.json",
                json.dumps(config, indent=1, ensure_ascii=False) + "\n",
            )
        # written last: with it, the tokenizer is complete
        with files.atomic_path(folder / "tokenizer.json") as temporary:
            temporary.write_bytes(self.content)


def find_file(tokenizer: str, file_name: str) -> Path | None:
    """Return a file of the tokenizer that --tokenizer names; None if it has no such file.

    Raises:
        ValueError: there is no such tokenizer
    """
    path = Path(tokenizer).expanduser()
    if path.exists():
        folder = path if path.is_dir() else path.parent
        return folder / file_name if (folder / file_name).is_file() else None
    if not is_repository_name(tokenizer):
        raise ValueError(
            f"--tokenizer={tokenizer}: there is no such file or folder; give one that exists, "
            "gpt2, bpe, bytes, or OWNER/NAME of a repository on the Hugging Face Hub"
        )
    return download(tokenizer, file_name)


def download(repository: str, file_name: str) -> Path | None:
    """Download a file of a repository on the Hub to the cache; return None if it has no such file."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(repository, file_name))
    except huggingface_hub.errors.RemoteEntryNotFoundError:
        return None
    except Exception as error:  # of httpx and huggingface_hub
        raise ValueError(
            f"--tokenizer={repository}: {file_name} cannot be downloaded ({error!r:.300}); check the name, "
            "run `hf auth login` if the repository is private, or give a folder"
        ) from error


def read_files(tokenizer: str, eot_text: str | None = None) -> TokenizerFiles:
    """Read the tokenizer that --tokenizer names: a folder, a tokenizer.json, or a Hub repository.

    Args:
        eot_text: its end-of-text token (default: the eos_token of its config files)

    Raises:
        ValueError: there is no such tokenizer, it is damaged, or its end-of-text token is unknown
    """
    path = Path(tokenizer).expanduser()
    tokenizer_path = path
    name = path.resolve().parent.name
    if not path.is_file():
        tokenizer_path = find_file(tokenizer, "tokenizer.json")
        name = path.resolve().name if path.is_dir() else tokenizer
    if tokenizer_path is None:
        raise ValueError(
            f"--tokenizer={tokenizer}: there is no tokenizer.json in it; give a folder or "
            "repository that has one, such as the output of a fast tokenizer's save_pretrained()"
        )
    content = tokenizer_path.read_bytes()
    description = files.read_json(tokenizer_path)
    if "model" not in description and "tokens" in description:
        # of another corpus, in the format of this repository
        return TokenizerFiles(str(description.get("name")), content, eot_text=None)
    try:
        ids = tokenizer_json.read_vocabulary(description)
    except ValueError as error:
        raise ValueError(
            f"{tokenizer_path} is not a tokenizer.json of the tokenizers library: {error}; give "
            "one that is"
        ) from error
    if eot_text is None:
        config_paths = [find_file(tokenizer, file_name) for file_name in CONFIG_FILES]
        eot_text = merge_configs([path for path in config_paths if path is not None]).get(
            "eos_token"
        )
    check_eot_text(tokenizer_path, eot_text, ids, tokenizer_json.find_special_tokens(description))
    return TokenizerFiles(name, content, eot_text)


def is_repository_name(text: str) -> bool:
    """Return whether a text can be the name of a repository on the Hub: OWNER/NAME."""
    parts = text.split("/")
    return len(parts) == 2 and all(part and part[0].isalnum() for part in parts)


def check_eot_text(
    path: Path, eot_text: str | None, ids: dict[str, int], special_tokens: list[str]
) -> None:
    """Raise ValueError if the end-of-text token is unknown; the message names the choices."""
    if eot_text in ids:
        return
    choices = "it has no special tokens, so you can name any token"
    if special_tokens:
        choices = f"its special tokens are {', '.join(special_tokens[:20])}"
    if eot_text is None:
        raise ValueError(
            f"{path} does not say which token ends a document; name it with --eot_token; {choices}"
        )
    raise ValueError(
        f"{path} has no token {eot_text}; name another one with --eot_token; {choices}"
    )
