"""data/fineweb_edu/prepare.py on local parquet files in FineWeb-Edu's schema, with bytes in GPT-2's place."""

import importlib
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import tokenizer
from data.shards import open_corpus

prepare = importlib.import_module("data.fineweb_edu.prepare")
TEXTS = ["One document.", "Ümlaute and 日本語.", "", "x" * 700, "last"]


@pytest.fixture
def parquet(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", tokenizer.byte_tokenizer)
    for index, texts in enumerate((TEXTS[:2], TEXTS[2:])):
        ids = [f"<urn:uuid:{index}-{i}>" for i in range(len(texts))]
        columns = {"text": texts, "id": ids, "score": [3.5] * len(texts), "token_count": [len(t) for t in texts]}
        pq.write_table(pa.table(columns), tmp_path / f"part_{index}.parquet")
    return str(tmp_path / "part_*.parquet")


def run(monkeypatch, out, *arguments):
    monkeypatch.setattr(sys, "argv", ["prepare.py", f"--out={out}", *arguments])
    prepare.main()
    return open_corpus(str(out))


def test_shards_hold_every_document_after_end_of_text(parquet, tmp_path, monkeypatch):
    corpus = run(monkeypatch, tmp_path / "out", f"--source={parquet}", "--shard_tokens=100")
    expected = [token for text in TEXTS for token in (256, *text.encode())]
    assert np.concatenate(corpus.val + corpus.train).tolist() == expected
    assert [len(shard) for shard in corpus.val + corpus.train] == [100] * (len(expected) // 100) + [len(expected) % 100]
    assert corpus.meta["val"] == {"bytes": sum(t != 256 for t in expected[:100]), "tokens": 100}
    assert corpus.meta["train"] == {"bytes": sum(t != 256 for t in expected[100:]), "tokens": len(expected) - 100}


def test_max_tokens_cuts_the_stream(parquet, tmp_path, monkeypatch):
    corpus = run(monkeypatch, tmp_path / "out", f"--source={parquet}", "--shard_tokens=100", "--max_tokens=250")
    assert [len(shard) for shard in corpus.val + corpus.train] == [100, 100, 50]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source=nowhere/*.parquet"], "nowhere/*.parquet cannot be read"),
        (["--max_tokens=0"], "--max_tokens=0: give 1 or more"),
        (["--shard_tokens=5000"], "fill no training shard"),
    ],
)
def test_mistakes_end_in_one_line(parquet, tmp_path, monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, tmp_path / "out", f"--source={parquet}", *arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "meta.json").exists()
    if (tmp_path / "out").exists():
        with pytest.raises(ValueError, match="was not prepared to its end"):
            open_corpus(str(tmp_path / "out"))


def test_preparing_again_leaves_nothing_of_the_first_time(parquet, tmp_path, monkeypatch):
    run(monkeypatch, tmp_path / "out", f"--source={parquet}", "--shard_tokens=50")
    corpus = run(monkeypatch, tmp_path / "out", f"--source={parquet}", "--shard_tokens=100", "--max_tokens=200")
    assert [len(shard) for shard in corpus.val + corpus.train] == [100, 100]
