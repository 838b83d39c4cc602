"""Test GPT-2's own vocabulary: every token is tiktoken's, and a run needs no network.

A run does not need tiktoken's cache either. The oracle is tiktoken's reading of OpenAI's two files
themselves.
"""

import contextlib
import errno
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import gpt2_oracle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
from helpers import ODD_TEXTS, ROOT, encode_shard, one_line_error, small_run
from in_process import call

from data import tokenizer
from data.shards import GPT2_META
from training import checkpoint

DOCUMENTS = [
    path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("data/*.py"))
] + ODD_TEXTS
ADVICE = "set TIKTOKEN_CACHE_DIR to a cache folder of tiktoken that holds it"


@pytest.fixture(scope="module")
def oracle():
    return gpt2_oracle.oracle()


@pytest.fixture(scope="module")
def gpt2():
    return tokenizer.gpt2_tokenizer()


def check_same(encoding: tokenizer.Tokenizer, oracle: tiktoken.Encoding) -> None:
    assert encoding.name == oracle.name == "gpt2"
    assert encoding.n_vocab == oracle.n_vocab == 50257
    assert encoding.eot_token == oracle.eot_token == 50256
    assert encoding.encoding._mergeable_ranks == oracle._mergeable_ranks
    assert encoding.encoding._pat_str == oracle._pat_str
    assert encoding.encoding._special_tokens == oracle._special_tokens
    check_same_ids(encoding, oracle)


def check_same_ids(encoding: tokenizer.Tokenizer, oracle: tiktoken.Encoding) -> None:
    for text in DOCUMENTS:
        tokens = encoding.encode(text, allowed_special="all")
        assert tokens == oracle.encode(text, allowed_special="all")


def test_every_token_is_tiktokens(oracle, gpt2):
    check_same(gpt2, oracle)


@pytest.fixture(scope="module")
def description(gpt2) -> dict:
    """Return the tokenizer as tokenizer.json holds it."""
    return json.loads(json.dumps(gpt2.to_json()))


def test_the_tokenizer_is_rebuilt_from_its_description(oracle, description):
    check_same(tokenizer.from_json(description), oracle)


