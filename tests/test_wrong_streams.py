"""Test that a mistake in a file of a stream is one line, and that what is trained is saved."""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from helpers import EXAMPLES, one_line_error, small_run
from in_process import call, train_in_processes

import model
import model_folder
from model import build
from training import checkpoint, metrics, setup

GATED = (EXAMPLES[0].parent / "gated-gpt-mha-rope.py").read_text(encoding="utf-8")
BLOCK = """from dataclasses import replace
from model.block import Block, Direct
from model.gpt import GPT
class Own(Block):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        {}
class Model(GPT):
    Block = Own
"""

# the mistake: the file, a part of the error line
FAULTY_FILES = {
    "half a file": (GATED[: GATED.index("):")], "line 12: SyntaxError: '(' was never closed"),
    "a misspelled name": (
        GATED.replace("WritingBlock)", "WritingBlok)"),
        "line 26: NameError: name 'WritingBlok'",
    ),
    "a key of the run": (GATED.replace("gate_init", "seed"), "seed is already a key of the run"),
    "a write that returns nothing": (
        GATED.replace("        return state +", "        state +"),
        "the write of block 0, attn, returns None; it must return the new state",
    ),
    "a write with other arguments": (
        GATED.replace("self, state, h, x_in, c, past=None", "self, state, h"),
        "TypeError: GatedWrite.forward() takes 3 positional arguments but 6 were given",
    ),
    "a read of another width": (
        BLOCK.format(
            "self.sites = [replace(s, read=lambda x, past: x[..., 1:]) for s in self.sites]"
        ),
        "the read of block 0, attn, returns (1, 16, 11); it must return x_in (B, T, d), here (1, 16, 12)",
    ),
    "a torch layer, which has no rule": (
        GATED.replace(
            "self.gate = nn.Parameter(torch.empty(config.hidden_size))",
            "self.gate = nn.Linear(config.hidden_size, 1)",
        ).replace('{"gate": Rule(constant(config.gate_init))}', "{}"),
        "gate.weight has no rule: add one to the dict `rules` of its Linear, or make the layer with `linear`",
    ),
}


