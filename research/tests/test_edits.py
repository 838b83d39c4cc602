"""Edits of a trained model: against models whose parameters are edited by hand, and against loops over tokens."""

import copy
import dataclasses

import naive_gates
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gates_helpers import KINDS, moved

from data import shards
from data.loader import ValidationBatches
from model import build
from research.analysis import edits
from research.benchmarks.figures import Figures

LARGE = 1e4  # a logit whose sigmoid and tanh are 1 to the last bit
EXACT = {"rtol": 1e-11, "atol": 1e-11}
OWN_GATE = {"ddl_erase_gate": "own"}


@pytest.fixture
def ids():
    return torch.randint(0, 260, (3, 10))


def own_losses(model, ids, targets):
    """Of each sequence, by the whole model at once."""
    with torch.no_grad():
        logits, _ = model(ids)
    return torch.stack([F.cross_entropy(row, goal) for row, goal in zip(logits, targets)])


def edited_losses(model, ids, targets, wanted: dict):
    """wanted {(layer, site): the edit's name}: from the first of these layers on."""
    sites = {(site.layer, site.name): site for block in model.transformer.h for site in block.sites}
    chosen = {
        key: next(e for e in edits.list_edits(sites[key]) if e.name == name)
        for key, name in wanted.items()
    }
    first = min(layer for layer, _ in wanted)
    return edits.measure_losses_from(
        model, edits.record_block_inputs(model, ids)[first], first, targets, chosen
    )


def forced_gate(write, logit: float) -> None:
    write.beta.weight.zero_()
    write.beta.bias.fill_(logit)


def delta(part, value):
    return lambda block: forced_gate(getattr(block, part), value)


@torch.no_grad()
def set_to(parameter, value) -> None:
    parameter.copy_(torch.as_tensor(value, dtype=parameter.dtype).expand_as(parameter))


def static_mix(block):
    set_to(block.hc_mlp.mix, torch.eye(4))


def dynamic_mix(block):
    """`scale` belongs to the read as well: only the rows of the maps that make the mix are cleared."""
    block.hc_mlp.maps.weight[2:] = 0
    set_to(block.hc_mlp.mix, torch.eye(4))


def dynamic_write(block):
    set_to(block.hc_mlp.write, 1.0)
    set_to(block.hc_mlp.write_scale, 0.0)


def manifold_write(block):
    block.hc_mlp.bias[4:8] = 0
    block.hc_mlp.scales[1] = 0


def mgt_beta(block):
    block.write_mlp.beta.weight.zero_()
    block.write_mlp.beta.bias.fill_(LARGE)


def mgt_gate(block):
    block.write_mlp.gate_norm.weight.zero_()
    block.write_mlp.gate_norm.bias.fill_(LARGE)


def only_the_last(block):
    set_to(
        block.average.weights,
        F.one_hot(torch.tensor(len(block.average.weights) - 1), len(block.average.weights)),
    )


