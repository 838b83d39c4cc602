"""What tests of decoding and others share."""

from models import EXPANDED, INPUTS, PAPER

CC, EC = "DDL-gpt-mha-rope-CC", "DDL-gpt-mha-rope-EC"
CASES = [(stem, {}) for stem in PAPER]
CASES += [
    (stem, {"ddl_map": "v", "ddl_k_hidden_size": 3}) for stem in PAPER if stem.startswith("DDL")
]
CASES += [(stem, {"ddl_map": "v", "ddl_k_branch": "attention"}) for stem in EXPANDED]
CASES += [("DDL-gpt-mha-rope", {"ddl_state_shortconv_kernel_size": k}) for k in (1, 2, 7)]
CASES += [
    (EC, {"input_embed_shortconv_kernel_size": k, "ddl_value_channels": 2}) for k in (1, 2, 7)
]
CASES += [
    (CC, {"ddl_beta_single_linear": False, "ddl_beta_hidden_size": 5, "ddl_update": "write_only"})
]
CASES += [("DDL-gpt-mha-rope", {"ddl_erase_gate": "own"})]
CASES += [("DDL-gpt-mha-rope", {"ddl_update": "erase_only"})]
CASES += [(stem, keys) for stem, keys in zip(("DDL-vdim1-gpt-mha-rope", EC, CC), INPUTS.values())]
CASES += [("gpt-mha-rope", {"rope_ratio": 0.5, "mup": True, "use_qk_rmsnorm": False})]
