"""docs/colab.ipynb, executed from beginning to end as Jupyter would."""

import json
import shutil
from pathlib import Path

import nbformat
import pytest
from helpers import ROOT
from nbclient import NotebookClient

NOTEBOOK = Path("docs", "colab.ipynb")
FEW_STEPS = (
    "--max_steps=2 --eval_interval=1 --eval_batches=1 --eval_full=False --block_size=64 "
    "--num_hidden_layers=2 --compile=False"
)
# of the repository's folders, those that the notebook does not need
LEFT_OUT = (".git", ".venv*", "__pycache__", "research", "results", "runs", "sweeps", "tests")


def execute(
    notebook: nbformat.NotebookNode, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Execute a notebook in a folder, and return what each code cell printed."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # nothing is downloaded, so that a package that is missing is an error
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    client = NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}})
    client.execute()
    return ["".join(o.get("text", "") for o in cell.get("outputs", [])) for cell in notebook.cells]


def list_pictures(cell: nbformat.NotebookNode) -> list[str]:
    """Return the PNG files that a cell shows, in base64."""
    return [o.data["image/png"] for o in cell.outputs if "image/png" in o.get("data", {})]


def test_the_notebook_trains_samples_and_draws_the_gates(tmp_path, monkeypatch):
    clone = tmp_path / "clone"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*LEFT_OUT))
    notebook = nbformat.read(clone / NOTEBOOK, as_version=4)
    parameters = notebook.cells[1]
    parameters.source = parameters.source.replace("--max_steps=800", FEW_STEPS)
    check = (
        "gates = draw_gates(CHANGED, 'def f', 5).axes[0].images[0].get_array()\n"
        "print(len(gates), bool(0 < gates.min() < gates.max() < 2), gates.std() > 0)"
    )
    notebook.cells.append(nbformat.v4.new_code_cell(check))
    printed = execute(notebook, clone / "docs", monkeypatch)
    _, _, _, _, training, loss_curve, samples, _, gates, _, changed, comparison, last = range(13)

    assert "step 2 | validation loss" in printed[training]
    assert printed[samples].startswith("def")
    assert "step 2 | validation loss" in printed[changed]
    num_pictures = {loss_curve: 1, gates: 1, comparison: 2}
    for index, expected in num_pictures.items():
        assert len(list_pictures(notebook.cells[index])) == expected
    # 2 blocks of two sublayers
    assert printed[last].strip() == "4 True True"
    [state] = clone.glob("runs/notebook_beta*/checkpoints/step_00000002/state.json")
    model_config = json.loads(state.read_text())["model_config"]
    assert (model_config["ddl_beta_init"], model_config["ddl_value_channels"]) == (0.5, 2)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_the_notebook_clones_the_repository_and_keeps_torch(tmp_path, monkeypatch):
    notebook = nbformat.read(ROOT / NOTEBOOK, as_version=4)
    del notebook.cells[3:]
    parameters = notebook.cells[1]
    parameters.source += f"\nREPOSITORY = {str(ROOT)!r}"
    printed = execute(notebook, tmp_path, monkeypatch)
    assert (tmp_path / "repository" / "train.py").is_file()
    assert "ERROR" not in printed[2]
    # a pinned torch would replace the one that Colab provides
    assert "torch==" not in notebook.cells[2].source


def test_the_notebook_is_short_and_stored_without_outputs():
    notebook = nbformat.read(ROOT / NOTEBOOK, as_version=4)
    assert len(notebook.cells) < 15
    assert not any(cell.get("outputs") for cell in notebook.cells)
