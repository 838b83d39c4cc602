"""The contract of a residual stream, for every stem of model/ and the examples of tests/streams."""

import shutil
import sys
from functools import partial

import broken_streams
import contract
import pytest
import torch
from helpers import EXAMPLES, ROOT, run_script, small_run
from model_settings import names_and_settings

import export
import train
from model import MODEL_NAMES, model_class
from model.gpt import GPT
from training import checkpoint, metrics

ALL = [*MODEL_NAMES, *(path.stem for path in EXAMPLES if path.stem not in MODEL_NAMES)]


pytestmark = pytest.mark.usefixtures("example_streams")


STREAMS = [*((stem, {}) for stem in ALL), *names_and_settings()]


def of_form(stem, form):
    cls = model_class(stem)
    return type(stem, (cls,), {"Config": partial(cls.Config, **form)}) if form else cls


@pytest.mark.parametrize("check", contract.CHECKS)
@pytest.mark.parametrize(("stem", "form"), STREAMS, ids=str)
def test_contract(stem, form, check):
    # A stem is compiled with its gradients; its other forms must not break the graph.
    keys = {"backend": "eager"} if form and check == "compiled" else {}
    contract.CHECKS[check](of_form(stem, form), **keys)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("stem", "form"), STREAMS, ids=str)
def test_compiled_by_inductor(stem, form, checkpointing, monkeypatch):
    monkeypatch.setattr(GPT, "activation_checkpointing", checkpointing)
    contract.check_compiled(of_form(stem, form), "inductor")


@pytest.mark.parametrize("fault", broken_streams.BROKEN)
def test_a_broken_stream_is_caught(fault):
    cls, check, message = broken_streams.BROKEN[fault]
    with pytest.raises((AssertionError, ValueError), match=message):
        contract.CHECKS[check](cls)


def run(*arguments) -> None:
    """train.py in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *arguments])
        train.main()


@pytest.mark.parametrize("stem", ALL)
def test_a_run_is_resumed_to_the_bit_exported_and_read_again(stem, corpus, tmp_path, monkeypatch):
    keys = {
        "model": stem,
        "max_steps": 3,
        "checkpoint_interval": 2,
        "eval_interval": 3,
        "statistics_interval": 3,
    }
    keys |= {"keep_last": 9, "schedule": "wsd", "decay_steps": 0}
    run(*small_run(corpus, tmp_path / "whole", **keys))
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(checkpoint.find(tmp_path / "parts"))
    run(*small_run(corpus, tmp_path / "parts", **keys, resume="auto"))
    newest = [checkpoint.find(tmp_path / name) for name in ("whole", "parts")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        whole, parts = ((folder / file).read_bytes() for folder in newest)
        assert whole == parts, f"after a stop and a start {file} has other bits"
    [record] = [r for r in metrics.read(tmp_path / "whole" / "metrics.jsonl") if "residual" in r]
    assert len(record["residual"]["attn.state_rms"]) == 2

    monkeypatch.setattr(
        sys, "argv", ["export.py", str(tmp_path / "whole"), str(tmp_path / "exported")]
    )
    export.main()
    trained, *_ = checkpoint.load_model(tmp_path / "whole", "cpu")
    read, *_ = checkpoint.load_model(tmp_path / "exported", "cpu")
    ids = torch.randint(0, 257, (2, 9))
    assert torch.equal(read(ids)[0], trained(ids)[0]), (
        "exported and read again it computes something else"
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 55


def test_extra_losses_with_accumulation_and_two_processes(corpus, tmp_path):
    """Recorded by site and block, and trained on: the same weights but for rounding, whoever
    computes what.
    """
    keys = {
        "model": "sparse-gpt-mha-rope",
        "max_steps": 3,
        "eval_interval": 3,
        "statistics_interval": 3,
    }
    run(*small_run(corpus, tmp_path / "whole", **keys, micro_batch_size=4))
    [record] = [r for r in metrics.read(tmp_path / "whole" / "metrics.jsonl") if "residual" in r]
    assert len(record["residual"]["mlp.extra_loss"]) == 2
    assert record["residual"]["attn.extra_loss"][1] == pytest.approx(
        0.01 * record["residual"]["attn.beta_mean"][1]
    )
    arguments = small_run(corpus, tmp_path / "shared", **keys, micro_batch_size=1)
    found = f"model.__path__.append({str(EXAMPLES[0].parent)!r}); model.MODEL_NAMES.append({keys['model']!r})"
    (tmp_path / "start.py").write_text(f"import model, train\n{found}\ntrain.main()\n")
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        tmp_path / "start.py",
    ]
    done = run_script(*torchrun, *arguments, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr.decode()
    whole, shared = (
        checkpoint.find(tmp_path / name) / "model.safetensors" for name in ("whole", "shared")
    )
    whole, shared = checkpoint.load_tensors(whole), checkpoint.load_tensors(shared)
    torch.testing.assert_close(shared, whole, rtol=1e-3, atol=1e-4)
