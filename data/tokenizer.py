"""The tokenizers of this repository, and the files that store them.

There are three kinds: encodings of tiktoken, which are GPT-2's, byte pairs that are trained on a
corpus, bytes and characters; your own tokenizer.json, which the `tokenizers` library reads; and the
ids of synthetic tasks, which are not text.

The file `tokenizer.json` beside the shards of a corpus, and in every checkpoint, rebuilds a
tokenizer. It is what `to_json` returns, or a file of the `tokenizers` library.
"""

import base64
import functools
import json
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Set
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tiktoken

from utils import errors, files

END_OF_TEXT = "<|endoftext|>"
BEGIN_OF_TEXT = "<|beginoftext|>"

# Words with the space before them, up to three digits, runs of punctuation, and a line break with
# the indentation after it: at best one token each, which suits source code.
SPLIT_PATTERN = r" ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s*\n[ \t]*|\s+"
# As tiktoken writes it; a constant, so that corpora do not depend on the version of tiktoken.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# tiktoken's regular expressions fail on a run of about a million blanks
MAX_BLANKS = 500_000
# Training counts pairs in pieces of at most this many characters. It is quadratic in the length of
# a piece, and text without spaces (DNA, base64, minified code) would be one piece.
MAX_TRAINING_PIECE = 500
SINGLE_BYTES = [bytes([value]) for value in range(256)]


class Tokenizer:
    """Encodes text as token ids, and decodes them.

    A subclass has the attributes

        name                what meta.json and messages call it
        n_vocab             highest id + 1; a few ids may be unused
        eot_token, eot_text end-of-text, which precedes every document unless there is a
                            beginning-of-text token
        bos_token, bos_text id and text of the token that precedes every document
        special_tokens_set  texts of all special tokens
        name_or_path        of a tokenizer of your own: its name in tokenizer_config.json
    """

    name: str
    n_vocab: int
    eot_token: int
    eot_text: str = END_OF_TEXT
    special_tokens_set: Set[str] = frozenset({END_OF_TEXT})
    name_or_path: str | None = None

    @property
    def bos_token(self) -> int:
        return self.eot_token

    @property
    def bos_text(self) -> str:
        return self.eot_text

    def encode(self, text: str, *, allowed_special: str | Set[str] = frozenset()) -> list[int]:
        """Return the ids of a text, to which no special token is added.

        Args:
            allowed_special: "all" reads special tokens in the text as such; by default they are
                plain text
        """
        raise NotImplementedError

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of each text, uint32, with special tokens as plain text."""
        return [np.array(self.encode(text), dtype=np.uint32) for text in texts]

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        raise NotImplementedError

    def decode_single_token_bytes(self, token: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text, b"" for an unused id."""
        raise NotImplementedError

    def bytes_by_token(self) -> np.ndarray:
        """Return how many bytes of text each token stands for, int64 (n_vocab,).

        Special tokens, and ids that are not text, stand for none.
        """
        raise NotImplementedError

    def to_json(self) -> dict:
        """Return the description from which `from_json` rebuilds the tokenizer."""
        raise NotImplementedError

    def to_hugging_face(self) -> dict:
        """Return the tokenizer in the format of tokenizer.json of the `tokenizers` library.

        Raises:
            ValueError: that format cannot express it
        """
        raise NotImplementedError


# ---- encodings of tiktoken ----


