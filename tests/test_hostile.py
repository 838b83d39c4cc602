"""Folders of models that are damaged, foreign or hostile.

Loading one must raise an error of one line that names the folder and the fault, and must not execute
anything in it.
"""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
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
    return Path(shutil.copytree(valid_folders / request.param, tmp_path / request.param))


@pytest.fixture
def exported_folder(valid_folders, tmp_path) -> Path:
    return Path(shutil.copytree(valid_folders / "exported", tmp_path / "exported"))


def read_refusal(folder: Path) -> str:
    """Check that the folder cannot be loaded, and return the error.

    The checksums of a checkpoint are made valid, as those of a hostile one would be.
    """
    if (folder / "state.json").exists() and not (folder / "model.safetensors").is_symlink():
        write_checksums(folder)
    with pytest.raises(ValueError, match=r".+") as error:
        model_folder.load_model(folder, "cpu")
    line = " ".join(str(error.value).split())
    assert str(folder) in line
    assert len(line) < 500
    return line


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def find_config(folder: Path) -> Path:
    """Return the file with the model's config."""
    state = folder / "state.json"
    return state if state.exists() else folder / "config.json"


def change_config(folder: Path, **settings) -> None:
    content = json.loads(find_config(folder).read_text())
    content.get("model_config", content).update(settings)
    find_config(folder).write_text(json.dumps(content))


def change_tokenizer(folder: Path, change: Callable[[dict], object]) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))


def test_valid_folders_load(folder):
    model, encoding, state = model_folder.load_model(folder, "cpu")
    assert state["model"] == CC
    assert encoding.n_vocab == 257
    assert model.num_parameters() > 0


# ---- pickles ----


def pickle_with_torch(trap: Trap) -> bytes:
    content = io.BytesIO()
    torch.save({"ln_f.weight": trap}, content)
    return content.getvalue()


def test_the_trap_is_executed_by_unpickling(tmp_path):
    """A pickle that is executed is seen by the tests below."""
    pickle.loads(pickle.dumps(Trap(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("name", "to_pickle"),
    [
        ("model.safetensors", pickle.dumps),
        ("model.safetensors", pickle_with_torch),
        ("tokenizer.json", pickle.dumps),
        ("config.json", pickle.dumps),
    ],
)
def test_pickles_are_not_executed(folder, name, to_pickle, tmp_path):
    trap = tmp_path / "executed"
    if name == "config.json":
        name = find_config(folder).name
    (folder / name).write_bytes(to_pickle(Trap(trap)))
    assert name in read_refusal(folder)
    assert not trap.exists()


@pytest.mark.parametrize("to_pickle", [pickle.dumps, pickle_with_torch])
def test_pickled_weights_are_not_executed(folder, to_pickle, tmp_path):
    trap = tmp_path / "executed"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(to_pickle(Trap(trap)))
    # a checkpoint has its weights in model.safetensors only
    message = "pytorch_model.bin is a pickle: save it as safetensors"
    if folder.name == "checkpoint":
        message = "is missing"
    with pytest.raises(ValueError, match=message):
        model_folder.load_model(folder, "cpu")
    assert not trap.exists()


# ---- weights ----


@pytest.mark.parametrize("cut", [0, 100, -1])
def test_truncated_weights(folder, cut):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:cut])
    assert "model.safetensors is damaged or unreadable" in read_refusal(folder)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_non_finite_weights(folder, value):
    name = "transformer.h.1.mlp.c_fc1.weight"

    def set_value(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][3, 2] = value

    change_weights(folder, set_value)
    message = f"model.safetensors: {name} holds NaN or infinite numbers"
    assert message in read_refusal(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("transformer.h.0.ln_2.weight"),
            "transformer.h.0.ln_2.weight is missing",
        ),
        (
            lambda tensors: tensors.update({"extra": torch.ones(1)}),
            "'extra' is not one of its weights",
        ),
        (
            lambda tensors: tensors.update({"ln_f.weight": torch.ones(13)}),
            "ln_f.weight has the shape (13,), expected (12,)",
        ),
        (
            lambda tensors: tensors.update({"ln_f.weight": torch.ones(12, dtype=torch.int64)}),
            "'ln_f.weight' is not a tensor of",
        ),
        (
            lambda tensors: tensors.update({"lm_head.weight": torch.ones(260, 12)}),
            "differs from transformer.wte.weight",
        ),
    ],
)
def test_weights_of_another_model(folder, change, message):
    change_weights(folder, change)
    assert message in read_refusal(folder)


# ---- configs and states ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_hidden_layers": 10**9},
            "transformer.h.2 is missing, but the config has num_hidden_layers=1000000000",
        ),
        ({"num_hidden_layers": 1}, "is not one of its weights"),
        ({"hidden_size": 24}, "expected ("),
        ({"block_size": 10**12}, "block_size=1000000000000 times head_dim=8 exceeds"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: give a number at least 1"),
        ({"hidden_size": "12"}, "hidden_size='12': give a whole number"),
        ({"hidden_size": None}, "hidden_size=None: give a whole number"),
        ({"mup": 1}, "mup=1: give True or False"),
        ({"rope_base": float("nan")}, "rope_base=nan: give a finite number"),
    ],
)
def test_impossible_configs(folder, settings, message):
    change_config(folder, **settings)
    assert message in read_refusal(folder)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not valid JSON"), ("[1]", "does not hold a JSON object")]
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_files_that_are_not_json(folder, text, message, name):
    if name == "config.json":
        name = find_config(folder).name
    (folder / name).write_text(text)
    line = read_refusal(folder)
    assert message in line
    assert name in line


