"""Folders that are damaged, foreign or hostile: one line that names file and fault, and nothing in
them executed.
"""

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from export_helpers import CC, build_noisy, export_run, save_released, save_run
from helpers import Trap, write_checksums
from safetensors.torch import load_file, save_file

from training import checkpoint

KINDS = ["checkpoint", "exported", "released"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One folder of each kind, of the same model."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("whole")
    made = build_noisy(CC, {})
    save_run(folder / "run", made, CC)
    shutil.copytree(folder / "run" / "checkpoints" / "step_00000007", folder / "checkpoint")
    export_run(folder / "run", folder / "exported")
    save_released(made, folder / "released", model_type="x", ddl_state_shortconv_kernel_size=4)
    shutil.copy(folder / "exported" / "tokenizer.json", folder / "released")
    return folder


@pytest.fixture(params=KINDS)
def folder(request, whole, tmp_path):
    return Path(shutil.copytree(whole / request.param, tmp_path / request.param))


def refused(folder: Path) -> str:
    """What loading says; a checkpoint's sums are right, as a hostile one's would be."""
    if (folder / "state.json").exists() and not (folder / "model.safetensors").is_symlink():
        write_checksums(folder)
    with pytest.raises(ValueError, match=r".+") as error:
        checkpoint.load_model(folder, "cpu")
    line = " ".join(str(error.value).split())
    assert str(folder) in line
    assert len(line) < 500
    return line


def change_weights(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def config_of(folder: Path) -> Path:
    """The file with the model's keys."""
    return folder / ("state.json" if (folder / "state.json").exists() else "config.json")


def change_config(folder: Path, **keys) -> None:
    content = json.loads(config_of(folder).read_text())
    content.get("model_config", content).update(keys)
    config_of(folder).write_text(json.dumps(content))


def test_whole_folders_load(folder):
    made, encoding, state = checkpoint.load_model(folder, "cpu")
    assert state["model"] == CC
    assert encoding.n_vocab == 257
    assert made.num_parameters() > 0


def archive(trap: Trap) -> bytes:
    """As torch.save pickles it."""
    content = io.BytesIO()
    torch.save({"ln_f.weight": trap}, content)
    return content.getvalue()


@pytest.mark.parametrize("packed", [pickle.dumps, archive])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "config.json", "pytorch_model.bin"]
)
def test_pickles_are_not_executed(folder, name, packed, tmp_path):
    trap = tmp_path / "executed"
    pickle.loads(pickle.dumps(Trap(trap)))
    assert trap.exists()  # the payload works
    trap.unlink()
    name = config_of(folder).name if name == "config.json" else name
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(packed(Trap(trap)))
    if folder.name == "checkpoint" and name == "pytorch_model.bin":
        with pytest.raises(ValueError, match="is missing"):  # ours is safetensors or nothing
            checkpoint.load_model(folder, "cpu")
    else:
        assert name in refused(folder)
    assert not trap.exists()


@pytest.mark.parametrize("cut", [0, 100, -1])
def test_truncated_weights(folder, cut):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:cut])
    assert "model.safetensors is damaged or unreadable" in refused(folder)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_non_finite_weights(folder, value):
    def spoil(tensors):
        tensors["transformer.h.1.mlp.c_fc1.weight"][3, 2] = value

    change_weights(folder, spoil)
    assert (
        "model.safetensors: transformer.h.1.mlp.c_fc1.weight holds NaN or infinite numbers"
        in refused(folder)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("transformer.h.0.ln_2.weight"), "transformer.h.0.ln_2.weight is missing"),
        (lambda t: t.update({"extra": torch.ones(1)}), "'extra' is not one of its weights"),
        (lambda t: t.update({"ln_f.weight": torch.ones(13)}), "ln_f.weight is (13,), needed (12,)"),
        (
            lambda t: t.update({"ln_f.weight": torch.ones(12, dtype=torch.int64)}),
            "'ln_f.weight' is not a tensor of",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(260, 12)}),
            "differs from transformer.wte.weight",
        ),
    ],
)
def test_weights_of_another_model(folder, change, message):
    change_weights(folder, change)
    assert message in refused(folder)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"num_hidden_layers": 10**9},
            "transformer.h.2 is missing, the config has num_hidden_layers=1000000000",
        ),
        ({"num_hidden_layers": 1}, "is not one of its weights"),
        ({"hidden_size": 24}, "needed ("),
        ({"block_size": 10**12}, "block_size=1000000000000 is more than"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: give 1 or more"),
        ({"hidden_size": "12"}, "hidden_size='12': give a whole number"),
        ({"hidden_size": None}, "hidden_size=None: give a whole number"),
        ({"mup": 1}, "mup=1: give True or False"),
        ({"rope_base": float("nan")}, "rope_base=nan: give a finite number"),
    ],
)
def test_configs_that_cannot_be(folder, keys, message):
    change_config(folder, **keys)
    assert message in refused(folder)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ("[1]", "does not hold a JSON object")]
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_files_that_are_not_json(folder, text, message, name):
    name = config_of(folder).name if name == "config.json" else name
    (folder / name).write_text(text)
    line = refused(folder)
    assert message in line
    assert name in line


