"""Folders of models that are damaged or foreign.

Loading one must raise an error of one line that names the folder and the fault, and must not execute
anything in it.
"""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from export_helpers import CC, build_noisy, export_run, save_released, save_run
from helpers import Trap, write_checksums
from safetensors.torch import load_file, save_file

import model_folder

KINDS = ["checkpoint", "exported", "released"]


@pytest.fixture(scope="module")
def valid_folders(tmp_path_factory) -> Path:
    """Return a folder with one folder of each kind, all of the same model."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("valid")
    model = build_noisy(CC, {})
    save_run(folder / "run", model, CC)
    shutil.copytree(folder / "run" / "checkpoints" / "step_00000007", folder / "checkpoint")
    export_run(folder / "run", folder / "exported")
    save_released(model, folder / "released", model_type="x", ddl_state_shortconv_kernel_size=4)
    shutil.copy(folder / "exported" / "tokenizer.json", folder / "released")
    return folder


@pytest.fixture(params=KINDS)
def folder(request, valid_folders, tmp_path) -> Path:
    """Return a copy of a valid folder, of each kind in turn."""
    model_folder.load_model(valid_folders / request.param, "cpu")
    return Path(shutil.copytree(valid_folders / request.param, tmp_path / request.param))


def read_refusal(folder: Path) -> str:
    """Check that the folder cannot be loaded, and return the error.

    The checksums of a checkpoint are made valid, as those of a hostile one would be.
    """
    if (folder / "state.json").exists():
        write_checksums(folder)
    with pytest.raises(ValueError, match=r".+") as error:
        model_folder.load_model(folder, "cpu")
    assert str(folder) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_pickles_are_not_executed(folder, tmp_path, name):
    trap = tmp_path / "executed"
    (folder / name).write_bytes(pickle.dumps(Trap(trap)))
    assert name in read_refusal(folder)
    assert not trap.exists()


def test_truncated_weights_are_refused(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-10])
    assert "model.safetensors is damaged or unreadable" in read_refusal(folder)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"extra": torch.ones(2)}, "extra is not one of its weights"),
        ({"ln_f.weight": torch.ones(3)}, "ln_f.weight has the shape (3,), expected (12,)"),
    ],
)
def test_weights_of_another_model_are_refused(folder, changed, message):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **changed}, folder / "model.safetensors")
    assert f"does not fit {CC}: {message}" in read_refusal(folder)


def test_tied_weights_that_differ_are_refused(valid_folders, tmp_path):
    folder = shutil.copytree(valid_folders / "exported", tmp_path / "exported")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["transformer.wte.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    model_folder.load_model(folder, "cpu")
    save_file({**tensors, "lm_head.weight": embedding + 1}, folder / "model.safetensors")
    assert "differs from" in read_refusal(folder)


def test_a_sharded_folder_loads(valid_folders, tmp_path):
    folder = shutil.copytree(valid_folders / "exported", tmp_path / "exported")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"part_{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for part in set(weight_map.values()):
        names = [name for name in tensors if weight_map[name] == part]
        save_file({name: tensors[name] for name in names}, folder / part)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    loaded, _, _ = model_folder.load_model(folder, "cpu")
    assert torch.equal(loaded.state_dict()["ln_f.weight"], tensors["ln_f.weight"])
