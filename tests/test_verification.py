"""Damaged shards are found and named; shards of others are examined and linked."""

import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, one_line_error, shard_bytes
from hub_server import Fault
from in_process import call

from data import preparation, tokenizer, verification
from data.shards import open_corpus
from data.sources import Texts

VOCABULARY = 257  # the byte tokenizer's, which stands in for GPT-2's


@pytest.fixture(autouse=True)
def _bytes_for_gpt2(monkeypatch):
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", tokenizer.byte_tokenizer)
    monkeypatch.setattr(verification, "CHUNK", 97)  # several to a shard


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A corpus of ten shards."""
    out = tmp_path_factory.mktemp("prepared")
    args = preparation.arguments("", out).parse_args(["--tokenizer=bytes", "--shard_tokens=300", "--val_tokens=700"])
    source = Texts([f"document {i}" for i in range(240)], "x")
    preparation.prepare(args, "x", [("val", source, 700), ("train", source, None)])
    assert len(list(out.glob("*.bin"))) == 11
    return out


@pytest.fixture
def folder(prepared, tmp_path):
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def test_what_is_intact_passes_and_is_not_touched(folder, capsys):
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}
    for workers in (1, 3):
        verification.verify(folder, workers)
        tokens = sum(len(f"document {i}") + 1 for i in range(240))
        assert capsys.readouterr() == (f"11 shards, {tokens:,} tokens: all as they were made\n", "")
    assert {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()} == before


@pytest.mark.parametrize("seed", range(6))
def test_one_flipped_bit_anywhere_is_found(folder, seed):
    draw = np.random.default_rng(seed)
    path = draw.choice(sorted(folder.glob("*.bin")))
    content = bytearray(path.read_bytes())
    at = int(draw.integers(len(content)) if seed % 2 else draw.integers(1024))  # half of them in the header
    content[at] ^= 1 << int(draw.integers(8))
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^1 of 11 shards are damaged: {path} (?!.*\.bin)"):
        verification.verify(folder, 2)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-2]), "is damaged: 300 tokens need 1624 bytes, it has 1622"),
        (lambda path: path.write_bytes(b""), "is not a token shard"),
        (lambda path: path.write_bytes(path.read_bytes()[:-2] + struct.pack("<H", 257)), "holds token id 257, the "),
        (lambda path: path.write_bytes(path.read_bytes()[:-2] + struct.pack("<H", 256)), "is not as it was made"),
        (lambda path: (path.unlink(), path.mkdir()), "Is a directory"),
    ],
)
def test_every_damaged_shard_is_named(folder, damage, what):
    names = ["x_val_000001.bin", "x_train_000008.bin"]
    for name in names:
        damage(folder / name)
    with pytest.raises(ValueError, match=r"^2 of 11 shards are damaged: ") as error:
        verification.verify(folder, 2)
    assert str(error.value).count(what) == 2
    assert all(name in str(error.value) for name in names)
    assert str(error.value).count(".bin") <= 2 * 2  # an OSError names its file again


@pytest.mark.parametrize("meta", [None, "{}", '{"vocab_size": 257}', "{"])
def test_without_sums_there_is_nothing_to_verify(folder, meta):
    (folder / "meta.json").unlink()
    if meta:
        (folder / "meta.json").write_text(meta)
    with pytest.raises(ValueError, match=r"prepare the corpus"):
        verification.verify(folder, 1)


@pytest.mark.parametrize("corpus", sorted(path.parent.name for path in ROOT.glob("data/*/prepare.py")))
def test_every_script_verifies(folder, corpus):
    result = call(f"data/{corpus}/prepare.py", "--verify", f"--out={folder}")
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"11 shards" in result.stdout
    (folder / "x_val_000001.bin").unlink()
    line = one_line_error(call(f"data/{corpus}/prepare.py", "--verify", f"--out={folder}"))
    assert "1 of 11 shards are damaged: " in line
    assert "x_val_000001.bin" in line


# Shards of others


TOKENS = {
    "edu_fineweb_val_000000.bin": [256, *b"held out", 256, *b"text"],
    "edu_fineweb_train_000001.bin": [256, *b"x" * 500, 256],
    "edu_fineweb_train_000002.bin": [*b"goes on", 0, 255],
}


@pytest.fixture
def foreign(tmp_path):
    folder = tmp_path / "foreign"
    folder.mkdir()
    for name, tokens in TOKENS.items():
        (folder / name).write_bytes(shard_bytes(tokens))
    (folder / "README.md").write_text("shards")
    return folder


def adopt(out, source):
    return call("data/fineweb_edu/prepare.py", f"--out={out}", f"--pretokenized={source}")


def check_adopted(corpus, source):
    assert [part.tolist() for part in corpus.val] == [TOKENS["edu_fineweb_val_000000.bin"]]
    assert [part.tolist() for part in corpus.train] == [TOKENS[f"edu_fineweb_train_00000{i}.bin"] for i in (1, 2)]
    about = {"tokenizer": "bytes", "vocab_size": VOCABULARY, "eot_token": 256, "source": str(source)}
    about["val"] = {"documents": 2, "bytes": 12, "tokens": 14}
    about["train"] = {"documents": 2, "bytes": 509, "tokens": 511}
    keys = [("val", name) for name in TOKENS if "val" in name] + [("train", name) for name in TOKENS if "train" in name]
    about["shards"] = [
        {
            "file": name,
            "split": split,
            "tokens": len(TOKENS[name]),
            "sha256": hashlib.sha256(shard_bytes(TOKENS[name])).hexdigest(),
        }
        for split, name in keys
    ]
    assert corpus.meta == about


def test_shards_of_a_folder_are_linked_and_counted(foreign, tmp_path):
    out = tmp_path / "new" / "out"
    for _ in range(2):
        assert adopt(out, foreign).returncode == 0
        check_adopted(open_corpus(str(out)), foreign)
        for name in TOKENS:
            assert (out / name).is_symlink()
            assert (out / name).resolve() == foreign / name
    assert json.loads((out / "tokenizer.json").read_text()) == tokenizer.to_json(tokenizer.byte_tokenizer())
    verification.verify(out, 2)
    (foreign / "edu_fineweb_train_000002.bin").write_bytes(shard_bytes([*b"goes on", 0, 254]))
    with pytest.raises(ValueError, match=r"edu_fineweb_train_000002\.bin is not as it was made"):
        verification.verify(out, 2)


def test_a_relative_folder_is_linked_too_and_a_folder_may_be_taken_over_in_place(foreign, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out, source in (("out", "foreign"), (foreign, foreign)):
        assert adopt(out, source).returncode == 0
        check_adopted(open_corpus(str(out)), source)
    assert not any((foreign / name).is_symlink() for name in TOKENS)


def change(folder, name, content):
    (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: change(f, "edu_fineweb_train_000002.bin", shard_bytes([0, 257, 1])), "holds token id 257, the voca"),
        (lambda f: change(f, "edu_fineweb_train_000002.bin", shard_bytes([65535])), "holds token id 65535"),
        (lambda f: change(f, "edu_fineweb_train_000001.bin", shard_bytes([1, 2])[:-1]), "000001.bin is damaged"),
        (lambda f: change(f, "another_train_0.bin", b"no shard"), "another_train_0.bin is not a token shard"),
        (lambda f: (f / "edu_fineweb_val_000000.bin").unlink(), "foreign holds no *train_*.bin and *val_*.bin"),
        (lambda f: [p.unlink() for p in f.glob("*train*")], "foreign holds no *train_*.bin and *val_*.bin"),
    ],
)
def test_what_is_not_gpt2_shards_is_refused(foreign, tmp_path, damage, message):
    damage(foreign)
    assert message in one_line_error(adopt(tmp_path / "out", foreign))
    assert not list((tmp_path / "out").iterdir())


def test_a_folder_in_use_is_refused(foreign, folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    line = one_line_error(adopt(folder, foreign))
    assert f"{folder} holds a preparation of its own: give another --out" in line
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    out = tmp_path / "out"
    out.mkdir()
    (out / "edu_fineweb_train_000001.bin").write_bytes(shard_bytes([1]))
    assert "edu_fineweb_train_000001.bin is there already and another file" in one_line_error(adopt(out, foreign))
    assert (out / "edu_fineweb_train_000001.bin").read_bytes() == shard_bytes([1])
    assert not (out / "meta.json").exists()


@pytest.mark.parametrize("corpus", ["fineweb_edu", "openwebtext"])
@pytest.mark.parametrize("option", ["--retry_minutes=5", "--revision=v2"])
def test_options_without_effect_are_refused(tmp_path, corpus, option):
    result = call(f"data/{corpus}/prepare.py", f"--out={tmp_path / 'out'}", "--source=docs", option)
    assert f"{option.partition('=')[0]} has no effect on --source: leave it out" in one_line_error(result)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def shared(server, foreign):
    """The shards as a repository of the hub; its commit."""
    server.commits.pop("org/shards", None)
    server.faults, server.log = [], []
    files = {path.name: path.read_bytes() for path in foreign.iterdir()}
    large = shard_bytes(list(np.random.default_rng(0).integers(0, 256, 150_000)))
    yield server.commit(
        "org/shards", {**files, "edu_fineweb_train_000003.bin": large, "sub/a_train_0.bin": b"no shard"}
    )
    server.faults = []


def fetched(client, out, *arguments):
    """GPT-2's vocabulary is not needed: what is fetched holds bytes alone."""
    return client("tests/adopt_bytes.py", f"--out={out}", "--pretokenized=org/shards", *arguments)


