"""Data sets of the hub, on a local clone of one and on a hub of our own, whose answers fail in every way."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import ROOT, one_line_error, script
from hub_server import Fault
from in_process import call

from data import patience, sources, tokenizer
from data.fineweb_edu import prepare
from data.hub import Hub
from data.shards import open_corpus

README = """---
configs:
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
- config_name: other
  data_files:
  - split: train
    path: other/*
---
# FineWeb-Edu
"""
TEXTS = [f"document {i}, größe " * (i % 7) for i in range(500)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone with two configurations; every fifth row of the first is null. One file is larger than a row group."""
    root = tmp_path_factory.mktemp("clone")
    (root / "README.md").write_text(README)
    rows = [row for i, text in enumerate(TEXTS) for row in ([text, None] if i % 5 == 0 else [text])]
    parts = {"sample/10BT/000": rows[:90], "sample/10BT/001": rows[90:500], "sample/10BT/002": rows[500:]}
    for name, part in {**parts, "other/000": ["another configuration"]}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        table = pa.table({"id": range(len(part)), "text": part, "score": [1.0] * len(part)})
        pq.write_table(table, root / f"{name}.parquet", row_group_size=60)
    return root


@pytest.fixture(autouse=True)
def _bytes_for_gpt2(monkeypatch, tmp_path):
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", tokenizer.byte_tokenizer)
    monkeypatch.setattr(sources, "ROWS", 32)


def texts(batches):
    return [text for batch in batches for text in batch.texts]


def test_reading_goes_on_from_every_cursor(clone):
    """With the same batches: a position counts tokens from its cursor."""
    source = Hub(str(clone), "sample-10BT")
    batches = list(source.read())
    assert len(batches) > 15
    expected = [batch.texts for batch in batches]
    for index, batch in enumerate(batches):
        rest = list(source.read(json.loads(json.dumps(batch.cursor))))
        assert [batch.texts for batch in rest] == expected[index:]


def test_identity_tells_what_is_read():
    """Each of these changes the documents; `tokens` is a guess, and `starts` belongs to the script."""
    keys = {"repository": "a", "name": "b", "split": "c", "column": "d", "revision": "e"}
    first = Hub(**keys).identity()
    assert first == Hub(**keys, tokens=5).identity() == json.loads(json.dumps(first))
    for key in keys:
        assert Hub(**{**keys, key: "other"}).identity() != first


def run(monkeypatch, out, *arguments):
    monkeypatch.setattr(sys, "argv", ["prepare.py", f"--out={out}", "--sample=sample-10BT", *map(str, arguments)])
    prepare.main()
    return open_corpus(str(out))


STREAM = [token for text in TEXTS for token in (256, *text.encode())]
SMALL = ["--val_tokens=2000", "--shard_tokens=1500"]


def test_fineweb_edu_from_a_clone_grows_as_at_once(clone, tmp_path, monkeypatch):
    for limit in (2100, 9999, None):
        more = [f"--max_tokens={limit}"] * (limit is not None)
        corpus = run(monkeypatch, tmp_path / "out", f"--repository={clone}", *SMALL, *more)
        assert np.concatenate(corpus.val + corpus.train).tolist() == STREAM[:limit]
    assert corpus.meta["source"] == str(clone)
    assert corpus.meta["name"] == "sample-10BT"
    assert not {"revision", "commit"} & corpus.meta.keys()


# The hub


FINEWEB = "data/fineweb_edu/prepare.py"


def parquet_bytes(texts, row_group_size=40) -> bytes:
    count, content = len(texts), io.BytesIO()
    table = pa.table({"id": [f"<urn:uuid:{i}>" for i in range(count)], "text": texts, "score": [3.5] * count})
    pq.write_table(table, content, row_group_size=row_group_size, compression="none", use_dictionary=False)
    return content.getvalue()


def repository(texts) -> dict[str, bytes]:
    """FineWeb-Edu's layout: the second of three files is the largest by far."""
    files = {"README.md": README.encode(), "other/000.parquet": parquet_bytes(["another configuration"])}
    for number, (first, last) in enumerate(((0, 60), (60, 800), (800, 1000))):
        files[f"sample/10BT/{number:03d}.parquet"] = parquet_bytes(texts[first:last])
    return files


DOCUMENTS = [f"document {i}: größe " + f"{i * i} " * (i % 150) for i in range(1000)]
OPTIONS = ["--sample=sample-10BT", "--tokenizer=bytes", "--val_tokens=30000", "--shard_tokens=20000"]


@pytest.fixture
def fineweb(server):
    """The data set's name and its commit; another configuration and other documents are about."""
    name = "org/fineweb-edu"
    server.commits.pop(name, None)
    server.commit(name, repository(DOCUMENTS[::-1]))
    commit = server.commit(name, repository(DOCUMENTS))
    server.faults, server.log = [], []
    yield SimpleNamespace(name=name, commit=commit)
    server.faults = []


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@pytest.fixture(scope="module")
def undisturbed(server, client, tmp_path_factory):
    """What a preparation writes that nothing disturbs, equal to one of the documents themselves."""
    out = tmp_path_factory.mktemp("undisturbed")
    server.commit("org/fineweb-edu", repository(DOCUMENTS[::-1]))
    server.commit("org/fineweb-edu", repository(DOCUMENTS))
    found = client(FINEWEB, f"--out={out}", "--repository=org/fineweb-edu", *OPTIONS)
    assert (found.code, found.err) == (0, "")
    corpus = open_corpus(str(out))
    stream = [token for text in DOCUMENTS for token in (256, *text.encode())]
    assert np.concatenate(corpus.val + corpus.train).tolist() == stream
    assert len(corpus.train) > 10
    return contents(out)


RANGES = "/cdn/.*10BT"
SCENARIOS = {
    "503 for half a second, of everything": [Fault("status", status=503, seconds=0.5)],
    "one 503 on the commit's lookup": [Fault("status", "/api/datasets/org/fineweb-edu$", times=1)],
    "one 503 on the listing": [Fault("status", "/tree/", times=1)],
    "one 502 on the card": [Fault("status", "README.md", 502, times=1)],
    "one 504 on an address": [Fault("status", "/resolve/.*10BT", 504, skip=3, times=1)],
    "429, too many requests": [Fault("status", RANGES, 429, skip=2, times=3)],
    "an expired address": [Fault("status", RANGES, 403, skip=3, times=1)],
    "reset, then cut every second time": [
        Fault("reset", RANGES, times=2),
        *(Fault("cut", RANGES, skip=number, times=1) for number in range(3, 12, 2)),
    ],
    "short": [Fault("short", RANGES, skip=2, times=2)],
    "Range ignored": [Fault("whole", RANGES, skip=3, times=1)],
    "slow": [Fault("slow", RANGES, skip=3, times=1, delay=0.3)],
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_bad_minutes_leave_no_trace_in_what_is_made(server, client, fineweb, undisturbed, tmp_path, scenario):
    server.faults = [Fault(**fault.__dict__) for fault in SCENARIOS[scenario]]
    found = client(FINEWEB, f"--out={tmp_path}", f"--repository={fineweb.name}", *OPTIONS)
    assert found.code == 0, found.err
    assert contents(tmp_path) == undisturbed
    assert sum(kind is not None for _, _, kind, _ in server.log) >= 1
    lines = found.err.splitlines()
    assert all("attempt " in line and line.endswith(" s") for line in lines)
    if scenario not in ("slow", "one 503 on the listing", "one 502 on the card"):  # which the library asks for again
        assert lines


def test_a_revision_that_moves_is_the_pinned_one_to_the_end(server, client, fineweb, undisturbed, tmp_path):
    move = Fault("call", RANGES, skip=5, times=1)
    move.action = lambda: server.commit(fineweb.name, repository(DOCUMENTS[1:]))
    server.faults = [move]
    found = client(FINEWEB, f"--out={tmp_path}", f"--repository={fineweb.name}", *OPTIONS)
    assert (found.code, found.err) == (0, "")
    assert list(server.commits[fineweb.name])[-1] != fineweb.commit
    assert contents(tmp_path) == undisturbed
    server.log = []
    found = client(FINEWEB, f"--out={tmp_path}", f"--repository={fineweb.name}", *OPTIONS, "--overwrite")
    assert found.code == 0
    assert open_corpus(str(tmp_path)).meta["commit"] == list(server.commits[fineweb.name])[-1]


def test_shrinking_keeps_the_commit_and_all_shards_but_those_too_many(server, client, fineweb, undisturbed, tmp_path):
    arguments = [f"--repository={fineweb.name}", *OPTIONS]
    for name, content in undisturbed.items():
        (tmp_path / name).write_bytes(content)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.bin")}
    server.commit(fineweb.name, repository(["newer"] * 1000))
    arguments += [f"--out={tmp_path}", "--max_tokens=60000"]
    found = client(FINEWEB, *arguments)
    assert found.code == 2
    assert found.err.rstrip().endswith("--overwrite to remove those too many")
    assert contents(tmp_path) == undisturbed
    found = client(FINEWEB, *arguments, "--overwrite")
    assert (found.code, found.err) == (0, "")
    corpus = open_corpus(str(tmp_path))
    stream = [token for text in DOCUMENTS for token in (256, *text.encode())]
    assert np.concatenate(corpus.val + corpus.train).tolist() == stream[:60000]
    assert corpus.meta["commit"] == fineweb.commit
    kept = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.bin")}
    assert kept.items() >= dict(sorted(before.items(), key=lambda each: each[0].split("_")[-1])[:3]).items()
    found = client(FINEWEB, *arguments, "--max_tokens=50000", "--shard_tokens=10000")  # another preparation
    assert "and begin anew" in found.err


def test_resuming_within_a_file_fetches_what_follows(server, client, fineweb, undisturbed, tmp_path):
    """Not the file from its start; nor is the hub asked for its newest commit, which may be another one by then."""
    names = sorted(name for name in undisturbed if name.endswith(".bin"))
    for name, content in undisturbed.items():
        (tmp_path / name).write_bytes(content)
    state = json.loads(undisturbed["preparation.json"])
    kept = 2 * len(names) // 3
    for record in state["shards"][kept:]:
        (tmp_path / record["file"]).unlink()
    state["shards"] = state["shards"][:kept]
    del state["max_tokens"]
    (tmp_path / "preparation.json").write_text(json.dumps(state))
    (tmp_path / "meta.json").unlink()
    server.commit(fineweb.name, repository(["newer"] * 1000))
    found = client(FINEWEB, f"--out={tmp_path}", f"--repository={fineweb.name}", *OPTIONS)
    assert (found.code, found.err) == (0, "")
    assert contents(tmp_path) == undisturbed
    whole = sum(map(len, repository(DOCUMENTS).values()))
    assert server.sent < 0.75 * whole, (server.sent, whole)  # with the footers; all of it is more than 1
    assert not [path for _, path, *_ in server.log if path.endswith(f"/datasets/{fineweb.name}")]


def test_a_revision_is_resolved_to_its_commit_and_not_silently_another(server, client, fineweb, tmp_path):
    first = next(iter(server.commits[fineweb.name]))
    arguments = [f"--out={tmp_path}", f"--repository={fineweb.name}", *OPTIONS]
    assert client(FINEWEB, *arguments, f"--revision={first}", "--max_tokens=40000").code == 0
    meta = open_corpus(str(tmp_path)).meta
    assert (meta["commit"], meta["revision"]) == (first, first)
    found = client(FINEWEB, *arguments, f"--revision={fineweb.commit}")
    assert found.code == 2
    assert "another preparation (revision" in found.err


LASTING = {
    "no data set": (["--repository=org/nothing"], [], "the hub knows no such data set, or hides it: check the name"),
    "no column": (["--column=body"], [], "has no column body, it has id, text, score: give --column"),
    "no configuration": (
        ["--sample=sample-350BT", "--max_tokens=90000"],
        [],
        "'sample-350BT' not found. Available: ['sample-10BT', 'other']",
    ),
    "no revision": (["--revision=v9"], [], "it has no revision v9: give another --revision"),
    "no terms accepted": ([], [Fault("status", "/resolve/", 403)], "`hf auth login` with an account that may"),
    "no storage": ([], [Fault("status", "/cdn/", 403)], "its storage refuses newly signed addresses too: give local f"),
    "no file": ([], [Fault("status", "/cdn/", 404)], "give local files by --source"),
    "no patience": (["--retry_minutes=0"], [Fault("status", RANGES)], "the hub answers 503, for --retry_minutes=0"),
    "no end": (["--retry_minutes=0.02"], [Fault("status", RANGES)], "for --retry_minutes=0.02"),
    "no sense": (["--retry_minutes=-1"], [], "--retry_minutes=-1: give 0 or more"),
}


@pytest.mark.parametrize("case", LASTING)
def test_what_lasts_ends_at_once_in_one_line(server, client, fineweb, tmp_path, case):
    options, server.faults, message = LASTING[case]
    found = client(FINEWEB, f"--out={tmp_path / 'out'}", f"--repository={fineweb.name}", *OPTIONS, *options)
    assert found.code == 2, found.err
    *tried, line = found.err.splitlines()
    assert message in line
    assert bool(tried) is (case in ("no end", "no storage"))
    assert len(tried) == 4 or case != "no storage"
    assert ("run the same command again" in line) is (case in ("no patience", "no end"))
    if case == "no column":  # what was begun wrongly is not in the way of what is right
        assert client(FINEWEB, f"--out={tmp_path / 'out'}", f"--repository={fineweb.name}", *OPTIONS).code == 0


def test_a_pinned_commit_that_is_gone_says_so(server, client, fineweb, tmp_path):
    arguments = [f"--out={tmp_path}", f"--repository={fineweb.name}", *OPTIONS]
    assert client(FINEWEB, *arguments, "--max_tokens=60000").code == 0
    del server.commits[fineweb.name][fineweb.commit]
    before = contents(tmp_path)
    found = client(FINEWEB, *arguments)
    assert found.code == 2
    (line,) = found.err.splitlines()
    assert f"the commit {fineweb.commit}, which this preparation was begun with, is gone from the hub: --over" in line
    assert "(--overwrite removes the 4 shards (124.1 KB))" in line
    assert line.endswith("; 4 whole shards are kept: run it with --max_tokens=60000 to end there")
    assert "auth" not in line
    assert client(FINEWEB, *arguments, "--max_tokens=60000").code == 0  # needs no hub
    shards_before = {name: content for name, content in before.items() if name.endswith(".bin")}
    assert contents(tmp_path).items() >= shards_before.items()
    assert client(FINEWEB, *arguments, "--overwrite").code == 0
    assert open_corpus(str(tmp_path)).meta["commit"] == list(server.commits[fineweb.name])[-1]


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    for package in ("huggingface_hub", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    line = one_line_error(call(FINEWEB, "--tokenizer=bytes", f"--out={tmp_path / 'out'}"))
    assert "that needs the datasets package: pip install datasets" in line


def test_ctrl_c_in_a_pause_is_one_line(server, fineweb, tmp_path):
    server.faults = [Fault("status", RANGES, skip=2)]
    arguments = [sys.executable, ROOT / FINEWEB, f"--out={tmp_path / 'out'}", f"--repository={fineweb.name}", *OPTIONS]
    env = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf")}
    process = subprocess.Popen(arguments, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "attempt 1 failed (the hub answers 503), again in 1 s" in process.stderr.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    line = process.communicate(timeout=20)[1]
    assert process.returncode == 130, line
    assert line.count("\n") == 1
    assert "prepare.py: interrupted; " in line
    assert "run the same command again to go on" in line


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (ConnectionResetError("by peer"), "ConnectionResetError: by peer"),
        (OSError("no such file"), None),
    ],
)
def test_what_passes_and_what_does_not(error, cause):
    assert patience.passing_cause(error) == cause
    outer = RuntimeError("outer")
    outer.__cause__ = error
    assert patience.passing_cause(outer) == cause


def test_pauses_grow_up_to_the_limit(monkeypatch, capsys):
    now, slept = [0.0], []
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(patience.time, "sleep", lambda pause: (slept.append(pause), now.__setitem__(0, now[0] + pause)))

    def refuse():
        raise ConnectionError("down")

    with pytest.raises(patience.OutOfPatience, match=r"^ConnectionError: down, for --retry_minutes=5 by now$"):
        patience.Patience("it", 5).ask(refuse)
    assert slept[:8] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert sum(slept) == 300
    lines = capsys.readouterr().err.splitlines()
    assert lines[1] == "it: attempt 2 failed (ConnectionError: down), again in 2 s"
    assert len(lines) == len(slept)


def test_a_split_that_a_data_set_does_not_have_is_named(clone):
    with pytest.raises(ValueError, match=r"\(sample-10BT\) has no split test, it has train$"):
        list(Hub(str(clone), "sample-10BT", "test").read())


def test_a_data_set_of_other_files_says_what_can_be_read(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    message = (
        r"is read from parquet files, .*/train\.jsonl is none: give --revision=refs/convert/parquet, .* as parquet;"
    )
    with pytest.raises(sources.Missing, match=message):
        list(Hub(str(tmp_path), None).read())


def test_offline_one_line_names_source(tmp_path):
    prepare_script = ROOT / "data" / "fineweb_edu" / "prepare.py"
    arguments = [prepare_script, "--tokenizer=bytes", f"--out={tmp_path / 'out'}"]
    line = one_line_error(script(*arguments, env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}))
    assert "HuggingFaceFW/fineweb-edu (sample-100BT) cannot be read: no connection to the hub" in line
    assert "give local files by --source" in line
    assert not list((tmp_path / "out").iterdir())
