"""Checkpoints: complete or absent, without pickle, and refused when damaged or foreign."""

import json

import pytest
import torch

from data import tokenizer
from model import build
from training import checkpoint

TINY = {"vocab_size": 257, "block_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 4}
TINY |= {"hidden_size": 8}
STEM = "DDL-gpt-mha-rope"


def save(run, step):
    model = build(STEM, **TINY)
    state = {"step": step, "seconds": 1.0, "model": STEM, "model_config": TINY, "run_config": {}, "corpus": {}}
    path = checkpoint.save(run, model, {"a:m": torch.arange(3.0)}, state, tokenizer.to_json(tokenizer.byte_tokenizer()))
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


def test_files_are_safetensors_and_json(tmp_path):
    _, path = save(tmp_path, 1)
    assert sorted(p.name for p in path.iterdir()) == [
        *("model.safetensors", "optimizer.safetensors", "state.json", "tokenizer.json")
    ]
    for name in ("model", "optimizer"):
        raw = (path / f"{name}.safetensors").read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])  # the format: length, JSON, data
        assert "lm_head.weight" not in header
    assert not list(tmp_path.rglob("*.tmp"))


def test_newest_wins_and_old_ones_go(tmp_path):
    for step in (1, 2, 10):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "step_00000011.tmp").mkdir()
    assert checkpoint.find(tmp_path).name == "step_00000010"
    checkpoint.remove_old(tmp_path, keep_last=2)
    assert [path.name for path in checkpoint.all_of(tmp_path)] == ["step_00000002", "step_00000010"]


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    _, path = save(tmp_path, 5)
    before = (path / "model.safetensors").read_bytes()
    monkeypatch.setattr(checkpoint, "sync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, 5)
    assert (path / "model.safetensors").read_bytes() == before
    assert checkpoint.all_of(tmp_path) == [path]


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_damage_is_reported(tmp_path, name):
    _, path = save(tmp_path, 1)
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="missing or damaged"):
        checkpoint.load_model(path, "cpu")


def test_a_state_without_its_keys_is_refused(tmp_path):
    _, path = save(tmp_path, 1)
    (path / "state.json").write_text('{"step": 1}')
    with pytest.raises(ValueError, match="corpus is gone"):
        checkpoint.read_state(path)


def test_another_shape_is_refused(tmp_path):
    _, path = save(tmp_path, 1)
    with pytest.raises(ValueError, match="does not fit the model"):
        checkpoint.load_weights(build(STEM, **{**TINY, "num_hidden_layers": 2}), path)
    with pytest.raises(ValueError, match=r"does not fit the model: transformer\.wte\.weight"):
        checkpoint.load_weights(build(STEM, **{**TINY, "vocab_size": 300}), path)