BY_HAND = [
    ("DDL-gpt-mha-rope", {}, "beta=0", delta("ddl_mlp", -LARGE)),
    ("DDL-gpt-mha-rope", {}, "beta=1", delta("ddl_mlp", 0.0)),
    ("DDL-gpt-mha-rope-CC", {"ddl_map": "v"}, "beta=2", delta("ddl_mlp", LARGE)),
    ("DDL-vdim1-gpt-mha-rope", {}, "beta=2", delta("ddl_mlp", LARGE)),
    ("HC-gpt-mha-rope", {"hc_dynamic": False}, "mix=I", static_mix),
    ("HC-gpt-mha-rope", {}, "mix=I", dynamic_mix),
    ("HC-gpt-mha-rope", {}, "write=1", dynamic_write),
    ("mHC-gpt-mha-rope", {}, "write=1", manifold_write),
    (
        "GatedResidual-gpt-mha-rope",
        {},
        "a=1/2",
        lambda block: set_to(block.gated_mlp.up.weight, 0.0),
    ),
    (
        "GatedResidual-gpt-mha-rope",
        {"hc_streams": 2},
        "g=1",
        lambda block: set_to(block.gated_mlp.inject.weight, 0.0),
    ),
    (
        "AttnRes-gpt-mha-rope",
        {"attn_res_blocks": 2},
        "uniform weights",
        lambda block: set_to(block.depth_mlp.query, 0),
    ),
    ("MGT-gpt-mha", {}, "beta=1", mgt_beta),
    ("MGT-gpt-mha", {}, "alpha=0", lambda block: set_to(block.write_mlp.alpha, 0.0)),
    ("MGT-gpt-mha", {"mgt_arm": "mhc"}, "gate=1", mgt_gate),
    ("ReZero-gpt-mha-rope", {}, "a=0", lambda block: set_to(block.write_mlp.scale, 0.0)),
    ("ReZero-gpt-mha-rope", {}, "a=1", lambda block: set_to(block.write_mlp.scale, 1.0)),
    ("DenseFormer-gpt-mha-rope", {}, "A=I", only_the_last),
    (
        "LAuReL-gpt-mha-rope",
        {},
        "no low rank",
        lambda block: set_to(block.write_mlp.up.weight, 0.0),
    ),
    (
        "LAuReL-gpt-mha-rope",
        {"laurel_form": "rw"},
        "a=b=1",
        lambda block: set_to(block.write_mlp.logits, 0.0),
    ),
    ("wide-gpt-mha-rope", {}, "w=1", lambda block: set_to(block.write_mlp.weights, 1.0)),
    ("gpt-mha-rope", {}, "h=0", lambda block: set_to(block.mlp.c_proj.weight, 0.0)),
]


@pytest.mark.parametrize(("stem", "keys", "name", "hand"), BY_HAND)
def test_an_edit_is_that_of_the_parameters_by_hand(stem, keys, name, hand, ids):
    """At the MLP's site of the last block alone, and of both blocks."""
    model, targets = moved(stem, **keys), ids.roll(-1, 1)
    for layers in ((1,), (0, 1)):
        found = edited_losses(model, ids, targets, {(layer, "mlp"): name for layer in layers})
        other = copy.deepcopy(model)
        # A copied block's sites are its own: what they call was copied with it.
        with torch.no_grad():
            for layer in layers:
                hand(other.transformer.h[layer])
        wanted = own_losses(other, ids, targets)
        assert not torch.allclose(wanted, own_losses(model, ids, targets), atol=1e-6)
        torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize(
    "stem", ["DDL-gpt-mha-rope", "DDL-gpt-mha-rope-CC-EC", "DDL-vdim1-gpt-mha-rope"]
)
def test_without_erase_everywhere_is_the_write_only_model(stem, ids):
    model, targets = moved(stem), ids.roll(-1, 1)
    other = build(stem, **{**dataclasses.asdict(model.config), "ddl_update": "write_only"}).double()
    other.load_state_dict(model.state_dict())
    plan = edits.EditPlan(model, ["no erase"])
    found = edits.measure_losses_from(
        model, edits.record_block_inputs(model, ids)[0], 0, targets, plan.at_all_sites["no erase"]
    )
    torch.testing.assert_close(found, own_losses(other, ids, targets), **EXACT)


