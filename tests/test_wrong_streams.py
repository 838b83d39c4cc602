"""A newcomer's stream does no silent harm: wrong files are one line each, and what is trained is
what is kept.
"""

import importlib
import re
import sys

import pytest
import torch
from helpers import EXAMPLES, one_line_error, small_run
from in_process import call, train_in_processes

import model
from model import build
from model.block import Block
from model.layers import AttentionInputs, Heads
from training import checkpoint, metrics

GATED = (EXAMPLES[0].parent / "gated-gpt-mha-rope.py").read_text(encoding="utf-8")
WRITE = "    def forward(self, state, h, x_in, c, past=None):\n        return state + (self.gate * h).to(state.dtype)\n"
BLOCK = "from dataclasses import replace\nfrom model.block import Block, Direct\nfrom model.gpt import GPT\n"
BLOCK += "class Own(Block):\n    def __init__(self, config, layer):\n"
BLOCK += "        super().__init__(config, layer)\n        {}\n"
BLOCK += "class Model(GPT):\n    Block = Own\n"

# {what is wrong: (the file, what the line says)}
WRONG = {
    "half a file": (GATED[: GATED.index("):")], "line 12: SyntaxError: '(' was never closed"),
    "a missing package": (
        "import nowhere\n" + GATED,
        "line 1: ModuleNotFoundError: No module named 'nowhere'",
    ),
    "a misspelled name": (
        GATED.replace("WritingBlock)", "WritingBlok)"),
        "line 26: NameError: name 'WritingBlok'",
    ),
    "no Model": (GATED[: GATED.index("class Model")], "has no class Model(GPT)"),
    "a Model of torch alone": (
        GATED.replace("Model(GPT)", "Model(nn.Module)"),
        "has no class Model(GPT)",
    ),
    "no dataclass": (
        GATED.replace("@dataclass\n", ""),
        "Config has keys but is not a dataclass; put @dataclass above it",
    ),
    "a key of the run": (GATED.replace("gate_init", "seed"), "seed is already a key of the run"),
    "a key of a kind that there is not": (
        GATED.replace("gate_init: float", "gate_init: list"),
        "the key gate_init is",
    ),
    "a write that returns nothing": (
        GATED.replace("        return state +", "        state +"),
        "GatedWrite of block 0, attn, returns None; it must return the new state",
    ),
    "a write with other arguments": (
        GATED.replace("self, state, h, x_in, c, past=None", "self, state, h"),
        "TypeError: GatedWrite.forward() takes 3 positional arguments but 6 were given",
    ),
    "a write with a mistake": (
        GATED.replace("self.gate * h", "self.gate @ h.T.T.sum((0, 1, 2)).view(1, 1)"),
        "line 23: RuntimeError: ",
    ),
    "a read of another width": (
        BLOCK.format(
            "self.sites = [replace(s, read=lambda x, past: x[..., 1:]) for s in self.sites]"
        ),
        "function of block 0, attn, returns (1, 1, 11); it must return x_in (B, T, d), here (1, 1, 12)",
    ),
    "no rule": (
        GATED.replace("Rule(constant(config.gate_init))", "None").replace('"gate": None', ""),
        "has no rule",
    ),
    "a torch layer": (
        GATED.replace(
            "self.gate = nn.Parameter(torch.empty(config.hidden_size))",
            "self.gate = nn.Linear(config.hidden_size, 1)",
        ).replace('{"gate": Rule(constant(config.gate_init))}', "{}"),
        "gate.weight has no rule: make the layer with model.parameters.linear(12, 1, Rule(",
    ),
    "a readout that is assigned after the initialization": (
        GATED
        + "\n    def __init__(self, config):\n        super().__init__(config)\n"
        + "        self.readout = GatedWrite(config)\n",
        "readout.gate was added after the parameters were initialized; name the class of its module",
    ),
    "a sublayer outside": (
        BLOCK.format(
            "from model.layers import MLP; attn, _ = self.sites; self.sites = attn, replace(_, "
            "sublayer=MLP(config))"
        ),
        "MLP is used by a site, but it is not a submodule of its block",
    ),
    "a weight in the same memory": (
        BLOCK.format("self.ln_2.weight = type(self.ln_1.weight)(self.ln_1.weight.data)"),
        "ln_2.weight is a copy of transformer.h.0.ln_1.weight in the same memory",
    ),
}


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Saves a file as if it were in model/."""
    folder = tmp_path / "model"
    folder.mkdir()
    monkeypatch.setattr(model, "__path__", [*model.__path__, str(folder)])
    before = list(model.MODEL_NAMES)

    def save(text: str, stem: str = "own-gpt") -> str:
        (folder / f"{stem}.py").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        model.MODEL_NAMES.append(stem)
        return stem

    yield save
    model.MODEL_NAMES[:] = before
    for name in [name for name in sys.modules if name.startswith("model.own-")]:
        del sys.modules[name]


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_file_is_one_line(fault, own, corpus, tmp_path):
    text, said = WRONG[fault]
    run = small_run(corpus, tmp_path / "run", model=own(text))
    line = one_line_error(call("train.py", *run))
    assert said in line
    assert not (tmp_path / "run").exists()


def test_a_name_without_a_hyphen_is_told(tmp_path, corpus, monkeypatch):
    (tmp_path / "gated.py").write_text(GATED)
    monkeypatch.setattr(model, "__file__", str(tmp_path / "__init__.py"))
    line = one_line_error(call("train.py", *small_run(corpus, tmp_path / "run", model="gated")))
    assert (
        "the file of a variant has a hyphen in its name; rename it to gated-gpt-mha-rope.py" in line
    )


def test_a_wrong_file_breaks_no_other_run(own, corpus, tmp_path):
    """Not its training, nor going on or a listing, which says what it leaves out."""
    own(WRONG["half a file"][0])
    run = small_run(corpus, tmp_path / "run", model="gpt-mha-rope", max_steps=2)
    for more in ((), ("--max_steps=3", "--resume=auto"), ("--max_steps=4", "--resume=auto")):
        done = call("train.py", *run, *more)
        assert done.returncode == 0
        assert b"own-gpt" not in done.stderr
    listed = call("train.py", "--help")
    assert listed.returncode == 0
    assert b"(its file has a syntax error in line 12)" in listed.stdout
    assert b"--ddl_value_channels" in listed.stdout
    hint = call("train.py", *run, "--ddl_valu_channels=2").stderr.decode().splitlines()
    assert "note: model/own-gpt.py, line 12: SyntaxError" in hint[0]
    assert "did you mean ddl_value_channels" in hint[-1]


# Each block has a gate of the block after it, which the last one lacks: there the parameter takes
# part in nothing.
UNUSED = BLOCK.replace(
    "import GPT\n",
    "import GPT\nfrom model.parameters import Rule, constant\nfrom torch import nn\nimport torch\n",
).format(
    "self.gate = nn.Parameter(torch.empty(1)); self.rules = {'gate': Rule(constant(1.0))}\n"
    "        if layer == 0: self.sites = [replace(s, read=lambda x, past: x * self.gate) for s in "
    "self.sites]"
)


def finish(arguments) -> str:
    done = call("train.py", *arguments)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


@pytest.mark.parametrize("processes", [1, 2])
def test_a_parameter_without_a_gradient_is_said_and_goes_on(processes, own, corpus, tmp_path):
    keys = {"model": own(UNUSED), "max_steps": 4, "checkpoint_interval": 2, "micro_batch_size": 2}
    keys |= {"schedule": "wsd", "decay_steps": 0}

    def train(name, **changes):
        run = small_run(corpus, tmp_path / name, **{**keys, **changes})
        printed = (
            train_in_processes(processes, run, tmp_path / "log") if processes > 1 else finish(run)
        )
        said = "note: the loss does not depend on transformer.h.1.gate, which will not be trained"
        assert said in printed
        return checkpoint.find(tmp_path / name)

    whole = train("whole")
    train("parts", max_steps=2)
    parts = train("parts", resume="auto")
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (parts / file).read_bytes() == (whole / file).read_bytes()
    assert (
        float(checkpoint.load_tensors(whole / "model.safetensors")["transformer.h.1.gate"]) == 1.0
    )


@pytest.mark.usefixtures("example_streams")
@pytest.mark.parametrize(
    ("stem", "keys"),
    [
        ("untied-gpt-mha-rope", {}),
        ("gpt-mha-rope", {"tie_embeddings": False}),
        ("capped-gpt-mha-rope", {}),
    ],
)
def test_a_head_of_its_own_is_kept(stem, keys, corpus, tmp_path):
    """What eval.py finds of a run, and of its exported folder, is what training said of the same
    tokens.
    """
    run = small_run(corpus, tmp_path / "run", model=stem, **keys, max_steps=6, eval_full=True)
    assert call("train.py", *run).returncode == 0
    said = [
        record for record in metrics.read(tmp_path / "run/metrics.jsonl") if "val_loss" in record
    ][-1]["val_loss"]
    assert call("export.py", tmp_path / "run", tmp_path / "exported").returncode == 0
    trained, *_ = checkpoint.load_model(tmp_path / "run", "cpu")
    assert ("lm_head.weight" in checkpoint.get_model_tensors(trained)) == (
        stem != "capped-gpt-mha-rope"
    )
    for folder in ("run", "exported"):
        done = call(
            "eval.py",
            tmp_path / folder,
            f"--val={corpus}",
            f"--out={tmp_path / 'eval'}",
            "--dtype=float32",
        )
        assert done.returncode == 0, done.stderr.decode()
        found = float(re.search(r"loss.*?(\d\.\d{4})", done.stdout.decode(), re.S)[1])
        assert found == pytest.approx(said, abs=6e-5), done.stdout.decode()


def test_what_is_no_fault_of_a_file_is_not_said_to_be_one():
    lack = RuntimeError(
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    )
    with (
        pytest.raises(RuntimeError, match="can't allocate"),
        model.errors_as_value_errors("gpt-mha-rope"),
    ):
        raise lack


def test_a_cap_is_on_the_loss_that_is_trained(example_streams):
    size = {
        "vocab_size": 29,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 8,
    }
    made, ids = build("capped-gpt-mha-rope", **size).double(), torch.arange(12).view(2, 6)
    torch.nn.init.normal_(made.transformer.wte.weight, std=9)  # so that the cap is felt
    plain = made.hidden(ids) @ made.transformer.wte.weight.T
    capped = 15 * (2 / (1 + torch.exp(-2 * plain / 15)) - 1)  # tanh, written out
    wanted = -(capped.log_softmax(-1).gather(-1, ids.roll(-1, 1).unsqueeze(-1))).mean()
    assert plain.abs().max() > 30
    assert abs(made(ids, ids.roll(-1, 1))[1] - wanted) < 1e-9


def test_queries_keys_and_values_of_inputs_apart():
    """Against heads made of each input by itself and a softmax written out; the values changed
    before it.
    """
    size = {
        "vocab_size": 29,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 4,
    }
    made = build("gpt-mha-rope", **size).double()
    attention, positions = (
        made.transformer.h[0].attn,
        made.positions(torch.zeros(1, 5, dtype=torch.int64)),
    )
    a, b, c = torch.randn(3, 1, 5, 8, dtype=torch.float64)
    q, k, v = (Heads()(attention, x, positions)[place] for place, x in enumerate((a, b, c)))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / 2 + torch.full((5, 5), -torch.inf).triu(1)
    mixed = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), 3 * v + 1).flatten(2)
    found = attention(AttentionInputs(a, b, c, lambda values: 3 * values + 1), positions)
    torch.testing.assert_close(found, mixed @ attention.c_proj.weight.T, rtol=0, atol=1e-12)


def test_a_tied_weight_in_a_file_twice_must_be_the_same(tmp_path):
    made = build(
        "gpt-mha-rope",
        vocab_size=29,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=8,
    )
    tensors = {
        **checkpoint.get_model_tensors(made),
        "lm_head.weight": made.lm_head.weight.detach() + 1,
    }
    checkpoint.save_tensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(
        ValueError,
        match=r"lm_head.weight differs from transformer.wte.weight, but this model ties them",
    ):
        model.weights.load_into(made, tmp_path)


@pytest.mark.usefixtures("example_streams")
def test_shared_blocks_are_stored_once_and_are_one_again():
    made = build(
        "shared-gpt-mha-rope",
        vocab_size=29,
        hidden_size=8,
        num_hidden_layers=4,
        num_attention_heads=1,
    )
    names = checkpoint.get_model_tensors(made)
    assert {name.split(".")[2] for name in names if name.startswith("transformer.h.")} == {"0", "2"}
    assert "transformer.h.2.ln_1.weight" not in names
    assert made.transformer.h[1] is made.transformer.h[0]
    assert isinstance(made.transformer.h[2], Block)
    assert made.num_parameters() == sum(map(torch.Tensor.numel, names.values()))
