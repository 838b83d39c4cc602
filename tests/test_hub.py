"""Data sets of the hub, on a local clone of one and on a hub of our own, whose answers fail."""

import hashlib
import io
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, one_line_error, run_script, write_parquet
from hub_server import Fault
from in_process import call

from data import hub, shards, sources
from data.hub import HubDataset
from data.shards import open_corpus

FINEWEB = "data/fineweb_edu/prepare.py"
README = """---
configs:
- {config_name: sample-10BT, data_files: [{split: train, path: sample/10BT/*}]}
- {config_name: other, data_files: [{split: train, path: other/*}]}
---
"""
DOCUMENTS = [f"document {i}: größe " + f"{i * i} " * (i % 150) for i in range(1000)]
STREAM = [token for text in DOCUMENTS for token in (256, *text.encode())]
OPTIONS = "--sample=sample-10BT --tokenizer=bytes --val_tokens=30000 --shard_tokens=20000".split()


def parquet_bytes(texts) -> bytes:
    content = io.BytesIO()
    write_parquet(content, texts, 40, compression="none", use_dictionary=False)
    return content.getvalue()


def repository(texts) -> dict[str, bytes]:
    """FineWeb-Edu's layout: the second of three files is the largest by far; some rows are null."""
    files = {"README.md": README.encode(), "other/000.parquet": parquet_bytes(["another"])}
    for number, (first, last) in enumerate(((0, 60), (60, 800), (800, 1000))):
        rows = [*texts[first:last], None]
        files[f"sample/10BT/{number:03d}.parquet"] = parquet_bytes(rows)
    return files


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def tokens_of(corpus) -> list[int]:
    return np.concatenate(corpus.val + corpus.train).tolist()


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    root = tmp_path_factory.mktemp("clone")
    for name, content in repository(DOCUMENTS).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_a_clone_is_read_from_every_cursor(clone, monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "ROWS", 32)
    source = HubDataset(str(clone), "sample-10BT")
    batches = list(source.read())
    assert [text for batch in batches for text in batch.texts] == DOCUMENTS
    for index in range(0, len(batches), 5):
        rest = list(source.read(json.loads(json.dumps(batches[index].cursor))))
        assert [batch.texts for batch in rest] == [batch.texts for batch in batches[index:]]
    result = call(FINEWEB, f"--repository={clone}", *OPTIONS, f"--out={tmp_path / 'out'}")
    assert result.returncode == 0, result.stderr
    corpus = open_corpus(str(tmp_path / "out"))
    assert tokens_of(corpus) == STREAM
    assert {"source": str(clone), "name": "sample-10BT"}.items() <= corpus.meta.items()
    assert not {"revision", "commit"} & corpus.meta.keys()


def test_identity_tells_what_is_read():
    """Each of these changes the documents; `tokens` is a guess, `starts` belongs to the script."""
    keys = {"repository": "a", "name": "b", "split": "c", "column": "d", "revision": "e"}
    first = HubDataset(**keys).identity()
    assert first == HubDataset(**keys, num_tokens=5).identity() == json.loads(json.dumps(first))
    for key in keys:
        assert HubDataset(**{**keys, key: "other"}).identity() != first


# ---- over HTTP ----


NAME = "org/fineweb-edu"


def committed(server) -> str:
    """The data set's commit; an earlier one has other documents."""
    server.commits.pop(NAME, None)
    server.commit(NAME, repository(DOCUMENTS[::-1]))
    return server.commit(NAME, repository(DOCUMENTS))


@pytest.fixture
def commit(server):
    name = committed(server)
    server.faults, server.log = [], []
    yield name
    server.faults = []


@pytest.fixture(scope="module")
def undisturbed(server, client, tmp_path_factory):
    """What a preparation writes that nothing disturbs, equal to the documents themselves."""
    out = tmp_path_factory.mktemp("undisturbed")
    committed(server)
    found = client(FINEWEB, f"--out={out}", f"--repository={NAME}", *OPTIONS)
    assert (found.code, found.err) == (0, "")
    assert tokens_of(open_corpus(str(out))) == STREAM
    assert not list(out.glob("**/*.parquet"))  # a file that was read is removed
    return contents(out)


