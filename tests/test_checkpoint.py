"""Checkpoints: complete or absent, without pickle, and refused when damaged or foreign."""

import multiprocessing
import os
import pickle
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import Trap, write_checksums
from safetensors.torch import load_file

from data import tokenizer
from model import build, weights
from training import checkpoint

TINY = {
    "vocab_size": 257,
    "block_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 4,
}
TINY |= {"hidden_size": 8}
STEM = "DDL-gpt-mha-rope"


def save(run, step):
    model = build(STEM, **TINY)
    state = {
        "step": step,
        "seconds": 1.0,
        "model": STEM,
        "model_config": TINY,
        "run_config": {},
        "corpus": {},
    }
    weights, moments = checkpoint.get_model_tensors(model), {"a:m": torch.arange(3.0)}
    path = checkpoint.save(
        run, weights, moments, state, tokenizer.to_json(tokenizer.byte_tokenizer())
    )
    return model, path


def test_round_trip(tmp_path):
    model, path = save(tmp_path, 7)
    assert path == tmp_path / "checkpoints" / "step_00000007"
    loaded, encoding, state = checkpoint.load_model(tmp_path, "cpu")
    assert not loaded.training
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for (name, a), (_, b) in zip(model.state_dict().items(), loaded.state_dict().items()):
        assert torch.equal(a, b), name
    assert encoding.n_vocab == 257
    assert state["step"] == 7
    assert checkpoint.load_tensors(path / "optimizer.safetensors")["a:m"].tolist() == [0, 1, 2]
    assert sorted(file.name for file in path.iterdir()) == [
        *(
            "SHA256SUMS",
            "model.safetensors",
            "optimizer.safetensors",
            "state.json",
            "tokenizer.json",
        )
    ]
    assert (
        subprocess.run(
            ["sha256sum", "-c", "SHA256SUMS"], cwd=path, check=False, capture_output=True
        ).returncode
        == 0
    )
    assert "lm_head.weight" not in load_file(path / "model.safetensors")


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    _, path = save(tmp_path, 5)
    before = (path / "model.safetensors").read_bytes()
    monkeypatch.setattr(checkpoint, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 5)
    assert (path / "model.safetensors").read_bytes() == before
    assert checkpoint.list_checkpoints(tmp_path) == [path]


def damaged_copies(path, tmp_path, count):
    """Copies of a checkpoint, each with one file changed: a byte flipped, cut short, grown, removed
    or emptied.
    """
    draw = random.Random(0)
    for number in range(count):
        copy = tmp_path / f"copy_{number}"
        shutil.copytree(path, copy)
        file = draw.choice(sorted(copy.iterdir()))
        content = bytearray(file.read_bytes())
        place = draw.randrange(len(content))
        match number % 5:
            case 0 | 1:
                content[place] ^= 1 << draw.randrange(8)
                file.write_bytes(content)
            case 2:
                file.write_bytes(content[:place])
            case 3:
                file.write_bytes(bytes(content) + b"\n")
            case 4:
                file.unlink()
        yield copy


def test_no_damage_passes(tmp_path):
    _, path = save(tmp_path / "run", 1)
    checkpoint.find(path)
    for copy in damaged_copies(path, tmp_path, 25):
        with pytest.raises(ValueError, match=r"is damaged|no checkpoint|is missing"):
            checkpoint.load_model(copy, "cpu")


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_taken(tmp_path, capsys):
    for step in (1, 2, 3):
        save(tmp_path, step)
    weights = tmp_path / "checkpoints" / "step_00000003" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (tmp_path / "checkpoints" / "step_00000002" / "optimizer.safetensors").unlink()
    assert checkpoint.find(tmp_path).name == "step_00000001"
    lines = capsys.readouterr().err.splitlines()
    assert "step_00000003 is damaged: the checksum of model.safetensors does not match" in lines[0]
    assert "step_00000002 is damaged: optimizer.safetensors is missing" in lines[1]
    (tmp_path / "checkpoints" / "step_00000001" / "state.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no valid checkpoint"):
        checkpoint.find(tmp_path)


