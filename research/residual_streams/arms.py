"""What is compared, on what: the arms, problems and hypotheses of PLAN.md, as settings."""

import math
from dataclasses import dataclass

BASELINE = "additive"
SEEDS = range(5)
SEARCH_SEED = 1000  # of the runs that choose learning rates; it is in no result
# Learning rates, which go on by factors of two where the best is at an edge.
MUON, ADAMW = (5e-3, 1e-2, 2e-2), (1e-3, 2e-3, 4e-3)

VDIM1, TC, CC = "DDL-vdim1-gpt-mha-rope", "DDL-gpt-mha-rope", "DDL-gpt-mha-rope-CC"
IDENTITY, NO_ERASE = {"ddl_state_conv_init": "identity"}, {"ddl_update": "write_only"}
# Every arm is a stream with its defaults but for what stands here. Order: as in tables and figures.
ARMS: dict[str, dict[str, str]] = {
    "additive": {"model": "gpt-mha-rope"},
    "conv": {"model": "conv-gpt-mha-rope"},
    "conv, identity": {"model": "conv-gpt-mha-rope", "conv_init": "identity"},
    "wide": {"model": "wide-gpt-mha-rope"},
    "wide, identity": {"model": "wide-gpt-mha-rope", **IDENTITY},
    "wide, CC": {"model": "wide-gpt-mha-rope", "wide_read": "cc"},
    "DDL, 1 column": {"model": VDIM1},
    "DDL, 1 column, no erase": {"model": VDIM1, **NO_ERASE},
    "DDL": {"model": TC},
    "DDL, no erase": {"model": TC, **NO_ERASE},
    "DDL, identity": {"model": TC, **IDENTITY},
    "DDL, identity, no erase": {"model": TC, **IDENTITY, **NO_ERASE},
    "DDL, beta 0.1": {"model": TC, "ddl_beta_init": "0.1"},
    "DDL-EC": {"model": f"{TC}-EC"},
    "DDL-CC": {"model": CC},
    "DDL-CC, no erase": {"model": CC, **NO_ERASE},
    "DDL-CC-EC": {"model": f"{CC}-EC"},
    "HC": {"model": "HC-gpt-mha-rope"},
    "mHC": {"model": "mHC-gpt-mha-rope"},
    "AttnRes": {"model": "AttnRes-gpt-mha-rope"},
}
# On tasks: those whose difference is the erase, and what they are compared with.
ON_TASKS = ("additive", "conv", "wide", "DDL, 1 column", "DDL, 1 column, no erase", "DDL")
ON_TASKS += ("DDL, no erase", "DDL-CC", "DDL-CC, no erase", "mHC", "AttnRes")
AGAIN = {"language": "DDL", "k_hop": "DDL-CC"}  # whose first seed is trained twice
# Trained on tasks once more, with the learning rate of the arm that they are compared with.
SWAPPED = {"DDL": "DDL, no erase", "DDL, no erase": "DDL"}
SWAPPED_ON = ("permutations", "k_hop")


def keys_of(preset: str, arm: str) -> dict[str, str]:
    """The arm's keys of train.py; runs of the CPU tier were made with other defaults of some."""
    keys = dict(ARMS[arm])
    if preset == "cpu":
        keys |= {"init": "normal", "muon_dtype": "bfloat16"}
        keys |= {"ddl_cc_read": "folded"} if keys["model"].startswith(CC) else {}
        keys |= {"mhc_rows_last": "False"} if keys["model"].startswith("mHC") else {}
    return keys


@dataclass(frozen=True)
class Problem:
    """config: a file; keys: of train.py, over it; metric: of an evaluation; guess: its value for a
    uniform guess; rates: that every arm tries.
    """

    config: str
    keys: dict[str, str]
    metric: str
    guess: float
    arms: tuple[str, ...] = ON_TASKS
    rates: tuple[float, ...] = MUON

    @property
    def lower_is_better(self) -> bool:
        return self.metric == "val_loss"


def steps(count: int, warmup: int, batch: int | None = None, **keys: str) -> dict[str, str]:
    sizes = {"global_batch_size": str(batch), "micro_batch_size": str(batch)} if batch else {}
    return {"max_steps": str(count), "warmup_steps": str(warmup), **sizes, **keys}


