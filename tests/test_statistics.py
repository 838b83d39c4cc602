"""Statistics of the residual stream, and activation checkpointing, against plain computations."""

import contextlib
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import SMALL
from models import AUTHORS_CC
from torch import nn

import train
from data.loader import ValidationBatches
from model import build
from training.residual_statistics import ObservedStream, compute_residual_statistics
from utils.processes import World


def random_model(model_name: str, **keys) -> nn.Module:
    """A model in float64 whose every weight is random, so that no term of an equation is 0."""
    model = build(model_name, **SMALL, **keys).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


# ---- statistics ----


@pytest.mark.parametrize(
    ("model_name", "keys"),
    [("DDL-vdim1-gpt-mha-rope", {}), ("DDL-gpt-mha-rope-CC-EC", AUTHORS_CC)],
    ids=str,
)
def test_statistics_of_the_rewrite_are_those_of_the_equations(model_name, keys):
    write = random_model(model_name, **keys).transformer.h[0].ddl_attn
    config = write.config
    d = config.hidden_size
    state = torch.randn(2, 3, config.ddl_value_channels, d, dtype=torch.float64)
    h, x_in, c = torch.randn(3, 2, 3, d, dtype=torch.float64)
    written = write(state, h, x_in, c)
    k = h / (h.square().sum(-1, keepdim=True) + config.ddl_k_eps**2).sqrt()
    bias = write.v_proj.bias if config.ddl_v_bias else 0
    v = config.ddl_v_sigmoid_scale * (x_in @ write.v_proj.weight.T + bias).sigmoid()

    def compute_discrepancy(x: torch.Tensor) -> torch.Tensor:
        return (v - torch.einsum("btd,btvd->btv", k, x)).square().mean(-1).sqrt()

    expected = {
        "beta": 2 * (c @ write.beta.weight[0] + write.beta.bias).sigmoid(),
        "discrepancy_before": compute_discrepancy(state),
        "discrepancy_after": compute_discrepancy(written),
    }
    statistics = write.statistics(state, h, x_in, c, written)
    torch.testing.assert_close(statistics, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_tokens", [8, 27, 100])
def test_padding_after_a_short_validation_split_is_not_averaged(num_tokens):
    """Compare with sequences that run by themselves; at most the first four count."""
    model = random_model("DDL-gpt-mha-rope")
    tokens = torch.randint(0, 260, (num_tokens,))
    logged = {}
    run = SimpleNamespace(
        model=model,
        data=SimpleNamespace(val=ValidationBatches([tokens.numpy().astype(np.uint16)], 8)),
        world=World(0, 1, torch.device("cpu")),
        autocast=contextlib.nullcontext(),
        log=SimpleNamespace(write=logged.update),
    )
    train.log_residual_statistics(run)
    states = []
    betas = []

    def record_write(site, write):
        states.append(write.state.flatten())
        betas.append(write.statistics["beta"].flatten())

    with torch.no_grad(), model.through(ObservedStream(record_write)):
        for sequence in tokens[:-1].split(8)[:4]:
            model(sequence[None])
    num_sites = 4
    for index, name in enumerate(("attn", "mlp")):
        for layer in (0, 1):
            site = 2 * layer + index
            state = torch.cat(states[site::num_sites])
            beta = torch.cat(betas[site::num_sites])
            expected = {
                "state_rms": state.square().mean().sqrt(),
                "beta_mean": beta.mean(),
                "beta_std": beta.std(),
            }
            for statistic, value in expected.items():
                result = logged["residual"][f"{name}.{statistic}"][layer]
                assert result == pytest.approx(value.item(), rel=1e-5), (name, layer, statistic)


def test_statistics_are_of_what_was_written_before_post_write():
    model = random_model("DDL-gpt-mha-rope")
    ids = torch.randint(0, 260, (2, 8))
    expected = compute_residual_statistics(model, ids, contextlib.nullcontext())
    block = model.transformer.h[-1]
    attn, mlp = block.sites
    block.sites = (attn, dataclasses.replace(mlp, post_write=lambda state: 100 * state))
    expected["mlp.state_rms"][-1] *= 100
    statistics = compute_residual_statistics(model, ids, contextlib.nullcontext())
    assert statistics.keys() == expected.keys()
    for name, values in expected.items():
        assert statistics[name] == pytest.approx(values), name


def test_blocks_that_are_compiled_in_place_stay_compiled():
    """FSDP compiles them so."""
    sizes_of_graphs = []

    def record_graph(graph_module, _):
        sizes_of_graphs.append(len(graph_module.graph.nodes))
        return graph_module.forward

    model = build("DDL-gpt-mha-rope", **SMALL)
    for block in model.transformer.h:
        block.compile(backend=record_graph)
    ids = torch.randint(0, SMALL["vocab_size"], (2, 8))
    try:
        model(ids, ids)
        size_of_block = min(sizes_of_graphs)
        compute_residual_statistics(model, ids, contextlib.nullcontext())
        model(ids, ids)
    finally:
        torch._dynamo.reset()
    assert min(sizes_of_graphs) == size_of_block  # none is a part of a block


# ---- activation checkpointing ----


def count_saved_numbers(model: nn.Module, ids: torch.Tensor, activation_checkpointing: bool) -> int:
    """Return how many numbers autograd saves in a forward pass."""
    model.activation_checkpointing = activation_checkpointing
    num_saved = 0

    def count(tensor):
        nonlocal num_saved
        num_saved += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model(ids, ids)
    return num_saved


def test_activation_checkpointing_saves_less_than_half():
    model = build("DDL-gpt-mha-rope", **SMALL).double()
    ids = torch.randint(0, 260, (2, 12))
    num_saved = count_saved_numbers(model, ids, activation_checkpointing=False)
    assert count_saved_numbers(model, ids, activation_checkpointing=True) < num_saved / 2
