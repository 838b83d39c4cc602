"""The arms of the controlled comparison: names, and keys of train.py."""

BASELINE = "additive"

ONE_COLUMN = "DDL-vdim1-gpt-mha-rope"
TOKEN_CONVOLUTION = "DDL-gpt-mha-rope"  # the paper's TC
NO_ERASE = {"ddl_update": "write_only"}

# In the order in which arms are left out if time ends, the last one first.
ARMS: dict[str, dict[str, object]] = {
    BASELINE: {"model": "gpt-mha-rope"},
    "main_gain": {
        "model": "Lambdas-gpt-mha-rope",
        "lambda_input": False,
        "lambda_values": "none",
        "lambda_gain": True,
    },
    "conv": {"model": "conv-gpt-mha-rope"},
    "wide": {"model": "wide-gpt-mha-rope"},
    "ddl_1": {"model": ONE_COLUMN},
    "ddl_1_no_erase": {"model": ONE_COLUMN, **NO_ERASE},
    "ddl_tc": {"model": TOKEN_CONVOLUTION},
    "ddl_tc_no_erase": {"model": TOKEN_CONVOLUTION, **NO_ERASE},
    "ddl_cc_ec": {"model": "DDL-gpt-mha-rope-CC-EC"},
    "ddl_own_erase_gate": {"model": TOKEN_CONVOLUTION, "ddl_erase_gate": "own"},
    "gated_residual": {"model": "GatedResidual-gpt-mha-rope"},
    "hc": {"model": "HC-gpt-mha-rope"},
    "attn_res": {"model": "AttnRes-gpt-mha-rope"},
    "mudd": {"model": "MUDD-gpt-mha-rope"},
    # `conv` starts with random taps, DDL's read with equal ones. This control starts as `additive`.
    "conv_identity": {"model": "conv-gpt-mha-rope", "conv_init": "identity"},
}

# Streams of other papers, which are part of no claim.
PUBLISHED = ("gated_residual", "hc", "attn_res", "mudd")
# Arms that are not in the plan, and are part of no claim.
ADDED = ("conv_identity",)

# Arms of planned claims.
PLANNED = (
    BASELINE,
    "main_gain",
    "conv",
    "wide",
    "ddl_1",
    "ddl_1_no_erase",
    "ddl_tc",
    "ddl_tc_no_erase",
    "ddl_cc_ec",
)
# Arms that are trained at the longer rung too, and with five seeds.
LONG = (*PLANNED, *ADDED)
# Arms whose best rates at the longer rung are the lowest or the highest that the plan tries. One run
# of each has rates a step further: both best rates of the shorter rung times two to this power.
EDGE = {
    BASELINE: -1.5,
    "main_gain": -1.5,
    "wide": 0.5,
    "ddl_1": -1.5,
    "ddl_tc": -1.5,
    "ddl_tc_no_erase": 0.5,
    "ddl_cc_ec": -1.5,
}
# Arms whose longer runs are trained again and evaluated on the half of the validation split on which
# learning rates were chosen.
HALVES = (BASELINE, "wide", "ddl_1", "ddl_tc", "ddl_cc_ec")
# Arms whose cross of rates is extended to nine points.
TOLERANCE = (BASELINE, "ddl_tc")
