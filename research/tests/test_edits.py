"""Edits of a trained model, against models whose parameters and configurations are edited by hand."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gates_helpers import LabeledDocuments, build_moved, open_run

from model import MODEL_NAMES
from research.analysis import edits
from research.analysis.common import LoadedRun

LARGE = 1e4  # a logit whose sigmoid is 1 to the last bit
EXACT = {"rtol": 1e-11, "atol": 1e-11}
# Student's 97.5% quantile at four degrees of freedom
T_4 = 2.776445
ALL_SITES = [(0, "attn"), (0, "mlp"), (1, "attn"), (1, "mlp")]


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


def compute_edited_losses(model, ids, targets, name: str, sites=ALL_SITES) -> torch.Tensor:
    """Return the losses with an edit at some sites."""
    writes = edits.collect_edits(model)[name]
    return edits.measure_losses(model, ids, targets, {site: writes[site] for site in sites})


def set_beta_logit(block, logit: float) -> None:
    block.ddl_mlp.beta.weight.zero_()
    block.ddl_mlp.beta.bias.fill_(logit)


def stop_erasing(block) -> None:
    block.ddl_mlp.config = dataclasses.replace(block.ddl_mlp.config, ddl_update="write_only")


# model name, its keys, the name of an edit, and the same at the MLP of a block by hand
BY_HAND = [
    ("DDL-gpt-mha-rope", {}, "beta=0", lambda block: set_beta_logit(block, -LARGE)),
    ("DDL-gpt-mha-rope", {}, "beta=1", lambda block: set_beta_logit(block, 0.0)),
    (
        "DDL-gpt-mha-rope-CC",
        {"ddl_map": "v"},
        "beta=2",
        lambda block: set_beta_logit(block, LARGE),
    ),
    (
        "DDL-vdim1-gpt-mha-rope",
        {"residual_branch_mult": 0.4},
        "beta=2",
        lambda block: set_beta_logit(block, LARGE),
    ),
    ("DDL-gpt-mha-rope-CC-EC", {}, "no erase", lambda block: stop_erasing(block)),
    ("gpt-mha-rope", {}, "h=0", lambda block: block.mlp.c_proj.weight.zero_()),
]


@pytest.mark.parametrize(("model_name", "keys", "name", "edit_by_hand"), BY_HAND)
def test_an_edit_is_that_of_the_parameters_by_hand(
    model_name, keys, name, edit_by_hand, ids, targets
):
    """At the MLP's site of the last block alone, and of both blocks."""
    model = build_moved(model_name, **keys)
    for layers in ((1,), (0, 1)):
        sites = [(layer, "mlp") for layer in layers]
        losses = compute_edited_losses(model, ids, targets, name, sites)
        # the sites of a copied block call its own modules, because these are copied with it
        edited_model = copy.deepcopy(model)
        with torch.no_grad():
            for layer in layers:
                edit_by_hand(edited_model.transformer.h[layer])
        expected = compute_losses(edited_model, ids, targets)
        assert not torch.allclose(expected, compute_losses(model, ids, targets), atol=1e-6)
        torch.testing.assert_close(losses, expected, **EXACT)


@pytest.mark.parametrize("model_name", MODEL_NAMES)
def test_every_stream_has_edits_that_change_its_loss_and_leave_the_model(model_name, ids, targets):
    model = build_moved(model_name)
    expected = compute_losses(model, ids, targets)
    unedited = edits.measure_losses(model, ids, targets, writes={})
    torch.testing.assert_close(unedited, expected, **EXACT)
    for writes in edits.collect_edits(model).values():
        for site, write in writes.items():
            losses = edits.measure_losses(model, ids, targets, {site: write})
            assert losses.isfinite().all()
            assert (losses - expected).abs().max() > 1e-12
    assert torch.equal(compute_losses(model, ids, targets), expected)


# ---- effects ----


@pytest.fixture
def model():
    return build_moved("DDL-gpt-mha-rope")


def test_effects_are_differences_paired_over_sequences(model, corpus):
    run = open_run(model, corpus, num_sequences=5)
    effects = edits.measure_effects(run, batch_size=2)
    assert len(effects) == 4 * (1 + 4)  # edits, at all sites and at each
    ids, targets = run.batches.get(run.sequences, 5)
    unedited_losses = compute_losses(model, ids, targets).numpy()
    for effect in effects:
        sites = [(effect["layer"], effect["site"])]
        if effect["layer"] is None:
            sites = ALL_SITES
        losses = compute_edited_losses(model, ids, targets, effect["edit"], sites)
        differences = losses.numpy() - unedited_losses
        assert effect["difference"] == pytest.approx(differences.mean(), abs=1e-10)
        standard_error = differences.std(ddof=1) / np.sqrt(5)
        assert effect["ci95"] == pytest.approx(T_4 * standard_error, rel=1e-6)


def test_sequences_without_targets_do_not_count(model):
    documents = np.random.default_rng(0).integers(1, 200, (3, 20))
    documents[1, 10:] = 0
    runs = [
        LoadedRun("", model, None, LabeledDocuments(chosen), list(range(len(chosen))))
        for chosen in (documents, documents[[0, 2]])
    ]
    effects, others = (edits.measure_effects(run, batch_size=3) for run in runs)
    for effect, other in zip(effects, others, strict=True):
        assert effect["windows"] == 2
        assert effect["difference"] == pytest.approx(other["difference"], abs=1e-10)