@pytest.mark.parametrize("stem", KINDS)
@pytest.mark.parametrize(
    ("options", "name", "naive"),
    [
        ({}, "no erase", {"erase": False}),
        ({}, "beta=2", {"beta": 2.0}),
        (OWN_GATE, "no erase", {"erase": False}),
        (OWN_GATE, "no write", {"write": False}),
        (OWN_GATE, "beta=2", {"beta": 2.0}),
        (OWN_GATE, "beta_erase=beta", {"shared": True}),
    ],
)
def test_one_edited_site_against_loops_over_tokens(stem, options, name, naive, ids):
    model, targets = moved(stem, **options), ids.roll(-1, 1)
    weights = {key: p.detach() for key, p in model.named_parameters()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    cfg, embedding_conv = dataclasses.asdict(model.config), stem.endswith("EC")
    for key in ((0, "mlp"), (1, "attn")):
        found = edited_losses(model, ids, targets, {key: name})
        pairs = zip(ids.tolist(), targets.tolist())
        wanted = [
            naive_gates.loss(
                weights, cfg, i, t, KINDS[stem], edits={key: naive}, embedding_conv=embedding_conv
            )
            for i, t in pairs
        ]
        assert found.tolist() == pytest.approx(wanted, abs=1e-9)


def test_the_last_source_alone(ids):
    """By hand: the second site reads the first one's output, the third site that of the second."""
    model, targets = moved("AttnRes-gpt-mha-rope", attn_res_blocks=None), ids.roll(-1, 1)
    every = {
        (0, "mlp"): "last source alone",
        (1, "attn"): "last source alone",
        (1, "mlp"): "last source alone",
    }
    found = edited_losses(model, ids, targets, every)
    positions = model.positions(ids)
    with torch.no_grad():
        sources = [model.transformer.wte(ids)]
        for block in model.transformer.h:
            sources.append(block.attn(block.ln_1(sources[-1]), positions, None))
            sources.append(block.mlp(block.ln_2(sources[-1]), positions, None))
        logits = model.logits(model.ln_f(model.readout(tuple(sources))))
    wanted = torch.stack([F.cross_entropy(row, goal) for row, goal in zip(logits, targets)])
    torch.testing.assert_close(found, wanted, **EXACT)


def test_the_identity_mix_of_mhc(ids):
    """Logits that make Sinkhorn-Knopp's matrix the identity but for its guard, 1e-6."""
    model, targets = moved("mHC-gpt-mha-rope"), ids.roll(-1, 1)
    for block in model.transformer.h:
        torch.nn.init.normal_(block.hc_mlp.bias, std=2)  # a mix that is far from the identity
    other = copy.deepcopy(model)
    with torch.no_grad():
        for block in other.transformer.h:
            block.hc_mlp.bias[8:] = 100 * (torch.eye(4, dtype=torch.float64).flatten() - 1)
            block.hc_mlp.scales[2] = 0
    found = edited_losses(model, ids, targets, {(0, "mlp"): "mix=I", (1, "mlp"): "mix=I"})
    assert found.tolist() == pytest.approx(own_losses(other, ids, targets).tolist(), abs=1e-4)
    assert found.tolist() != pytest.approx(own_losses(model, ids, targets).tolist(), abs=1e-3)


def test_differences_are_paired_over_windows_and_stored_batch_by_batch(corpus, tmp_path):
    model = moved("DDL-gpt-mha-rope")
    batches = ValidationBatches(shards.open_corpus(str(corpus)).val, 10)
    windows, plan = [0, 5, 9, 30, 31], edits.EditPlan(model, ["beta=0", "no erase"])
    key, device = {"weights": "w"}, torch.device("cpu")
    figures = Figures(tmp_path / "f.json", device, {}, code="c")
    edits.measure_losses(model, batches, windows, 2, plan, figures, key, "label")
    found = edits.compute_effects(figures.rows)
    assert len(found) == 2 * (1 + 4)
    ids, targets = batches.get(windows, 5)
    base = own_losses(model, ids, targets).numpy()
    for each in found:
        every = each["layer"] is None
        keys = [(layer, site) for layer in range(2) for site in ("attn", "mlp")]
        wanted = {k: each["edit"] for k in (keys if every else [(each["layer"], each["site"])])}
        difference = edited_losses(model, ids, targets, wanted).numpy() - base
        assert each["difference"] == pytest.approx(difference.mean(), abs=1e-10)
        # Student's 97.5% quantile at four degrees of freedom.
        assert each["ci95"] == pytest.approx(
            2.776445 * difference.std(ddof=1) / np.sqrt(5), rel=1e-6
        )
    # What was interrupted goes on: only the rows that are missing are measured.
    again = Figures(tmp_path / "f.json", device, {}, resume=True, code="c")
    again.rows = again.rows[:4]
    edits.measure_losses(model, batches, windows, 2, plan, again, key, "label")
    assert sorted(map(str, again.rows)) == sorted(map(str, figures.rows))