FETCHING = {
    "nothing": [],
    "a byte that flips on its way": [Fault("flip", "/cdn/.*000003", times=1)],
    "one in a file that is read at once": [Fault("flip", "/cdn/.*000002", times=1)],
    "503, short, cut, expired, whole": [
        *(Fault("status", "/cdn/", status, skip=number, times=1) for number, status in ((1, 503), (6, 403))),
        *(Fault(kind, "/cdn/", skip=number, times=1) for number, kind in ((2, "short"), (3, "cut"), (5, "whole"))),
    ],
    "503 on the commit and the listing": [Fault("status", "/api/", times=3)],
}


@pytest.mark.parametrize("disturbed", FETCHING)
def test_shards_are_fetched_and_compared_with_the_hubs_sums(server, client, shared, tmp_path, disturbed):
    server.faults = [Fault(**fault.__dict__) for fault in FETCHING[disturbed]]
    found = fetched(client, tmp_path / "out")
    assert found.code == 0, found.err
    assert len(found.err.splitlines()) >= (disturbed != "nothing")
    wanted = {path: content for path, content in server.commits["org/shards"][shared].items() if "/" not in path}
    for path, content in wanted.items():
        assert (tmp_path / "out" / path).exists() is path.endswith(".bin")
        if path.endswith(".bin"):
            assert (tmp_path / "out" / path).read_bytes() == content
    assert not list((tmp_path / "out").glob("*.part"))
    meta = open_corpus(str(tmp_path / "out")).meta
    assert (meta["source"], meta["commit"]) == ("org/shards", shared)
    sums = {path: hashlib.sha256(content).hexdigest() for path, content in wanted.items() if path.endswith(".bin")}
    assert {record["file"]: record["sha256"] for record in meta["shards"]} == sums
    server.faults, server.log = [], []
    assert fetched(client, tmp_path / "out").code == 0  # nothing is fetched again
    assert not [path for _, path, *_ in server.log if "/cdn/" in path]