def test_loading_executes_nothing(tmp_path):
    """Of a hostile checkpoint, whose sums are right; test_hostile.py has more of its files."""
    trap = tmp_path / "executed"
    payload = pickle.dumps(Trap(trap))
    _, path = save(tmp_path / "run", 1)
    (path / "optimizer.safetensors").write_bytes(payload)
    write_checksums(path)
    with pytest.raises(ValueError, match=r"optimizer\.safetensors is missing or damaged"):
        checkpoint.load_tensors(checkpoint.find(path) / "optimizer.safetensors")
    assert not trap.exists()


def die_while_saving(run: Path, calls: int) -> None:
    def counted(function):
        def call(*arguments, **keys):
            nonlocal calls
            calls -= "step_" in str(arguments[0])
            if calls == 0:
                os._exit(9)
            return function(*arguments, **keys)

        return call

    Path.replace, shutil.rmtree = counted(Path.replace), counted(shutil.rmtree)
    save(run, 1)


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_saving_a_step_again_never_leaves_none(tmp_path, call):
    """The process, a fork of this one, dies before each of the calls that rename or remove a
    folder.
    """
    save(tmp_path, 1)
    process = multiprocessing.get_context("fork").Process(
        target=die_while_saving, args=(tmp_path, call)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    found = checkpoint.find(tmp_path)
    assert checkpoint.get_step(found) == 1
    assert checkpoint.load_model(found, "cpu")
    save(tmp_path, 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_the_newest_and_every_so_many_stay_and_other_things_are_let_be(tmp_path, capsys):
    for step in range(1, 10):
        save(tmp_path, step)
        checkpoint.remove_old(tmp_path, keep_last=2, keep_every=3)
    others = [
        tmp_path / "checkpoints" / name
        for name in ("step_00000020", "step_00000021.bak", "step_00000022.tmp")
    ]
    others[0].write_text("a file")
    for other in others[1:]:
        shutil.copytree(tmp_path / "checkpoints" / "step_00000003", other)
    assert checkpoint.find(tmp_path).name == "step_00000009"
    assert [checkpoint.get_step(path) for path in checkpoint.list_checkpoints(tmp_path)] == [
        3,
        6,
        8,
        9,
    ]
    checkpoint.remove_old(tmp_path, keep_last=1)
    assert checkpoint.list_checkpoints(tmp_path) == [tmp_path / "checkpoints" / "step_00000009"]
    assert all(other.exists() for other in others)
    assert not capsys.readouterr().err


def test_damaged_newer_checkpoints_do_not_push_out_good_ones(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    start = tmp_path / "checkpoints" / "step_00000001"
    checkpoint.rename_damaged(tmp_path, start)
    assert checkpoint.list_checkpoints(tmp_path) == [start]
    assert (tmp_path / "checkpoints" / "damaged_step_00000003").is_dir()
    checkpoint.rename_damaged(tmp_path, None)
    assert checkpoint.list_checkpoints(tmp_path) == [start]


def test_a_file_that_cannot_be_read_is_damage(tmp_path):
    _, path = save(tmp_path, 1)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to("/proc/self/mem")  # opens, and fails to read
    with pytest.raises(ValueError, match=r"is damaged: .* unreadable \(Input/output error\)"):
        checkpoint.verify(path)


def test_another_shape_is_refused(tmp_path):
    _, path = save(tmp_path, 1)
    with pytest.raises(ValueError, match="does not fit the model"):
        weights.load_into(build(STEM, **{**TINY, "num_hidden_layers": 2}), path)
    with pytest.raises(ValueError, match=r"does not fit the model: transformer\.wte\.weight"):
        weights.load_into(build(STEM, **{**TINY, "vocab_size": 300}), path)
