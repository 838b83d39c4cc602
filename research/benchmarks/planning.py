"""Print how long the paper's runs are predicted to take on H200s, and the memory that they need.

    python -m research.benchmarks.planning                               # the table of docs/cluster.md
    python -m research.benchmarks.planning config/ddl_dv4_cc_medium.py   # one configuration

No GPU and no data are needed, and none of the figures has been measured on a GPU. The memory is the
estimate of `train.py --dry_run`; for engine=fsdp, that of eight GPUs. The speed of the small models
is the prediction of results/predicted_small_h200.json. A model of another size is assumed to have
the MFU that is predicted for its small version. The speed is assumed to grow in proportion to the
number of GPUs.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch

import model
from model.gpt import GPTConfig
from training import memory
from training.config import TrainConfig
from training.metrics import PEAK_FLOPS, compute_nominal_flops_per_token
from training.settings import configure
from utils import errors
from utils.units import format_bytes

PREDICTIONS = Path(__file__).parents[2] / "results" / "predicted_small_h200.json"
VARIANTS = ("gpt", "ddl_dv1", "ddl_dv4", "ddl_dv4_ec", "ddl_dv4_cc", "ddl_dv4_cc_ec")
CONFIGS = tuple(
    f"config/{variant}_{size}.py" for size in ("small", "medium") for variant in VARIANTS
)
NUMBERS_OF_GPUS = (1, 4, 8)
COLUMNS = (
    "Config",
    "Parameters",
    "Memory per GPU",
    "MFU",
    "Tokens/s per GPU",
    *(f"Hours on {number}" for number in NUMBERS_OF_GPUS),
)


class Prediction(NamedTuple):
    """The predicted speed of a run on one H200."""

    num_parameters: int
    num_tokens: int  # of the entire run
    mfu: float
    tokens_per_second: float

    def compute_hours(self, num_gpus: int) -> float:
        """Return the hours that the run takes, if speed is proportional to the number of GPUs."""
        return self.num_tokens / self.tokens_per_second / num_gpus / 3600


def predict(config: TrainConfig, model_config: GPTConfig) -> Prediction:
    """Predict the speed of a run from the stored prediction for the small version of its model.

    Raises:
        ValueError: there is no prediction for this model
    """
    rows = {row["model"]: row for row in json.loads(PREDICTIONS.read_text())["rows"]}
    if config.model not in rows:
        raise ValueError(
            f"model={config.model} has no predicted speed; the models that have one are "
            f"{', '.join(rows)}"
        )
    row = rows[config.model]
    with torch.device("meta"):
        built_model = model.build(config.model, model_config)
    flops_per_second = row["predicted_mfu"] * PEAK_FLOPS["H200"]
    return Prediction(
        num_parameters=built_model.num_parameters(),
        num_tokens=config.max_steps * config.global_batch_size * model_config.block_size,
        mfu=row["predicted_mfu"],
        tokens_per_second=flops_per_second / compute_nominal_flops_per_token(built_model),
    )


def make_speed_cells(config: TrainConfig, model_config: GPTConfig) -> list[str]:
    """Return the cells of a row that follow from the predicted speed, from the MFU on."""
    prediction = predict(config, model_config)
    hours = [prediction.compute_hours(num_gpus) for num_gpus in NUMBERS_OF_GPUS]
    return [
        f"{prediction.mfu:.1%}",
        f"{prediction.tokens_per_second / 1000:.0f}K",
        *(f"{number:.1f}" for number in hours),
    ]


def make_row(name: str, config: TrainConfig, model_config: GPTConfig) -> str:
    """Return the row of the table for a configuration, called `name`."""
    # with engine=ddp it is the same on any number of GPUs, with engine=fsdp it is that on eight
    peak = memory.estimate_memory(config, model_config, "cuda", NUMBERS_OF_GPUS[-1])
    cells = [
        f"`{name}`",
        f"{predict(config, model_config).num_parameters / 1e6:.0f}M",
        format_bytes(peak.total),
        *make_speed_cells(config, model_config),
    ]
    return f"| {' | '.join(cells)} |"


def make_table(command_lines: list[list[str]]) -> str:
    """Return the table in Markdown, with a row for each configuration."""
    rows = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for arguments in command_lines:
        config, model_config = configure(arguments, note=lambda _: None)
        rows.append(make_row(Path(arguments[0]).stem, config, model_config))
    return "\n".join(rows)


def main() -> None:
    if "--help" in sys.argv[1:]:
        print(__doc__)
        return
    with errors.one_line_errors():
        command_lines = [[path] for path in CONFIGS]
        if sys.argv[1:]:
            command_lines = [sys.argv[1:]]
        print(make_table(command_lines))


if __name__ == "__main__":
    main()
