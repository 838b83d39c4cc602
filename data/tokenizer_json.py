"""The tokenizer.json of the `tokenizers` library.

`write` and `read` convert a byte-pair encoding of tiktoken. tiktoken merges the neighbors whose
union has the lowest rank, but `tokenizers` goes through a list of merges. So each token of two or
more bytes becomes one merge, of the two parts that the tokens before it make of it.

The other functions read from any tokenizer.json what is needed without the library.
"""

import functools
import hashlib
import re
from itertools import pairwise

# SHA-256 of repr() of GPT-2's tokens in rank order
GPT2_SHA256 = "b7cc3f4d1607c17604556413145cd3ecef05b33f90bd8fe4f42b83260e2b290f"

MAX_VOCAB = 2**24


@functools.cache  # decoding a vocabulary asks for it at every token
def printable_bytes() -> dict[str, int]:
    """Return the byte that each character of GPT-2's printable byte alphabet stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    alphabet = {chr(value): value for value in printable}
    for index, value in enumerate(others):
        alphabet[chr(256 + index)] = value
    return alphabet


# ---- byte-pair encodings of tiktoken ----


def find_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Return the two parts that tokens of lower rank make of a token.

    Raises:
        ValueError: they make more than two
    """
    rank_limit = ranks[token]
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        unions = [ranks.get(left + right, rank_limit) for left, right in pairwise(parts)]
        rank = min(unions)
        if rank >= rank_limit:
            raise ValueError(
                f"the token {token!r} is not the union of two earlier tokens, so it cannot be "
                "written as a merge"
            )
        index = unions.index(rank)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return parts[0], parts[1]


def write(pattern: str, tokens: list[bytes], end_of_text: str) -> dict:
    """Return the tokenizer.json of a byte-pair encoding.

    Args:
        pattern: regular expression that splits text
        tokens: in rank order
        end_of_text: the special token, whose id follows the others

    Raises:
        ValueError: a token cannot be written as a merge
    """
    character_of = {value: character for character, value in printable_bytes().items()}
    texts = {token: "".join(character_of[value] for value in token) for token in tokens}
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = [
        [texts[part] for part in find_merge(token, ranks)] for token in tokens if len(token) > 1
    ]
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    end_of_text_token = {
        "id": len(tokens),
        "content": end_of_text,
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end_of_text_token],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            # like tiktoken, take a piece of text that is a token as a whole
            "ignore_merges": True,
            "vocab": {texts[token]: rank for token, rank in ranks.items()},
            "merges": merges,
        },
    }


def read(description: dict, end_of_text: str) -> tuple[str, str, list[bytes]]:
    """Read the byte-pair encoding that `write` wrote, even if the library saved it again.

    Returns:
        name, pattern, and tokens in rank order

    Raises:
        ValueError, KeyError, TypeError or AttributeError: it is another kind of tokenizer
    """
    split, byte_level = description["pre_tokenizer"]["pretokenizers"]
    if (split["type"], split["behavior"], byte_level["type"]) != ("Split", "Isolated", "ByteLevel"):
        raise ValueError("it splits text differently")
    changes_text = byte_level["use_regex"] or byte_level["add_prefix_space"]
    if changes_text or description["normalizer"] is not None:
        raise ValueError("it changes text before splitting it")
    pattern = split["pattern"]["Regex"]
    vocabulary = dict(description["model"]["vocab"])
    vocabulary.pop(end_of_text, None)
    size = len(vocabulary)
    if not isinstance(pattern, str) or {type(rank) for rank in vocabulary.values()} != {int}:
        raise ValueError("its pattern is not a string, or an id is not an integer")
    added = {entry["content"]: entry["id"] for entry in description["added_tokens"]}
    if added != {end_of_text: size}:
        raise ValueError(
            f"its added tokens are {str(added)[:80]}, not only {end_of_text} after all other tokens"
        )
    if set(vocabulary.values()) != set(range(size)):
        raise ValueError("its ids have gaps")
    to_byte = printable_bytes()
    tokens = [
        bytes(to_byte[character] for character in text)
        for text in sorted(vocabulary, key=vocabulary.get)
    ]
    return name_tokens(tokens), pattern, tokens


def name_tokens(tokens: list[bytes]) -> str:
    """Return the name that `data.tokenizer` gives to an encoding of these tokens."""
    if len(tokens) == 50256 and hashlib.sha256(repr(tokens).encode()).hexdigest() == GPT2_SHA256:
        return "gpt2"
    return "bytes" if len(tokens) == 256 else f"bpe{len(tokens) + 1}"


# ---- any tokenizer.json ----


def read_vocabulary(description: dict) -> dict[str, int]:
    """Return the id of every token, added tokens included.

    Raises:
        ValueError: it is not the tokenizer.json of a tokenizer
    """
    try:
        vocabulary = description["model"]["vocab"]
        if isinstance(vocabulary, list):
            # a unigram model lists (token, score)
            ids = {entry[0]: index for index, entry in enumerate(vocabulary)}
        else:
            ids = dict(vocabulary)
        for entry in description.get("added_tokens") or []:
            ids[entry["content"]] = entry["id"]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"it has no vocabulary of tokens and ids ({error!r})") from error
    if not ids:
        raise ValueError("its vocabulary is empty")
    for token, token_id in ids.items():
        if type(token_id) is not int or not 0 <= token_id < MAX_VOCAB or type(token) is not str:
            raise ValueError(f"the id of {token!r} is {token_id!r}, not 0 to {MAX_VOCAB - 1}")
    return ids


def find_special_tokens(description: dict) -> list[str]:
    """Return the texts of the special tokens of a valid tokenizer.json, by id."""
    added_tokens = sorted(description.get("added_tokens") or [], key=lambda entry: entry["id"])
    return [entry["content"] for entry in added_tokens if entry.get("special")]


def list_decoders(description: dict) -> list[dict]:
    """Return the steps that turn tokens into text, in order."""
    decoder = description.get("decoder")
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def decode_token(token: str, decoders: list[dict]) -> bytes:
    """Return the bytes that a token, which is not an added one, adds to a text.

    Args:
        decoders: what `list_decoders` returns
    """
    types = [decoder["type"] for decoder in decoders]
    if "ByteLevel" in types:
        to_byte = printable_bytes()
        if all(character in to_byte for character in token):
            return bytes(to_byte[character] for character in token)
        return token.encode()
    if not decoders:
        return f" {token}".encode()  # the library joins tokens by spaces
    if "ByteFallback" in types and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    for decoder in decoders:
        if decoder["type"] == "Metaspace":
            token = token.replace(decoder["replacement"], " ")
        elif decoder["type"] == "Replace" and "String" in decoder["pattern"]:
            token = token.replace(decoder["pattern"]["String"], decoder["content"])
        elif decoder["type"] == "WordPiece":
            prefix = decoder["prefix"]
            is_continuation = token.startswith(prefix)
            token = token.removeprefix(prefix) if is_continuation else f" {token}"
        elif decoder["type"] == "BPEDecoder":
            token = token.replace(decoder["suffix"], " ")
    return token.encode()
