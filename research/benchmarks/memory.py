"""Compare the memory that train.py computes before a run with the peak that is measured on this CPU.

    python data/python_stdlib/prepare.py
    python -m research.benchmarks.memory --json=results/memory_cpu.json

Every row is a process of its own: train.py takes three steps in bfloat16, eager or compiled, with
and without activation checkpointing. `measured` is its peak resident memory in bytes, `least` the
lower bound and `estimate` the expected peak, both of training/memory.py. It takes about fifteen
minutes on two cores.
"""

import itertools
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import configurator
from training import memory, metrics
from training.provenance import collect_provenance, store_figures
from training.settings import configure
from utils import errors
from utils.units import format_bytes

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = {
    "num_attention_heads": 4,
    "device": "cpu",
    "dtype": "bfloat16",
    "global_batch_size": 16,
    "micro_batch_size": 16,
    "max_steps": 3,
    "warmup_steps": 1,
    "eval_batches": 1,
    "eval_full": False,
}
SIZES = {
    "d=128 L=4 T=256 V=4096": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "block_size": 256,
        "vocab_size": 4096,
    },
    # the loss of a large vocabulary is computed in chunks
    "d=256 L=4 T=512 V=50304": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "head_dim": 64,
        "block_size": 512,
        "vocab_size": 50304,
    },
}
MODELS = {
    "d=128 L=4 T=256 V=4096": [
        "gpt-mha-rope",
        "DDL-gpt-mha-rope",
        "DDL-gpt-mha-rope-CC-EC",
        "mHC-gpt-mha-rope",
    ],
    "d=256 L=4 T=512 V=50304": ["gpt-mha-rope", "DDL-gpt-mha-rope"],
}


def measure(model: str, size_name: str, compile: bool, checkpointing: bool) -> dict:
    """Train three steps in a process and return a row of the figures."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            **SETTINGS,
            **SIZES[size_name],
            "model": model,
            "compile": compile,
            "activation_checkpointing": checkpointing,
            "dataset": "python_stdlib",
            "out_dir": f"{folder}/run",
        }
        arguments = [f"--{key}={value}" for key, value in settings.items()]
        subprocess.run(
            [sys.executable, "train.py", *arguments],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        records = metrics.read(Path(folder) / "run" / "metrics.jsonl")
        config, model_config = configure(arguments)
    return {
        "size": size_name,
        "model": model,
        "compile": compile,
        "activation_checkpointing": checkpointing,
        "measured": max(record["memory"] for record in records if "memory" in record),
        "least": memory.least_memory(config, model_config),
        "estimate": memory.estimate_memory(config, model_config, "cpu").total,
    }


def describe_row(row: dict) -> str:
    mode = "compiled" if row["compile"] else "eager"
    if row["activation_checkpointing"]:
        mode = f"{mode}, checkpointing"
    return (
        f"{row['size']} | {row['model']} | {mode} | measured {format_bytes(row['measured'])} | "
        f"estimate {row['estimate'] / row['measured']:.2f} and least "
        f"{row['least'] / row['measured']:.2f} of it"
    )


def describe_errors(rows: list[dict]) -> str:
    """Return the relative errors of the estimate in words."""
    relative_errors = [row["estimate"] / row["measured"] - 1 for row in rows]
    absolute_errors = [abs(error) for error in relative_errors]
    return (
        f"relative error of the estimate: median {statistics.median(relative_errors):+.0%} "
        f"(of its absolute value {statistics.median(absolute_errors):.0%}), minimum "
        f"{min(relative_errors):+.0%}, maximum {max(relative_errors):+.0%}"
    )


def main() -> None:
    parser = configurator.Parser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="file to write the figures to")
    arguments = parser.parse_args()
    with errors.one_line_errors():
        # the commit of the code before it measures anything
        origin = collect_provenance()
        rows = []
        for size_name in SIZES:
            grid = itertools.product(MODELS[size_name], (False, True), (False, True))
            for model, compile, checkpointing in grid:
                rows.append(measure(model, size_name, compile, checkpointing))
                print(describe_row(rows[-1]), flush=True)
                figures = {"settings": SETTINGS, "sizes": SIZES, "rows": rows}
                store_figures(arguments.json, figures, origin)
        print(describe_errors(rows))


if __name__ == "__main__":
    main()
