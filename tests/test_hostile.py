"""Folders that are damaged, foreign or hostile: one line that names file and fault, and nothing in them executed."""

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from conftest import one_line_error, script, sign
from safetensors.torch import load_file, save_file
from test_checkpoint import Trap
from test_export import CC, exported, noisy, save_run

from model import released
from training import checkpoint

KINDS = ["checkpoint", "exported", "released"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One folder of each kind, of the same model."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("whole")
    made = noisy(CC, {})
    save_run(folder / "run", made, CC)
    shutil.copytree(folder / "run" / "checkpoints" / "step_00000007", folder / "checkpoint")
    exported(folder / "run", folder / "exported")
    (folder / "released").mkdir()
    tensors = {name: value.clone() for name, value in released.state_dict(made).items()}
    save_file(tensors, folder / "released" / "model.safetensors")
    config = {**vars(made.config), "model_type": "x", "ddl_state_shortconv_kernel_size": 4}
    (folder / "released" / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "exported" / "tokenizer.json", folder / "released")
    return folder


@pytest.fixture(params=KINDS)
def folder(request, whole, tmp_path):
    return Path(shutil.copytree(whole / request.param, tmp_path / request.param))


def refused(folder: Path) -> str:
    """What loading says; a checkpoint's sums are right, as a hostile one's would be."""
    if (folder / "state.json").exists() and not (folder / "model.safetensors").is_symlink():
        sign(folder)
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


def change_config(folder: Path, **keys) -> None:
    """Of the model, wherever the folder keeps it."""
    path = folder / ("state.json" if (folder / "state.json").exists() else "config.json")
    content = json.loads(path.read_text())
    content.get("model_config", content).update(keys)
    path.write_text(json.dumps(content))


def test_whole_folders_load(folder):
    made, encoding, state = checkpoint.load_model(folder, "cpu")
    assert state["model"] == CC
    assert encoding.n_vocab == 257
    assert made.num_parameters() > 0


def pickles(trap: Path) -> list[bytes]:
    archive, old = io.BytesIO(), io.BytesIO()
    torch.save({"ln_f.weight": Trap(trap)}, archive)
    torch.save({"ln_f.weight": Trap(trap)}, old, _use_new_zipfile_serialization=False)
    return [pickle.dumps(Trap(trap)), archive.getvalue(), old.getvalue()]


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "pytorch_model.bin"])
def test_pickles_are_not_executed(folder, name, number, tmp_path):
    trap = tmp_path / "executed"
    pickle.loads(pickle.dumps(Trap(trap)))
    assert trap.exists()  # the payload works
    trap.unlink()
    if folder.name == "checkpoint" and name == "config.json":
        name = "state.json"
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickles(trap)[number])
    if folder.name == "checkpoint" and name == "pytorch_model.bin":
        with pytest.raises(ValueError, match="is missing"):  # ours is safetensors or nothing
            checkpoint.load_model(folder, "cpu")
    else:
        assert name in refused(folder)
    assert not trap.exists()


@pytest.mark.parametrize("cut", [0, 7, 100, -9, -1])
def test_truncated_weights(folder, cut):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:cut])
    assert "model.safetensors is damaged or unreadable" in refused(folder)


