"""Print the memory and the traffic that a GPU of a cluster is estimated to need.

    python -m research.benchmarks.cluster                                      # the table of docs/cluster.md
    python -m research.benchmarks.cluster config/ddl_dv4_medium.py             # the same for one configuration
    python -m research.benchmarks.cluster config/gpt_7b.py --optimizer=muon --activation_checkpointing=True

The figures are those that `train.py --dry_run` prints on the processes of a job. No GPU and no data
are needed, and none of them has been measured on a GPU.
"""

import dataclasses
import math
import sys
from pathlib import Path
from typing import NamedTuple

from model.gpt import GPTConfig
from training import memory, traffic
from training.config import TrainConfig
from training.settings import configure
from utils import errors
from utils.units import format_bytes

CONFIGS = (
    "config/gpt_small.py",
    "config/gpt_medium.py",
    "config/gpt_1b.py",
    "config/gpt_7b.py",
)
GPUS_PER_NODE = 8


class Layout(NamedTuple):
    """A way to train on several GPUs."""

    num_gpus: int
    engine: str
    shard_size: int | None  # None for all GPUs


LAYOUTS = (
    Layout(1, "ddp", None),
    Layout(8, "ddp", None),
    Layout(8, "fsdp", None),
    Layout(64, "ddp", None),
    Layout(64, "fsdp", None),
    Layout(64, "fsdp", GPUS_PER_NODE),
)

COLUMNS = (
    "Config",
    "GPUs",
    "Engine",
    "Micro-batch",
    "Memory per GPU",
    "Sent per GPU and step",
    "of which between copies",
    "Muon adds",
)


def fit_batch(config: TrainConfig, num_gpus: int) -> TrainConfig:
    """Return the configuration with the nearest larger batch that the GPUs divide."""
    # rounded up, so that 64 GPUs get the 512 sequences that docs/cluster.md proposes
    local_batch_size = math.ceil(config.global_batch_size / num_gpus)
    micro_batch_size = max(
        size for size in range(1, config.micro_batch_size + 1) if local_batch_size % size == 0
    )
    return dataclasses.replace(
        config,
        global_batch_size=local_batch_size * num_gpus,
        micro_batch_size=micro_batch_size,
    )


def make_row(name: str, config: TrainConfig, model_config: GPTConfig, layout: Layout) -> str:
    """Return the row of the table for a configuration, called `name`, on some GPUs."""
    planned = dataclasses.replace(
        fit_batch(config, layout.num_gpus),
        engine=layout.engine,
        shard_size=layout.shard_size,
    )
    peak = memory.estimate_memory(planned, model_config, "cuda", layout.num_gpus)
    sent = traffic.estimate_traffic(planned, model_config, "cuda", layout.num_gpus)
    # a column of its own, because the rest of the traffic is the same with AdamW
    with_muon = dataclasses.replace(planned, optimizer="muon")
    muon = traffic.estimate_traffic(with_muon, model_config, "cuda", layout.num_gpus).muon
    engine = layout.engine
    if layout.shard_size is not None:
        engine = f"{engine}, shard_size={layout.shard_size}"
    cells = [
        name,
        str(layout.num_gpus),
        engine,
        str(planned.micro_batch_size),
        format_bytes(peak.total),
        format_traffic(sent.total),
        format_traffic(sent.gradients_between_copies),
        format_traffic(muon),
    ]
    return f"| {' | '.join(cells)} |"


def format_traffic(num_bytes: int) -> str:
    """Format a number of bytes; a dash for none."""
    return format_bytes(num_bytes) if num_bytes else "-"


def make_table(command_lines: list[list[str]]) -> str:
    """Return the table in Markdown, with a row for each configuration and layout."""
    rows = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for arguments in command_lines:
        config, model_config = configure(arguments)
        name = Path(arguments[0]).stem
        rows.extend(make_row(name, config, model_config, layout) for layout in LAYOUTS)
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
