"""bfloat16 against the model's own float64 evaluation, in units of how far its rounded weights
alone move that.
"""

import copy

import pytest
import torch
from models import PAPER

from model import build

SIZE = {"vocab_size": 128, "block_size": 64, "num_hidden_layers": 12, "head_dim": 32}


def outputs(model, ids, targets, autocast=False):
    """Return the logits, and the whole gradient as one vector, in float64."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits, loss = model(ids, targets, return_logits=True)
    parameters = list(model.parameters())
    gradient = torch.cat([g.flatten().double() for g in torch.autograd.grad(loss, parameters)])
    return logits.detach().double(), gradient


def rounded(model):
    """Return a copy whose parameters are rounded to bfloat16, as autocast rounds them first."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("model_name", PAPER)
def test_bfloat16_adds_little_to_what_rounded_weights_do(model_name, width):
    """Measured over four seeds: 1.3 to 2.1 times as far, with this seed to 1.8; 2.2 without
    `at_least_fp32`.

    A bound on the error itself would hold at one width alone. With its weights rounded and
    everything else exact, the gradient of the stream read over tokens moves 5% at d = 64 and 2.7%
    at d = 128, the baseline's 1.2% at both: DDL's function is that steep at the start, less so with
    fewer layers, and less so without the erase.
    """
    torch.manual_seed(0)
    model = build(
        model_name,
        **SIZE,
        hidden_size=width,
        num_attention_heads=width // 32,
        init_order="sequential",  # the factors above are those of its weights
    )
    exact = copy.deepcopy(model).double()
    batch = torch.randint(0, 128, (2, 4, 64))
    expected = outputs(exact, *batch)
    of_rounded_weights = outputs(rounded(exact), *batch)
    of_autocast = outputs(model, *batch, autocast=True)
    for true, unit, low in zip(expected, of_rounded_weights, of_autocast):
        assert 0 < (low - true).norm() < 2.1 * (unit - true).norm()