@pytest.mark.parametrize(("key", "value"), [("model", 5), ("step", "7"), ("corpus", None)])
def test_states_of_wrong_types(whole, tmp_path, key, value):
    folder = Path(shutil.copytree(whole / "checkpoint", tmp_path / "c"))
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, key: value}))
    assert f"state.json is damaged: {key} is not" in refused(folder)


@pytest.mark.parametrize("stem", [5, "../../evil-stem"])
def test_unknown_variants(whole, tmp_path, stem):
    folder = Path(shutil.copytree(whole / "exported", tmp_path / "e"))
    change_config(folder, stem=stem)
    with pytest.raises(ValueError, match=r"stem=|is not a model variant"):
        checkpoint.load_model(folder, "cpu")


def change_tokenizer(folder: Path, change) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("model"), "tokenizer.json"),
        (lambda c: c["model"].update(vocab=5), "tokenizer.json"),
        (
            lambda c: c["model"]["vocab"].update(a=300),
            "the tokenizer has 301 tokens, but the model",
        ),
        (lambda c: c["model"]["vocab"].update(a=-1), "tokenizer.json"),
        (lambda c: c.update(added_tokens=[]), "end-of-text"),
    ],
)
def test_files_that_are_no_tokenizer(whole, tmp_path, change, message):
    folder = Path(shutil.copytree(whole / "exported", tmp_path / "e"))
    change_tokenizer(folder, change)
    assert message in refused(folder)


def test_a_tokenizer_of_another_form_is_read_by_the_library(whole, tmp_path):
    folder = Path(shutil.copytree(whole / "exported", tmp_path / "e"))
    change_tokenizer(folder, lambda c: c.update(normalizer={"type": "NFC"}))
    _, model_tokenizer, _ = checkpoint.load_model(folder, "cpu")
    assert model_tokenizer.encode("e\u0301") == model_tokenizer.encode("\u00e9")


def test_a_tokenizer_of_another_size(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    if "tokens" in content:
        content["tokens"] += ["YWI=", "YWM=", "YWQ=", "YWU="]
    else:
        content["model"]["vocab"] |= {"ab": 256, "ac": 257, "ad": 258, "ae": 259}
        content["added_tokens"][0]["id"] = 260
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert "the tokenizer has 261 tokens, but the model has only vocab_size=260" in refused(folder)


def sharded(folder: Path) -> dict:
    """The weights as two files and an index, as transformers writes large models."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, parts = (
        sorted(tensors),
        ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    )
    files = {name: parts[number % 2] for number, name in enumerate(names)}
    for part in parts:
        save_file({name: tensors[name] for name in names if files[name] == part}, folder / part)
    return files


@pytest.mark.parametrize("kind", ["exported", "released"])
def test_shards_are_read_by_their_index(whole, tmp_path, kind):
    folder = Path(shutil.copytree(whole / kind, tmp_path / kind))
    files, index = sharded(folder), folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    made, before = (
        checkpoint.load_model(path, "cpu")[0].state_dict() for path in (folder, whole / kind)
    )
    assert all(torch.equal(made[name], before[name]) for name in before)
    outside = tmp_path / "outside.safetensors"
    shutil.copy(folder / "model-00001-of-00002.safetensors", outside)
    for name in ("../outside.safetensors", str(outside), "config.json", 5):
        index.write_text(json.dumps({"weight_map": {**files, "ln_f.weight": name}}))
        assert "model.safetensors.index.json" in refused(folder)
    index.write_text(json.dumps({"weight_map": []}))
    assert "weight_map is [], needed the file of each tensor" in refused(folder)
    index.write_text(json.dumps({"weight_map": {**files, "ln_f.weight": "model-3.safetensors"}}))
    assert "model-3.safetensors is damaged or unreadable" in refused(folder)
    index.write_text(json.dumps({"weight_map": {"a": files["transformer.wte.weight"]}}))
    assert "is missing" in refused(folder)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-3.safetensors")
    index.write_text(json.dumps({"weight_map": {**files, "x": "model-3.safetensors"}}))
    assert "is in another file as well" in refused(folder)


def test_pairs_that_do_not_fit(whole, tmp_path):
    folder = Path(shutil.copytree(whole / "released", tmp_path / "r"))
    change_weights(folder, lambda tensors: tensors.update({"readout.read": torch.ones(3)}))
    with pytest.raises(
        ValueError, match=r"readout\.weight \(12, 4\) and readout\.read \(3,\) do not form a pair"
    ):
        checkpoint.load_model(folder, "cpu")


def test_code_in_a_folder_is_not_executed(whole, tmp_path):
    folder = Path(shutil.copytree(whole / "exported", tmp_path / "e"))
    for name in ("stem.py", "modeling_ddl.py", "gpt.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    checkpoint.load_model(folder, "cpu")
    assert os.listdir(tmp_path) == ["e"]