def test_a_byte_that_never_comes_right_is_refused(server, client, shared, tmp_path):
    server.faults = [Fault("flip", "/cdn/.*000003")]
    found = fetched(client, tmp_path / "out", "--retry_minutes=0")
    assert found.code == 2
    *tried, line = found.err.splitlines()
    said = "edu_fineweb_train_000003.bin came with other bytes than the hub's SHA-256 says"
    assert [each.split(": ", 1)[1] for each in tried] == [f"attempt {i} failed ({said})" for i in range(1, 6)]
    assert f"{said}, 5 times: give another --revision, or --pretokenized takes the folder of such" in line
    assert not (tmp_path / "out" / "edu_fineweb_train_000003.bin").exists()
    assert not (tmp_path / "out" / "meta.json").exists()


def test_a_fetch_goes_on_with_the_commit_it_was_begun_with(server, client, shared, tmp_path):
    """And within a file."""
    out = tmp_path / "out"
    server.faults = [Fault("status", "/cdn/.*000003", 404, skip=2)]
    assert fetched(client, out).code == 2
    assert 0 < (out / "edu_fineweb_train_000003.bin.part").stat().st_size < 300_000
    files = server.commits["org/shards"][shared]
    server.commit("org/shards", {name: shard_bytes([1, 2, 3]) for name in files if name.endswith(".bin")})
    server.faults, server.log = [], []
    found = fetched(client, out)
    assert (found.code, found.err) == (0, "")
    assert open_corpus(str(out)).meta["commit"] == shared
    name = "edu_fineweb_train_000003.bin"
    assert (out / name).read_bytes() == files[name]
    assert sum(size for _, path, _, size in server.log if "000003" in path) < 200_000
    (out / name).write_bytes(files[name][:-1] + b"\1")
    found = fetched(client, out)
    assert found.code == 2
    assert f"{out / name} is not what org/shards has: delete it to fetch it, or give another --out" in found.err
    (out / name).unlink()
    assert fetched(client, out).code == 0
    found = fetched(client, out, "--revision=v2")
    assert f"{out} holds shards of org/shards, revision None: give another --out" in found.err


