"""Statistics of the residual stream, activation checkpointing and the watch over losses, against
plain computations.
"""

import contextlib

import pytest
import torch
from helpers import SMALL
from models import PAPER

from model import build
from training.residual_statistics import residual_statistics


@pytest.mark.parametrize("stem", PAPER)
def test_statistics_are_those_of_the_equations(stem):
    model = build(stem, **SMALL).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(0, 260, (3, 10))
    expected, hooks = {}, []

    def expect(name, value):
        expected.setdefault(name, []).append(value.item())

    def after_write(site):
        def hook(write, inputs, written):
            state, h, x_in, c, _ = inputs
            expect(f"{site.name}.state_rms", written.square().mean().sqrt())
            if not hasattr(write, "v_proj"):
                return
            # (B, T, d), the k-Map
            k = h / (h.square().sum(-1, keepdim=True) + write.config.ddl_k_eps**2).sqrt()
            t = 4 * (x_in @ write.v_proj.weight.T + write.v_proj.bias).sigmoid()
            beta = 2 * (c @ write.beta.weight.T + write.beta.bias).sigmoid()
            gaps = [
                (t - torch.einsum("btd,btvd->btv", k, x)).square().mean(-1).sqrt()
                for x in (state, written)
            ]
            for name, value in zip(
                ("beta", "discrepancy_before", "discrepancy_after"), (beta, *gaps)
            ):
                expect(f"{site.name}.{name}_mean", value.mean())
                expect(f"{site.name}.{name}_std", value.std())

        return hook

    for site in (site for block in model.transformer.h for site in block.sites):
        hooks.append(site.write.register_forward_hook(after_write(site)))
    model(ids)
    for hook in hooks:
        hook.remove()
    found = residual_statistics(model, ids, contextlib.nullcontext())
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-5), name  # k has a guard in its norm


@pytest.mark.parametrize("stem", PAPER)
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