@pytest.mark.parametrize("length", [0, 2**20, 2**62])
def test_headers_that_lie_about_their_length(folder, length):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + content[8:])
    assert "model.safetensors is damaged or unreadable" in refused(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none(folder, value):
    def spoil(tensors):
        tensors["transformer.h.1.mlp.c_fc1.weight"][3, 2] = value

    change_weights(folder, spoil)
    assert "model.safetensors: transformer.h.1.mlp.c_fc1.weight holds NaN or infinite numbers" in refused(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("transformer.h.0.ln_2.weight"), "transformer.h.0.ln_2.weight is missing"),
        (lambda t: t.update({"extra": torch.ones(1)}), "'extra' is not one of its weights"),
        (lambda t: t.update({"y" * 10**5: torch.ones(1)}), "yyy... is not one of its weights"),
        (lambda t: t.update({"ln_f.weight": torch.ones(13)}), "ln_f.weight is (13,), needed (12,)"),
        (lambda t: t.update({"ln_f.weight": torch.ones(12, 1)}), "ln_f.weight is (12, 1), needed (12,)"),
        (
            lambda t: t.update({"ln_f.weight": torch.ones(12, dtype=torch.int64)}),
            "'ln_f.weight' is not a tensor of",
        ),
        (lambda t: t.update({"ln_f.weight": torch.ones(12, dtype=torch.bool)}), "'ln_f.weight' is not a tensor of"),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(260, 12)}),
            "lm_head.weight differs from transformer.wte.weight",
        ),
    ],
)
def test_weights_of_another_model(folder, change, message):
    change_weights(folder, change)
    assert message in refused(folder)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_hidden_layers": 10**9}, "transformer.h.2 is missing, the config has num_hidden_layers=1000000000"),
        ({"num_hidden_layers": 1}, "is not one of its weights"),
        ({"hidden_size": 10**9}, "sizes that no model can have"),
        ({"hidden_size": 10**40}, "hidden_size has more than 63 bits"),
        ({"block_size": 2**20, "head_dim": 2**12}, "block_size=1048576 is more than"),
        ({"mup": True, "hidden_size_base": 10**400}, "hidden_size_base has more than 63 bits"),
        ({"hidden_size": 24}, "needed ("),
        ({"vocab_size": 10**12}, "needed (1000000000000, 12)"),
        ({"head_dim": 10**6}, "needed"),
        ({"ddl_value_channels": 10**7}, "needed"),
        ({"block_size": 10**12}, "block_size=1000000000000 is more than"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: give 1 or more"),
        ({"hidden_size": "12"}, "hidden_size='12': give a whole number"),
        ({"hidden_size": None}, "hidden_size=None: give a whole number"),
        ({"hidden_size": [12]}, "hidden_size=[12]: give a whole number"),
        ({"mup": 1}, "mup=1: give True or False"),
        ({"rope_base": float("nan")}, "rope_base=nan: give a finite number"),
        ({"ddl_map": {"k": "v"}}, "ddl_map="),
    ],
)
def test_configs_that_cannot_be(folder, keys, message):
    change_config(folder, **keys)
    assert message in refused(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[1]", "no JSON object"),
        ("null", "no JSON object"),
        ("[" * 100_000, "no JSON"),
        ('{"a": ' * 100_000, "no JSON"),
        ('{"step": ' + "9" * 9999 + "}", "no JSON"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_json_that_is_none(folder, text, message, name):
    if folder.name == "checkpoint" and name == "config.json":
        name = "state.json"
    (folder / name).write_text(text)
    line = refused(folder)
    assert message in line
    assert name in line


@pytest.mark.parametrize(
    ("key", "value"), [("model", 5), ("model_config", [1]), ("step", "7"), ("corpus", None), ("seconds", {})]
)
def test_states_of_wrong_types(whole, tmp_path, key, value):
    folder = Path(shutil.copytree(whole / "checkpoint", tmp_path / "c"))
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, key: value}))
    assert f"state.json is damaged, {key} is no" in refused(folder)


@pytest.mark.parametrize("stem", [5, [CC], "x" * 1000, "../../evil-stem", "os-path"])
def test_variants_that_are_none(whole, tmp_path, stem):
    folder = Path(shutil.copytree(whole / "exported", tmp_path / "e"))
    change_config(folder, stem=stem)
    with pytest.raises(ValueError, match=r"stem=|is not a variant"):
        checkpoint.load_model(folder, "cpu")


def vocabulary(change):
    def apply(content):
        change(content["model"]["vocab"])

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (vocabulary(lambda v: v.pop("a")), "its added tokens"),
        (vocabulary(lambda v: v.update(a=300)), "its ids have gaps"),
        (vocabulary(lambda v: v.update(a="0")), "an id no number"),
        (vocabulary(lambda v: v.update({"尺": v.pop("a")})), "no tokenizer that export.py writes"),
        (vocabulary(lambda v: v.update({"ab": v.pop("a")})), "it lacks bytes"),
        (lambda c: c.update(added_tokens=[]), "its added tokens"),
        (lambda c: c.update(normalizer={"type": "NFC"}), "it changes text before it splits it"),
        (lambda c: c.update(pre_tokenizer=None), "no tokenizer that export.py writes"),
        (lambda c: c.update(model=[]), "no tokenizer that export.py writes"),
        (lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"), "splits text in another way"),
        (lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "(a"}), "tokenizer.json"),
    ],
)
def test_tokenizers_that_are_none(whole, tmp_path, change, message):
    folder = Path(shutil.copytree(whole / "exported", tmp_path / "e"))
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert message in refused(folder)


def test_a_tokenizer_of_another_size(folder):
    content = json.loads((folder / "tokenizer.json").read_text())
    if "tokens" in content:
        content["tokens"] += ["YWI=", "YWM=", "YWQ=", "YWU="]
    else:
        content["model"]["vocab"] |= {"ab": 256, "ac": 257, "ad": 258, "ae": 259}
        content["added_tokens"][0]["id"] = 260
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert "its tokenizer has 261 tokens, its model vocab_size=260" in refused(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_links_that_lead_nowhere(folder, name):
    if folder.name == "checkpoint" and name == "config.json":
        name = "state.json"
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    with pytest.raises(ValueError, match=r"model\.safetensors|tokenizer\.json|config\.json|state\.json|no checkpoint"):
        checkpoint.load_model(folder, "cpu")


def test_links_to_devices_are_not_read(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        checkpoint.load_model(folder, "cpu")


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(1, 1).expand(2**28, 16), torch.zeros(4, 4).to_sparse(), torch.zeros(4).to(torch.float8_e4m3fn)],
)
def test_tensors_of_odd_kinds(whole, tmp_path, tensor):
    folder = Path(shutil.copytree(whole / "released", tmp_path / "r"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, "transformer.wte.weight": tensor}, folder / "pytorch_model.bin")
    assert "transformer.wte.weight" in refused(folder)


