"""The package of a stream, as it runs in a model of one's own, which has no GPT of this repository."""

import dataclasses
import importlib
import re
import subprocess
import sys
from types import SimpleNamespace

import naive
import pytest
import torch
from helpers import ROOT, example_streams, one_line_error
from in_process import call
from torch import nn

__all__ = ["example_streams"]

CC_EC = "DDL-gpt-mha-rope-CC-EC"
NUM_TOKENS = 6


@pytest.fixture
def import_package(tmp_path, monkeypatch):
    """Return a function that exports a variant under a name and imports this package."""

    def export(variant: str, name: str):
        result = call("export.py", variant, tmp_path / name)
        assert result.returncode == 0, result.stderr.decode()
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(name)

    before = set(sys.modules)
    yield export
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {path.name for path in tmp_path.iterdir()}:
            del sys.modules[name]


def make_own_model(package, dtype: torch.dtype, **keys) -> SimpleNamespace:
    """Return three blocks of torch's encoder layers, in order, and the stream that runs them."""
    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(3)
    ).to(dtype)
    mask = nn.Transformer.generate_square_subsequent_mask(NUM_TOKENS, dtype=dtype)

    def attend(layer: nn.TransformerEncoderLayer, c: torch.Tensor) -> torch.Tensor:
        return layer.self_attn(c, c, c, attn_mask=mask.to(c.dtype), need_weights=False)[0]

    def make_sublayers(layer: nn.TransformerEncoderLayer) -> list:
        return [lambda c: attend(layer, c), layer._ff_block]

    return SimpleNamespace(
        layers=layers,
        norms=[norm for layer in layers for norm in (layer.norm1, layer.norm2)],
        sublayers=[sublayer for layer in layers for sublayer in make_sublayers(layer)],
        stream=package.ResidualStream(3, 16, **keys).to(dtype),
    )


def run(own: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
    return own.stream(x, own.norms, own.sublayers)


def test_the_page_puts_the_stream_into_nanogpt(import_package):
    text = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    section = text.partition("## A stream in your own model\n")[2]
    command, code = re.findall(r"```(?:bash|python)\n(.*?)```", section, re.S)
    assert command.startswith(f"python export.py {CC_EC} ")
    # nanoGPT's names
    blocks = [
        SimpleNamespace(
            ln_1=nn.LayerNorm(16), attn=nn.Identity(), ln_2=nn.LayerNorm(16), mlp=nn.Tanh()
        )
        for _ in range(3)
    ]
    x = torch.randn(2, NUM_TOKENS, 16)
    names = {
        "ResidualStream": import_package(CC_EC, "ddl_streams").ResidualStream,
        "config": SimpleNamespace(n_layer=3, n_embd=16),
        "self": SimpleNamespace(transformer=SimpleNamespace(h=blocks)),
        "x": x,
    }
    exec(code, names)
    assert names["x"].shape == x.shape
    assert len(names["self"].stream.blocks) == 3
    assert (names["x"] - x).abs().max() > 0.1


def test_the_package_agrees_with_plain_loops(import_package):
    own = make_own_model(import_package(CC_EC, "ddl_streams"), torch.float64)
    with torch.no_grad():
        for parameter in own.stream.parameters():  # many are equal at the start
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(1, NUM_TOKENS, 16, dtype=torch.float64)
    config = dataclasses.asdict(own.stream.blocks[0].ddl_attn.config)
    weights = {
        name.replace("expander.", "input_embed."): weight
        for name, weight in own.stream.named_parameters()
    }
    states = naive.expand(weights, list(x[0]), 4, embedding_conv=True)
    with torch.no_grad():
        for i, (norm, sublayer) in enumerate(zip(own.norms, own.sublayers)):
            w = naive.select(weights, f"blocks.{i // 2}.")
            x_ins = naive.read(naive.select(w, "compress."), states, "channel")
            cs = [norm(x_in) for x_in in x_ins]
            hs = sublayer(torch.stack(cs)[None])[0]
            site = naive.select(w, ("ddl_attn.", "ddl_mlp.")[i % 2])
            states = [naive.rewrite(site, *each, config) for each in zip(states, hs, x_ins, cs)]
        expected = torch.stack(naive.read(naive.select(weights, "readout."), states, "channel"))
        actual = run(own, x)
    torch.testing.assert_close(actual[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", [CC_EC, "DDL-gpt-mha-rope", "conv-gpt-mha-rope"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "autocast"])
def test_every_parameter_learns_in_every_dtype(import_package, variant, dtype):
    own_dtype = torch.float32 if dtype == "autocast" else dtype
    own = make_own_model(import_package(variant, "any-name 1"), own_dtype)
    x = torch.randn(2, NUM_TOKENS, 16, dtype=own_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
        y = run(own, x)
    assert y.dtype == own_dtype
    (y.float() * torch.randn(y.shape)).sum().backward()
    for name, parameter in [*own.stream.named_parameters(), *own.layers.named_parameters()]:
        assert parameter.grad.isfinite().all(), name
        # the output of attention, not a bias of its keys, which cancels
        assert "in_proj" in name or parameter.grad.abs().max() > 0, name


def test_the_stream_starts_as_the_model_does(import_package):
    """The gate starts at beta = 1, and the read as the mean over the value channels."""
    stream = import_package(CC_EC, "ddl_streams").ResidualStream(2, 16)
    attn, _ = stream.blocks[0].sites
    state = torch.randn(1, 8, 4, 16)
    x_in = attn.read(state)
    beta = attn.write.statistics(state, x_in, x_in, x_in, state)["beta"]
    assert (beta.mean() - 1).abs() < 0.3
    torch.testing.assert_close(stream.expander(x_in), x_in.unsqueeze(2).expand(-1, -1, 4, -1))


def test_the_package_leaves_a_project_like_nanogpts_alone(tmp_path):
    """Its model.py and configurator.py are imported and executed as before."""
    (tmp_path / "model.py").write_text("OWN = True\n")
    (tmp_path / "configurator.py").write_text("steps = int(sys.argv[1])\n")
    (tmp_path / "main.py").write_text(
        "import sys\n\nfrom model import OWN\nfrom ddl_streams import ResidualStream\n\n"
        "exec(open('configurator.py').read())\nResidualStream(1, 8)\nprint(OWN, steps)\n"
    )
    assert call("export.py", CC_EC, tmp_path / "ddl_streams").returncode == 0
    result = subprocess.run(
        [sys.executable, "main.py", "3"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.stdout == "True 3\n", result.stderr


@pytest.mark.parametrize("variant", ["MUDD-gpt-mha-rope", "third-gpt-mha-rope"])
def test_a_stream_that_needs_more_than_sublayers_is_refused(example_streams, tmp_path, variant):
    message = one_line_error(call("export.py", variant, tmp_path / "streams"))
    assert "its sites need more of attention and the MLP" in message
    assert not list(tmp_path.iterdir())


def test_the_package_checks_the_keys_of_its_stream(import_package):
    package = import_package(CC_EC, "ddl_streams")
    with pytest.raises(ValueError, match="ddl_update='delt': give one of"):
        package.ResidualStream(2, 16, ddl_update="delt")
