"""Packing by "fit or cut", compared with a loop over documents and positions of one stream."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import one_line_error, small_run, write_parquet
from in_process import call

from data import sources, tokenizer
from data.loader import TrainBatches
from data.packing import FitOrCut, PackedReader
from data.sequences import IGNORED_TARGET, SequenceLayout
from data.shards import open_corpus, read_shard
from data.sources import Texts

FINEWEB = "data/fineweb_edu/prepare.py"
ENCODING = tokenizer.byte_tokenizer().with_bos()
EOS = 256
BOS = 257
PADDING = -1
SPECIAL_LENGTHS = [
    0,
    1,
    97,
    98,
    99,
    100,
    1021,
    1022,
    1023,
    1024,
    1025,
    2046,
    2047,
    2145,
    2146,
    9000,
]


def draw_texts(count: int, longest: int, seed: int = 0) -> list[str]:
    """Draw texts of bytes whose lengths are spread evenly over their logarithm, many of them special."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(0, math.log(longest), count)).astype(int)
    special = rng.random(count) < 0.3
    lengths[special] = rng.choice([n for n in SPECIAL_LENGTHS if n <= longest], special.sum())
    letters = rng.integers(ord("a"), ord("z"), lengths.sum()).astype(np.uint8).tobytes().decode()
    ends = np.cumsum(lengths)
    return [letters[end - length : end] for length, end in zip(lengths.tolist(), ends.tolist())]


def pack_naively(texts: list[str], block_size: int, cut_threshold: int) -> tuple[np.ndarray, int]:
    """Place each document in one stream, whose blocks begin at multiples of block_size.

    Returns:
        The stream (blocks, block_size), in which padding is -1, and the number of tokens left out.
    """
    stream: list[int] = []
    num_cut = 0
    for text in texts:
        document = [BOS, *text.encode(), EOS]
        while True:
            begin = len(stream)
            end = begin + len(document)
            last_block = (end - 1) // block_size
            num_in_last_block = end - last_block * block_size
            if begin // block_size == last_block or num_in_last_block >= cut_threshold:
                break
            num_in_first_block = block_size - begin % block_size
            if num_in_first_block >= cut_threshold:
                document = document[:-num_in_last_block]
                num_cut += num_in_last_block
                break
            stream += [PADDING] * num_in_first_block
        stream += document
    stream += [PADDING] * (-len(stream) % block_size)
    return np.array(stream).reshape(-1, block_size), num_cut


def open_reader(texts: list[str], packing: FitOrCut) -> PackedReader:
    return packing.open_reader(Texts(texts, "drawn"), ENCODING, workers=2)


def read_all(texts: list[str], packing: FitOrCut) -> tuple[np.ndarray, dict[str, int]]:
    """Return the sequences of all texts, (blocks, block_size + 1), and what was counted."""
    reader = open_reader(texts, packing)
    num_tokens = 2 * sum(map(len, texts)) + 10 * packing.window_tokens
    tokens = reader.take(packing.round_down(num_tokens))
    return tokens.reshape(-1, packing.window_tokens), reader.packed


@pytest.mark.parametrize(
    ("block_size", "cut_threshold", "count", "longest"),
    [(1024, 100, 10_000, 3100), (64, 10, 3000, 300), (16, 16, 1000, 99), (8, 2, 1000, 40)],
)
def test_blocks_are_those_of_a_loop_over_documents(block_size, cut_threshold, count, longest):
    texts = draw_texts(count, longest)
    if longest > 1025:
        assert {0, 1, 99, 100, 1023, 1024, 1025} <= set(map(len, texts))
    expected, num_cut = pack_naively(texts, block_size, cut_threshold)
    windows, packed = read_all(texts, FitOrCut(block_size, cut_threshold))
    assert np.array_equal(windows[:, :-1], np.where(expected == PADDING, EOS, expected))
    num_padding = int((expected == PADDING).sum())
    assert packed == {
        "kept": expected.size - num_padding,
        "cut": num_cut,
        "padding": num_padding,
    }
    if cut_threshold > 2:
        assert num_cut > 0
        assert num_padding > block_size
    # the rule has no other effect than these two
    assert packed["kept"] + num_cut == sum(len(text) + 2 for text in texts)