@pytest.fixture
def save_variant(tmp_path, monkeypatch):
    """Return a function that saves a file as if it were in model/."""
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.setattr(model, "__path__", [*model.__path__, str(folder)])
    original_names = list(model.MODEL_NAMES)

    def save(text: str, model_name: str = "own-gpt") -> str:
        (folder / f"{model_name}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        model.MODEL_NAMES.append(model_name)
        return model_name

    yield save
    model.MODEL_NAMES[:] = original_names
    for name in [name for name in sys.modules if name.startswith("model.own-")]:
        del sys.modules[name]


@pytest.mark.parametrize("fault", FAULTY_FILES)
def test_a_faulty_file_is_one_line(fault, save_variant, corpus, tmp_path):
    text, message = FAULTY_FILES[fault]
    arguments = small_run(corpus, tmp_path / "run", model=save_variant(text))
    assert message in one_line_error(call("train.py", *arguments))
    assert not (tmp_path / "run").exists()


def test_a_name_in_both_folders_is_refused(save_variant, corpus, tmp_path):
    model_name = save_variant(GATED, "HC-gpt-mha-rope")
    line = one_line_error(call("train.py", *small_run(corpus, tmp_path / "run", model=model_name)))
    assert "model/HC-gpt-mha-rope.py and " in line
    assert "model/streams/HC-gpt-mha-rope.py have the same name; rename one of them" in line
    assert not (tmp_path / "run").exists()


def test_a_faulty_file_disturbs_neither_other_runs_nor_the_help(save_variant, corpus, tmp_path):
    save_variant(FAULTY_FILES["half a file"][0])
    result = call("train.py", *small_run(corpus, tmp_path / "run", model="gpt-mha-rope"))
    assert result.returncode == 0
    assert b"own-gpt" not in result.stderr
    result = call("train.py", "--help")
    assert result.returncode == 0
    assert b"(its file has a syntax error in line 12)" in result.stdout
    assert b"--ddl_value_channels" in result.stdout


# Every block has a gate; only the first one reads with it, so that the loss does not depend on those
# of the others.
UNUSED = BLOCK.replace(
    "import GPT\n",
    "import GPT\nfrom model.parameters import Rule, constant\nfrom torch import nn\nimport torch\n",
).format(
    "self.gate = nn.Parameter(torch.empty(1)); self.rules = {'gate': Rule(constant(1.0))}\n"
    "        if layer == 0: self.sites = [replace(s, read=lambda x, past: x * self.gate) for s in "
    "self.sites]"
)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_with_a_parameter_without_a_gradient_says_so_and_resumes(
    num_processes, save_variant, corpus, tmp_path
):
    model_name = save_variant(UNUSED)

    def train(folder: str, **changes) -> Path:
        settings = {
            "model": model_name,
            "max_steps": 4,
            "checkpoint_interval": 2,
            "micro_batch_size": 2,
            "schedule": "wsd",
            "decay_steps": 0,
        }
        arguments = small_run(corpus, tmp_path / folder, **{**settings, **changes})
        if num_processes == 1:
            result = call("train.py", *arguments)
            assert result.returncode == 0, result.stderr.decode()
            printed = result.stdout.decode()
        else:
            printed = train_in_processes(num_processes, arguments, tmp_path / "log")
        assert (
            "note: the loss does not depend on transformer.h.1.gate, which will not be trained"
            in printed
        )
        return checkpoint.find(tmp_path / folder)

    uninterrupted = train("uninterrupted")
    train("resumed", max_steps=2)
    resumed = train("resumed", resume="auto")
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (resumed / file).read_bytes() == (uninterrupted / file).read_bytes()
    tensors = checkpoint.load_tensors(uninterrupted / "model.safetensors")
    assert float(tensors["transformer.h.1.gate"]) == 1.0


def test_ddp_cannot_capture_a_step_with_a_parameter_without_a_gradient(
    save_variant, corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(setup, "check_machine", lambda config, device: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = small_run(
        corpus, tmp_path / "run", model=save_variant(UNUSED), max_steps=2, cuda_graphs="step"
    )
    result = call("train.py", *arguments)
    assert result.returncode == 2
    (message,) = result.stderr.decode().splitlines()
    assert "does not depend on transformer.h.1.gate; give --cuda_graphs=auto" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("example_streams")
@pytest.mark.parametrize(
    ("model_name", "has_own_head"),
    [("untied-gpt-mha-rope", True), ("capped-gpt-mha-rope", False)],
)
def test_evaluation_with_an_own_head_equals_that_of_training(
    model_name, has_own_head, corpus, tmp_path
):
    """Evaluate the same tokens from the run and from its exported folder."""
    run = tmp_path / "run"
    exported = tmp_path / "exported"
    arguments = small_run(corpus, run, model=model_name, eval_full=True)
    assert call("train.py", *arguments).returncode == 0
    expected_loss = metrics.find_evaluation(run / "metrics.jsonl")["val_loss"]
    assert call("export.py", run, exported).returncode == 0
    trained_model, *_ = model_folder.load_model(run, "cpu")
    assert ("lm_head.weight" in checkpoint.get_model_tensors(trained_model)) == has_own_head
    for folder in (run, exported):
        out = f"--out={tmp_path / 'eval'}"
        result = call("eval.py", folder, f"--val={corpus}", out, "--dtype=float32")
        assert result.returncode == 0, result.stderr.decode()
        printed = result.stdout.decode()
        loss = float(re.search(r"loss.*?(\d\.\d{4})", printed, re.S)[1])
        assert loss == pytest.approx(expected_loss, abs=6e-5), printed


def test_a_lack_of_memory_is_not_a_mistake_in_a_file():
    error = RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    )
    with (
        pytest.raises(RuntimeError, match="can't allocate"),
        model.errors_as_value_errors("gpt-mha-rope"),
    ):
        raise error


@pytest.mark.usefixtures("example_streams")
def test_shared_blocks_are_saved_once_and_loaded_as_one():
    tiny_model = build(
        "shared-gpt-mha-rope",
        vocab_size=29,
        hidden_size=8,
        num_hidden_layers=4,
        num_attention_heads=1,
    )
    names = checkpoint.get_model_tensors(tiny_model)
    assert {name.split(".")[2] for name in names if name.startswith("transformer.h.")} == {"0", "2"}
    assert "transformer.h.2.ln_1.weight" not in names
    assert tiny_model.num_parameters() == sum(map(torch.Tensor.numel, names.values()))
