"""Settings that give a variant other parameters or other code paths than its defaults.

The contract of a residual stream is checked for each of them.
"""

from models import AUTHORS, AUTHORS_CC

from model import MODEL_NAMES

TEST_SETTINGS: dict[str, tuple[dict, ...]] = {
    "AttnRes-gpt-mha-rope": ({"attn_res_blocks": 2}, {"attn_res_blocks": None}),
    "DDL-gpt-mha-rope": (
        AUTHORS,
        {"ddl_map": "v"},
        {"ddl_update": "erase_only"},
    ),
    "DDL-gpt-mha-rope-CC": (
        {**AUTHORS_CC, "ddl_beta_single_linear": False},
        {"ddl_map": "v", "ddl_k_branch": "attention", "ddl_cc_read": "pair"},
        {
            "ddl_map": "v",
            "ddl_k_norm": "shifted",
            "ddl_k_input": "mean",
            "ddl_beta_input": "mean",
        },
        {
            "ddl_map": "v",
            "ddl_k_input": "flat",
            "ddl_beta_input": "flat",
        },
    ),
    "DDL-gpt-mha-rope-CC-EC": (
        {
            "ddl_cc_read": "pair",
            "ddl_state_dv_shortconv_causal": True,
            "ddl_state_shortconv_kernel_size": 3,
        },
    ),
    "DDL-vdim1-gpt-mha-rope": (
        {"ddl_map": "v"},
        {"ddl_beta_single_linear": False},
    ),
    "GatedResidual-gpt-mha-rope": ({"hc_streams": 2, "gated_residual_rank": 3},),
    "HC-gpt-mha-rope": ({"hc_dynamic": False},),
    "LAuReL-gpt-mha-rope": ({"laurel_form": "rw"}, {"laurel_form": "zaya"}),
    "Lambdas-gpt-mha-rope": (
        {"lambda_values": "head", "lambda_value_embeddings": True},
        {"lambda_input": False, "lambda_values": "none", "lambda_skips": True},
        {"lambda_input": False, "lambda_values": "none", "lambda_gain": True},
    ),
    "MGT-gpt-mha": (
        {"mgt_arm": "ddl"},
        {"mgt_arm": "mhc"},
        {"mgt_arm": "standard"},
        {"mgt_arm": "additive"},
        {"mgt_arm": "mhc_pre"},
        {"mgt_arm": "ddl_post"},
        {"mgt_arm": "full_post"},
        {"mgt_arm": "additive", "residual_branch_mult": 0.38},
    ),
    "NormPlacement-gpt-mha-rope": (
        {"norm_placement": "lns"},
        {"norm_placement": "keel"},
        {"norm_placement": "post"},
        {"norm_placement": "deepnorm"},
    ),
    "gpt-mha-rope": ({"residual_branch_mult": 0.5},),
    "mHC-gpt-mha-rope": ({"mhc_mix": "identity", "mhc_readout": "sigmoid"},),
    "wide-gpt-mha-rope": ({"wide_read": "cc"},),
}


def names_and_settings() -> list[tuple[str, dict]]:
    """Return each variant with each of its settings, in the order of the variants."""
    return [(name, settings) for name in MODEL_NAMES for settings in TEST_SETTINGS.get(name, ())]