@pytest.mark.parametrize(("key", "value"), [("model", 5), ("step", "7"), ("corpus", None)])
def test_states_of_wrong_types(valid_folders, tmp_path, key, value):
    folder = Path(shutil.copytree(valid_folders / "checkpoint", tmp_path / "checkpoint"))
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, key: value}))
    assert f"state.json is damaged: {key} is not" in read_refusal(folder)


@pytest.mark.parametrize("stem", [5, "../../evil-stem"])
def test_unknown_models(exported_folder, stem):
    change_config(exported_folder, stem=stem)
    with pytest.raises(ValueError, match=r"stem=|is not a model variant"):
        model_folder.load_model(exported_folder, "cpu")


# ---- tokenizers ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("model"), "tokenizer.json"),
        (lambda content: content["model"].update(vocab=5), "tokenizer.json"),
        (
            lambda content: content["model"]["vocab"].update(a=300),
            "the tokenizer has 301 tokens, but the model",
        ),
        (lambda content: content["model"]["vocab"].update(a=-1), "tokenizer.json"),
        (lambda content: content.update(added_tokens=[]), "end-of-text"),
    ],
)
def test_files_that_are_no_tokenizer(exported_folder, change, message):
    change_tokenizer(exported_folder, change)
    assert message in read_refusal(exported_folder)


def test_a_tokenizer_of_another_form_is_read_by_the_library(exported_folder):
    change_tokenizer(exported_folder, lambda content: content.update(normalizer={"type": "NFC"}))
    _, model_tokenizer, _ = model_folder.load_model(exported_folder, "cpu")
    assert model_tokenizer.encode("e\u0301") == model_tokenizer.encode("\u00e9")


def test_a_tokenizer_of_another_size(folder):
    def add_tokens(content: dict) -> None:
        if "tokens" in content:
            content["tokens"] += ["YWI=", "YWM=", "YWQ=", "YWU="]
        else:
            content["model"]["vocab"].update({"ab": 256, "ac": 257, "ad": 258, "ae": 259})
            content["added_tokens"][0]["id"] = 260

    change_tokenizer(folder, add_tokens)
    message = "the tokenizer has 261 tokens, but the model has only vocab_size=260"
    assert message in read_refusal(folder)


# ---- weights in several files ----

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(params=["exported", "released"])
def sharded_folder(request, valid_folders, tmp_path) -> Path:
    """Return a folder whose weights are two files, as transformers writes large models.

    The index with the file of each tensor is not written.
    """
    folder = Path(shutil.copytree(valid_folders / request.param, tmp_path / request.param))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[0::2]}, folder / SHARDS[0])
    save_file({name: tensors[name] for name in names[1::2]}, folder / SHARDS[1])
    return folder


def write_index(folder: Path, change: Callable[[dict], object] = dict) -> None:
    """Write the index of a sharded folder, with a change to the map from tensors to files."""
    weight_map = {name: shard for shard in SHARDS for name in load_file(folder / shard)}
    index = {"metadata": {}, "weight_map": change(weight_map)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_read_by_their_index(sharded_folder, valid_folders):
    write_index(sharded_folder)
    model, _, _ = model_folder.load_model(sharded_folder, "cpu")
    original, _, _ = model_folder.load_model(valid_folders / sharded_folder.name, "cpu")
    state = model.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in original.state_dict().items())


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight_map: {**weight_map, "ln_f.weight": "../outside.safetensors"}, INDEX),
        (lambda weight_map: {**weight_map, "ln_f.weight": "/outside.safetensors"}, INDEX),
        (lambda weight_map: {**weight_map, "ln_f.weight": "config.json"}, INDEX),
        (lambda weight_map: {**weight_map, "ln_f.weight": 5}, INDEX),
        (lambda weight_map: [], "weight_map is [], but must map each tensor to its file"),
        (
            lambda weight_map: {**weight_map, "ln_f.weight": "model-3.safetensors"},
            "model-3.safetensors is damaged or unreadable",
        ),
        (lambda weight_map: {"a": weight_map["transformer.wte.weight"]}, "is missing"),
        (lambda weight_map: {**weight_map, "x": "copy.safetensors"}, "is also in another file"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(sharded_folder, tmp_path, change, message):
    for copy in (tmp_path / "outside.safetensors", sharded_folder / "copy.safetensors"):
        shutil.copy(sharded_folder / SHARDS[0], copy)
    write_index(sharded_folder, change)
    assert message in read_refusal(sharded_folder)


# ---- releases and exports ----


def test_pairs_that_do_not_fit(valid_folders, tmp_path):
    folder = Path(shutil.copytree(valid_folders / "released", tmp_path / "released"))
    change_weights(folder, lambda tensors: tensors.update({"readout.read": torch.ones(3)}))
    assert "readout.read has the shape (3,), expected (4,)" in read_refusal(folder)


def test_code_in_a_folder_is_not_executed(exported_folder, tmp_path):
    for name in ("stem.py", "modeling_ddl.py", "gpt.py"):
        (exported_folder / name).write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    model_folder.load_model(exported_folder, "cpu")
    assert os.listdir(tmp_path) == ["exported"]
