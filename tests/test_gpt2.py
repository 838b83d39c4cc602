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

import gpt2_oracle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
from helpers import ODD_TEXTS, ROOT, one_line_error, small_run
from in_process import call

from data import tokenizer
from data.shards import GPT2_META
from training import checkpoint

DOCUMENTS = [
    path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("data/*.py"))
] + ODD_TEXTS


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


def test_gpt2_has_the_entries_of_a_corpus_without_meta(gpt2):
    assert {
        "tokenizer": gpt2.name,
        "vocab_size": gpt2.n_vocab,
        "eot_token": gpt2.eot_token,
    } == GPT2_META


@pytest.mark.parametrize("content", [None, '{"name": "gpt2"}'])
def test_a_folder_that_describes_no_tokenizer_has_gpt2s(gpt2, tmp_path, content):
    """Shards of llm.c come without one; earlier versions wrote the name alone."""
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
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


def read_stream(corpus: Path) -> list[int]:
    """Return the tokens of all shards, those of the validation split first."""
    files = [*sorted(corpus.glob("*val*.bin")), *sorted(corpus.glob("*train*.bin"))]
    assert len(files) > 3
    return np.concatenate([np.fromfile(file, "<u2", offset=1024) for file in files]).tolist()


def test_a_corpus_and_a_run_need_no_network(tmp_path, oracle, description):
    """A run that is sampled does not need tiktoken's cache either."""
    source = tmp_path / "documents.parquet"
    pq.write_table(pa.table({"text": DOCUMENTS}), source, row_group_size=5)
    corpus = tmp_path / "corpus"
    run = tmp_path / "run"
    options = (f"--source={source}", "--val_tokens=2000", "--shard_tokens=3000")
    with offline():
        run_script("data/fineweb_edu/prepare.py", f"--out={corpus}", *options)
        run_script("train.py", *small_run(corpus, run, **KEYS))
    expected = []
    for text in filter(None, DOCUMENTS):
        expected += [50256, *oracle.encode_ordinary(text)]
    assert read_stream(corpus) == expected
    meta = json.loads((corpus / "meta.json").read_text())
    num_bytes = sum(len(text.encode()) for text in DOCUMENTS)
    assert meta["val"]["bytes"] + meta["train"]["bytes"] == num_bytes
    latest = checkpoint.find_latest(run)
    assert json.loads((latest / "tokenizer.json").read_text()) == description
    with offline(tmp_path / "empty_cache"):
        output = run_script("sample.py", run, "--prompt=def größe", "--max_new_tokens=5")
    assert output.count("def größe") == 1


def test_a_preparation_without_the_vocabulary_says_where_to_put_it(tmp_path):
    source = tmp_path / "text.jsonl"
    source.write_text('{"text": "a"}\n')
    out = tmp_path / "corpus"
    with offline(tmp_path / "empty_cache"):
        result = call("data/fineweb_edu/prepare.py", f"--source={source}", f"--out={out}")
    advice = "set TIKTOKEN_CACHE_DIR to a cache folder of tiktoken that holds it"
    assert advice in one_line_error(result)
    assert {path.name for path in out.glob("*")} <= {"lock"}
