"""Configurations that tests of decoding and of generation go through."""

from models import DDL, EXPANDED, INPUTS, PAPER

CC = "DDL-gpt-mha-rope-CC"
EC = "DDL-gpt-mha-rope-EC"

# (model name, its settings)
CASES = [
    *((model_name, {}) for model_name in PAPER),
    *((model_name, {"ddl_map": "v", "ddl_k_hidden_size": 3}) for model_name in DDL),
    *((model_name, {"ddl_map": "v", "ddl_k_branch": "attention"}) for model_name in EXPANDED),
    *(("DDL-gpt-mha-rope", {"ddl_state_shortconv_kernel_size": size}) for size in (1, 2, 7)),
    *(
        (EC, {"input_embed_shortconv_kernel_size": size, "ddl_value_channels": 2})
        for size in (1, 2, 7)
    ),
    (
        CC,
        {
            "ddl_beta_single_linear": False,
            "ddl_beta_hidden_size": 5,
            "ddl_update": "write_only",
        },
    ),
    ("DDL-gpt-mha-rope", {"ddl_erase_gate": "own"}),
    ("DDL-gpt-mha-rope", {"ddl_update": "erase_only"}),
    ("DDL-vdim1-gpt-mha-rope", INPUTS["read"]),
    (EC, INPUTS["mean"]),
    (CC, INPUTS["flat"]),
    ("gpt-mha-rope", {"rope_ratio": 0.5, "mup": True, "use_qk_rmsnorm": False}),
]
