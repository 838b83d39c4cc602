"""The arms of the MGT study, and what each of its experiments trains (PLAN.md)."""

import dataclasses
from dataclasses import dataclass, field

from model import model_class
from training.memory import count_parameters

MODEL = "MGT-gpt-mha"
VOCAB_SIZE = 320  # the 257 ids of data/shakespeare_char, as train.py pads them

# keys of the model by arm
ARMS = {
    # the paper's four, and the pre-norm Transformer, which is ours
    "standard": {"mgt_arm": "standard"},
    "mhc": {"mgt_arm": "mhc"},
    "ddl": {"mgt_arm": "ddl"},
    "full": {"mgt_arm": "full"},
    "additive": {"mgt_arm": "additive"},
    # the other placement of the norm
    "mhc_pre": {"mgt_arm": "mhc_pre"},
    "ddl_post": {"mgt_arm": "ddl_post"},
    "full_post": {"mgt_arm": "full_post"},
    # the branch of `full` starts at tanh(1) / 2 = 0.38 times that of `additive`
    "additive_038": {"mgt_arm": "additive", "residual_branch_mult": 0.38},
    # for experiment 3: beta starts at 0, so that nothing is written at first
    "full_bias_0": {"mgt_arm": "full", "mgt_beta_bias_init": 0.0},
}


@dataclass(frozen=True)
class Setting:
    """What is tuned by itself and trained with several seeds: an arm at one depth and width."""

    arm: str
    num_layers: int
    width: int
    head_dim: int = 16
    # "width" or "size" where an experiment compares arms both ways, else ""
    equal: str = ""

    @property
    def name(self) -> str:
        parts = [self.arm, f"{self.num_layers}_blocks", f"width_{self.width}"]
        if self.head_dim != 16:
            parts.append(f"head_dim_{self.head_dim}")
        if self.equal:
            parts.append(f"equal_{self.equal}")
        return "-".join(parts)

    def model_keys(self) -> dict[str, object]:
        """Return the keys of train.py that say which model this is."""
        return {
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.width,
            "head_dim": self.head_dim,
            **ARMS[self.arm],
        }


@dataclass(frozen=True)
class Experiment:
    """One command of study.py: its settings, and how each of them is trained."""

    title: str
    settings: tuple[Setting, ...]
    steps: int
    seeds: tuple[int, ...] = (0, 1, 2)
    # further keys of train.py
    keys: dict[str, object] = field(default_factory=dict)
    # which measurements of small_measures.py are made of every reported run
    measure: str | None = None


def count_size(setting: Setting) -> int:
    """Return the number of parameters of the model of a setting."""
    config_class = model_class(MODEL).Config
    config = config_class(
        vocab_size=VOCAB_SIZE, block_size=32, num_attention_heads=2, **setting.model_keys()
    )
    return count_parameters(MODEL, config)


def make_settings(arms: str, depths: tuple[int, ...], width: int = 32) -> tuple[Setting, ...]:
    """Return every arm at every depth, the shallowest depth of all arms first."""
    return tuple(Setting(arm, depth, width) for depth in depths for arm in arms.split())


def make_equal_size_settings(shapes: dict[tuple[str, int], tuple[int, int]]) -> tuple[Setting, ...]:
    """Return a setting for every (arm, number of blocks) with its (width, head_dim)."""
    return tuple(
        Setting(arm, num_layers, width, head_dim, equal="size")
        for (arm, num_layers), (width, head_dim) in shapes.items()
    )


# (arm, blocks): (width, head_dim) of models with 300,000 parameters, to 1%. A step of the width
# changes the size by up to 9%, so head_dim is 18, 14 or 20 where no width with 16 comes as near.
SHAPES_OF_300K = {
    ("standard", 6): (68, 16),
    ("full", 6): (57, 16),
    ("standard", 12): (47, 16),
    ("full", 12): (40, 14),
    ("standard", 24): (30, 20),
    ("full", 24): (26, 18),
    ("standard", 48): (20, 18),
    ("full", 48): (17, 18),
}
# the same for the size of `full` at width 64, 367,948
SHAPES_OF_LANGUAGE = {
    ("standard", 6): (77, 16),
    ("mhc", 6): (69, 18),
    ("ddl", 6): (69, 18),
    ("full", 6): (64, 16),
    ("additive", 6): (77, 16),
}

PAPERS_ARMS = "standard mhc ddl full additive"
NORM_MATCHED_ARMS = "mhc_pre ddl_post full_post additive_038"


def make_experiments() -> dict[str, Experiment]:
    """Return the experiments by name, in the paper's order."""
    language = tuple(
        dataclasses.replace(setting, equal="width")
        for setting in make_settings(PAPERS_ARMS, (6,), width=64)
    )
    return {
        "rank": Experiment(
            "effective rank over depth",
            make_settings("standard additive full", (12, 24, 48, 100)),
            steps=200,
            measure="rank",
        ),
        "ablation": Experiment(
            "ablation and synergy",
            make_settings(f"{PAPERS_ARMS} {NORM_MATCHED_ARMS}", (24,)),
            steps=300,
            seeds=tuple(range(8)),
        ),
        "beta": Experiment(
            "the gate beta over depth and training",
            make_settings("full full_bias_0", (24,)),
            steps=300,
            keys={"checkpoint_interval": 75, "keep_last": 4},
            measure="beta",
        ),
        "depth": Experiment(
            "depth at a fixed number of parameters",
            make_equal_size_settings(SHAPES_OF_300K),
            steps=300,
            keys={"eval_interval": 25},
        ),
        "language": Experiment(
            "language modeling",
            language + make_equal_size_settings(SHAPES_OF_LANGUAGE),
            steps=1500,
            keys={"eval_interval": 250},
        ),
    }
