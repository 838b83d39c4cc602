"""research/archive.py: what leaves git can be had again, and a file that is another is told."""

import csv
import hashlib
import subprocess
import tarfile

import pytest
from helpers import ROOT, one_line_error
from in_process import call

from research import archive


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    """One of its own; archive.py keeps the functions' default, so that rows and store are given it."""
    path = tmp_path / "archive.csv"
    for name in ("rows_of", "store"):
        own = getattr(archive, name)
        monkeypatch.setattr(archive, name, lambda *args, own=own: own(*args, manifest=path))
    return path


def test_what_is_packed_is_checked(manifest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for name, text in (("metrics.jsonl", "{}\n"), ("model.safetensors", "weights"), ("log", "")):
        (tmp_path / "run" / name).write_text(text)
    packed = [
        call("research/archive.py", "pack", "run", f"--out={tmp_path / name}.tar.gz")
        for name in "ab"
    ]
    assert all(each.returncode == 0 for each in packed)
    assert (tmp_path / "a.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "b.tar.gz") as found:
        assert found.getnames() == ["run/log", "run/metrics.jsonl"]
    with open(manifest, newline="") as file:
        rows = {row["path"]: row for row in csv.DictReader(file)}
    assert rows["run/metrics.jsonl"]["sha256"] == hashlib.sha256(b"{}\n").hexdigest()
    assert call("research/archive.py", "check", "b.tar.gz").returncode == 0
    assert "not in" in one_line_error(call("research/archive.py", "check", "a.tar.gz"))
    manifest.write_text(manifest.read_text().replace(rows["run/log"]["sha256"], "0" * 64))
    assert "run/log is missing or another file" in one_line_error(
        call("research/archive.py", "check", "b.tar.gz")
    )
    assert "nowhere is not there" in one_line_error(
        call("research/archive.py", "pack", "nowhere", "--out=c.tar.gz")
    )
    assert not (tmp_path / "c.tar.gz").exists()


def test_files_are_had_again_from_the_history(manifest, tmp_path):
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    if not head:
        pytest.skip("no history here")
    committed = subprocess.run(
        ["git", "show", "HEAD:LICENSE"], cwd=ROOT, capture_output=True
    ).stdout
    archive.store({"LICENSE": archive.row_of("LICENSE", committed, head)})
    assert call("research/archive.py", "get", "LIC*", f"--out={tmp_path / 'raw'}").returncode == 0
    assert (tmp_path / "raw/LICENSE").read_bytes() == committed
    archive.store({"LICENSE": archive.row_of("LICENSE", committed + b"\n", head)})
    assert "has no such file" in one_line_error(
        call("research/archive.py", "get", "LICENSE", f"--out={tmp_path / 'x'}")
    )
    assert "no such path" in one_line_error(
        call("research/archive.py", "get", "gone", f"--out={tmp_path / 'x'}")
    )
    assert not (tmp_path / "x").exists()


def test_the_manifest_names_no_file_that_is_there_as_it_was():
    rows = archive.rows_of()
    assert rows
    for path, row in rows.items():
        here = ROOT / path
        assert not here.exists() or archive.row_of(path, here.read_bytes(), row["from"]) != row, (
            path
        )