class BytePairTokenizer(Tokenizer):
    """A byte-pair encoding of tiktoken, and end-of-text, whose id follows those of its tokens.

    Args:
        pattern: regular expression that splits text; no token crosses its borders
        tokens: in rank order
        has_bos: whether beginning-of-text has an id of its own, the one after end-of-text, as in
            packed corpora of earlier versions
    """

    def __init__(self, name: str, pattern: str, tokens: list[bytes], has_bos: bool = False):
        if len({token for token in tokens if len(token) == 1}) != 256:
            raise ValueError("some bytes have no token")
        self.name = name
        self.pattern = pattern
        self.tokens = tokens
        self.has_bos = has_bos
        self.eot_token = len(tokens)
        special_tokens = {END_OF_TEXT: self.eot_token}
        if has_bos:
            special_tokens[BEGIN_OF_TEXT] = self.bos_token
        self.special_tokens_set = frozenset(special_tokens)
        self.n_vocab = len(tokens) + len(special_tokens)
        self.encoding = tiktoken.Encoding(
            name,
            pat_str=pattern,
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens=special_tokens,
        )

    @property
    def bos_token(self) -> int:
        return self.eot_token + 1 if self.has_bos else self.eot_token

    @property
    def bos_text(self) -> str:
        return BEGIN_OF_TEXT if self.has_bos else END_OF_TEXT

    def encode(self, text: str, *, allowed_special: str | Set[str] = frozenset()) -> list[int]:
        if allowed_special:
            return self.encoding.encode(text, allowed_special="all")
        return [
            token for piece in split_blanks(text) for token in self.encoding.encode_ordinary(piece)
        ]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [
            np.concatenate(
                [
                    # disallowed_special=(): special tokens in the text are plain text
                    self.encoding.encode_to_numpy(piece, disallowed_special=())
                    for piece in split_blanks(text)
                ]
            )
            for text in texts
        ]

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)

    def decode_single_token_bytes(self, token: int) -> bytes:
        return self.encoding.decode_single_token_bytes(token)

    def bytes_by_token(self) -> np.ndarray:
        lengths = [len(token) for token in self.tokens]
        return np.array(lengths + [0] * len(self.special_tokens_set), dtype=np.int64)

    def to_json(self) -> dict:
        description = {
            "name": self.name,
            "pattern": self.pattern,
            "tokens": [base64.b64encode(token).decode("ascii") for token in self.tokens],
        }
        if self.has_bos:
            description["eot_token"] = self.eot_token
            description["bos_token"] = self.bos_token
        return description

    def to_hugging_face(self) -> dict:
        converters = errors.import_optional(
            "transformers.convert_slow_tokenizer", "writing a tokenizer for transformers"
        )
        ranks = {token: rank for rank, token in enumerate(self.tokens)}
        # the converter reads ranks from a file, by this function in all versions of transformers
        with mock.patch("tiktoken.load.load_tiktoken_bpe", return_value=ranks):
            converted = converters.TikTokenConverter(pattern=self.pattern).converted()
        # in the order of their ids
        converted.add_special_tokens([END_OF_TEXT, BEGIN_OF_TEXT][: len(self.special_tokens_set)])
        return json.loads(converted.to_str())


def split_blanks(text: str) -> Iterator[str]:
    """Yield the text in pieces, cutting runs of whitespace that are too long for tiktoken."""
    if len(text) < MAX_BLANKS:
        yield text
        return
    cuts = [0]
    # (?<!\s) makes the expression try each run once instead of at each of its blanks
    for run in re.finditer(rf"(?<!\s)\s{{{MAX_BLANKS},}}", text):
        cuts.extend(range(run.start(), run.end() + 1, MAX_BLANKS))
    for start, end in pairwise([*cuts, len(text)]):
        yield text[start:end]


def byte_tokenizer() -> BytePairTokenizer:
    """Return the tokenizer of single bytes; the id of a byte is its value."""
    return BytePairTokenizer("bytes", r"[\s\S]", SINGLE_BYTES)


def characters_tokenizer(texts: Iterable[str]) -> BytePairTokenizer:
    """Return the tokenizer of the characters of ASCII texts, with the ids that nanoGPT gives them.

    All other bytes have the ids after them.
    """
    used = [character.encode("ascii") for character in sorted(set().union(*texts))]
    unused = [byte for byte in SINGLE_BYTES if byte not in used]
    return BytePairTokenizer("characters", r"[\s\S]", used + unused)


def gpt2_tokenizer() -> BytePairTokenizer:
    """Return GPT-2's tokenizer.

    tiktoken reads its vocabulary from its cache, or downloads it there.

    Raises:
        ValueError: its vocabulary is not on this machine, and cannot be downloaded
    """
    try:
        ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
    except Exception as error:  # requests, proxies and file systems have exceptions of their own
        raise ValueError(
            "GPT-2's vocabulary is not on this machine and cannot be downloaded "
            f"({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a cache folder of tiktoken that "
            "holds it (docs/data.md)"
        ) from error
    return BytePairTokenizer("gpt2", GPT2_PATTERN, sorted(ranks, key=ranks.get))


def train_byte_pairs(
    texts: Iterable[str], vocab_size: int, pattern: str = SPLIT_PATTERN
) -> BytePairTokenizer:
    """Train a byte-pair encoding on texts.

    Args:
        vocab_size: number of tokens, end-of-text included
        pattern: regular expression that splits text; no token crosses its borders

    Raises:
        ValueError: the texts yield fewer tokens
    """
    import tokenizers
    from tokenizers import models, pre_tokenizers, trainers

    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            pre_tokenizers.FixedLength(MAX_TRAINING_PIECE),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    learner.train_from_iterator(texts, trainer)
    # The library has an order of its own for single bytes; merges follow in id order.
    vocabulary = learner.get_vocab()
    merged_tokens = [
        decode_printable(token)
        for token in sorted(vocabulary, key=vocabulary.get)
        if len(token) > 1
    ]
    num_tokens = len(SINGLE_BYTES) + len(merged_tokens) + 1
    if num_tokens != vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size}, but the text yields only {num_tokens} tokens; give that "
            "number or less"
        )
    return BytePairTokenizer(f"bpe{vocab_size}", pattern, SINGLE_BYTES + merged_tokens)