def test_targets_are_the_next_tokens_of_the_stream_and_no_padding():
    texts = draw_texts(3000, 300)
    expected, _ = pack_naively(texts, 64, 10)
    windows, _ = read_all(texts, FitOrCut(64, 10))
    layout = SequenceLayout(window_tokens=65, padding_token=EOS)
    ids, targets = layout.ids_and_targets(windows)
    stream = np.append(expected.ravel(), PADDING)
    is_target = (stream[:-1] != PADDING) & (stream[1:] != PADDING)
    expected_targets = np.where(is_target, stream[1:], IGNORED_TARGET).reshape(-1, 64)
    assert np.array_equal(ids, windows[:, :-1])
    # all but the last target of the corpus, which no next block has
    assert np.array_equal(targets.flatten()[:-1], expected_targets.ravel()[:-1])


def test_a_reader_resumes_at_every_block(monkeypatch):
    """The cursor and the number of used tokens say enough, also within a document."""
    monkeypatch.setattr(sources, "ROWS", 7)
    texts = [*draw_texts(300, 300), "x" * 999, *draw_texts(50, 300, seed=1)]
    packing = FitOrCut(64, 10)
    expected, expected_counts = read_all(texts, packing)
    cursor = None
    num_used = 0
    windows = []
    counts = dict.fromkeys(expected_counts, 0)
    while True:
        reader = open_reader(texts, packing)
        reader.cursor = cursor
        reader.num_used = num_used
        window = reader.take(65)
        if not window.size:
            break
        windows.append(window)
        counts = {key: counts[key] + reader.packed[key] for key in counts}
        cursor = reader.cursor
        num_used = reader.num_used
    assert np.array_equal(windows, expected)
    assert counts == expected_counts


# ---- the script ----

OPTIONS = (
    "--packing=fit_or_cut",
    "--block_size=64",
    "--cut_threshold=10",
    "--tokenizer=bytes",
    "--workers=2",
    "--shard_tokens=6600",
    "--val_tokens=4000",
)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [text or "-" for text in draw_texts(1000, 300)]  # rows without text are skipped


