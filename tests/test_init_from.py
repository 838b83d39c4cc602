"""Test training from the weights of a folder: the settings, the weights and that it is read once."""

import shutil
from pathlib import Path

import pytest
import torch
from export_helpers import export_run, save_released, save_run
from helpers import SMALL, configure, small_run
from safetensors.torch import load_file, save_file
from training_runs import read_state, read_weights, run_train, training_error

from data import tokenizer
from model import build
from training import settings

MODEL_NAME = "DDL-gpt-mha-rope-CC-EC"
SETTINGS = {**SMALL, "ddl_value_channels": 2, "mup": True, "hidden_size_base": 24}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Save one model as a run, as exported folders (float32 and bfloat16) and as a released one."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("weights")
    model = build(MODEL_NAME, **SETTINGS)
    save_run(folder / "run", model, MODEL_NAME)
    export_run(folder / "run", folder / "exported")
    export_run(folder / "run", folder / "rounded", "--dtype=bfloat16")
    save_released(model, folder / "released")
    return folder


def arguments_without_model(corpus: Path, out: Path, **changes) -> list[str]:
    """Return arguments of train.py that leave the settings of the model to the folder."""
    model_keys = {f"--{key}" for key in ("model", *SMALL) if key not in changes}
    return [
        argument
        for argument in small_run(corpus, out, **changes)
        if argument.partition("=")[0] not in model_keys
    ]


@pytest.mark.parametrize("kind", ["rounded", "released"])
def test_settings_and_weights_are_those_of_the_folder(corpus, folders, tmp_path, kind):
    # with a learning rate of zero, the checkpoint of the first step has the folder's weights
    keys = {"init_from": folders / kind, "learning_rate": 0, "max_steps": 1}
    run_train(*arguments_without_model(corpus, tmp_path, **keys))
    state = read_state(tmp_path)
    assert state["step"] == 1
    assert state["model"] == MODEL_NAME
    assert state["model_config"] == vars(build(MODEL_NAME, **SETTINGS).config)
    expected = load_file(folders / "exported" / "model.safetensors")
    tolerance = 1e-6 if kind == "released" else 0
    for name, weight in read_weights(tmp_path).items():
        expected_weight = expected[name]
        if kind == "rounded":
            expected_weight = expected_weight.bfloat16().float()
        torch.testing.assert_close(weight, expected_weight, rtol=0, atol=tolerance)


def test_a_resumed_run_does_not_need_the_folder(corpus, folders, tmp_path):
    source = shutil.copytree(folders / "exported", tmp_path / "source")
    out = tmp_path / "out"
    arguments = arguments_without_model(
        corpus, out, init_from=source, resume="auto", checkpoint_interval=2
    )
    run_train(*arguments)
    expected = read_weights(out)
    # the optimizer has started with step 1
    state = read_weights(out, 4, "optimizer.safetensors")
    assert {float(value) for name, value in state.items() if name.endswith("step")} == {4.0}

    shutil.rmtree(source)
    # the run resumes at the checkpoint before this one
    (out / "checkpoints" / "step_00000006" / "state.json").write_text("")
    run_train(*arguments)
    for name, weight in read_weights(out).items():
        assert torch.equal(weight, expected[name]), name


def test_the_context_may_be_longer_than_that_of_the_folder(corpus, folders, tmp_path):
    """The dry run, which writes nothing, computes the RoPE tables for the longer context."""
    out = tmp_path / "out"
    arguments = arguments_without_model(
        corpus, out, init_from=folders / "run", block_size=40, dry_run=True
    )
    assert "4 sequences x 40 tokens" in run_train(*arguments)
    assert not out.exists()


def test_contradictions_are_refused_by_name(corpus, folders, tmp_path):
    keys = {"init_from": folders / "exported", "hidden_size": 24, "model": "DDL-gpt-mha-rope"}
    message = (
        r"trained with hidden_size=12 \(not 24\), "
        r"model='DDL-gpt-mha-rope-CC-EC' \(not 'DDL-gpt-mha-rope'\)"
    )
    with pytest.raises(ValueError, match=message):
        configure(arguments_without_model(corpus, tmp_path, **keys))


def test_the_folder_decides_what_a_config_file_says_otherwise(folders, tmp_path):
    """A recipe for models of one size can be applied to weights of another."""
    config_file = tmp_path / "mine.py"
    config_file.write_text(
        f"init_from = {str(folders / 'run')!r}\nhidden_size = 24\nlearning_rate = 0.5\n"
    )
    resolved = settings.resolve(settings.read_arguments([str(config_file)]))
    assert vars(resolved.model_config) == vars(build(MODEL_NAME, **SETTINGS).config)
    assert resolved.config.learning_rate == 0.5
    [note] = resolved.notes
    assert note.startswith("the run keeps hidden_size=12 (not 24), although")


def test_another_tokenizer_is_refused(corpus, tmp_path):
    encoding = tokenizer.train_byte_pairs(["ab ab ab"] * 5, 258)
    save_run(tmp_path / "run", build("gpt-mha-rope", **SMALL), "gpt-mha-rope", encoding)
    arguments = arguments_without_model(corpus, tmp_path / "out", init_from=tmp_path / "run")
    line = training_error(*arguments)
    assert "was trained with the tokenizer bpe258" in line
    assert "was tokenized with bytes" in line
    assert not (tmp_path / "out").exists()


def test_damaged_weights_end_with_one_line(corpus, folders, tmp_path):
    folder = Path(shutil.copytree(folders / "exported", tmp_path / "e"))
    tensors = load_file(folder / "model.safetensors")
    tensors["ln_f.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    line = training_error(*arguments_without_model(corpus, tmp_path / "out", init_from=folder))
    assert "model.safetensors: ln_f.weight holds NaN or infinite numbers" in line
    assert not (tmp_path / "out").exists()
