"""Test datasets of the Hub on a local server whose answers fail."""

import functools
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from helpers import ROOT, one_line_error, run_script, write_parquet
from hub_server import Fault

from data.shards import open_corpus

FINEWEB = "data/fineweb_edu/prepare.py"
README = """---
configs:
- {config_name: sample-10BT, data_files: [{split: train, path: sample/10BT/*}]}
- {config_name: other, data_files: [{split: train, path: other/*}]}
---
"""
DOCUMENTS = [f"document {i}: größe " + f"{i * i} " * (i % 150) for i in range(1000)]
TOKENS = [token for text in DOCUMENTS for token in (256, *text.encode())]
OPTIONS = [
    "--sample=sample-10BT",
    "--tokenizer=bytes",
    "--val_tokens=30000",
    "--shard_tokens=20000",
]
NAME = "org/fineweb-edu"
FILES = "/cdn/.*10BT"


def parquet_bytes(texts) -> bytes:
    content = io.BytesIO()
    write_parquet(content, texts, 40, compression="none", use_dictionary=False)
    return content.getvalue()


def make_repository(texts) -> dict[str, bytes]:
    """Return files in FineWeb-Edu's layout; the second of three is the largest, some rows are null."""
    files = {"README.md": README.encode(), "other/000.parquet": parquet_bytes(["another"])}
    for number, (first, last) in enumerate(((0, 60), (60, 800), (800, 1000))):
        rows = [*texts[first:last], None]
        files[f"sample/10BT/{number:03d}.parquet"] = parquet_bytes(rows)
    return files


def read_files(folder) -> dict[str, bytes]:
    paths = [path for path in sorted(Path(folder).iterdir()) if path.is_file()]
    return {path.name: path.read_bytes() for path in paths}


def read_tokens(corpus) -> list[int]:
    return np.concatenate(corpus.val + corpus.train).tolist()


# ---- over HTTP ----


def commit_documents(server) -> str:
    """Commit the data set after one with other documents, and return the name of the commit."""
    server.commits.pop(NAME, None)
    server.commit(NAME, make_repository(DOCUMENTS[::-1]))
    return server.commit(NAME, make_repository(DOCUMENTS))


@pytest.fixture
def commit(server) -> Iterator[str]:
    name = commit_documents(server)
    server.faults = []
    server.log = []
    yield name
    server.faults = []


@pytest.fixture(scope="module")
def undisturbed_files(server, client, tmp_path_factory) -> dict[str, bytes]:
    """Return the files of a preparation that nothing disturbs."""
    out = tmp_path_factory.mktemp("undisturbed_files")
    commit = commit_documents(server)
    result = client(FINEWEB, f"--out={out}", f"--repository={NAME}", *OPTIONS)
    assert result.code == 0, result.err
    assert result.err == ""
    corpus = open_corpus(str(out))
    assert read_tokens(corpus) == TOKENS
    assert corpus.meta["commit"] == commit
    return read_files(out)


def test_temporary_faults_leave_no_trace(server, client, commit, undisturbed_files, tmp_path):
    """The storage of the hub is down for two requests."""
    server.faults = [Fault("status", FILES, times=2)]
    result = client(FINEWEB, f"--out={tmp_path}", f"--repository={NAME}", *OPTIONS)
    assert result.code == 0, result.err
    assert read_files(tmp_path) == undisturbed_files
    assert {kind for _, kind in server.log} == {None, "status"}


class Interrupted(NamedTuple):
    """A preparation that a missing file has ended, and that a newer commit could disturb."""

    out: Path
    message: str
    prepare: Callable[..., SimpleNamespace]  # runs the same command, with further options


@pytest.fixture
def interrupted(server, client, commit, tmp_path) -> Interrupted:
    prepare = functools.partial(
        client, FINEWEB, f"--out={tmp_path}", f"--repository={NAME}", *OPTIONS
    )
    server.faults = [Fault("status", FILES, 404, skip=2)]
    result = prepare()
    assert result.code == 2
    server.faults = []
    server.log = []
    server.commit(NAME, make_repository(["newer"] * 1000))
    return Interrupted(tmp_path, result.err, prepare)


def test_a_resumed_preparation_keeps_its_commit(server, commit, interrupted, undisturbed_files):
    assert f"{NAME} cannot be read (HfHubHTTPError: Client error '404" in interrupted.message
    result = interrupted.prepare()
    assert result.code == 0, result.err
    assert read_files(interrupted.out) == undisturbed_files
    other = interrupted.prepare(f"--revision={next(iter(server.commits[NAME]))}")
    assert "prepared with other options (revision was None" in other.err


def test_overwrite_starts_again_from_the_latest_commit(server, interrupted):
    result = interrupted.prepare("--val_tokens=3000", "--overwrite")
    assert result.code == 0, result.err
    latest = list(server.commits[NAME])[-1]
    assert open_corpus(str(interrupted.out)).meta["commit"] == latest


PERMANENT_ERRORS = {
    "no dataset": (["--repository=org/nothing"], [], "org/nothing cannot be read"),
    "no column": (["--column=body"], [], "body"),
    "no answer": ([], [Fault("silent", "/api/datasets/")], "ReadTimeout"),
    "no terms": ([], [Fault("status", "/resolve/", 403)], f"{NAME} cannot be read"),
}


@pytest.mark.parametrize("case", PERMANENT_ERRORS)
def test_a_permanent_error_ends_the_preparation_in_one_line(server, client, commit, tmp_path, case):
    options, server.faults, message = PERMANENT_ERRORS[case]
    out = tmp_path / "out"
    result = client(FINEWEB, f"--out={out}", f"--repository={NAME}", *OPTIONS, *options)
    assert result.code == 2, result.err
    [line] = result.err.splitlines()
    assert message in line


def test_an_offline_machine_is_offered_local_files(tmp_path):
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    out = tmp_path / "out"
    result = run_script(ROOT / FINEWEB, "--tokenizer=bytes", f"--out={out}", env=environment)
    line = one_line_error(result)
    assert "HuggingFaceFW/fineweb-edu cannot be read from the Hugging Face Hub" in line
    assert "give local files with --source" in line
