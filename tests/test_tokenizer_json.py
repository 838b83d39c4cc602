"""The tokenizers library makes tiktoken's ids from tokenizer.json, which can be read again."""

import json
import random
from typing import NamedTuple

import pytest
from helpers import ODD_TEXTS, ROOT

from data import tokenizer

tokenizers = pytest.importorskip("tokenizers")

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("data/*.py"))]


class Pair(NamedTuple):
    """A tokenizer of this repository, and the library's from the JSON that is written for it."""

    encoding: tokenizer.Tokenizer
    library: tokenizers.Tokenizer


@pytest.fixture(scope="module", params=["bytes", "bytes with BOS", "own pattern", "GPT-2"])
def pair(request) -> Pair:
    if request.param == "own pattern":
        encoding = tokenizer.train_byte_pairs(TEXTS, 1500)
    elif request.param == "GPT-2":
        encoding = tokenizer.gpt2_tokenizer()
    else:
        has_bos = request.param == "bytes with BOS"
        encoding = tokenizer.BytePairTokenizer("bytes", r"[\s\S]", tokenizer.SINGLE_BYTES, has_bos)
    description = json.dumps(encoding.to_hugging_face())
    return Pair(encoding, tokenizers.Tokenizer.from_str(description))


def check_ids(pair: Pair, text: str) -> None:
    """Check that both make the same ids of a text, and the library the text from them."""
    ids = pair.encoding.encode(text, allowed_special="all")
    assert pair.library.encode(text).ids == ids
    assert pair.library.decode(ids, skip_special_tokens=False) == text


def test_source_code_and_random_mixtures_of_words_and_whitespace(pair):
    generator = random.Random(0)
    characters = " \n\t\r\v\x1c\x85\u00a0\u2028\u200b\u0301\ufeffé²_!尺"
    words = ["ab", "'s", "'ll", "12", "def", "<|", "<|endoftext|>", "<|beginoftext|>"]
    mixtures = ["".join(generator.choices([*characters, *words], k=20)) for _ in range(300)]
    for text in [*TEXTS, *ODD_TEXTS, *mixtures]:
        check_ids(pair, text)


def test_characters_of_every_block(pair):
    """Both regular expression engines put a character into the same class.

    Each stands between letters, digits, spaces and line breaks.
    """
    for code in (*range(0, 0xD800, 31), *range(0xE000, 0x110000, 397)):
        character = chr(code)
        check_ids(pair, f"a {character}{character}b  1{character}_{character} \n{character}\n")


def test_an_exported_encoding_is_read_again(pair, tmp_path):
    (tmp_path / "tokenizer.json").write_text(pair.library.to_str(pretty=True), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    encoding = tokenizer.read(tmp_path)
    assert encoding.name == f"hf:{tmp_path.name}"
    assert tokenizer.same_tokens(encoding, pair.encoding)
    for text in ODD_TEXTS:
        ids = pair.encoding.encode(text)
        assert encoding.encode(text) == ids
        assert encoding.decode(ids) == text
    assert (encoding.bytes_by_token() == pair.encoding.bytes_by_token()).all()
