"""The README's example of a stream in one's own model, which has no GPT."""

import dataclasses
import re
import shutil

import naive
import pytest
import torch
from helpers import ROOT, run_script
from torch import nn

README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCE = re.search(r"## Use a stream in your own model\n.*?```python\n(.*?)```", README, re.S)[1]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def example() -> dict:
    """Run the README's code on the sublayers of torch's encoder layers, in float64.

    Returns:
        What the code defines, with `sublayers` and `norms`.
    """
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(512, 8, dropout=0.0, batch_first=True, dtype=torch.float64)
        for _ in range(6)
    ]
    mask = nn.Transformer.generate_square_subsequent_mask(NUM_TOKENS, dtype=torch.float64)

    def attend(layer: nn.TransformerEncoderLayer, c: torch.Tensor) -> torch.Tensor:
        return layer.self_attn(c, c, c, attn_mask=mask, need_weights=False)[0]

    def make_sublayers(layer: nn.TransformerEncoderLayer) -> list:
        return [lambda c: attend(layer, c), layer._ff_block]

    names = {
        "nn": nn,
        "sublayers": [sublayer for layer in layers for sublayer in make_sublayers(layer)],
        "norms": [norm for layer in layers for norm in (layer.norm1, layer.norm2)],
    }
    exec(SOURCE, names)
    for key in ("reads", "writes"):
        names[key].double()
    return names


def randomize_weights(example: dict) -> None:
    """Move every parameter of the stream away from its start, where many are equal."""
    for key in ("reads", "writes"):
        for parameter in example[key].parameters():
            nn.init.normal_(parameter, std=0.3)


def test_the_example_agrees_with_plain_loops(example):
    randomize_weights(example)
    x = torch.randn(1, NUM_TOKENS, 512, dtype=torch.float64)
    config = dataclasses.asdict(example["config"])
    reads, writes = (dict(example[key].named_parameters()) for key in ("reads", "writes"))
    states = naive.expand({}, list(x[0]), 4, embedding_conv=False)
    with torch.no_grad():
        for i, (norm, sublayer) in enumerate(zip(example["norms"], example["sublayers"])):
            x_ins = naive.read(naive.select(reads, f"{i // 2}."), states, "token")
            cs = [norm(x_in) for x_in in x_ins]
            hs = sublayer(torch.stack(cs)[None])[0]
            w = naive.select(writes, f"{i}.")
            states = [naive.rewrite(w, *each, config) for each in zip(states, hs, x_ins, cs)]
        expected = torch.stack(naive.read(naive.select(reads, "6."), states, "token"))
        actual = example["run_blocks"](x)
    torch.testing.assert_close(actual[0], expected, rtol=1e-9, atol=1e-9)


def test_every_parameter_of_the_stream_learns(example):
    loss = example["run_blocks"](torch.randn(2, NUM_TOKENS, 512, dtype=torch.float64)).square()
    loss.mean().backward()
    for key in ("reads", "writes"):
        for name, parameter in example[key].named_parameters():
            assert parameter.grad.isfinite().all(), f"{key}.{name}"
            assert parameter.grad.abs().max() > 0, f"{key}.{name}"


def test_the_example_starts_as_the_models_do():
    """The gate starts at beta = 1, and the read as the mean over tokens and value channels."""
    names = {"nn": nn, "sublayers": [], "norms": []}
    exec(SOURCE, names)
    state = torch.randn(1, 8, 4, 512)
    x_in = names["reads"][0](state)
    torch.testing.assert_close(x_in[:, 3:], state.unfold(1, 4, 1).mean(-1).mean(2))
    write = names["writes"][0]
    beta = write.statistics(state, x_in, x_in, x_in, state)["beta"]
    assert (beta.mean() - 1).abs() < 0.1


def test_the_folders_that_the_readme_names_suffice(tmp_path):
    for folder in ("model", "utils"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "configurator.py", tmp_path)
    script = tmp_path / "own.py"
    script.write_text(f"from torch import nn\n{SOURCE}")
    result = run_script(script)
    assert result.returncode == 0, result.stderr.decode()
