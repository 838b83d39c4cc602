"""Statistics of the residual stream, activation checkpointing and the watch over losses, against plain computations."""

import contextlib
import math

import numpy as np
import pytest
import torch
from conftest import SMALL

from model import STEMS, build
from training.metrics import Spikes
from training.residual_statistics import residual_statistics


@pytest.mark.parametrize("stem", STEMS)
def test_statistics_are_those_of_the_equations(stem):
    model = build(stem, **SMALL).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 260, (3, 10))
    seen = {}

    def keep(name):
        def hook(_module, inputs, output):
            seen[name] = (*inputs, output)

        return hook

    for index, block in enumerate(model.transformer.h):
        block.register_forward_hook(keep(f"block {index}"))
        for site in ("attn", "mlp"):
            if hasattr(block, f"ddl_{site}"):
                getattr(block, f"ddl_{site}").register_forward_hook(keep(f"{site} {index}"))
    hooks = sum(len(module._forward_hooks) for module in model.modules())
    found = residual_statistics(model, ids, contextlib.nullcontext())
    expected = {"state_rms": [seen[f"block {i}"][-1].square().mean().sqrt().item() for i in range(2)]}
    for site in ("attn", "mlp"):
        for index in range(2) if f"{site} 0" in seen else ():
            state, h, x_in, c, written = seen[f"{site} {index}"]
            rewrite = getattr(model.transformer.h[index], f"ddl_{site}")
            k = h / (h.square().sum(-1, keepdim=True) + rewrite.config.ddl_k_eps**2).sqrt()  # (B, T, d), the k-Map
            t = x_in @ rewrite.v_proj.weight.T + rewrite.v_proj.bias
            t = rewrite.config.ddl_v_sigmoid_scale * t.sigmoid() if rewrite.config.ddl_v_sigmoid else t
            beta = 2 * (c @ rewrite.beta.weight.T + rewrite.beta.bias).sigmoid()
            for name, x in (("before", state), ("after", written)):
                gap = t - torch.einsum("btd,btvd->btv", k, x)
                expected.setdefault(f"ddl_{site}.discrepancy_{name}", []).append(gap.square().mean().sqrt().item())
            expected.setdefault(f"ddl_{site}.beta_mean", []).append(beta.mean().item())
            expected.setdefault(f"ddl_{site}.beta_std", []).append(beta.std().item())
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-5), name  # k has a guard in its norm
    assert hooks == sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("stem", STEMS)
def test_activation_checkpointing_changes_nothing_but_what_is_kept(stem):
    model = build(stem, **SMALL).double()
    ids = torch.randint(0, 260, (2, 12))

    def run(wanted):
        model.activation_checkpointing = wanted
        kept = 0

        def count(tensor):
            nonlocal kept
            kept += tensor.numel()
            return tensor

        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            _, loss = model(ids, ids)
        loss.backward()
        return kept, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    (plain, gradients), (less, again) = run(False), run(True)
    assert less < plain / 2
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    with torch.no_grad():
        assert model(ids)[0].shape == (2, 12, 260)


def test_spikes_are_measured_against_the_recent_course():
    draw = np.random.default_rng(0)
    values = 3 + 0.1 * draw.standard_normal(400)
    values[300] = 4.0
    state = {}
    found = [Spikes(state).deviation("loss", float(value)) for value in values]  # the state is all there is
    assert found[: Spikes.WARMUP] == [None] * Spikes.WARMUP
    assert found[300] > Spikes.THRESHOLD
    assert all(abs(x) < 5 for x in found[Spikes.WARMUP : 300])
    # A plain exponential mean and variance, with the whole history, of what came before the spike.
    mean, variance = float(values[0]), 0.0
    for n, value in enumerate(values[:300]):
        weight = max(0.02, 1 / (n + 1))
        mean, variance = mean + weight * (value - mean), (1 - weight) * (variance + weight * (value - mean) ** 2)
    assert found[300] == pytest.approx((4.0 - mean) / math.sqrt(variance))
