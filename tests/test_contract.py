"""Check the contract of a residual stream for every variant of model/ and those of tests/streams."""

import shutil
import sys
from functools import partial
from pathlib import Path

import broken_streams
import contract
import pytest
import torch
from helpers import EXAMPLES, find_example_streams, small_run
from in_process import restore_signals
from model_settings import names_and_settings

import export
import model_folder
import train
from model import MODEL_NAMES, model_class
from model.gpt import GPT
from training import checkpoint

pytestmark = pytest.mark.usefixtures("example_streams")

ALL = [*MODEL_NAMES, *(path.stem for path in EXAMPLES if path.stem not in MODEL_NAMES)]

# (model name, its settings)
STREAMS = [*((model_name, {}) for model_name in ALL), *names_and_settings()]

# states of different kinds; test_compiled_by_inductor compiles all streams
COMPILED = {"AttnRes-gpt-mha-rope", "DDL-gpt-mha-rope-CC-EC", "mHC-gpt-mha-rope"}


def is_slow(model_name: str, settings: dict, check: str) -> bool:
    """Return whether make soak alone has the check, because others check nearly the same."""
    if check == "fused" and model_name.startswith("DDL"):
        return settings != {}  # test_kernel_streams.py has them
    return check in {"checkpointing", "costs", "losses"} and settings != {}


CASES = [
    pytest.param(
        model_name,
        settings,
        check,
        marks=[pytest.mark.slow] if is_slow(model_name, settings, check) else [],
    )
    for model_name, settings in STREAMS
    for check in contract.CHECKS
    if check != "compiled" or (model_name in COMPILED and settings == {})
]


def class_with_settings(model_name: str, settings: dict) -> type[GPT]:
    """Return a model's class whose Config has other defaults."""
    cls = model_class(model_name)
    if not settings:
        return cls
    return type(model_name, (cls,), {"Config": partial(cls.Config, **settings)})


@pytest.mark.parametrize(("model_name", "settings", "check"), CASES, ids=str)
def test_contract(model_name, settings, check):
    contract.CHECKS[check](class_with_settings(model_name, settings))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("model_name", "settings"), STREAMS, ids=str)
def test_compiled_by_inductor(model_name, settings, checkpointing, monkeypatch):
    monkeypatch.setattr(GPT, "activation_checkpointing", checkpointing)
    contract.check_compiled(class_with_settings(model_name, settings), "inductor")


@pytest.mark.parametrize("fault", broken_streams.BROKEN)
def test_a_broken_stream_is_caught(fault):
    cls, check, message = broken_streams.BROKEN[fault]
    with pytest.raises(AssertionError, match=message):
        contract.CHECKS[check](cls)


def train_here(arguments: list[str]) -> None:
    """Run train.py in this process, and let its exceptions pass."""
    # a run takes over SIGINT, and the fixture that restores it per test does not cover `trained_run`
    with restore_signals(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *arguments])
        train.main()


RUN_SETTINGS = {
    "max_steps": 3,
    "checkpoint_interval": 2,
    "eval_interval": 3,
    "keep_last": 9,
    "schedule": "wsd",
    "decay_steps": 0,
}


# streams with parameters or states of different kinds
TRAINED = {
    "AttnRes-gpt-mha-rope",
    "DDL-gpt-mha-rope-CC-EC",
    "Lambdas-gpt-mha-rope",
    "MGT-gpt-mha",
    "MUDD-gpt-mha-rope",
    "mHC-gpt-mha-rope",
    "shared-gpt-mha-rope",
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(model_name, marks=[] if model_name in TRAINED else [pytest.mark.slow])
        for model_name in ALL
    ],
)
def trained_run(request, corpus, tmp_path_factory) -> Path:
    """Train a model for three steps, and return its run folder, which has the model's name."""
    run = tmp_path_factory.mktemp("runs") / request.param
    with find_example_streams():
        train_here(small_run(corpus, run, **RUN_SETTINGS, model=request.param))
    return run


def test_a_resumed_run_has_the_same_bits(trained_run, corpus, tmp_path):
    resumed = shutil.copytree(trained_run, tmp_path / "resumed")
    shutil.rmtree(checkpoint.find(resumed))  # the checkpoint of step 2 remains
    train_here(small_run(corpus, resumed, **RUN_SETTINGS, model=trained_run.name, resume="auto"))
    expected_checkpoint = checkpoint.find(trained_run)
    resumed_checkpoint = checkpoint.find(resumed)
    assert resumed_checkpoint.name == expected_checkpoint.name
    for file in ("model.safetensors", "optimizer.safetensors"):
        expected = (expected_checkpoint / file).read_bytes()
        assert (resumed_checkpoint / file).read_bytes() == expected, f"{file} has other bits"


def test_an_exported_run_computes_the_same_logits(trained_run, tmp_path, monkeypatch):
    exported = tmp_path / "exported"
    monkeypatch.setattr(sys, "argv", ["export.py", str(trained_run), str(exported)])
    export.main()
    trained_model, *_ = model_folder.load_model(trained_run, "cpu")
    exported_model, *_ = model_folder.load_model(exported, "cpu")
    ids = torch.randint(0, 257, (2, 9))
    assert torch.equal(exported_model(ids)[0], trained_model(ids)[0])