HERE = "research/residual_streams"
ON_CPU = (f"{HERE}/cpu.py", steps(400, 40), "val_loss", math.log(4096), tuple(ARMS))
ON_GPU = (f"{HERE}/gpu.py", steps(1200, 100), "val_loss", math.log(16384), tuple(ARMS), ADAMW)
PERMUTATIONS = steps(300, 30, 128, eval_batches="2")
K_HOP = steps(150, 30, 48, dataset="data/k_hop_48")
RECALL = steps(600, 30, dataset="data/recall_4")
PRESETS: dict[str, dict[str, Problem]] = {
    "cpu": {
        "language": Problem(*ON_CPU),
        "permutations": Problem("config/permutations_cpu.py", PERMUTATIONS, "val_accuracy", 1 / 24),
        "k_hop": Problem("config/k_hop_cpu.py", K_HOP, "val_accuracy", 1 / 4),
        "recall": Problem("config/recall_cpu.py", RECALL, "val_accuracy", 1 / 4),
    },
    "gpu": {"language": Problem(*ON_GPU)},
}


@dataclass(frozen=True)
class Hypothesis:
    """pairs: (arm, the arm that it is compared with). each: they are judged one by one, else all
    must hold. differs: worse supports it as well.
    """

    name: str
    text: str
    pairs: tuple[tuple[str, str], ...]
    at: str = "tokens"
    each: bool = True
    differs: bool = False


def both_starts(control: str) -> tuple[tuple[str, str], ...]:
    return ("DDL", control), ("DDL", f"{control}, identity")


ERASE = tuple((arm, f"{arm}, no erase") for arm in ("DDL, 1 column", "DDL", "DDL-CC"))
OTHERS = tuple(("DDL", other) for other in ("HC", "mHC", "AttnRes"))
EC = (("DDL-EC", "DDL"), ("DDL-CC-EC", "DDL-CC"))
SCALAR, EXPANDED = ("DDL, 1 column", BASELINE), ("DDL", BASELINE)
BETA, START = ("DDL, beta 0.1", "DDL"), ("DDL, identity", "DDL")
WIDER = "the expanded state beats the same width without erase"
SAME_READ = "DDL beats additive with the same convolution"
FROM_IDENTITY = "from the identity, the expanded state beats additive"
WIDE_IDENTITY = (("DDL, identity", "wide, identity"),)
ERASE_IDENTITY = (("DDL, identity", "DDL, identity, no erase"),)
OF_LANGUAGE = (
    Hypothesis("L1", "scalar DDL beats additive", (SCALAR,)),
    Hypothesis("L2", "the expanded state beats additive", (EXPANDED,)),
    Hypothesis("L3", WIDER, both_starts("wide"), each=False),
    Hypothesis("L4", SAME_READ, both_starts("conv"), each=False),
    Hypothesis("L5", "erase matters beyond write-only", ERASE),
    Hypothesis("L6", "EC helps", EC),
    Hypothesis("L7", "CC helps", (("DDL-CC", "DDL"),)),
    Hypothesis("L8", "beta_init matters", (BETA,), differs=True),
    Hypothesis("L9", "DDL beats what the field would take", OTHERS, "seconds"),
    Hypothesis("L10", "DDL beats additive", (EXPANDED, SCALAR), "seconds"),
)
# Added after the stage rates had been seen, and corrected by themselves (PLAN.md, Changed since).
EXPLORED = (
    Hypothesis("X1", "the read's start matters", (START,), differs=True),
    Hypothesis("X2", FROM_IDENTITY, (("DDL, identity", BASELINE),)),
    Hypothesis("X3", "... and the same width without erase", WIDE_IDENTITY),
    Hypothesis("X4", "... and erase matters", ERASE_IDENTITY),
)
OF_TASKS = (
    Hypothesis("T1", "erase is what the task needs", ERASE),
    Hypothesis("T2", "DDL beats additive", (EXPANDED,)),
)
OTHER_RATE = ", other's rate"  # an arm of the stage swapped
AT_ONE_RATE = (
    ("DDL", f"DDL, no erase{OTHER_RATE}", "tokens"),
    (f"DDL{OTHER_RATE}", "DDL, no erase", "tokens"),
)
# Asked after results were seen: (arm, than, at equal). Intervals, not corrected, and no words.
AFTERWARDS = {"permutations": AT_ONE_RATE, "k_hop": AT_ONE_RATE}
AFTERWARDS["language"] = (
    ("DDL-CC", "wide, CC", "tokens"),
    ("DDL, identity, no erase", "DDL-CC-EC", "tokens"),
    ("DDL, identity", BASELINE, "seconds"),
    ("DDL, identity", "wide, identity", "seconds"),
    ("DDL, identity", "DDL, identity, no erase", "seconds"),
    ("DDL, identity", "AttnRes", "seconds"),
    ("HC", BASELINE, "seconds"),
    ("AttnRes", BASELINE, "seconds"),
    ("DDL-CC-EC", "AttnRes", "seconds"),
    ("DDL, identity, no erase", "AttnRes", "seconds"),
)
