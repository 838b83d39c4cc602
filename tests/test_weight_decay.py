"""Which parameters of each model have weight decay."""

import pytest
import torch
from models import TINY

from model import MODEL_NAMES, build
from training import optimizer
from training.config import TrainConfig

BLOCK = ("attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj", "mlp.c_fc1", "mlp.c_fc2", "mlp.c_proj")
BACKBONE = {
    "transformer.wte.weight",
    *(f"transformer.h.{layer}.{name}.weight" for layer in (0, 1) for name in BLOCK),
}

# What decays besides the backbone, written out once more: names in both blocks, with SITE for attn
# and mlp, and names outside the blocks.
DDL_SITE = ("ddl_SITE.beta.weight", "ddl_SITE.v_proj.weight")
TOKEN_READ = "compress.shortconv.weight"
CHANNEL_READ = "compress.weight"
TOKEN_READOUT = "readout.shortconv.weight"
CHANNEL_READOUT = "readout.weight"
EC = "input_embed.conv.weight"
TC_NAMES = (*DDL_SITE, TOKEN_READ)
CC_NAMES = (*DDL_SITE, CHANNEL_READ)
STREAMS = [
    ("gpt-mha-rope", {}, (), ()),
    ("AttnRes-gpt-mha-rope", {}, (), ()),
    ("DDL-vdim1-gpt-mha-rope", {}, DDL_SITE, ()),
    ("DDL-gpt-mha-rope", {}, TC_NAMES, (TOKEN_READOUT,)),
    ("DDL-gpt-mha-rope-EC", {}, TC_NAMES, (TOKEN_READOUT, EC)),
    ("DDL-gpt-mha-rope-CC", {}, CC_NAMES, (CHANNEL_READOUT,)),
    ("DDL-gpt-mha-rope-CC", {"ddl_cc_read": "folded"}, CC_NAMES, (CHANNEL_READOUT,)),
    ("DDL-gpt-mha-rope-CC-EC", {}, CC_NAMES, (CHANNEL_READOUT, EC)),
    (
        "DDL-vdim1-gpt-mha-rope",
        {"ddl_beta_single_linear": False},
        ("ddl_SITE.beta_in.weight", "ddl_SITE.beta_out.weight", "ddl_SITE.v_proj.weight"),
        (),
    ),
    (
        "DDL-vdim1-gpt-mha-rope",
        {"ddl_map": "v"},
        (*DDL_SITE, "ddl_SITE.k_in.weight", "ddl_SITE.k_out.weight"),
        (),
    ),
    (
        "DDL-gpt-mha-rope",
        {"ddl_map": "v", "ddl_k_branch": "attention"},
        (*TC_NAMES, "ddl_SITE.k_key.weight", "ddl_SITE.k_out.weight"),
        (TOKEN_READOUT,),
    ),
    ("DenseFormer-gpt-mha-rope", {}, (), ()),
    (
        "GatedResidual-gpt-mha-rope",
        {},
        ("gated_SITE.down.weight", "gated_SITE.up.weight", "gated_SITE.inject.weight"),
        ("readout.down.weight", "readout.up.weight"),
    ),
    ("HC-gpt-mha-rope", {}, ("hc_SITE.maps.weight",), ()),
    ("LAuReL-gpt-mha-rope", {}, ("write_SITE.down.weight", "write_SITE.up.weight"), ()),
    ("LAuReL-gpt-mha-rope", {"laurel_form": "rw"}, (), ()),
    ("LAuReL-gpt-mha-rope", {"laurel_form": "zaya"}, (), ()),
    ("Lambdas-gpt-mha-rope", {"lambda_skips": True}, (), ()),
    (
        "Lambdas-gpt-mha-rope",
        {"lambda_value_embeddings": True},
        (),
        ("transformer.h.1.embedding.weight",),
    ),
    ("MGT-gpt-mha", {}, ("write_SITE.gate.weight", "write_SITE.beta.weight"), ()),
    ("MUDD-gpt-mha-rope", {}, ("dense.first.weight", "dense.second.weight"), ()),
    ("MuseSpark-gpt-mha-rope", {}, (), ()),
    ("NormPlacement-gpt-mha-rope", {}, (), ()),
    ("ReZero-gpt-mha-rope", {}, (), ()),
    ("conv-gpt-mha-rope", {}, (TOKEN_READ,), (TOKEN_READOUT,)),
    ("mHC-gpt-mha-rope", {}, ("hc_SITE.maps.weight",), ()),
    (
        "mHC-gpt-mha-rope",
        {"mhc_readout": "sigmoid"},
        ("hc_SITE.maps.weight",),
        ("readout.maps.weight",),
    ),
    ("nGPT-gpt-mha-rope", {}, (), ()),
    ("wide-gpt-mha-rope", {}, (TOKEN_READ,), (TOKEN_READOUT,)),
]


def list_decayed_parameters(model_name: str, keys: dict, kind: str = "adamw") -> set[str]:
    """Return the names of the parameters that an optimizer decays."""
    with torch.device("meta"):  # the values do not matter
        model = build(model_name, **TINY, **keys)
    optimizers = optimizer.build_optimizers(model, TrainConfig(optimizer=kind))
    groups = [group for each_optimizer in optimizers for group in each_optimizer.param_groups]
    assert all(group["decays"] == (group["weight_decay"] > 0) for group in groups)
    return {name for group in groups if group["weight_decay"] > 0 for name in group["names"]}


def full_names(in_blocks: tuple[str, ...], outside: tuple[str, ...]) -> set[str]:
    """Return the names of parameters in both blocks, and of those outside of them."""
    names = set(outside)
    for layer in (0, 1):
        for site in ("attn", "mlp"):
            names |= {f"transformer.h.{layer}.{name.replace('SITE', site)}" for name in in_blocks}
    return names


@pytest.mark.parametrize(("model_name", "keys", "in_blocks", "outside"), STREAMS, ids=str)
def test_decayed_parameters_are_the_listed_ones(model_name, keys, in_blocks, outside):
    names = full_names(in_blocks, outside)
    assert list_decayed_parameters(model_name, keys) == BACKBONE | names


def test_muon_decays_the_same_parameters_as_adamw():
    names = full_names(CC_NAMES, (CHANNEL_READOUT, EC))
    assert list_decayed_parameters("DDL-gpt-mha-rope-CC-EC", {}, "muon") == BACKBONE | names


def test_every_stream_is_listed():
    assert {model_name for model_name, *_ in STREAMS} == set(MODEL_NAMES)
