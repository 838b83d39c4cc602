"""Norms and heads of attention round to bfloat16 once, after they are computed in float32.

What autocast and weights in bfloat16 do to entire models is in test_low_precision.py.
"""

import copy

import pytest
import torch
from models import TINY, build_tiny

from model.layers import LayerNorm, RMSNorm, apply_rope


@pytest.mark.parametrize("norm_class", [RMSNorm, LayerNorm])
def test_a_norm_rounds_once(norm_class):
    norm = norm_class(64)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(32, 64).bfloat16()
    expected = copy.deepcopy(norm).double()(x.double())
    assert torch.equal(norm(x), expected.bfloat16())


@torch.no_grad()
def test_queries_and_keys_are_rounded_once():
    model = build_tiny("gpt-mha-rope").float()
    attention = model.transformer.h[0].attn
    positions = model.positions(torch.zeros(1, 9, dtype=torch.int64))
    x = torch.randn(1, 9, TINY["hidden_size"])
    with torch.autocast("cpu", torch.bfloat16):
        projections = attention.project(x)
        heads = attention.heads(x, positions)
    norms = (attention.q_rms, attention.k_rms)
    for projection, norm, head in zip(projections, norms, heads):
        rotated = apply_rope(projection, positions.cos.double(), positions.sin.double())
        expected = copy.deepcopy(norm).double()(rotated)
        assert torch.equal(head, expected.bfloat16())
