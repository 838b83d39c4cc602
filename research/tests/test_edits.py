"""Edits of a trained model: against models whose parameters are edited by hand, and against loops over tokens."""

import copy
import dataclasses
import math
from collections.abc import Callable

import naive_gates
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gates_helpers import READ_KINDS, LabeledDocuments, build_moved
from naive_gates import NaiveEdit

from data import shards
from data.loader import ValidationBatches
from model import build
from research.analysis import edits
from research.benchmarks.figures import Figures

LARGE = 1e4  # a logit whose sigmoid and tanh are 1 to the last bit
EXACT = {"rtol": 1e-11, "atol": 1e-11}
SCALED = {"residual_branch_mult": 0.4}
# Student's 97.5% quantile at four degrees of freedom
T_4 = 2.776445


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 260, (3, 10))


@pytest.fixture
def targets(ids) -> torch.Tensor:
    return ids.roll(-1, 1)


@torch.no_grad()
def compute_losses(model, ids, targets) -> torch.Tensor:
    """Return the loss of each sequence (B,), by one forward pass of the model."""
    logits, _ = model(ids)
    return torch.stack(
        [F.cross_entropy(sequence, goals) for sequence, goals in zip(logits, targets)]
    )


def compute_edited_losses(model, ids, targets, names: dict[tuple[int, str], str]) -> torch.Tensor:
    """Return the losses with edits, running the model from their first layer on.

    names: (layer, site name) -> name of the edit
    """
    chosen_edits = {}
    for block in model.transformer.h:
        for site in block.sites:
            key = (site.layer, site.name)
            if key in names:
                [chosen_edits[key]] = [
                    edit for edit in edits.list_edits(site) if edit.name == names[key]
                ]
    first_layer = min(layer for layer, _ in names)
    block_input = edits.record_block_inputs(model, ids)[first_layer]
    return edits.measure_losses_from(model, block_input, first_layer, targets, chosen_edits)


# ---- edits of the MLP's site of a block, by hand ----


def set_parameter(parameter, value) -> None:
    parameter.copy_(torch.as_tensor(value, dtype=parameter.dtype).expand_as(parameter))


def set_beta_logit(block, logit: float) -> None:
    block.ddl_mlp.beta.weight.zero_()
    block.ddl_mlp.beta.bias.fill_(logit)


def unmix_static(block) -> None:
    set_parameter(block.hc_mlp.mix, torch.eye(4))


def unmix_dynamic(block) -> None:
    # `scale` belongs to the read as well, so the rows of `maps` that make the mix are cleared
    block.hc_mlp.maps.weight[2:] = 0
    set_parameter(block.hc_mlp.mix, torch.eye(4))


def write_one_dynamic(block) -> None:
    set_parameter(block.hc_mlp.write, 1.0)
    set_parameter(block.hc_mlp.write_scale, 0.0)


def write_one_manifold(block) -> None:
    block.hc_mlp.bias[4:8] = 0
    block.hc_mlp.scales[1] = 0


def halve_read_gate(block) -> None:
    set_parameter(block.gated_mlp.up.weight, 0.0)


def inject_one(block) -> None:
    set_parameter(block.gated_mlp.inject.weight, 0.0)


def attend_uniformly(block) -> None:
    set_parameter(block.depth_mlp.query, 0)


def open_mgt_beta(block) -> None:
    block.write_mlp.beta.weight.zero_()
    block.write_mlp.beta.bias.fill_(LARGE)


def open_mgt_gate(block) -> None:
    block.write_mlp.gate_norm.weight.zero_()
    block.write_mlp.gate_norm.bias.fill_(LARGE)


def clear_mgt_alpha(block) -> None:
    set_parameter(block.write_mlp.alpha, 0.0)


def scale_by(value: float) -> Callable:
    return lambda block: set_parameter(block.write_mlp.scale, value)


def keep_last_depth(block) -> None:
    num_weights = len(block.average.weights)
    set_parameter(block.average.weights, F.one_hot(torch.tensor(num_weights - 1), num_weights))


def clear_low_rank(block) -> None:
    set_parameter(block.write_mlp.up.weight, 0.0)


def weight_equally(block) -> None:
    set_parameter(block.write_mlp.logits, 0.0)