@functools.cache
def printable_bytes() -> dict[str, int]:
    """Return the byte that each character of GPT-2's printable byte alphabet stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    return {
        **{chr(value): value for value in printable},
        **{chr(256 + index): value for index, value in enumerate(others)},
    }


def decode_printable(token: str) -> bytes:
    """Return the bytes of a token that is written in GPT-2's printable byte alphabet."""
    to_byte = printable_bytes()
    return bytes(to_byte[character] for character in token)


# ---- tokenizer.json of the library ----


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the `tokenizers` library.

    Nothing is added to a text, truncated or padded.

    Args:
        name: what meta.json and messages call it
        description: the content of its tokenizer.json
        eot_text: its end-of-text token

    Raises:
        ValueError: the library cannot read it, or it has no such end-of-text token
    """

    def __init__(self, name: str, description: dict, eot_text: str):
        self.name = name
        self.name_or_path = name.removeprefix("hf:")
        # the post-processor adds special tokens
        unused = {"truncation": None, "padding": None, "post_processor": None}
        self.description = {**description, **unused}
        if "dropout" in self.description["model"]:
            self.description["model"] = {**self.description["model"], "dropout": None}
        self.eot_text = eot_text
        self._thread = threading.local()
        self.ids = self._encoder.get_vocab(with_added_tokens=True)
        added = self._encoder.get_added_tokens_decoder()
        self.added = {token.content for token in added.values()}
        self.special_tokens_set = {token.content for token in added.values() if token.special}
        if eot_text not in self.ids:
            raise ValueError(
                f"{name} has no end-of-text token {eot_text}; its special tokens are "
                f"{', '.join(sorted(self.special_tokens_set)[:20])}"
            )
        self.special_tokens_set |= {eot_text}
        self.n_vocab = max(self.ids.values()) + 1
        self.eot_token = self.ids[eot_text]

    @property
    def _encoder(self) -> Any:
        """The library's tokenizer of this thread: threads that share one wait for its cache."""
        if not hasattr(self._thread, "encoder"):
            # a preparation has threads of its own, and --workers says how many
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
            import tokenizers

            try:
                encoder = tokenizers.Tokenizer.from_str(json.dumps(self.description))
            except Exception as error:  # the library raises no narrower class
                raise ValueError(
                    f"the tokenizer.json of {self.name} cannot be read by the tokenizers library "
                    f"({error})"
                ) from error
            self._thread.encoder = encoder
        return self._thread.encoder

    def encode(self, text: str, *, allowed_special: str | Set[str] = frozenset()) -> list[int]:
        encoder = self._encoder
        encoder.encode_special_tokens = not allowed_special
        return encoder.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encoder = self._encoder
        encoder.encode_special_tokens = True
        # "fast" leaves out the positions of tokens in the text
        encodings = encoder.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: list[int]) -> str:
        return self._encoder.decode(ids, skip_special_tokens=False)

    @cached_property
    def _bytes_of(self) -> dict[int, bytes]:
        """The bytes of every token, of byte-level tokenizers and of those of SentencePiece."""
        is_byte_level = '"ByteLevel"' in json.dumps(self.description.get("decoder"))

        def to_bytes(token: str) -> bytes:
            if token in self.added:
                return token.encode()
            if is_byte_level:
                return decode_printable(token)
            if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()

        return {token_id: to_bytes(token) for token, token_id in self.ids.items()}

    def decode_single_token_bytes(self, token: int) -> bytes:
        return self._bytes_of.get(token, b"")

    def bytes_by_token(self) -> np.ndarray:
        lengths = np.zeros(self.n_vocab, dtype=np.int64)
        for token_id, content in self._bytes_of.items():
            lengths[token_id] = len(content)
        lengths[[self.ids[token] for token in self.special_tokens_set]] = 0
        return lengths

    def to_json(self) -> dict:
        return {
            "name": self.name,
            "eot_text": self.eot_text,
            "tokenizer_json": self.description,
        }

    def to_hugging_face(self) -> dict:
        return self.description


def read_own(source: str, eot_text: str | None = None) -> Tokenizer:
    """Return the tokenizer that --tokenizer names: a folder, a tokenizer.json, or a Hub repository.

    Args:
        eot_text: its end-of-text token (default: the eos_token of its config files)

    Raises:
        ValueError: there is no such tokenizer, it is damaged, or its end-of-text token is unknown
    """
    path = Path(source).expanduser()
    if path.exists():
        name = files.show_path((path if path.is_dir() else path.parent).resolve().name)
    else:
        path = download(source)
        name = source
    if path.is_dir():
        path = path / "tokenizer.json"
    description = files.read_json(path)
    if "model" not in description:
        return from_json(description)  # of another corpus
    return read_library(path.parent, description, name, eot_text)


