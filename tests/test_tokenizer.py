"""Tokenizers round-trip texts, learn known merges, and encode the same after they are stored."""

import json
import math
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
def bpe() -> tokenizer.Tokenizer:
    return tokenizer.train_byte_pairs(CORPUS, 360)


@pytest.fixture(scope="module")
def byte_level() -> tokenizer.Tokenizer:
    return tokenizer.byte_tokenizer()


# ---- bytes ----


def test_the_byte_tokenizer_has_256_bytes_and_end_of_text(byte_level):
    assert byte_level.n_vocab == 257
    assert byte_level.eot_token == 256
    assert byte_level.special_tokens_set == {"<|endoftext|>"}


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_byte_ids_are_bytes(byte_level, text):
    assert byte_level.encode(text) == list(text.encode())
    assert byte_level.decode(list(text.encode())) == text


def test_every_byte_decodes_to_itself(byte_level):
    for value in range(256):
        assert byte_level.decode_single_token_bytes(value) == bytes([value])


# ---- byte pairs ----

# Pairs by count, without ties: the two bytes of é 40, _y 15, then a space before it 10. Words hold
# underscores, and the space before a word belongs to it.
MERGES = ["é\n" * 40, " _y;" * 10, "_y;" * 5]


@pytest.mark.parametrize("vocab_size", [257, 258, 259, 260])
def test_training_merges_the_commonest_pairs_first(vocab_size):
    encoding = tokenizer.train_byte_pairs(MERGES, vocab_size)
    assert encoding.n_vocab == vocab_size
    assert encoding.eot_token == vocab_size - 1
    tokens = [bytes([value]) for value in range(256)]
    tokens += [merge.encode() for merge in ("é", "_y", " _y")]
    vocabulary = [encoding.decode_single_token_bytes(i) for i in range(vocab_size - 1)]
    assert vocabulary == tokens[: vocab_size - 1]


def merge_by_rank(encoding: tokenizer.Tokenizer, piece: str) -> list[int]:
    """Return the ids of one piece of the split text.

    Neighbors that make the token of lowest rank are merged until no two make a token.
    """
    ranks = {encoding.decode_single_token_bytes(i): i for i in range(encoding.eot_token)}
    parts = [bytes([value]) for value in piece.encode()]
    while len(parts) > 1:
        merge_ranks = [ranks.get(a + b, math.inf) for a, b in pairwise(parts)]
        lowest = min(merge_ranks)
        if lowest == math.inf:
            break
        index = merge_ranks.index(lowest)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return [ranks[part] for part in parts]


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
def test_encoding_splits_source_code_and_merges_by_rank(bpe, pieces):
    merged = [i for piece in pieces for i in merge_by_rank(bpe, piece)]
    assert bpe.encode("".join(pieces)) == merged


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.text())
def test_byte_pairs_round_trip(bpe, text):
    assert bpe.decode(bpe.encode(text)) == text


# ---- stored tokenizers ----


@pytest.fixture(scope="module")
def other_pattern() -> tokenizer.Tokenizer:
    """Return a tokenizer that splits every character, and so never merges a and b."""
    return tokenizer.BytePairTokenizer("old", r"[\s\S]", [*tokenizer.SINGLE_BYTES, b"ab"])


@pytest.mark.parametrize("name", ["bpe", "byte_level", "other_pattern"])
def test_stored_tokenizers_encode_the_same(request, tmp_path, name):
    encoding = request.getfixturevalue(name)
    stored = json.loads(json.dumps(encoding.to_json()))
    rebuilt = tokenizer.from_json(stored)
    assert (rebuilt.name, rebuilt.n_vocab) == (encoding.name, encoding.n_vocab)
    assert (rebuilt.eot_token, rebuilt.bos_token) == (encoding.eot_token, encoding.bos_token)
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    assert tokenizer.read(tmp_path).to_json() == stored
    for text in [*ODD_TEXTS, *CORPUS[:5], "abab"]:
        ids = encoding.encode(text, allowed_special="all")
        assert rebuilt.encode(text, allowed_special="all") == ids
    for i in range(encoding.eot_token):
        assert rebuilt.decode_single_token_bytes(i) == encoding.decode_single_token_bytes(i)


# ---- GPT-2 ----


def test_gpt2_out_of_reach_is_one_clear_error(monkeypatch, tmp_path):
    def fail(name):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(tiktoken, "get_encoding", fail)
    message = r"GPT-2's vocabulary .*\(ConnectionError.*TIKTOKEN_CACHE_DIR"
    with pytest.raises(ValueError, match=message) as error:
        tokenizer.read(tmp_path)
    assert isinstance(error.value.__cause__, ConnectionError)


def test_tokenizers_are_compared_by_their_tokens(byte_level, bpe):
    renamed = tokenizer.BytePairTokenizer("x", r"[\s\S]", tokenizer.SINGLE_BYTES)
    reordered = tokenizer.BytePairTokenizer("x", r"[\s\S]", tokenizer.SINGLE_BYTES[::-1])
    assert tokenizer.same_tokens(byte_level, renamed)
    assert not tokenizer.same_tokens(byte_level, reordered)
    assert not tokenizer.same_tokens(byte_level, bpe)


# ---- prompts ----


@pytest.mark.parametrize("text", ["", "hé", "a<|endoftext|>b", "a < | b |> <|"])
def test_prompts_follow_end_of_text(byte_level, text):
    expected = []
    for part in text.split("<|endoftext|>"):
        expected += [256, *part.encode()]
    assert tokenizer.encode_prompt(byte_level, text) == expected


def test_a_prompt_with_an_unknown_special_token_is_refused(byte_level):
    message = (
        r"<\|im_start\|>, which the tokenizer bytes does not know; its special tokens are "
        r"<\|endoftext\|>"
    )
    with pytest.raises(ValueError, match=message):
        tokenizer.encode_prompt(byte_level, "<|endoftext|>hello <|im_start|>user")


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
