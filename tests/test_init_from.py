"""Test training from the weights of a folder: the settings, the weights and that it is read once."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from export_helpers import export_run, save_released, save_run
from helpers import SMALL, configure, one_line_error, small_run
from in_process import call
from safetensors.torch import load_file, save_file

from data import tokenizer
from model import build
from training import checkpoint, settings

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


def run_train(arguments: list[str], exit_code: int = 0) -> str:
    """Run train.py in this process, expect an exit code and return what it prints."""
    result = call("train.py", *arguments)
    assert result.returncode == exit_code, result.stderr.decode()
    return result.stdout.decode() + result.stderr.decode()


def read_weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(out / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


def read_state(out: Path, step: int) -> dict:
    return json.loads((out / "checkpoints" / f"step_{step:08d}" / "state.json").read_text())


class UntrainedRun(NamedTuple):
    """A run of one step with a learning rate of zero: its checkpoint has the folder's weights."""

    kind: str
    folder: Path
    out: Path


@pytest.fixture(scope="module", params=["rounded", "released"])
def untrained_run(request, corpus, folders, tmp_path_factory) -> UntrainedRun:
    folder = folders / request.param
    out = tmp_path_factory.mktemp("untrained") / "out"
    arguments = arguments_without_model(
        corpus, out, init_from=folder, learning_rate=0, max_steps=1, eval_full=False
    )
    run_train(arguments)
    return UntrainedRun(request.param, folder, out)


def test_the_settings_are_those_of_the_folder(untrained_run):
    state = read_state(untrained_run.out, 1)
    assert state["step"] == 1
    assert state["model"] == MODEL_NAME
    assert state["model_config"] == vars(build(MODEL_NAME, **SETTINGS).config)
    assert state["run_config"]["init_from"] == str(untrained_run.folder)


def test_the_weights_are_those_of_the_folder(untrained_run, folders):
    expected = load_file(folders / "exported" / "model.safetensors")
    tolerance = 1e-6 if untrained_run.kind == "released" else 0
    for name, weight in read_weights(untrained_run.out, 1).items():
        expected_weight = expected[name]
        if untrained_run.kind == "rounded":
            expected_weight = expected_weight.bfloat16().float()
        torch.testing.assert_close(weight, expected_weight, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def model_with_pair():
    torch.manual_seed(4)
    return build(
        MODEL_NAME,
        **{**SETTINGS, "ddl_value_channels": 3},
        ddl_cc_read="pair",
        ddl_state_dv_shortconv_causal=True,
        ddl_state_shortconv_kernel_size=2,
    )


@pytest.fixture(scope="module")
def released_pair(model_with_pair, tmp_path_factory) -> Path:
    """Save a model whose read is a pair of a convolution and a vector, as the authors release it."""
    return save_released(model_with_pair, tmp_path_factory.mktemp("pair") / "released")


def test_a_released_pair_is_read_as_a_pair_and_trained(
    corpus, released_pair, model_with_pair, tmp_path
):
    """Train both of its parameters, as the authors' code does; muP doubles a step of 1e-5."""
    arguments = arguments_without_model(
        corpus,
        tmp_path,
        init_from=released_pair,
        learning_rate=1e-5,
        min_lr=1e-5,
        warmup_steps=1,
        max_steps=1,
        eval_full=False,
    )
    run_train(arguments)
    expected = model_with_pair.state_dict()
    for name, weight in read_weights(tmp_path, 1).items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=3e-5)
        assert not torch.equal(weight, expected[name]), name
    model_config = read_state(tmp_path, 1)["model_config"]
    assert model_config["ddl_cc_read"] == "pair"
    assert model_config["ddl_state_dv_shortconv_causal"] is True
    assert model_config["ddl_state_shortconv_kernel_size"] == 2


def test_a_pair_is_not_read_as_a_folded_one(corpus, released_pair, tmp_path):
    arguments = arguments_without_model(
        corpus, tmp_path, init_from=released_pair, ddl_cc_read="folded"
    )
    with pytest.raises(ValueError, match=r"init_from=.* with ddl_cc_read='pair' \(not 'folded'\)"):
        configure(arguments)


class RunWithoutFolder(NamedTuple):
    """A complete run whose init_from has been deleted."""

    out: Path
    settings: dict


@pytest.fixture(scope="module")
def run_without_folder(corpus, folders, tmp_path_factory) -> RunWithoutFolder:
    folder = tmp_path_factory.mktemp("trained")
    source = shutil.copytree(folders / "exported", folder / "source")
    settings = {
        "init_from": source,
        "resume": "auto",
        "eval_full": False,
        "checkpoint_interval": 2,
    }
    run_train(arguments_without_model(corpus, folder / "out", **settings))
    shutil.rmtree(source)
    return RunWithoutFolder(folder / "out", settings)


def test_the_optimizer_starts_with_step_1(run_without_folder):
    path = run_without_folder.out / "checkpoints" / "step_00000004" / "optimizer.safetensors"
    steps = {float(value) for name, value in load_file(path).items() if name.endswith("step")}
    assert steps == {4.0}


def test_every_parameter_learns(run_without_folder, folders):
    initial = load_file(folders / "exported" / "model.safetensors")
    for name, weight in read_weights(run_without_folder.out, 6).items():
        assert not torch.equal(weight, initial[name]), name


