"""data/fineweb_edu/prepare.py on local files in FineWeb-Edu's schema."""

import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import one_line_error
from gpt2_oracle import oracle
from in_process import call

from data.fineweb_edu import prepare
from data.shards import open_corpus

TEXTS = ["One document.", "Ümlaute and 日本語.", "", "one word and another " * 180, "last"]
EOT = 50256
EXPECTED = [token for text in TEXTS for token in (EOT, *oracle().encode_ordinary(text))]


@pytest.fixture
def parquet(tmp_path):
    for index, texts in enumerate((TEXTS[:2], TEXTS[2:])):
        ids = [f"<urn:uuid:{index}-{i}>" for i in range(len(texts))]
        columns = {"text": texts, "id": ids, "score": [3.5] * len(texts), "token_count": [len(t) for t in texts]}
        pq.write_table(pa.table(columns), tmp_path / f"part_{index}.parquet")
    return str(tmp_path / "part_*.parquet")


def run(monkeypatch, out, *arguments):
    monkeypatch.setattr(sys, "argv", ["prepare.py", f"--out={out}", *arguments])
    prepare.main()
    return open_corpus(str(out))


SMALL = ["--val_tokens=150", "--shard_tokens=100"]


def test_shards_hold_every_document_after_end_of_text(parquet, tmp_path, monkeypatch):
    corpus = run(monkeypatch, tmp_path / "out", f"--source={parquet}", *SMALL)
    assert np.concatenate(corpus.val).tolist() == EXPECTED[:150]
    assert np.concatenate(corpus.train).tolist() == EXPECTED[150:]
    rest = len(EXPECTED) - 150
    assert [len(shard) for shard in corpus.val + corpus.train] == [100, 50] + [100] * (rest // 100) + [rest % 100]
    for split, part in (("val", EXPECTED[:150]), ("train", EXPECTED[150:])):
        size = len(oracle().decode_bytes([token for token in part if token != EOT]))
        assert corpus.meta[split] == {"documents": part.count(EOT), "bytes": size, "tokens": len(part)}
    assert corpus.meta["source"] == parquet
    assert (tmp_path / "out" / "fineweb_edu_val_000000.bin").exists()
    assert (tmp_path / "out" / "fineweb_edu_train_000002.bin").exists()


def test_several_sources_and_another_column(parquet, tmp_path, monkeypatch):
    rows = [{"body": text} for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "more"}))
    sources = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    corpus = run(monkeypatch, tmp_path / "out", "--column=body", *SMALL, "--source", *sources)
    assert np.concatenate(corpus.val + corpus.train).tolist() == [*EXPECTED, EOT, *oracle().encode_ordinary("more")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source=nowhere/*.parquet"], "--source=nowhere/*.parquet: no files there"),
        (["--shard_tokens=5000"], "leave nothing for training: give more text, or --val_tokens below"),
        (["--column=body"], "part_0.parquet has no column body, it has text, id, score, token_count: give --column"),
        (["--pretokenized=nowhere", "--workers=0"], "--workers=0: give 1 or more"),
        (["--verify"], "has no meta.json with SHA-256 sums: prepare the corpus first"),
    ],
)
def test_mistakes_end_in_one_line(parquet, tmp_path, arguments, message):
    out = tmp_path / "out"
    result = call("data/fineweb_edu/prepare.py", f"--out={out}", f"--source={parquet}", *arguments)
    assert message in one_line_error(result)
    assert not (out / "meta.json").exists()
