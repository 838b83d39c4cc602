"""Check that streams of 200 blocks train at a learning rate of 1e-3 without warm-up."""

import math

import pytest
from helpers import SMALL, run_script

from model import model_class
from training import metrics

SETTINGS = {
    **SMALL,
    "num_hidden_layers": 200,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "block_size": 32,
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
    "activation_checkpointing": True,
    "learning_rate": 1e-3,
    "warmup_steps": 0,
    "max_steps": 20,
    "global_batch_size": 4,
    "micro_batch_size": 4,
    "eval_batches": 1,
    "eval_full": False,
}

# The backward pass of a delta write enlarges the gradient, the more the narrower the model is and
# the wider the gate is open: at ddl_beta_init=1 the first gradient of so narrow a model is about
# 4e11, and clipping leaves nothing of it.
CC = "DDL-gpt-mha-rope-CC"
STREAMS = [
    ("MGT-gpt-mha", {}),
    ("AttnRes-gpt-mha-rope", {"attn_res_blocks": 8}),
    (CC, {"ddl_beta_init": "1/L"}),
    (CC, {"residual_branch_mult": 12 / 200}),
    (CC, {"ddl_beta_init": "1/L", "init": "normal", "ddl_cc_read": "folded"}),
]


@pytest.mark.parametrize(
    ("settings", "is_noted"),
    [
        ({}, True),
        ({"ddl_beta_init": "1/L"}, False),
        ({"residual_branch_mult": 12 / 200}, False),
        ({"num_hidden_layers": 12}, False),
        ({"hidden_size": 768, "num_hidden_layers": 24}, False),
        ({"ddl_update": "write_only"}, False),
        ({"ddl_update": "erase_only"}, True),
    ],
)
def test_a_depth_at_which_gradients_explode_is_noted(settings, is_noted):
    config = model_class(CC).Config(**{"num_hidden_layers": 200, "hidden_size": 32, **settings})
    notes = [note for note in config.notes() if "first gradient" in note]
    assert all("--ddl_beta_init=1/L" in note for note in notes)
    assert bool(notes) is is_noted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_name", "changes"),
    STREAMS,
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_200_blocks_train_without_warm_up(model_name, changes, corpus, tmp_path):
    run = tmp_path / "run"
    settings = {"model": model_name, "dataset": corpus, "out_dir": run, **SETTINGS, **changes}
    result = run_script("train.py", *(f"--{key}={value}" for key, value in settings.items()))
    assert result.returncode == 0, result.stderr.decode()
    steps = [record for record in metrics.read(run / "metrics.jsonl") if "loss" in record]
    losses = [record["loss"] for record in steps]
    assert len(losses) == 20
    assert all(math.isfinite(record["grad_norm"]) for record in steps)
    assert losses[0] == pytest.approx(math.log(260), abs=0.3)
    assert max(losses[-5:]) < losses[0] - 0.2


@pytest.mark.parametrize("keys", [{"ddl_update": "erase_only"}, {"ddl_v_constant": True}])
def test_value_channels_that_get_the_same_update_are_noted(keys):
    [note] = model_class("DDL-gpt-mha-rope").Config(**keys).notes()
    assert "every value channel gets the same update" in note
    assert model_class("DDL-vdim1-gpt-mha-rope").Config(**keys).notes() == []


def test_one_value_channel_of_ddl_is_not_mistaken_for_the_papers_model():
    [note] = model_class("DDL-gpt-mha-rope").Config(ddl_value_channels=1).notes()
    assert "DDL-vdim1-gpt-mha-rope" in note
    assert model_class("DDL-gpt-mha-rope").Config(ddl_value_channels=2).notes() == []