FILES = "/cdn/.*10BT"
SCENARIOS = {
    "503 for half a second, of everything": Fault("status", seconds=0.5),
    "cut": Fault("cut", FILES, times=2),
    "short": Fault("short", FILES, skip=1, times=1),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_bad_minutes_leave_no_trace(server, client, commit, undisturbed, tmp_path, scenario):
    server.faults = [SCENARIOS[scenario]]
    found = client(FINEWEB, f"--out={tmp_path}", f"--repository={NAME}", *OPTIONS)
    assert found.code == 0, found.err
    assert contents(tmp_path) == undisturbed
    assert sum(kind is not None for _, kind in server.log) >= 1
    assert all("; retrying in " in line for line in found.err.splitlines())


def test_the_commit_stays_the_one_it_was_begun_with(server, client, commit, undisturbed, tmp_path):
    """Also after a stop; only --overwrite takes the newest."""
    words = [FINEWEB, f"--out={tmp_path}", f"--repository={NAME}", *OPTIONS]
    server.faults = [Fault("status", FILES, 404, skip=2)]
    found = client(*words)
    assert found.code == 2
    assert "give local files with --source, or a local clone with --repository=FOLDER" in found.err
    assert "complete shards are kept" in found.err
    server.faults, server.log = [], []
    server.commit(NAME, repository(["newer"] * 1000))
    found = client(*words)
    assert (found.code, found.err) == (0, "")
    assert contents(tmp_path) == undisturbed
    # Not the files before the one it stood in, nor the name of the newest commit.
    asked = [path for path, _ in server.log]
    assert not [path for path in asked if "/cdn/" in path and "10BT/000" in path]
    assert not [path for path in asked if path.endswith(f"/datasets/{NAME}")]
    del server.commits[NAME][commit]
    shard = tmp_path / "fineweb_edu_train_000004.bin"
    shard.unlink()
    found = client(*words)
    assert (
        f"it no longer has the commit {commit}; give --overwrite to start again from the latest"
        in found.err
    )
    shard.write_bytes(undisturbed[shard.name])
    found = client(*words, "--val_tokens=3000", "--overwrite")
    assert found.code == 0, found.err
    corpus = open_corpus(str(tmp_path))
    assert corpus.meta["commit"] == list(server.commits[NAME])[-1]
    found = client(*words, f"--revision={next(iter(server.commits[NAME]))}")
    assert "another preparation (" in found.err


LASTING = {
    "no data set": (
        ["--repository=org/nothing"],
        [],
        "the Hub has no such dataset, or it is private or gated",
    ),
    "no column": (
        ["--column=body"],
        [],
        "has no column body; name one of its columns with --column: text, id, score, token_count",
    ),
    "no configuration": (["--sample=sample-350BT", "--max_tokens=90000"], [], "'sample-350BT' not"),
    "no revision": (["--revision=v9"], [], "it has no revision v9; give another --revision"),
    "no terms": ([], [Fault("status", "/resolve/", 403)], "`hf auth login` with an account that"),
    "no patience": (
        ["--retry_minutes=0"],
        [Fault("status", FILES)],
        "was retried for --retry_minutes=0",
    ),
    "no sense": (["--retry_minutes=-1"], [], "--retry_minutes=-1.0: give 0 or more"),
}


@pytest.mark.parametrize("case", LASTING)
def test_what_lasts_ends_at_once_in_one_line(server, client, commit, tmp_path, case):
    options, server.faults, message = LASTING[case]
    words = [FINEWEB, f"--out={tmp_path / 'out'}", f"--repository={NAME}", *OPTIONS]
    found = client(*words, *options)
    assert found.code == 2, found.err
    [line] = found.err.splitlines()
    assert message in line
    assert ("rerun the same command" in line) is (case == "no patience")
    if case == "no column":  # what was begun wrongly is not in the way of what is right
        assert client(*words).code == 0


def test_without_a_network_or_packages_one_line_says_what_to_do(tmp_path, monkeypatch):
    words = [ROOT / FINEWEB, "--tokenizer=bytes", f"--out={tmp_path / 'out'}"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    line = one_line_error(run_script(*words, env=offline))
    assert "HuggingFaceFW/fineweb-edu (sample-100BT) cannot be read: HF_HUB_OFFLINE forbids" in line
    assert "give local files with --source" in line
    assert not list((tmp_path / "out").iterdir())
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    line = one_line_error(call(FINEWEB, *words[1:]))
    assert "reading from the Hugging Face Hub needs the huggingface_hub package" in line


def test_pauses_grow_up_to_the_limit(monkeypatch, capsys):
    now, slept = [0.0], []

    def sleep(pause):
        slept.append(pause)
        now[0] += pause

    monkeypatch.setattr(hub, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))

    def refuse():
        raise RuntimeError("outer") from ConnectionError("down")

    message = r"^it cannot be read \(ConnectionError: down\) and was retried for --retry_minutes=5$"
    with pytest.raises(hub.RetriesExhausted, match=message):
        hub.retry(refuse, "it", 5)
    assert slept[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert sum(slept) == 300
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "it: ConnectionError: down; retrying in 2 s"
    assert len(lines) == len(slept)
    assert hub.describe_transient(OSError("no such file")) is None
    for status, passes in ((429, True), (408, True), (500, True), (404, False), (403, False)):
        error = OSError("refused")
        error.response = SimpleNamespace(status_code=status)
        assert hub.describe_transient(error) == (
            f"the Hub responds with status {status}" if passes else None
        )


def test_ctrl_c_in_a_pause_is_one_line(tmp_path, monkeypatch):
    def pressed(pause):
        os.kill(os.getpid(), signal.SIGINT)

    def down():
        raise ConnectionError("down")

    monkeypatch.setattr(HubDataset, "pin", lambda source, commit: source.ask(down))
    monkeypatch.setattr(hub, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pressed))
    result = call(FINEWEB, f"--out={tmp_path}", *OPTIONS)
    again, end = result.stderr.decode().splitlines()
    assert again.endswith("ConnectionError: down; retrying in 1 s")
    assert (result.returncode, end) == (130, "prepare.py: interrupted")


def test_a_file_that_was_read_is_removed(clone, tmp_path, monkeypatch):
    """A preparation needs the room of one file of the data set."""
    files = sorted(clone.glob("sample/10BT/*.parquet"))
    source = HubDataset("org/name", download_folder=tmp_path)
    source.files = [f"hf://datasets/org/name@commit/{file.name}" for file in files]

    def download(name):
        assert not list(tmp_path.iterdir())
        return str(shutil.copy(clone / "sample" / "10BT" / name, tmp_path))

    monkeypatch.setattr(source, "download", download)
    assert [text for batch in source.read() for text in batch.texts] == DOCUMENTS
    assert not list(tmp_path.iterdir())


def test_splits_and_files_that_cannot_be_read_are_named(clone, tmp_path):
    with pytest.raises(
        ValueError, match=r"\(sample-10BT\) has no split test; its splits are train$"
    ):
        list(HubDataset(str(clone), "sample-10BT", "test").read())
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    message = r"cannot be read, because .*/train\.jsonl is not a parquet file; give --revision=refs/convert"
    with pytest.raises(sources.PermanentSourceError, match=message):
        list(HubDataset(str(tmp_path)).read())


# ---- shards of others ----


@pytest.fixture
def shared(server, tmp_path):
    """Shards as a repository of the hub; its commit."""
    draw = np.random.default_rng(0)
    files = {"sub/a_train_0.bin": b"no shard", "README.md": b"shards"}
    for number, split in enumerate(("val", "train", "train", "train")):
        name = f"edu_fineweb_{split}_{number:06d}.bin"
        shards.write_shard(tmp_path / name, draw.integers(0, 257, 50_000 if number == 3 else 400))
        files[name] = (tmp_path / name).read_bytes()
    server.commits.pop("org/shards", None)
    server.faults, server.log = [], []
    yield server.commit("org/shards", files)
    server.faults = []


def test_shards_are_fetched_as_they_are(server, client, shared, tmp_path):
    """Although the commit, the listing and the last file fail at first."""
    kinds = enumerate(("status", "short", "cut"))
    server.faults = [Fault(kind, "/cdn/.*000003", skip=i, times=1) for i, kind in kinds]
    server.faults.append(Fault("status", "/api/", times=3))
    words = [FINEWEB, f"--out={tmp_path / 'out'}", "--pretokenized=org/shards"]
    found = client(*words)
    assert found.code == 0, found.err
    files = server.commits["org/shards"][shared]
    wanted = {name: files[name] for name in files if name.startswith("edu")}
    there = contents(tmp_path / "out")
    assert wanted.items() <= there.items()
    assert sorted(there.keys() - wanted) == ["fetched.json", "meta.json", "tokenizer.json"]
    meta = open_corpus(str(tmp_path / "out")).meta
    assert (meta["source"], meta["commit"]) == ("org/shards", shared)
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in wanted.items()}
    assert {record["file"]: record["sha256"] for record in meta["shards"]} == sums


def test_wrong_bytes_and_a_newer_commit(server, client, shared, tmp_path):
    name, out = "edu_fineweb_train_000003.bin", tmp_path / "out"
    words = [FINEWEB, f"--out={out}", "--pretokenized=org/shards"]
    server.faults = [Fault("flip", f"/cdn/.*{name}", times=1)]
    found = client(*words)
    assert found.code == 2
    assert f"{out / name} does not have the SHA-256 that the Hub knows; delete it" in found.err
    assert not (out / "meta.json").exists()
    files = server.commits["org/shards"][shared]
    server.commit("org/shards", {each: b"newer" for each in files})
    (out / name).unlink()
    found = client(*words)  # goes on with the commit it was begun with
    assert (found.code, found.err) == (0, "")
    assert (out / name).read_bytes() == files[name]
    assert open_corpus(str(out)).meta["commit"] == shared
    found = client(*words, "--revision=v2")
    assert f"{out} holds shards of org/shards, revision None; give another --out" in found.err
