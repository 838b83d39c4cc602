"""What is needed of a tokenizer.json of the `tokenizers` library without that library.

`read` recognizes the byte-pair encodings of this repository, which export.py converts to that
format.
"""

import functools
import hashlib
import re

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


def read(
    description: dict, end_of_text: str, begin_of_text: str
) -> tuple[str, str, list[bytes], bool]:
    """Read a byte-pair encoding that was converted from tiktoken, even if the library saved it again.

    Returns:
        name, pattern, tokens in rank order, and whether there is a beginning-of-text token

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
    vocabulary.pop(begin_of_text, None)
    size = len(vocabulary)
    if not isinstance(pattern, str) or {type(rank) for rank in vocabulary.values()} != {int}:
        raise ValueError("its pattern is not a string, or an id is not an integer")
    added = {entry["content"]: entry["id"] for entry in description["added_tokens"]}
    has_bos = begin_of_text in added
    if added.pop(begin_of_text, size + 1) != size + 1 or added != {end_of_text: size}:
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
    return name_tokens(tokens), pattern, tokens, has_bos


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
