"""Where a stored figure comes from, in a repository of the test's own."""

import json
import subprocess

from training import provenance


def test_a_figure_of_a_changed_tree_says_so(tmp_path, capsys):
    def git(*words):
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        return subprocess.run(
            ["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    assert provenance.commit_of(tmp_path) == ""  # no repository
    git("init", "-q")
    (tmp_path / "results").mkdir()
    code, figures = tmp_path / "code.py", tmp_path / "results" / "figures.json"
    for path in (code, figures):
        path.write_text("{}")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    clean = git("rev-parse", "HEAD")[:12]
    figures.write_text("[]")  # what a measurement writes
    (tmp_path / "notes.txt").write_text("")
    assert provenance.commit_of(tmp_path) == clean
    (tmp_path / "new.py").write_text("")  # a stream that is being tried
    assert provenance.commit_of(tmp_path) == f"{clean}-dirty"
    (tmp_path / "new.py").unlink()
    code.write_text("changed")
    assert provenance.commit_of(tmp_path) == f"{clean}-dirty"
    code.write_text("{}")
    assert provenance.commit_of(tmp_path) == clean

    for commit, notes in ((clean, 0), (f"{clean}-dirty", 1)):
        for value in (1, 2):  # a file that is written after every figure is spoken of once
            provenance.store(figures, {"rows": [value]}, {"commit": commit, "date": "2026-01-02"})
        assert json.loads(figures.read_text()) == {
            "commit": commit,
            "date": "2026-01-02",
            "rows": [2],
        }
        assert (
            capsys.readouterr().err.count(f"note: {figures} is of {commit}, with changes") == notes
        )
    provenance.store(figures, {"rows": []})
    assert json.loads(figures.read_text()) == {**provenance.provenance(), "rows": []}