def clear_scaling(block) -> None:
    for part in (block.write_mlp.affine_state, block.write_mlp.affine_output):
        set_parameter(part.bias, 0.0)
        set_parameter(part.scale, 1.0)


def write_one_to_all_channels(block) -> None:
    set_parameter(block.write_mlp.weights, 1.0)


def clear_sublayer(block) -> None:
    set_parameter(block.mlp.c_proj.weight, 0.0)


# model name, its keys, the name of an edit, and the same by hand
BY_HAND = [
    ("DDL-gpt-mha-rope", {}, "beta=0", lambda block: set_beta_logit(block, -LARGE)),
    ("DDL-gpt-mha-rope", {}, "beta=1", lambda block: set_beta_logit(block, 0.0)),
    (
        "DDL-gpt-mha-rope-CC",
        {"ddl_map": "v"},
        "beta=2",
        lambda block: set_beta_logit(block, LARGE),
    ),
    ("DDL-vdim1-gpt-mha-rope", {}, "beta=2", lambda block: set_beta_logit(block, LARGE)),
    ("DDL-vdim1-gpt-mha-rope", SCALED, "beta=2", lambda block: set_beta_logit(block, LARGE)),
    ("HC-gpt-mha-rope", {"hc_dynamic": False}, "mix=I", unmix_static),
    ("HC-gpt-mha-rope", {}, "mix=I", unmix_dynamic),
    ("HC-gpt-mha-rope", {}, "write=1", write_one_dynamic),
    ("mHC-gpt-mha-rope", {}, "write=1", write_one_manifold),
    ("GatedResidual-gpt-mha-rope", {}, "a=1/2", halve_read_gate),
    ("GatedResidual-gpt-mha-rope", {"hc_streams": 2}, "g=1", inject_one),
    ("AttnRes-gpt-mha-rope", {"attn_res_blocks": 2}, "uniform weights", attend_uniformly),
    ("MGT-gpt-mha", {}, "beta=1", open_mgt_beta),
    ("MGT-gpt-mha", {}, "alpha=0", clear_mgt_alpha),
    ("MGT-gpt-mha", {"mgt_arm": "mhc"}, "gate=1", open_mgt_gate),
    ("MGT-gpt-mha", SCALED, "beta=1", open_mgt_beta),
    ("MGT-gpt-mha", SCALED, "alpha=0", clear_mgt_alpha),
    ("MGT-gpt-mha", {"mgt_arm": "mhc", "residual_branch_mult": 0.5}, "gate=1", open_mgt_gate),
    ("ReZero-gpt-mha-rope", {}, "a=0", scale_by(0.0)),
    ("ReZero-gpt-mha-rope", {}, "a=1", scale_by(1.0)),
    ("DenseFormer-gpt-mha-rope", {}, "A=I", keep_last_depth),
    ("LAuReL-gpt-mha-rope", {}, "no low rank", clear_low_rank),
    ("LAuReL-gpt-mha-rope", {"laurel_form": "rw"}, "a=b=1", weight_equally),
    ("LAuReL-gpt-mha-rope", {"laurel_form": "zaya"}, "no scaling", clear_scaling),
    ("wide-gpt-mha-rope", {}, "w=1", write_one_to_all_channels),
    ("gpt-mha-rope", {}, "h=0", clear_sublayer),
]


@pytest.mark.parametrize(("model_name", "keys", "name", "edit_by_hand"), BY_HAND)
def test_an_edit_is_that_of_the_parameters_by_hand(
    model_name, keys, name, edit_by_hand, ids, targets
):
    """At the MLP's site of the last block alone, and of both blocks."""
    model = build_moved(model_name, **keys)
    for layers in ((1,), (0, 1)):
        losses = compute_edited_losses(
            model, ids, targets, {(layer, "mlp"): name for layer in layers}
        )
        # the sites of a copied block call its own modules, because these are copied with it
        edited_model = copy.deepcopy(model)
        with torch.no_grad():
            for layer in layers:
                edit_by_hand(edited_model.transformer.h[layer])
        expected = compute_losses(edited_model, ids, targets)
        assert not torch.allclose(expected, compute_losses(model, ids, targets), atol=1e-6)
        torch.testing.assert_close(losses, expected, **EXACT)