def download(repository: str) -> Path:
    """Return a folder with the tokenizer of a repository on the Hub."""
    import huggingface_hub

    patterns = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:  # of httpx and huggingface_hub
        raise ValueError(
            f"--tokenizer={repository}: there is no such file or folder, and the Hugging Face Hub "
            f"does not provide it ({error!r:.200}); give one that exists, gpt2, bpe, bytes, or "
            "OWNER/NAME of a repository"
        ) from error


def read_library(
    folder: Path, description: dict, name: str | None = None, eot_text: str | None = None
) -> LibraryTokenizer:
    """Return the tokenizer of a tokenizer.json of the library, and of the config files beside it."""
    for config_name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / config_name
        config = files.read_json(path) if path.exists() else {}
        eos_token = config.get("eos_token")
        eot_text = eot_text or (eos_token["content"] if isinstance(eos_token, dict) else eos_token)
        name = name or config.get("name_or_path")
    added_tokens = [token.get("content") for token in description.get("added_tokens", [])]
    if eot_text is None and END_OF_TEXT in added_tokens:
        eot_text = END_OF_TEXT
    if eot_text is None:
        raise ValueError(
            f"{folder / 'tokenizer.json'} does not say which token ends a document; name it with "
            "--eot_token, or write it as eos_token into tokenizer_config.json"
        )
    return LibraryTokenizer(f"hf:{name or folder.resolve().name}", description, eot_text)


# ---- ids of synthetic tasks ----


class IdTokenizer(Tokenizer):
    """The ids of a synthetic task, which are not text: nothing can be encoded or decoded."""

    name = "ids"
    # no id ends or begins a sequence
    eot_token = -1

    def __init__(self, n_vocab: int):
        self.n_vocab = n_vocab

    def encode(self, text: str, *, allowed_special: str | Set[str] = frozenset()) -> list[int]:
        raise ValueError("the tokens of this model are the ids of a synthetic task, not text")

    def decode_single_token_bytes(self, token: int) -> bytes:
        return b""

    def to_json(self) -> dict:
        return {"name": "ids", "vocab_size": self.n_vocab}

    def to_hugging_face(self) -> dict:
        raise ValueError(
            "the model cannot be exported: its tokens are ids, not text, for which transformers has "
            "no tokenizer"
        )


# ---- stored tokenizers ----


def from_json(description: dict) -> Tokenizer:
    """Return the tokenizer of a description.

    Raises:
        ValueError: the description is damaged
    """
    if "tokenizer_json" in description:
        return LibraryTokenizer(
            description["name"], description["tokenizer_json"], description["eot_text"]
        )
    if description["name"] == "ids":
        return IdTokenizer(int(description["vocab_size"]))
    tokens = [base64.b64decode(token) for token in description["tokens"]]
    has_bos = "bos_token" in description
    return BytePairTokenizer(description["name"], description["pattern"], tokens, has_bos)


def read(folder: Path) -> Tokenizer:
    """Return the tokenizer of a corpus, a checkpoint or an exported model.

    A folder without tokenizer.json has GPT-2's.

    Raises:
        ValueError: tokenizer.json is damaged, or GPT-2's vocabulary cannot be found
    """
    path = folder / "tokenizer.json"
    # a broken link is an error, and does not stand for GPT-2's tokenizer
    description = files.read_json(path) if os.path.lexists(path) else {"name": "gpt2"}
    if description == {"name": "gpt2"}:
        return gpt2_tokenizer()
    try:
        if "model" in description:
            return read_library(folder, description)
        return from_json(description)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged: it does not describe a tokenizer ({error})"
        ) from error


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether the ids of two tokenizers stand for the same bytes."""
    if (one.n_vocab, one.eot_token) != (other.n_vocab, other.eot_token):
        return False
    return all(
        one.decode_single_token_bytes(token) == other.decode_single_token_bytes(token)
        for token in range(one.n_vocab)
    )


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a prompt, after the token that precedes every document in training.

    Raises:
        ValueError: the prompt has a `<|name|>` that the tokenizer, and so the model, does not know
    """
    for special_token in re.findall(r"<\|[^\s|>]+\|>", text):
        if special_token not in tokenizer.special_tokens_set:
            special_tokens = ", ".join(sorted(tokenizer.special_tokens_set)[:20])
            raise ValueError(
                f"the prompt has the special token {special_token}, which the tokenizer "
                f"{tokenizer.name} does not know; its special tokens are {special_tokens}"
            )
    return [tokenizer.bos_token, *tokenizer.encode(text, allowed_special="all")]