def test_a_fetch_that_was_killed_before_its_file_had_its_name_is_finished(server, client, shared, tmp_path):
    """All bytes are there, and there is no range to ask for."""
    name, out = "edu_fineweb_train_000003.bin", tmp_path / "out"
    content = server.commits["org/shards"][shared][name]
    out.mkdir()
    (out / f"{name}.part").write_bytes(content)
    (out / "edu_fineweb_train_000002.bin.part").write_bytes(bytes(9999))  # longer than the file, and wrong
    found = fetched(client, out, "--retry_minutes=0")
    assert found.code == 0, found.err
    (line,) = found.err.splitlines()
    assert "edu_fineweb_train_000002.bin came with other bytes" in line
    assert (out / name).read_bytes() == content
    assert not [path for _, path, *_ in server.log if "/cdn/" in path and name in path]
    verification.verify(out, 1)


def test_ctrl_c_in_a_fetch_says_how_to_go_on(server, shared, tmp_path):
    server.faults = [Fault("status", "/cdn/.*000003")]
    program = (
        "import sys; sys.path[:0] = ['.', 'tests']; from data import interruption; interruption.end_in_one_line(); "
    )
    program += "import adopt_bytes; adopt_bytes.main()"
    arguments = [sys.executable, "-c", program, f"--out={tmp_path / 'out'}", "--pretokenized=org/shards"]
    env = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hf")}
    process = subprocess.Popen(arguments, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert "attempt 1 failed (the hub answers 503)" in process.stderr.readline()
    while len(list((tmp_path / "out").glob("*.bin"))) < 3 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    line = process.communicate(timeout=20)[1].splitlines()[-1]
    assert process.returncode == 130
    assert line == "-c: interrupted; 3 of 4 shards are here: run the same command again to go on"
