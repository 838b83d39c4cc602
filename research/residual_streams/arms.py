"""What is compared, on what: the arms and the problems of PLAN.md, as keys of train.py."""

import math
from dataclasses import dataclass

BASELINE = "additive"
SEEDS = range(5)
SEARCH_SEED = 1000  # of the runs that choose learning rates; it is in no result
MUON = (
    5e-3,
    1e-2,
    2e-2,
)  # learning rates, which go on by factors of two where the best is at an edge
ADAMW = 1e-3, 2e-3, 4e-3

# Every arm is a stream with its defaults but for what stands here. Order: as in tables and figures.
ARMS: dict[str, dict[str, str]] = {
    "additive": {"model": "gpt-mha-rope"},
    "conv": {"model": "conv-gpt-mha-rope"},
    "conv, identity": {"model": "conv-gpt-mha-rope", "conv_init": "identity"},
    "wide": {"model": "wide-gpt-mha-rope"},
    "wide, identity": {"model": "wide-gpt-mha-rope", "ddl_state_conv_init": "identity"},
    "wide, CC": {"model": "wide-gpt-mha-rope", "wide_read": "cc"},
    "DDL, 1 column": {"model": "DDL-vdim1-gpt-mha-rope"},
    "DDL, 1 column, no erase": {"model": "DDL-vdim1-gpt-mha-rope", "ddl_update": "write_only"},
    "DDL": {"model": "DDL-gpt-mha-rope"},
    "DDL, no erase": {"model": "DDL-gpt-mha-rope", "ddl_update": "write_only"},
    "DDL, identity": {"model": "DDL-gpt-mha-rope", "ddl_state_conv_init": "identity"},
    "DDL, identity, no erase": {
        "model": "DDL-gpt-mha-rope",
        "ddl_state_conv_init": "identity",
        "ddl_update": "write_only",
    },
    "DDL, beta 0.1": {"model": "DDL-gpt-mha-rope", "ddl_beta_init": "0.1"},
    "DDL-EC": {"model": "DDL-gpt-mha-rope-EC"},
    "DDL-CC": {"model": "DDL-gpt-mha-rope-CC"},
    "DDL-CC, no erase": {"model": "DDL-gpt-mha-rope-CC", "ddl_update": "write_only"},
    "DDL-CC-EC": {"model": "DDL-gpt-mha-rope-CC-EC"},
    "HC": {"model": "HC-gpt-mha-rope"},
    "mHC": {"model": "mHC-gpt-mha-rope"},
    "AttnRes": {"model": "AttnRes-gpt-mha-rope"},
}

# The arms of the tasks: those whose difference is the erase, and what they are compared with.
ON_TASKS = (
    "additive",
    "conv",
    "wide",
    "DDL, 1 column",
    "DDL, 1 column, no erase",
    "DDL",
    "DDL, no erase",
    "DDL-CC",
    "DDL-CC, no erase",
    "mHC",
    "AttnRes",
)


def keys_of(preset: str, arm: str) -> dict[str, str]:
    """The arm's keys of train.py. The runs of the CPU tier were made when these keys' defaults were others."""
    keys = dict(ARMS[arm])
    if preset == "cpu":
        keys |= {"init": "normal", "muon_dtype": "bfloat16"}
        keys |= {"ddl_cc_read": "folded"} if keys["model"].startswith("DDL-gpt-mha-rope-CC") else {}
        keys |= {"mhc_rows_last": "False"} if keys["model"].startswith("mHC") else {}
    return keys


AGAIN = {"language": "DDL", "k_hop": "DDL-CC"}  # arms whose first seed is trained twice
# Arms of tasks that are trained once more with the learning rate of the arm that they are compared with.
SWAPPED = {"DDL": "DDL, no erase", "DDL, no erase": "DDL"}
SWAPPED_ON = "permutations", "k_hop"


@dataclass(frozen=True)
class Problem:
    """config: a config file; keys: of train.py, over it; metric: of an evaluation, what is compared; guess: that of a
    uniform guess; arms: those that are trained on it; rates: that every arm tries."""

    config: str
    keys: dict[str, str]
    metric: str
    guess: float
    arms: tuple[str, ...] = ON_TASKS
    rates: tuple[float, ...] = MUON

    @property
    def lower_is_better(self) -> bool:
        return self.metric == "val_loss"


HERE = "research/residual_streams"
PRESETS: dict[str, dict[str, Problem]] = {
    "cpu": {
        "language": Problem(
            f"{HERE}/cpu.py",
            {"max_steps": "400", "warmup_steps": "40"},
            "val_loss",
            math.log(4096),
            tuple(ARMS),
        ),
        "permutations": Problem(
            "config/permutations_cpu.py",
            {
                **{
                    "max_steps": "300",
                    "warmup_steps": "30",
                    "global_batch_size": "128",
                    "micro_batch_size": "128",
                },
                "eval_batches": "2",
            },
            "val_accuracy",
            1 / 24,
        ),
        "k_hop": Problem(
            "config/k_hop_cpu.py",
            {
                **{
                    "max_steps": "150",
                    "warmup_steps": "30",
                    "global_batch_size": "48",
                    "micro_batch_size": "48",
                },
                "dataset": "data/k_hop_48",
            },
            "val_accuracy",
            1 / 4,
        ),
        "recall": Problem(
            "config/recall_cpu.py",
            {"max_steps": "600", "warmup_steps": "30", "dataset": "data/recall_4"},
            "val_accuracy",
            1 / 4,
        ),
    },
    "gpu": {
        "language": Problem(
            f"{HERE}/gpu.py",
            {"max_steps": "1200", "warmup_steps": "100"},
            "val_loss",
            math.log(16384),
            tuple(ARMS),
            ADAMW,
        ),
    },
}