def test_a_folder_holds_the_complete_description(description, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    assert tokenizer.read(tmp_path).to_json() == description


def test_gpt2_has_the_entries_of_a_corpus_without_meta(gpt2):
    assert {
        "tokenizer": gpt2.name,
        "vocab_size": gpt2.n_vocab,
        "eot_token": gpt2.eot_token,
    } == GPT2_META


def test_a_folder_without_a_tokenizer_has_gpt2s(gpt2, tmp_path):
    """Shards of llm.c come without one."""
    assert tokenizer.read(tmp_path).to_json() == gpt2.to_json()


def test_a_folder_that_only_names_gpt2_has_its_tokens(gpt2, tmp_path):
    """Corpora and checkpoints of earlier versions hold the name alone."""
    (tmp_path / "tokenizer.json").write_text('{"name": "gpt2"}')
    assert tokenizer.read(tmp_path).to_json() == gpt2.to_json()


# ---- a machine without a network ----


def raise_unreachable(*_, **__):
    raise OSError(errno.ENETUNREACH, "Network is unreachable")


@contextlib.contextmanager
def offline(cache: Path | None = None) -> Iterator[None]:
    """Let no address be reached.

    Args:
        cache: folder of tiktoken's cache; None for the one that holds GPT-2's vocabulary
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", raise_unreachable)
        patch.setattr(socket, "getaddrinfo", raise_unreachable)
        # forget the encodings that this process has loaded
        patch.setattr(tiktoken.registry, "ENCODINGS", {})
        if cache is not None:
            patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        yield


def run_script(*command) -> str:
    """Run a script in this process, expect success, and return what it prints."""
    result = call(*command)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


KEYS = {
    "vocab_size": 50304,
    "max_steps": 2,
    "warmup_steps": 0,
    "eval_interval": 2,
    "eval_full": True,
    "checkpoint_interval": 2,
}


@pytest.fixture(scope="module")
def empty_cache(tmp_path_factory) -> Path:
    """Return an empty folder for tiktoken's cache."""
    return tmp_path_factory.mktemp("cache")


class PreparedRun(NamedTuple):
    corpus: Path
    folder: Path


@pytest.fixture(scope="module")
def prepared_run(tmp_path_factory) -> PreparedRun:
    """Prepare a corpus of GPT-2 tokens and train on it, without a network."""
    folder = tmp_path_factory.mktemp("gpt2")
    pq.write_table(pa.table({"text": DOCUMENTS}), folder / "documents.parquet", row_group_size=5)
    run = PreparedRun(folder / "corpus", folder / "run")
    with offline():
        run_script(
            "data/fineweb_edu/prepare.py",
            f"--out={run.corpus}",
            f"--source={folder / 'documents.parquet'}",
            "--val_tokens=2000",
            "--shard_tokens=3000",
        )
        run_script("train.py", *small_run(run.corpus, run.folder, **KEYS))
    return run


def test_shards_hold_tiktokens_tokens(prepared_run, oracle):
    """Read all shards as one stream, in which each document with text follows end-of-text."""
    corpus = prepared_run.corpus
    files = [*sorted(corpus.glob("*val*.bin")), *sorted(corpus.glob("*train*.bin"))]
    assert len(files) > 3
    tokens = np.concatenate([np.fromfile(file, dtype="<u2", offset=1024) for file in files])
    expected = []
    for text in filter(None, DOCUMENTS):
        expected += [50256, *oracle.encode_ordinary(text)]
    assert tokens.tolist() == expected


def test_meta_counts_the_bytes_of_all_documents(prepared_run):
    meta = json.loads((prepared_run.corpus / "meta.json").read_text())
    num_bytes = sum(len(text.encode()) for text in DOCUMENTS)
    assert meta["val"]["bytes"] + meta["train"]["bytes"] == num_bytes


def test_a_checkpoint_holds_the_tokenizer(prepared_run, description):
    latest = checkpoint.find_latest(prepared_run.folder)
    assert json.loads((latest / "tokenizer.json").read_text()) == description


SAMPLE_OPTIONS = ("--prompt=def größe", "--max_new_tokens=5", "--temperature=0")


def test_a_run_is_sampled_without_tiktokens_cache(prepared_run, empty_cache):
    with offline(empty_cache):
        output = run_script("sample.py", prepared_run.folder, *SAMPLE_OPTIONS)
    assert output.count("def größe") == 1


@pytest.fixture
def shards_of_llm_c(tmp_path, oracle) -> Path:
    """Write shards of GPT-2's tokens beside which no file names a tokenizer."""
    tokens = [50256, *oracle.encode_ordinary("".join(DOCUMENTS))]
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "edu_fineweb_val_000000.bin").write_bytes(encode_shard(tokens[:500]))
    (folder / "edu_fineweb_train_000001.bin").write_bytes(encode_shard(tokens[500:2500]))
    return folder


def test_training_on_shards_of_llm_c_needs_the_vocabulary(shards_of_llm_c, empty_cache, tmp_path):
    arguments = small_run(shards_of_llm_c, tmp_path / "run", **KEYS)
    with offline(empty_cache):
        assert ADVICE in one_line_error(call("train.py", *arguments))
    assert not (tmp_path / "run").exists()


def test_a_preparation_without_the_vocabulary_says_where_to_put_it(empty_cache, tmp_path):
    source = tmp_path / "text.jsonl"
    source.write_text('{"text": "a"}\n')
    out = tmp_path / "corpus"
    with offline(empty_cache):
        result = call("data/fineweb_edu/prepare.py", f"--source={source}", f"--out={out}")
    assert ADVICE in one_line_error(result)
    assert {path.name for path in out.glob("*")} <= {"lock"}
