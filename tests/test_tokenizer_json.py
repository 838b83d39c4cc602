"""tokenizer.json: the tokenizers library makes tiktoken's ids, and gives the encoding back."""

import json
import random

import pytest
from helpers import ODD_TEXTS, ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tokenizer, tokenizer_json

tokenizers = pytest.importorskip("tokenizers")

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*/*.py"))]


@pytest.fixture(scope="module", params=["bytes", "own pattern", "GPT-2"])
def pair(request):
    """(tiktoken's encoding, the library's tokenizer from the JSON written for it)."""
    made = {"bytes": tokenizer.byte_tokenizer, "GPT-2": tokenizer.gpt2_tokenizer}
    make = made.get(request.param, lambda: tokenizer.train_byte_pairs(TEXTS, 1500))
    encoding = make()
    return encoding, tokenizers.Tokenizer.from_str(json.dumps(written(encoding)))


def written(encoding) -> dict:
    return encoding.to_hugging_face()


def check(pair, text: str) -> None:
    encoding, library = pair
    ids = encoding.encode(text, allowed_special="all")
    assert library.encode(text).ids == ids
    assert library.decode(ids, skip_special_tokens=False) == text


def test_odd_text(pair):
    for text in [*TEXTS, *ODD_TEXTS]:
        check(pair, text)
    draw = random.Random(0)
    pieces = [*" \n\t\r\v\x1c\x85\u00a0\u2028\u200b\u0301\ufeffé²_!尺", "<|endoftext|>"]
    for _ in range(300):
        check(pair, "".join(draw.choices([*pieces, *"ab 's 'll 12 def <|".split()], k=20)))
    # Between letters, digits, spaces and line breaks: both regular expression engines must class a
    # character of every block alike.
    for code in (*range(0, 0xD800, 31), *range(0xE000, 0x110000, 397)):
        check(pair, f"a {chr(code)}{chr(code)}b  1{chr(code)}_{chr(code)} \n{chr(code)}\n")


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.text())
def test_any_text(pair, text):
    check(pair, text)


def test_the_encoding_comes_back(pair, tmp_path):
    """From what we write, and from what the library makes of it."""
    encoding, library = pair
    for text in (json.dumps(written(encoding)), library.to_str(pretty=True)):
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        back = tokenizer.describe(tmp_path)
        assert back == tokenizer.to_json(encoding) | {"name": back["name"]}
        assert (
            tokenizer.from_json(back).n_vocab == encoding.n_vocab == tokenizer.get_vocab_size(back)
        )
    assert back["name"] == encoding.name


def test_gpt2_is_known_by_its_tokens_and_merges():
    """Which part of a token meets which follows from the ranks: line by line OpenAI's vocab.bpe."""
    lines = tokenizer.read_packaged_merges().splitlines()[1:]
    merges = written(tokenizer.gpt2_tokenizer())["model"]["merges"]
    assert [" ".join(merge) for merge in merges] == lines
    tokens = tokenizer.gpt2_tokens()
    assert tokenizer_json.name_tokens(tokens) == "gpt2"
    assert tokenizer_json.name_tokens([*tokens, b"more"]) == "bpe50258"
    tokens[262:264] = tokens[263], tokens[262]
    assert tokenizer_json.name_tokens(tokens) == "bpe50257"


OTHERWISE = [
    (
        lambda d: d["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
        "changes text",
    ),
    (lambda d: d["pre_tokenizer"]["pretokenizers"][1].update(use_regex=True), "changes text"),
    (lambda d: d.update(normalizer={"type": "NFC"}), "changes text"),
    (lambda d: d["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"), "in another way"),
    (lambda d: d["added_tokens"].append({"content": "<|other|>", "id": 257}), "its added tokens"),
    (lambda d: d["added_tokens"][0].update(id=300), "its added tokens are"),
    (lambda d: d["model"]["vocab"].update(a=300), "its ids have gaps"),
    (lambda d: d["model"]["vocab"].update(a="97"), "an id is not a whole number"),
    (lambda d: d["model"]["vocab"].update({"": d["model"]["vocab"].pop("a")}), "it lacks bytes"),
    (lambda d: d.pop("model") and d.update(model={}), "'vocab'"),
]


@pytest.mark.parametrize(("change", "message"), OTHERWISE)
def test_a_library_tokenizer_that_makes_other_tokens_is_refused(tmp_path, change, message):
    description = written(tokenizer.byte_tokenizer())
    change(description)
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=rf"is damaged: .*{message}"):
        tokenizer.describe(tmp_path)


def test_a_token_without_its_parts_is_refused():
    tokens = [bytes([value]) for value in range(256)]
    ranks = {token: rank for rank, token in enumerate([*tokens, b"bc", b"abc"])}
    assert tokenizer_json.find_merge(b"abc", ranks) == (b"a", b"bc")
    with pytest.raises(ValueError, match=r"b'abc' is not the union of two earlier tokens"):
        tokenizer_json.write("x", [*tokens, b"abc", b"bc"], "<|endoftext|>")