def test_shapes_that_overflow(folder):
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    for shape in ([0, 2**64 - 1], [0, 2**40, 2**40]):
        header = json.loads(data[8 : 8 + length])
        header["ln_f.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        refused(folder)


def sharded(folder: Path) -> dict:
    """The weights as two files and an index, as transformers writes large models."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, parts = sorted(tensors), ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    places = {name: parts[number % 2] for number, name in enumerate(names)}
    for part in parts:
        save_file({name: tensors[name] for name in names if places[name] == part}, folder / part)
    return places


@pytest.mark.parametrize("kind", ["exported", "released"])
def test_shards_are_read_by_their_index(whole, tmp_path, kind):
    folder = Path(shutil.copytree(whole / kind, tmp_path / kind))
    places, index = sharded(folder), folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    made, before = (checkpoint.load_model(path, "cpu")[0].state_dict() for path in (folder, whole / kind))
    assert all(torch.equal(made[name], before[name]) for name in before)
    outside = tmp_path / "outside.safetensors"
    shutil.copy(folder / "model-00001-of-00002.safetensors", outside)
    for name in ("../outside.safetensors", str(outside), "config.json", "..", 5, "x\0.safetensors", None):
        index.write_text(json.dumps({"weight_map": {**places, "ln_f.weight": name}}))
        assert "model.safetensors.index.json" in refused(folder) or name == "x\0.safetensors"
    index.write_text(json.dumps({"weight_map": []}))
    assert "is not the name of a safetensors file" in refused(folder)
    index.write_text(json.dumps({"weight_map": {**places, "ln_f.weight": "model-3.safetensors"}}))
    assert "model-3.safetensors is damaged or unreadable" in refused(folder)
    index.write_text(json.dumps({"weight_map": {"a": places["transformer.wte.weight"]}}))
    assert "is missing" in refused(folder)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-3.safetensors")
    index.write_text(json.dumps({"weight_map": {**places, "x": "model-3.safetensors"}}))
    assert "is in another file as well" in refused(folder)


def test_pairs_that_do_not_fit(whole, tmp_path):
    folder = Path(shutil.copytree(whole / "released", tmp_path / "r"))
    change_weights(folder, lambda tensors: tensors.update({"readout.read": torch.ones(3)}))
    with pytest.raises(ValueError, match=r"readout\.read is \(3,\), readout\.weight \(12, 4\): no pair"):
        checkpoint.load_model(folder, "cpu")


def test_a_pickled_state_dict_is_read(whole, tmp_path):
    """pytorch_model.bin with nothing but tensors; anything else in it is refused."""
    folder = Path(shutil.copytree(whole / "released", tmp_path / "r"))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    made, before = (checkpoint.load_model(path, "cpu")[0].state_dict() for path in (folder, whole / "released"))
    assert all(torch.equal(made[name], before[name]) for name in before)
    for content, message in (
        ({**tensors, "ln_f.weight": 5}, "'ln_f.weight' is not a tensor"),
        ({**tensors, "ln_f.weight": torch.ones(12).long()}, "'ln_f.weight' is not a tensor"),
        ({**tensors, "ln_f.weight": torch.ones(1, 12)}, "ln_f.weight is (1, 12), needed (12,)"),
        ([1], "holds no tensors by name"),
        ({5: torch.ones(1)}, "holds no tensors by name"),
    ):
        torch.save(content, folder / "pytorch_model.bin")
        assert message in refused(folder)


def test_the_scripts_end_with_one_line(whole, tmp_path):
    folder = Path(shutil.copytree(whole / "exported", tmp_path / "e"))
    trap = tmp_path / "executed"
    (folder / "model.safetensors").write_bytes(pickle.dumps(Trap(trap)))
    for name in ("stem.py", "modeling_ddl.py", "gpt.py"):
        (folder / name).write_text(f"open({str(trap)!r}, 'w')")
    line = one_line_error(script("sample.py", folder, "--device=cpu"))
    assert "model.safetensors is damaged or unreadable" in line
    line = one_line_error(script("export.py", folder, tmp_path / "out"))
    assert "model.safetensors is damaged or unreadable" in line
    assert not trap.exists()
    assert not (tmp_path / "out").exists()
    assert sorted(os.listdir(tmp_path)) == ["e"]
