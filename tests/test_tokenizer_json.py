"""The tokenizers library makes tiktoken's ids from tokenizer.json, which can be read again."""

import json
import random
from typing import NamedTuple

import pytest
from helpers import ODD_TEXTS, ROOT

from data import tokenizer, tokenizer_json

tokenizers = pytest.importorskip("tokenizers")

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("data/*.py"))]


class Pair(NamedTuple):
    """A tokenizer of this repository, and the library's from the JSON that is written for it."""

    encoding: tokenizer.Tokenizer
    library: tokenizers.Tokenizer


@pytest.fixture(scope="module", params=["bytes", "bytes with BOS", "own pattern", "GPT-2"])
def pair(request) -> Pair:
    if request.param == "bytes":
        encoding = tokenizer.byte_tokenizer()
    elif request.param == "bytes with BOS":
        encoding = tokenizer.byte_tokenizer().with_bos()
    elif request.param == "GPT-2":
        encoding = tokenizer.gpt2_tokenizer()
    else:
        encoding = tokenizer.train_byte_pairs(TEXTS, 1500)
    description = json.dumps(encoding.to_hugging_face())
    return Pair(encoding, tokenizers.Tokenizer.from_str(description))


def check_ids(pair: Pair, text: str) -> None:
    """Check that both make the same ids of a text, and the library the text from them."""
    ids = pair.encoding.encode(text, allowed_special="all")
    assert pair.library.encode(text).ids == ids
    assert pair.library.decode(ids, skip_special_tokens=False) == text


def test_source_code_and_odd_texts(pair):
    for text in [*TEXTS, *ODD_TEXTS]:
        check_ids(pair, text)


def test_random_mixtures_of_words_and_whitespace(pair):
    generator = random.Random(0)
    characters = " \n\t\r\v\x1c\x85\u00a0\u2028\u200b\u0301\ufeffé²_!尺"
    words = ["ab", "'s", "'ll", "12", "def", "<|", "<|endoftext|>", "<|beginoftext|>"]
    for _ in range(300):
        check_ids(pair, "".join(generator.choices([*characters, *words], k=20)))


def test_characters_of_every_block(pair):
    """Both regular expression engines put a character into the same class.

    Each stands between letters, digits, spaces and line breaks.
    """
    for code in (*range(0, 0xD800, 31), *range(0xE000, 0x110000, 397)):
        character = chr(code)
        check_ids(pair, f"a {character}{character}b  1{character}_{character} \n{character}\n")


def test_the_encoding_is_read_from_the_json_that_is_written_for_it(pair, tmp_path):
    content = json.dumps(pair.encoding.to_hugging_face())
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    encoding = tokenizer.read(tmp_path)
    assert tokenizer.same_tokens(encoding, pair.encoding)
    assert encoding.n_vocab == pair.encoding.n_vocab


def test_the_encoding_is_read_from_the_json_of_the_library(pair, tmp_path):
    content = pair.library.to_str(pretty=True)
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    assert tokenizer.read(tmp_path).to_json() == pair.encoding.to_json()


def test_gpt2_is_known_by_its_tokens():
    tokens = tokenizer.gpt2_tokens()
    assert tokenizer_json.name_tokens(tokens) == "gpt2"
    assert tokenizer_json.name_tokens([*tokens, b"more"]) == "bpe50258"
    swapped = [*tokens[:262], tokens[263], tokens[262], *tokens[264:]]
    assert tokenizer_json.name_tokens(swapped) == "bpe50257"


# ---- files of other libraries ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda content: content["pre_tokenizer"]["pretokenizers"][1].update(
                add_prefix_space=True
            ),
            "changes text",
        ),
        (
            lambda content: content["pre_tokenizer"]["pretokenizers"][1].update(use_regex=True),
            "changes text",
        ),
        (lambda content: content.update(normalizer={"type": "NFC"}), "changes text"),
        (
            lambda content: content["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
            "splits text differently",
        ),
        (
            lambda content: content["added_tokens"].append({"content": "<|other|>", "id": 257}),
            "its added tokens",
        ),
        (lambda content: content["added_tokens"][0].update(id=300), "its added tokens are"),
        (lambda content: content["model"]["vocab"].update(a=300), "its ids have gaps"),
        (lambda content: content["model"]["vocab"].update(a="97"), "an id is not an integer"),
        (
            lambda content: content["model"]["vocab"].update(
                {"": content["model"]["vocab"].pop("a")}
            ),
            "some bytes have no token",
        ),
        (lambda content: content.update(model={}), "'vocab'"),
    ],
)
def test_a_library_tokenizer_that_makes_other_tokens_is_refused(tmp_path, change, message):
    content = tokenizer.byte_tokenizer().to_hugging_face()
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"is damaged: .*{message}"):
        tokenizer.read(tmp_path)
