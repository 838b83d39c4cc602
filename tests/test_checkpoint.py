"""Checkpoints: complete or absent, without pickle, and refused when damaged or foreign."""

import multiprocessing
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import SMALL
from safetensors.torch import load_file
from training_runs import write_checkpoint

import model_folder
from model import build
from training import checkpoint

MODEL_NAME = "DDL-gpt-mha-rope"
# the name of the folder of step 7 while it is written
TEMPORARY = "step_00000007.tmp"


def save(run, step, **tensors_of_other_files):
    """Save a checkpoint of a new model; return the model and the checkpoint's folder."""
    model = build(MODEL_NAME, **SMALL)
    tensors_by_file = {
        "model.safetensors": checkpoint.get_model_tensors(model),
        "optimizer.safetensors": {"a:m": torch.arange(3.0)},
        **tensors_of_other_files,
    }
    return model, write_checkpoint(run, step, tensors_by_file, MODEL_NAME, **SMALL)


def test_a_saved_model_is_loaded_with_its_tokenizer_and_state(tmp_path):
    model, path = save(tmp_path, 7)
    assert path == tmp_path / "checkpoints" / "step_00000007"
    loaded, encoding, state = model_folder.load_model(tmp_path, "cpu")
    assert not loaded.training
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for (name, a), (_, b) in zip(model.state_dict().items(), loaded.state_dict().items()):
        assert torch.equal(a, b), name
    assert encoding.n_vocab == 257
    assert state["step"] == 7
    assert checkpoint.load_tensors(path / "optimizer.safetensors")["a:m"].tolist() == [0, 1, 2]


def test_files_of_a_checkpoint(tmp_path):
    _, path = save(tmp_path, 7)
    expected = {"SHA256SUMS", *checkpoint.FILES}
    assert {file.name for file in path.iterdir()} == expected
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    command = ["sha256sum", "-c", "SHA256SUMS"]
    assert subprocess.run(command, cwd=path, check=False, capture_output=True).returncode == 0


def test_every_file_is_flushed_before_the_folder_is_renamed(tmp_path, monkeypatch):
    """Otherwise a power cut could leave a folder with partial files."""
    flushed = []
    monkeypatch.setattr(checkpoint, "fsync", lambda path: flushed.append(path.name))
    _, path = save(tmp_path, 7)
    *before_rename, after_rename = flushed
    assert sorted(before_rename) == sorted([*(file.name for file in path.iterdir()), TEMPORARY])
    assert after_rename == "checkpoints"


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    def fail(_):
        raise OSError("disk full")

    _, path = save(tmp_path, 5)
    weights = (path / "model.safetensors").read_bytes()
    monkeypatch.setattr(checkpoint, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 5)
    assert (path / "model.safetensors").read_bytes() == weights
    assert list(path.parent.iterdir()) == [path]  # nothing partial beside it


DAMAGES = {
    "a flipped bit": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "cut short": lambda content: content[:-1],
    "grown": lambda content: content + b"\n",
}


@pytest.mark.parametrize("damage", [*DAMAGES, "removed"])
@pytest.mark.parametrize("name", [*checkpoint.FILES, checkpoint.EMA_FILE])
def test_every_damage_is_noticed(tmp_path, name, damage):
    _, path = save(tmp_path, 1, **{checkpoint.EMA_FILE: {"weight": torch.ones(3)}})
    checkpoint.verify(path, to_resume=True)
    content = (path / name).read_bytes()
    (path / name).unlink()
    if damage != "removed":
        (path / name).write_bytes(DAMAGES[damage](content))
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.verify(path, to_resume=True)


@pytest.mark.parametrize(
    "removed_files", [["optimizer.safetensors"], ["optimizer.safetensors", "SHA256SUMS"]]
)
def test_a_model_is_loaded_without_the_files_that_only_resuming_needs(tmp_path, removed_files):
    model, path = save(tmp_path, 1)
    for name in removed_files:
        (path / name).unlink()
    loaded, _, _ = model_folder.load_model(tmp_path, "cpu")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    with pytest.raises(ValueError, match=f"{removed_files[-1]} is missing"):
        checkpoint.verify(path, to_resume=True)


@pytest.mark.parametrize("name", checkpoint.MODEL_FILES)
def test_a_model_without_one_of_its_files_is_refused(tmp_path, name):
    _, path = save(tmp_path, 1)
    (path / "SHA256SUMS").unlink()
    (path / name).unlink()
    with pytest.raises(ValueError, match=rf"{name} is missing"):
        model_folder.load_model(path, "cpu")


def test_damaged_newest_checkpoints_are_reported_and_an_older_one_is_used(tmp_path, capsys):
    for step in (1, 2, 3):
        save(tmp_path, step)
    weights = tmp_path / "checkpoints" / "step_00000003" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (tmp_path / "checkpoints" / "step_00000002" / "optimizer.safetensors").unlink()
    assert checkpoint.find_latest(tmp_path, to_resume=True).name == "step_00000001"
    lines = capsys.readouterr().err.splitlines()
    assert "step_00000003 is damaged: the checksum of model.safetensors does not match" in lines[0]
    assert "step_00000002 is damaged: optimizer.safetensors is missing" in lines[1]


def test_a_run_without_a_valid_checkpoint_is_refused(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "step_00000001" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no valid checkpoint"):
        checkpoint.find(tmp_path)


def die_while_saving(run: Path, fatal_call: int) -> None:
    """Save a checkpoint, but end the process at the n-th call that renames or removes its folder."""
    num_calls = 0

    def die_at_fatal_call(function):
        def call(*arguments, **options):
            nonlocal num_calls
            if "step_" in str(arguments[0]):
                num_calls += 1
            if num_calls == fatal_call:
                os._exit(9)
            return function(*arguments, **options)

        return call

    Path.replace = die_at_fatal_call(Path.replace)
    shutil.rmtree = die_at_fatal_call(shutil.rmtree)
    save(run, 1)


@pytest.mark.parametrize("fatal_call", [1, 2, 3, 4])
def test_a_process_that_dies_while_it_saves_a_step_again_leaves_a_checkpoint(tmp_path, fatal_call):
    save(tmp_path, 1)
    process = multiprocessing.get_context("fork").Process(
        target=die_while_saving, args=(tmp_path, fatal_call)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    remaining = checkpoint.find(tmp_path)
    assert checkpoint.get_step(remaining) == 1
    assert model_folder.load_model(remaining, "cpu")
    save(tmp_path, 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_the_newest_checkpoints_and_every_third_step_are_kept(tmp_path):
    for step in range(1, 10):
        save(tmp_path, step)
        checkpoint.remove_old(tmp_path, keep_last=2, keep_every=3)
    checkpoints = checkpoint.list_checkpoints(tmp_path)
    assert [checkpoint.get_step(path) for path in checkpoints] == [3, 6, 8, 9]


def test_other_files_and_folders_are_neither_found_nor_removed(tmp_path, capsys):
    for step in (8, 9):
        save(tmp_path, step)
    folder = tmp_path / "checkpoints"
    others = [folder / name for name in ("step_00000020", "step_00000021.bak", "step_00000022.tmp")]
    others[0].write_text("a file")
    for other in others[1:]:
        shutil.copytree(folder / "step_00000008", other)
    assert checkpoint.find(tmp_path) == folder / "step_00000009"
    checkpoint.remove_old(tmp_path, keep_last=1)
    assert checkpoint.list_checkpoints(tmp_path) == [folder / "step_00000009"]
    assert all(other.exists() for other in others)
    assert not capsys.readouterr().err
