"""The commit that a stored figure names, in a repository of the test's own."""

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


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("train.py", "python train.py --seed=1"),
        # as `python -m` gives it
        (str(provenance.ROOT / "research" / "sweep.py"), "python -m research.sweep --seed=1"),
    ],
)
def test_the_command_has_no_folder_of_the_machine(monkeypatch, script, command):
    monkeypatch.setattr("sys.argv", [script, "--seed=1"])
    assert provenance.describe_command() == command