def test_a_resumed_run_does_not_need_the_folder(run_without_folder, corpus):
    out, settings = run_without_folder
    expected = read_weights(out, 6)
    # the run resumes at the checkpoint before this one
    (out / "checkpoints" / "step_00000006" / "state.json").write_text("")
    run_train(arguments_without_model(corpus, out, **settings))
    for name, weight in read_weights(out, 6).items():
        assert torch.equal(weight, expected[name]), name


def test_a_new_run_needs_the_folder(run_without_folder, corpus, tmp_path):
    arguments = arguments_without_model(corpus, tmp_path / "new", **run_without_folder.settings)
    run_train(arguments, exit_code=2)
    assert not (tmp_path / "new").exists()


def test_a_resumed_run_does_not_accept_another_folder(run_without_folder, corpus, folders):
    out, settings = run_without_folder
    arguments = arguments_without_model(
        corpus, out, **{**settings, "init_from": folders / "run"}, max_steps=8
    )
    assert "init_from=" in run_train(arguments, exit_code=2)


@pytest.mark.parametrize(("keys", "block_size"), [({}, 16), ({"block_size": 40}, 40)])
def test_the_context_may_be_longer_than_that_of_the_folder(
    corpus, folders, tmp_path, keys, block_size
):
    folder = folders / "released"
    config, model_config = configure(
        arguments_without_model(corpus, tmp_path, init_from=folder, **keys)
    )
    assert config.model == MODEL_NAME
    assert model_config.block_size == block_size
    assert model_config.ddl_value_channels == 2


def test_a_dry_run_with_a_longer_context_writes_nothing(corpus, folders, tmp_path):
    """Compute the RoPE tables for the longer context."""
    out = tmp_path / "out"
    arguments = arguments_without_model(
        corpus, out, init_from=folders / "run", block_size=40, dry_run=True
    )
    assert "parameters" in run_train(arguments)
    assert not out.exists()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": 24}, r"init_from=.* was trained with hidden_size=12 \(not 24\)"),
        ({"mup": False}, r"init_from=.* was trained with mup=True \(not False\)"),
        (
            {"model": "DDL-gpt-mha-rope"},
            r"trained with model='DDL-gpt-mha-rope-CC-EC' \(not 'DDL-gpt-mha-rope'\)",
        ),
        ({"init_from": "nowhere"}, "nowhere does not exist"),
        ({"init_from": "docs"}, "docs holds no checkpoint"),
    ],
)
def test_contradictions_are_refused_by_name(corpus, folders, tmp_path, keys, message):
    with pytest.raises(ValueError, match=message):
        configure(
            arguments_without_model(corpus, tmp_path, **{"init_from": folders / "exported", **keys})
        )


@pytest.fixture
def write_config(folders, tmp_path) -> Callable[[str], str]:
    """Return a function that writes a config file with init_from and a text, and returns its path."""

    def write(text: str) -> str:
        (tmp_path / "mine.py").write_text(f"init_from = {str(folders / 'run')!r}\n{text}")
        return str(tmp_path / "mine.py")

    return write


def test_the_folder_decides_what_a_config_file_says_otherwise(write_config):
    """A recipe for models of one size can be applied to weights of another."""
    arguments = settings.read_arguments([write_config("hidden_size = 24\nlearning_rate = 0.5\n")])
    resolved = settings.resolve(arguments)
    assert vars(resolved.model_config) == vars(build(MODEL_NAME, **SETTINGS).config)
    assert resolved.config.learning_rate == 0.5
    [note] = resolved.notes
    assert note.startswith("the run keeps hidden_size=12 (not 24), although")


@pytest.mark.parametrize("kind", ["run", "exported"])
def test_another_tokenizer_is_refused(corpus, tmp_path, kind):
    encoding = tokenizer.train_byte_pairs(["ab ab ab"] * 5, 258)
    save_run(tmp_path / "run", build("gpt-mha-rope", **SMALL), "gpt-mha-rope", encoding)
    export_run(tmp_path / "run", tmp_path / "exported")
    arguments = arguments_without_model(
        corpus, tmp_path / "out", init_from=tmp_path / kind, dry_run=True
    )
    line = run_train(arguments, exit_code=2)
    name = "bpe258" if kind == "run" else "hf:exported"
    assert f"was trained with the tokenizer {name}" in line
    assert "was tokenized with bytes" in line
    assert not (tmp_path / "out").exists()


def test_a_released_folder_with_another_vocabulary_is_refused(corpus, tmp_path):
    """Compare the sizes: released folders have no tokenizer."""
    model = build("gpt-mha-rope", **{**SMALL, "vocab_size": 200})
    (tmp_path / "released").mkdir()
    save_file(checkpoint.get_model_tensors(model), tmp_path / "released" / "model.safetensors")
    (tmp_path / "released" / "config.json").write_text(json.dumps(vars(model.config)))
    arguments = arguments_without_model(corpus, tmp_path / "out", init_from=tmp_path / "released")
    assert "vocab_size=200, but" in run_train(arguments, exit_code=2)
    assert not (tmp_path / "out").exists()


def test_damaged_weights_end_with_one_line(corpus, folders, tmp_path):
    folder = Path(shutil.copytree(folders / "exported", tmp_path / "e"))
    tensors = load_file(folder / "model.safetensors")
    tensors["ln_f.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    line = one_line_error(
        call("train.py", *arguments_without_model(corpus, tmp_path / "out", init_from=folder))
    )
    assert "model.safetensors: ln_f.weight holds NaN or infinite numbers" in line
    assert not (tmp_path / "out").exists()