@pytest.fixture(scope="module")
def source(texts, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("in")
    write_parquet(folder / "0.parquet", texts[:600], 50)
    write_parquet(folder / "1.parquet", texts[600:], 50)
    return f"--source={folder}"


def prepare(source: str, out: Path, *options: str) -> str:
    """Prepare a packed corpus and return what the script printed."""
    result = call(FINEWEB, source, f"--out={out}", *OPTIONS, *options)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


@pytest.fixture(scope="module")
def packed_corpus(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "corpus"
    prepare(source, out)
    return out


def test_the_corpus_holds_the_blocks_of_all_documents(texts, packed_corpus):
    expected, num_cut = pack_naively(texts, 64, 10)
    corpus = open_corpus(str(packed_corpus))
    blocks = np.concatenate([*corpus.val, *corpus.train]).reshape(-1, 65)[:, :-1]
    assert np.array_equal(blocks, np.where(expected == PADDING, EOS, expected))
    splits = [corpus.meta["val"], corpus.meta["train"]]
    # both splits consist of whole sequences
    assert splits[0]["tokens"] == 4000 // 65 * 65
    sums = {key: sum(split[key] for split in splits) for key in splits[0]}
    num_padding = int((expected == PADDING).sum())
    assert sums == {
        "documents": len(texts),
        "bytes": int((expected < EOS).sum()) - num_padding,
        "tokens": 65 * len(expected),
        "kept": expected.size - num_padding,
        "cut": num_cut,
        "padding": num_padding,
    }


def test_meta_and_tokenizer_have_both_ids(packed_corpus):
    meta = json.loads((packed_corpus / "meta.json").read_text())
    stored = json.loads((packed_corpus / "tokenizer.json").read_text())
    for entries in (meta, stored):
        assert (entries["eot_token"], entries["bos_token"]) == (EOS, BOS)
    assert (meta["vocab_size"], meta["window_tokens"], meta["padding_token"]) == (258, 65, EOS)
    assert meta["packing"] == {"block_size": 64, "cut_threshold": 10}


def test_gpt2_has_the_next_id_and_decodes():
    encoding = tokenizer.gpt2_tokenizer().with_bos()
    assert (encoding.eot_token, encoding.bos_token, encoding.n_vocab) == (50256, 50257, 50258)
    ids = tokenizer.encode_prompt(encoding, "a<|endoftext|>")
    assert ids == [50257, 64, 50256]
    assert encoding.decode(ids) == "<|beginoftext|>a<|endoftext|>"
    assert len(encoding.bytes_by_token()) == 50258
    again = tokenizer.from_json(encoding.to_json())
    assert tokenizer.same_tokens(again, encoding)
    assert not tokenizer.same_tokens(tokenizer.gpt2_tokenizer(), encoding)


def test_more_tokens_continue_a_preparation(source, packed_corpus, tmp_path):
    """Shards are those of a preparation at once, and one that was deleted is prepared again."""
    prepare(source, tmp_path, "--max_tokens=20000")
    prepare(source, tmp_path, "--max_tokens=33000")
    deleted = sorted(tmp_path.glob("*train*.bin"))[1]
    deleted.unlink()
    prepare(source, tmp_path)

    def read_tokens(folder: Path) -> list[int]:
        return np.concatenate([read_shard(p) for p in sorted(folder.glob("*.bin"))]).tolist()

    assert read_tokens(tmp_path) == read_tokens(packed_corpus)
    metas = [json.loads((folder / "meta.json").read_text()) for folder in (tmp_path, packed_corpus)]
    assert metas[0]["train"] == metas[1]["train"]


def test_a_run_trains_samples_and_is_exported(packed_corpus, tmp_path):
    out = tmp_path / "run"
    arguments = small_run(packed_corpus, out, eval_full=True)
    # the block size and the vocabulary are those of the corpus
    arguments = [a for a in arguments if not a.startswith(("--block_size", "--vocab_size"))]
    result = call("train.py", *arguments)
    assert result.returncode == 0, result.stderr.decode()
    state = json.loads((out / "checkpoints" / "step_00000006" / "state.json").read_text())
    assert state["model_config"]["block_size"] == 64
    assert tokenizer.encode_prompt(tokenizer.read(out / "checkpoints" / "step_00000006"), "") == [
        BOS
    ]
    sampled = call("sample.py", out, "--prompt=abc", "--max_new_tokens=5")
    assert sampled.returncode == 0, sampled.stderr.decode()
    assert sampled.stdout.startswith(b"abc")
    exported = call("export.py", out, tmp_path / "exported")
    assert exported.returncode == 0, exported.stderr.decode()
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (BOS, EOS)
    assert tokenizer.same_tokens(tokenizer.read(tmp_path / "exported"), ENCODING)


def test_every_target_of_a_batch_counts_the_same(packed_corpus):
    """Micro-batches are weighted, because padding leaves them different numbers of targets."""
    corpus = open_corpus(str(packed_corpus))
    layout = SequenceLayout.from_meta(corpus.meta)
    batches = TrainBatches(corpus.train, 64, 32, seed=0, vocab_size=258, layout=layout)
    num_weighted = 0
    for step in range(5):
        weights = batches.loss_weights(step, 1)
        _, targets = batches.get(step, 0, 32)
        counts = (targets != IGNORED_TARGET).sum(1).double()
        if (counts != counts[0]).any():
            num_weighted += 1
            torch.testing.assert_close(weights.double(), counts / counts.mean(), rtol=1e-6, atol=0)
    assert num_weighted > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cut_threshold=65",), "cut_threshold=65 is larger than block_size=64"),
        (("--packing=stream",), "block_size"),
        (("--tokenizer=llama",), "adds a token to the vocabulary"),
        (("--cut_threshold=1",), "cut_threshold"),
        (("--pretokenized=folder",), "omit --pretokenized"),
    ],
)
def test_mistakes_end_in_one_line(source, tmp_path, options, message):
    result = call(FINEWEB, source, f"--out={tmp_path / 'out'}", *OPTIONS, *options)
    assert message in one_line_error(result)
    assert not (tmp_path / "out").exists()


def test_another_packing_needs_another_folder(source, packed_corpus):
    result = call(FINEWEB, source, f"--out={packed_corpus}", *OPTIONS, "--cut_threshold=11")
    assert "cut_threshold was 10 and is now 11" in one_line_error(result)
