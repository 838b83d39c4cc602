"""Notes on settings that train badly; streams of 200 blocks train at 1e-3 without warm-up."""

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


DEEP = {"num_hidden_layers": 200, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
SAME_UPDATE = "every value channel gets the same update"
# (model, its keys, words of the note; None if nothing is noted)
NOTES = [
    # gradients explode
    (CC, DEEP, "--ddl_beta_init=1/L"),
    (CC, {**DEEP, "ddl_update": "erase_only"}, "--ddl_beta_init=1/L"),
    (CC, {**DEEP, "ddl_beta_init": "1/L"}, None),
    (CC, {**DEEP, "residual_branch_mult": 12 / 200}, None),
    (CC, {**DEEP, "num_hidden_layers": 12}, None),
    (CC, {**DEEP, "ddl_update": "write_only"}, None),
    # value channels are of no use
    (CC, {"ddl_update": "erase_only"}, SAME_UPDATE),
    (CC, {"ddl_v_constant": True}, SAME_UPDATE),
    (CC, {"ddl_value_channels": 1}, "DDL-vdim1-gpt-mha-rope"),
    ("DDL-vdim1-gpt-mha-rope", {"ddl_v_constant": True}, None),
]


@pytest.mark.parametrize(("model_name", "keys", "words"), NOTES)
def test_settings_that_train_badly_are_noted(model_name, keys, words):
    notes = model_class(model_name).Config(**keys).notes()
    if words is None:
        assert notes == []
    else:
        assert any(words in note for note in notes)


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
