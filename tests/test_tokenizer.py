"""Tokenizers round-trip texts, learn known merges, and encode the same after they are stored."""

import json

import pytest
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
def bpe() -> tokenizer.Tokenizer:
    return tokenizer.train_byte_pairs(CORPUS, 360)


@pytest.fixture(scope="module")
def byte_level() -> tokenizer.Tokenizer:
    return tokenizer.byte_tokenizer()


# ---- bytes ----


def test_ids_of_the_byte_tokenizer_are_bytes_and_end_of_text(byte_level):
    assert byte_level.n_vocab == 257
    assert byte_level.eot_token == 256
    assert byte_level.special_tokens_set == {"<|endoftext|>"}
    for text in ODD_TEXTS:
        assert byte_level.encode(text) == list(text.encode())
        assert byte_level.decode(list(text.encode())) == text
    for value in range(256):
        assert byte_level.decode_single_token_bytes(value) == bytes([value])


# ---- byte pairs ----

# Pairs by count, without ties: the two bytes of é 40, _y 15, then a space before it 10. Words hold
# underscores, and the space before a word belongs to it.
MERGES = ["é\n" * 40, " _y;" * 10, "_y;" * 5]


@pytest.mark.parametrize("vocab_size", [257, 260])
def test_training_merges_the_commonest_pairs_first(vocab_size):
    encoding = tokenizer.train_byte_pairs(MERGES, vocab_size)
    assert encoding.n_vocab == vocab_size
    assert encoding.eot_token == vocab_size - 1
    tokens = [bytes([value]) for value in range(256)]
    tokens += [merge.encode() for merge in ("é", "_y", " _y")]
    vocabulary = [encoding.decode_single_token_bytes(i) for i in range(vocab_size - 1)]
    assert vocabulary == tokens[: vocab_size - 1]


def test_long_runs_are_cut_for_training():
    """Training is quadratic in the length of a piece that nothing splits."""
    encoding = tokenizer.train_byte_pairs(["x" * 1_000_000], 265)
    lengths = encoding.bytes_by_token()
    assert lengths.max() <= tokenizer.MAX_TRAINING_PIECE
    assert encoding.decode(encoding.encode("x" * 3000)) == "x" * 3000


PIECES = [
    ["def", " größe", "(", "self", ",", " value", "):", "\n    ", "if"],
    [" résumé", "  ", "width", " +", " 123", "45", "\n\n\t", "return", "\t"],
    ["_size_", "7", ".", "größenordnung", " 99", "!=", "  \n  ", "None"],
]


@pytest.mark.parametrize("pieces", PIECES)
def test_no_token_crosses_the_border_of_a_piece_of_source_code(bpe, pieces):
    """Within a piece, tests/test_tokenizer_json.py compares the tokens with another library's."""
    assert bpe.encode("".join(pieces)) == [i for piece in pieces for i in bpe.encode(piece)]
    assert bpe.encode(" größe") == bpe.encode(" größe(")[:-1]
    assert len(bpe.encode(" größe")) == 1


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.text())
def test_byte_pairs_round_trip(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


# ---- stored tokenizers ----


@pytest.fixture(scope="module")
def other_pattern() -> tokenizer.Tokenizer:
    """Return a tokenizer that splits every character, and so never merges a and b.

    It has a beginning-of-text token, as packed corpora of earlier versions.
    """
    tokens = [*tokenizer.SINGLE_BYTES, b"ab"]
    return tokenizer.BytePairTokenizer("old", r"[\s\S]", tokens, has_bos=True)


@pytest.mark.parametrize("name", ["bpe", "byte_level", "other_pattern"])
def test_stored_tokenizers_encode_the_same(request, tmp_path, name):
    encoding = request.getfixturevalue(name)
    (tmp_path / "tokenizer.json").write_text(json.dumps(encoding.to_json()))
    rebuilt = tokenizer.read(tmp_path)
    assert rebuilt.to_json() == encoding.to_json()
    assert tokenizer.same_tokens(rebuilt, encoding)
    assert rebuilt.bos_token == encoding.bos_token
    for text in [*ODD_TEXTS, *CORPUS[:5], "abab"]:
        ids = encoding.encode(text, allowed_special="all")
        assert rebuilt.encode(text, allowed_special="all") == ids


def test_tokenizers_are_compared_by_their_tokens(byte_level, bpe):
    renamed = tokenizer.BytePairTokenizer("x", r"[\s\S]", tokenizer.SINGLE_BYTES)
    reordered = tokenizer.BytePairTokenizer("x", r"[\s\S]", tokenizer.SINGLE_BYTES[::-1])
    assert tokenizer.same_tokens(byte_level, renamed)
    assert not tokenizer.same_tokens(byte_level, reordered)
    assert not tokenizer.same_tokens(byte_level, bpe)


# ---- prompts ----


@pytest.mark.parametrize("text", ["", "hé", "a<|endoftext|>b", "a < | b |> <|"])
def test_prompts_follow_the_token_that_begins_a_document(byte_level, other_pattern, text):
    expected = []
    for part in text.split("<|endoftext|>"):
        expected += [256, *part.encode()]
    assert tokenizer.encode_prompt(byte_level, text) == expected
    assert tokenizer.encode_prompt(other_pattern, text)[0] == 258


# ---- ids ----


def test_ids_are_not_text(tmp_path, bpe):
    ids = tokenizer.IdTokenizer(130)
    (tmp_path / "tokenizer.json").write_text(json.dumps(ids.to_json()))
    stored = tokenizer.read(tmp_path)
    assert (stored.name, stored.n_vocab) == ("ids", 130)
    assert tokenizer.same_tokens(ids, stored)
    for other in (tokenizer.IdTokenizer(131), bpe):
        assert not tokenizer.same_tokens(ids, other)
        assert not tokenizer.same_tokens(other, ids)
    with pytest.raises(ValueError, match="the ids of a synthetic task, not text"):
        tokenizer.encode_prompt(stored, "1 2")