def test_the_identity_mix_of_mhc(ids, targets):
    """Logits that make Sinkhorn-Knopp's matrix the identity, apart from its guard of 1e-6."""
    model = build_moved("mHC-gpt-mha-rope")
    for block in model.transformer.h:
        torch.nn.init.normal_(block.hc_mlp.bias, std=2)  # a mix that is far from the identity
    edited_model = copy.deepcopy(model)
    with torch.no_grad():
        for block in edited_model.transformer.h:
            block.hc_mlp.bias[8:] = 100 * (torch.eye(4, dtype=torch.float64).flatten() - 1)
            block.hc_mlp.scales[2] = 0
    losses = compute_edited_losses(
        model, ids, targets, {(0, "mlp"): "mix=I", (1, "mlp"): "mix=I"}
    ).tolist()
    assert losses == pytest.approx(compute_losses(edited_model, ids, targets).tolist(), abs=1e-4)
    assert losses != pytest.approx(compute_losses(model, ids, targets).tolist(), abs=1e-3)


def test_the_last_source_alone(ids, targets):
    """Each site after the first one reads the output of the site before it, here by hand."""
    model = build_moved("AttnRes-gpt-mha-rope", attn_res_blocks=None)
    losses = compute_edited_losses(
        model,
        ids,
        targets,
        {
            (0, "mlp"): "last source alone",
            (1, "attn"): "last source alone",
            (1, "mlp"): "last source alone",
        },
    )
    positions = model.positions(ids)
    with torch.no_grad():
        sources = [model.transformer.wte(ids)]
        for block in model.transformer.h:
            sources.append(block.attn(block.ln_1(sources[-1]), positions, None))
            sources.append(block.mlp(block.ln_2(sources[-1]), positions, None))
        logits = model.logits(model.ln_f(model.readout(tuple(sources))))
    expected = torch.stack(
        [F.cross_entropy(sequence, goals) for sequence, goals in zip(logits, targets)]
    )
    torch.testing.assert_close(losses, expected, **EXACT)


# ---- edits of delta rewrites ----


@pytest.mark.parametrize(
    "model_name", ["DDL-gpt-mha-rope", "DDL-gpt-mha-rope-CC-EC", "DDL-vdim1-gpt-mha-rope"]
)
def test_without_erase_at_all_sites_is_the_write_only_model(model_name, ids, targets):
    model = build_moved(model_name)
    write_only_config = dataclasses.replace(model.config, ddl_update="write_only")
    write_only_model = build(model_name, write_only_config).double()
    write_only_model.load_state_dict(model.state_dict())
    plan = edits.EditPlan(model, ["no erase"])
    first_input = edits.record_block_inputs(model, ids)[0]
    losses = edits.measure_losses_from(
        model, first_input, 0, targets, plan.at_all_sites["no erase"]
    )
    torch.testing.assert_close(losses, compute_losses(write_only_model, ids, targets), **EXACT)


@pytest.mark.parametrize("model_name", READ_KINDS)
@pytest.mark.parametrize(
    ("keys", "name", "naive_edit"),
    [
        ({}, "no erase", NaiveEdit(erase=False)),
        ({}, "beta=2", NaiveEdit(beta=2.0)),
    ],
)
def test_one_edited_site_against_loops_over_tokens(
    model_name, keys, name, naive_edit, ids, targets
):
    model = build_moved(model_name, **keys)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    cfg = dataclasses.asdict(model.config)
    for key in ((0, "mlp"), (1, "attn")):
        losses = compute_edited_losses(model, ids, targets, {key: name})
        expected = [
            naive_gates.loss(
                weights,
                cfg,
                sequence,
                goals,
                READ_KINDS[model_name],
                embedding_conv=model_name.endswith("EC"),
                edits={key: naive_edit},
            )
            for sequence, goals in zip(ids.tolist(), targets.tolist())
        ]
        assert losses.tolist() == pytest.approx(expected, abs=1e-9)


# ---- measuring and storing ----


SEQUENCES = [0, 5, 9, 30, 31]


@pytest.fixture
def model():
    return build_moved("DDL-gpt-mha-rope")


