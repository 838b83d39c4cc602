"""`analyze.py causality`: what it says of files of streams and of runs, and its exit code."""

import sys

import pytest
from helpers import EXAMPLES, one_line_error, small_run
from in_process import call

import model
from model.ddl import DeltaRewrite

# A published comparison's "DDL": its direction and gate are means over the whole sequence.
AVERAGED = """
from dataclasses import replace

from model.gpt import GPT
from model.ddl import DeltaBlock, DeltaRewrite, Repeat, SingleChannelRead
from model.ddl_config import SingleChannelConfig


class AveragedRewrite(DeltaRewrite):
    def __init__(self, config):
        super().__init__(config)
        direction = self.direction
        gate = self.gate
        self.direction = lambda *args: direction(*args).mean(1, keepdim=True)
        self.gate = lambda *args: gate(*args).mean(1, keepdim=True)


class AveragedBlock(DeltaBlock):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.ddl_attn = AveragedRewrite(config)
        self.ddl_mlp = AveragedRewrite(config)
        attn, mlp = self.sites
        self.sites = (replace(attn, write=self.ddl_attn), replace(mlp, write=self.ddl_mlp))


class Model(GPT):
    Config = SingleChannelConfig
    Expander = Repeat
    Block = AveragedBlock
    Readout = SingleChannelRead
"""
# the same token by token
TOKEN_BY_TOKEN = AVERAGED.replace(".mean(1, keepdim=True)", "")


@pytest.fixture
def stream_file(tmp_path, monkeypatch):
    """Return a function that saves the file of a stream outside of model/."""
    monkeypatch.setattr(model, "__path__", list(model.__path__))
    names_before = list(model.MODEL_NAMES)
    modules_before = set(sys.modules)

    def save(text: str, name: str) -> str:
        file = tmp_path / f"{name}.py"
        file.write_text(text, encoding="utf-8")
        return str(file)

    yield save
    model.MODEL_NAMES[:] = names_before
    for name in set(sys.modules) - modules_before:
        if name.startswith("model."):
            del sys.modules[name]


def test_a_file_whose_write_averages_over_the_sequence_leaks(stream_file):
    file = stream_file(AVERAGED, "averaged-gpt-mha-rope")
    result = call("research/analyze.py", "causality", file)
    assert result.returncode == 1
    line = result.stdout.decode()
    assert line.startswith(
        f"{file}: later tokens leak. Block 0, attn: the state that the write returns changes by "
    )
    assert line.endswith(" at position 0 when the token at position 1 changes.\n")


def test_one_leak_among_several_files_is_said_and_decides_the_exit_code(stream_file):
    averaged = stream_file(AVERAGED, "averaged-gpt-mha-rope")
    token_by_token = stream_file(TOKEN_BY_TOKEN, "exact-gpt-mha-rope")
    result = call("research/analyze.py", "causality", averaged, token_by_token, "--tokens=5")
    assert result.returncode == 1
    leaking, exact = result.stdout.decode().splitlines()
    assert "later tokens leak" in leaking
    assert exact == (
        f"{token_by_token}: no leak. Of 5 tokens, the last 4 were changed in turn, and nothing before "
        "them changed."
    )


def test_keys_of_a_stream_are_set(stream_file):
    file = stream_file(TOKEN_BY_TOKEN, "exact-gpt-mha-rope")
    result = call("research/analyze.py", "causality", f"{file}+block_size=7+ddl_map=v")
    assert result.returncode == 0
    assert "Of 7 tokens, the last 6" in result.stdout.decode()
    wrong = call("research/analyze.py", "causality", f"{file}+ddl_mop=v")
    assert "unknown key ddl_mop, did you mean ddl_map" in one_line_error(wrong)


@pytest.mark.usefixtures("stream_file")
def test_files_of_model_and_of_the_examples():
    result = call(
        "research/analyze.py", "causality", "model/gpt-mha-rope.py", EXAMPLES[0], "--tokens=4"
    )
    assert result.returncode == 0
    assert result.stdout.decode().count("no leak") == 2


def test_a_run_with_and_without_a_leak(corpus, tmp_path, monkeypatch):
    run = tmp_path / "run"
    arguments = small_run(corpus, run, model="DDL-vdim1-gpt-mha-rope", max_steps=1, eval_full=False)
    assert call("train.py", *arguments).returncode == 0
    result = call("research/analyze.py", "causality", run)
    assert result.returncode == 0
    assert f"{run}: no leak" in result.stdout.decode()

    token_by_token = DeltaRewrite.gate
    monkeypatch.setattr(
        DeltaRewrite,
        "gate",
        lambda write, *args: token_by_token(write, *args).mean(1, keepdim=True),
    )
    result = call("research/analyze.py", "causality", run)
    assert result.returncode == 1
    assert "leak. Block 0, attn: the state that the write returns" in result.stdout.decode()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.py"], "nowhere.py does not exist"),
        (["nowhere"], "nowhere does not exist"),
        (["model/gpt-mha-rope.py", "--tokens=1"], "--tokens=1: give a number at least 2"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    assert message in one_line_error(call("research/analyze.py", "causality", *arguments))


def test_a_file_without_a_stream_and_one_with_a_taken_name(stream_file):
    file = stream_file("x = 1\n", "empty-gpt-mha-rope")
    line = one_line_error(call("research/analyze.py", "causality", file))
    assert "has no attribute 'Model'" in line
    file = stream_file(TOKEN_BY_TOKEN, "HC-gpt-mha-rope")
    line = one_line_error(call("research/analyze.py", "causality", file))
    assert "model/streams/HC-gpt-mha-rope.py have the same name; rename one of them" in line
    assert str(file) in line
    file = stream_file(TOKEN_BY_TOKEN, "gpt-mha-rope")
    line = one_line_error(call("research/analyze.py", "causality", file))
    assert f"{file} has the same name as " in line
    assert "model/gpt-mha-rope.py; rename it" in line
