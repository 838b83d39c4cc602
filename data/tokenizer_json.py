"""The tokenizer.json of the `tokenizers` library, written for a byte-pair encoding and read back.

tiktoken merges the neighbours whose union has the lowest rank; `tokenizers` goes through a list of
merges. Each token longer than a byte is therefore one merge: of the two parts that the earlier
tokens make of it.
"""

import hashlib
from itertools import pairwise

# SHA-256 of repr(its tokens by rank)
GPT2 = "b7cc3f4d1607c17604556413145cd3ecef05b33f90bd8fe4f42b83260e2b290f"


def printable_bytes() -> dict[str, int]:
    """The byte that each character of GPT-2's printable byte alphabet stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    own = {chr(value): value for value in printable}
    return own | {chr(256 + i): value for i, value in enumerate(others)}


def merge_of(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that tokens of lower rank make of a token. ValueError: they make more."""
    parts, limit = [token[i : i + 1] for i in range(len(token))], ranks[token]
    while len(parts) > 2:
        rank, at = min((ranks.get(a + b, limit), at) for at, (a, b) in enumerate(pairwise(parts)))
        if rank >= limit:
            what = f"the token {token!r} is no union of two earlier ones"
            raise ValueError(f"{what}: it cannot be written as a merge")
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def write(pattern: str, tokens: list[bytes], end_of_text: str) -> dict:
    """tokenizer.json of an encoding: its pattern, its tokens in rank order, end-of-text after them.

    ValueError: a token that no merge makes.
    """
    character = {value: char for char, value in printable_bytes().items()}
    text = {token: "".join(character[value] for value in token) for token in tokens}
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = [[text[part] for part in merge_of(token, ranks)] for token in tokens if len(token) > 1]
    special = {"id": len(tokens), "content": end_of_text, "special": True}
    special |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level["use_regex"] = False
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    split["invert"] = False
    # ignore_merges: as tiktoken, take a piece of text that is a token at once.
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False}
    model["ignore_merges"] = True
    model |= {"vocab": {text[token]: rank for token, rank in ranks.items()}, "merges": merges}
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [special]}
    whole |= {"normalizer": None, "pre_tokenizer": pre_tokenizer, "post_processor": None}
    return {**whole, "decoder": byte_level, "model": model}


def read(description: dict, end_of_text: str) -> tuple[str, str, list[bytes]]:
    """(name, pattern, tokens in rank order) of what `write` made, perhaps saved again since.

    ValueError, KeyError, TypeError or AttributeError: it is built otherwise.
    """
    split, byte_level = description["pre_tokenizer"]["pretokenizers"]
    if (split["type"], split["behavior"], byte_level["type"]) != ("Split", "Isolated", "ByteLevel"):
        raise ValueError("it splits text in another way")
    changes = byte_level["use_regex"] or byte_level["add_prefix_space"]
    if changes or description["normalizer"] is not None:
        raise ValueError("it changes text before it splits it")
    pattern, vocabulary = split["pattern"]["Regex"], dict(description["model"]["vocab"])
    vocabulary.pop(end_of_text, None)
    size = len(vocabulary)
    if not isinstance(pattern, str) or {type(rank) for rank in vocabulary.values()} != {int}:
        raise ValueError("its pattern is no text, or an id no number")
    added = {entry["content"]: entry["id"] for entry in description["added_tokens"]}
    if added != {end_of_text: size}:
        wanted = f"not {end_of_text} alone after the others"
        raise ValueError(f"its added tokens are {str(added)[:80]}, {wanted}")
    if set(vocabulary.values()) != set(range(size)):
        raise ValueError("its ids have gaps")
    to_byte = printable_bytes()
    tokens = [bytes(to_byte[c] for c in text) for text in sorted(vocabulary, key=vocabulary.get)]
    return name_of(tokens), pattern, tokens


def name_of(tokens: list[bytes]) -> str:
    """The name that `data.tokenizer` gives an encoding of these tokens."""
    if len(tokens) == 50256 and hashlib.sha256(repr(tokens).encode()).hexdigest() == GPT2:
        return "gpt2"
    return "bytes" if len(tokens) == 256 else f"bpe{len(tokens) + 1}"