@pytest.fixture
def batches(corpus) -> ValidationBatches:
    return ValidationBatches(shards.open_corpus(str(corpus)).val, 10)


def measure(model, batches, figures) -> None:
    """Measure two edits over SEQUENCES, two at a time."""
    plan = edits.EditPlan(model, ["beta=0", "no erase"])
    edits.measure_losses(model, batches, SEQUENCES, 2, plan, figures, {"weights": "w"}, "label")


def test_effects_are_differences_paired_over_sequences(model, batches):
    figures = Figures(None, torch.device("cpu"), {}, code="c")
    measure(model, batches, figures)
    effects = edits.compute_effects(figures.rows)
    assert len(effects) == 2 * (1 + 4)  # edits, at all sites and at each
    ids, targets = batches.get(SEQUENCES, 5)
    unedited_losses = compute_losses(model, ids, targets).numpy()
    all_sites = [(0, "attn"), (0, "mlp"), (1, "attn"), (1, "mlp")]
    for effect in effects:
        sites = [(effect["layer"], effect["site"])]
        if effect["layer"] is None:
            sites = all_sites
        names = {site: effect["edit"] for site in sites}
        differences = compute_edited_losses(model, ids, targets, names).numpy() - unedited_losses
        assert effect["difference"] == pytest.approx(differences.mean(), abs=1e-10)
        standard_error = differences.std(ddof=1) / np.sqrt(5)
        assert effect["ci95"] == pytest.approx(T_4 * standard_error, rel=1e-6)


def test_effects_are_over_targets_if_documents_have_different_numbers_of_labels(model):
    """Sequences have 2, 10, 0 and 5 labels; the interval is that of a ratio of sums."""
    generator = np.random.default_rng(0)
    documents = generator.integers(1, 200, (4, 20))
    num_labels = [2, 10, 0, 5]
    for document, number in zip(documents, num_labels):
        document[10 + number :] = 0
    batches = LabeledDocuments(documents)
    figures = Figures(None, torch.device("cpu"), {}, code="c")
    plan = edits.EditPlan(model, ["no erase"])
    edits.measure_losses(model, batches, [0, 1, 2, 3], 3, plan, figures, {}, "label")
    [effect] = [row for row in edits.compute_effects(figures.rows) if row["layer"] is None]

    def sum_nats(evaluated_model) -> list[float]:
        """Return the sum over the labels of each sequence."""
        with torch.no_grad():
            logits, _ = evaluated_model(torch.from_numpy(documents[:, :10]))
        return [
            -sum(
                row[position].log_softmax(-1)[document[10 + position]].item()
                for position in range(number)
            )
            for row, document, number in zip(logits, documents, num_labels)
        ]

    write_only_config = dataclasses.replace(model.config, ddl_update="write_only")
    write_only_model = build("DDL-gpt-mha-rope", write_only_config).double()
    write_only_model.load_state_dict(model.state_dict())
    edited = sum_nats(write_only_model)
    unedited = sum_nats(model)
    mean = (sum(edited) - sum(unedited)) / 17
    assert effect["loss"] == pytest.approx(sum(edited) / 17, abs=1e-10)
    assert effect["difference"] == pytest.approx(mean, abs=1e-10)
    assert effect["windows"] == 3
    residuals = [
        edited[index] - unedited[index] - mean * number
        for index, number in enumerate(num_labels)
        if number
    ]
    variance = sum(residual**2 for residual in residuals) / (3 - 1)
    assert effect["standard_error"] == pytest.approx(3 / 17 * math.sqrt(variance / 3), rel=1e-9)


def test_an_interrupted_measurement_continues_where_it_stopped(model, batches, tmp_path):
    figures = Figures(tmp_path / "f.json", torch.device("cpu"), {}, code="c")
    measure(model, batches, figures)
    resumed = Figures(tmp_path / "f.json", torch.device("cpu"), {}, resume=True, code="c")
    first_rows = resumed.rows[:4]
    resumed.rows = list(first_rows)
    measure(model, batches, resumed)
    assert resumed.rows[:4] == first_rows
    assert sorted(map(str, resumed.rows)) == sorted(map(str, figures.rows))
