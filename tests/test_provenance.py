"""The commit that a stored figure names, in a repository of the test's own."""

import json
import subprocess
from pathlib import Path

import pytest

from utils import provenance


def git(repository: Path, *arguments: str) -> str:
    author = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    return subprocess.run(
        ["git", *author, *arguments], cwd=repository, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repository(tmp_path) -> Path:
    """A repository with code.py and results/figures.json in its only commit."""
    (tmp_path / "results").mkdir()
    (tmp_path / "code.py").write_text("{}")
    (tmp_path / "results" / "figures.json").write_text("{}")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    return tmp_path


# ---- the commit ----


def test_a_folder_without_a_repository_has_no_commit(tmp_path):
    assert provenance.describe_commit(tmp_path) == ""


def test_figures_and_notes_may_change(repository):
    (repository / "results" / "figures.json").write_text("[]")  # as a measurement writes it
    (repository / "notes.txt").write_text("")
    commit = git(repository, "rev-parse", "HEAD")[:12]
    assert provenance.describe_commit(repository) == commit


@pytest.mark.parametrize("file", ["code.py", "new.py"])
def test_changed_and_new_code_makes_the_tree_dirty(repository, file):
    (repository / file).write_text("changed")
    commit = git(repository, "rev-parse", "HEAD")[:12]
    assert provenance.describe_commit(repository) == f"{commit}-dirty"


# ---- stored figures ----


def test_figures_are_stored_with_the_origin_that_is_given(tmp_path):
    origin = {"commit": "0123456789ab", "date": "2026-01-02"}
    figures = tmp_path / "figures.json"
    for value in (1, 2):  # the file is replaced
        provenance.store_figures(figures, {"rows": [value]}, origin)
    assert json.loads(figures.read_text()) == {**origin, "rows": [2]}


def test_figures_without_an_origin_have_that_of_this_process(tmp_path):
    figures = tmp_path / "figures.json"
    provenance.store_figures(figures, {"rows": []})
    assert json.loads(figures.read_text()) == {**provenance.collect_provenance(), "rows": []}


def test_uncommitted_changes_are_reported_once_per_file(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    for _ in range(2):
        provenance.store_figures(figures, {"rows": []}, {"commit": "0123456789ab-dirty"})
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("note: figures.json names commit 0123456789ab-dirty")


# ---- digests ----


def test_a_digest_is_of_files_once_and_without_those_excluded():
    digest = provenance.compute_digest("utils/*.py")
    assert provenance.compute_digest("utils/*.py", exclude=("units.py",)) != digest
    assert provenance.compute_digest("utils/*.py", "utils/units.py") == digest


def test_the_command_of_a_module_has_no_folder_of_the_machine(monkeypatch):
    path = str(provenance.ROOT / "research" / "benchmarks" / "costs.py")
    monkeypatch.setattr("sys.argv", [path, "--json=out.json"])
    assert provenance.describe_command() == "python -m research.benchmarks.costs --json=out.json"


def test_the_command_of_a_script_is_as_it_was_typed(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "config/demo_cpu.py", "--seed=1"])
    assert provenance.describe_command() == "python train.py config/demo_cpu.py --seed=1"
