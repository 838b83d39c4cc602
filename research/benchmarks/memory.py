"""Compare the memory that train.py computes before a run with the peak that is measured on this CPU.

    python -m research.benchmarks.memory --json=results/memory_cpu.json

Every row is a process of its own: three steps in bfloat16, eager or compiled, with and without
activation checkpointing. `measured` is its peak resident memory in bytes, `least` the lower bound
and `estimate` the expectation of training/memory.py. It takes about five minutes on two cores.
"""

import itertools
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
MODELS = ["gpt-mha-rope", "DDL-gpt-mha-rope", "DDL-gpt-mha-rope-CC-EC", "mHC-gpt-mha-rope"]
SIZES = {
    "d=128 L=4 T=256": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "block_size": 256,
    },
}


def measure(model: str, size: dict[str, int], compile: bool, checkpointing: bool) -> dict:
    """Train three steps in a process and return a row of the figures."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            **size,
            "model": model,
            "dataset": "python_stdlib",
            "out_dir": f"{folder}/run",
            "num_attention_heads": 4,
            "device": "cpu",
            "dtype": "bfloat16",
            "compile": compile,
            "activation_checkpointing": checkpointing,
            "global_batch_size": 16,
            "micro_batch_size": 16,
            "max_steps": 3,
            "warmup_steps": 1,
            "eval_batches": 1,
            "eval_full": False,
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
        "model": model,
        "compile": compile,
        "activation_checkpointing": checkpointing,
        "measured": max(record["memory"] for record in records if "memory" in record),
        "least": memory.least_memory(config, model_config),
        "estimate": memory.estimate_memory(config, model_config, "cpu").total,
    }


def main() -> None:
    parser = configurator.Parser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="file to write the figures to")
    arguments = parser.parse_args()
    with errors.one_line_errors():
        # the code before it measures anything
        origin = collect_provenance()
        rows = []
        grid = itertools.product(SIZES, MODELS, (False, True), (False, True))
        for size_name, model, compile, checkpointing in grid:
            row = measure(model, SIZES[size_name], compile, checkpointing)
            rows.append({"size": size_name, **row})
            print(
                f"{size_name} | {model} | compile={compile} | checkpointing={checkpointing} | "
                f"measured {format_bytes(row['measured'])} | estimate "
                f"{row['estimate'] / row['measured']:.2f} and least "
                f"{row['least'] / row['measured']:.2f} of it",
                flush=True,
            )
            store_figures(arguments.json, {"sizes": SIZES, "rows": rows}, origin)


if __name__ == "__main__":
    main()
