"""Measure speed: every variant against the additive baseline, interleaved in one process.

    python bench.py step                                       training step of all variants, at the demo's size
    python bench.py step --models=gpt-mha-rope,DDL-gpt-mha-rope --hidden_size=256 --num_hidden_layers=6 --rounds=30

A round runs one step of each model in turn, so that what else the machine does falls on all alike. The ratio is the
baseline's time over the model's in the same round: its median, and its 10th and 90th percentile. JSON goes to --json.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import torch

import configurator
from model import STEMS, build
from training import distributed, optimizer
from training.provenance import provenance

BASELINE = "gpt-mha-rope"


def training_step(stem: str, size: dict, rows: int, device, dtype: torch.dtype, compiled: bool):
    """(a function that runs one training step and waits for it, the model's parameters)."""
    torch.manual_seed(0)
    model = build(stem, **size).to(device)
    settings = SimpleNamespace(optimizer="adamw", learning_rate=1e-3, weight_decay=0.1, beta1=0.9, beta2=0.95)
    [adamw] = optimizer.build_optimizers(model, settings)
    ids, targets = torch.randint(0, size["vocab_size"], (2, rows, size["block_size"]), device=device)
    run = torch.compile(model) if compiled else model

    def step():
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            _, loss = run(ids, targets)
        loss.backward()
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step, model.num_parameters()


def measure(steps: dict, warmup: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round."""
    seconds = {stem: [] for stem in steps}
    for stem, step in steps.items():
        started = time.perf_counter()
        for _ in range(warmup):
            step()
        print(f"warmed up {stem} in {time.perf_counter() - started:.0f} s", flush=True)
    for _ in range(rounds):
        for stem, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[stem].append(time.perf_counter() - started)
    return seconds


def rows_of(seconds: dict[str, list[float]], parameters: dict[str, int], tokens: int) -> list[dict]:
    """One row a model: parameters, median tokens/s, and its ratio to the baseline with percentiles."""
    rows = []
    for stem, times in seconds.items():
        ratios = sorted(base / own for base, own in zip(seconds[BASELINE], times))
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        rows.append(
            {"model": stem, "parameters": parameters[stem], "tokens_per_second": tokens / statistics.median(times)}
            | {"ratio": statistics.median(ratios), "ratio_p10": low, "ratio_p90": high}
        )
    return rows


def markdown(rows: list[dict]) -> str:
    lines = ["| model | parameters | tokens/s | relative to additive (10th to 90th percentile) |", "|---|---|---|---|"]
    for r in rows:
        spread = f"{r['ratio']:.3f} ({r['ratio_p10']:.3f} to {r['ratio_p90']:.3f})"
        lines.append(f"| `{r['model']}` | {r['parameters']:,} | {r['tokens_per_second']:,.0f} | {spread} |")
    return "\n".join(lines)


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step", help="training step: forward, backward, AdamW")
    step.add_argument("--models", default=",".join([BASELINE, *(s for s in STEMS if s != BASELINE)]))
    for name, default in (("vocab_size", 4096), ("block_size", 256), ("num_hidden_layers", 4), ("hidden_size", 128)):
        step.add_argument(f"--{name}", type=int, default=default)
    step.add_argument("--num_attention_heads", type=int, default=4)
    step.add_argument("--head_dim", type=int, default=32)
    step.add_argument("--micro_batch_size", type=int, default=8, help="sequences per step")
    step.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    step.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    step.add_argument("--compile", choices=("True", "False"), default="True")
    step.add_argument("--warmup", type=int, default=5, help="steps of each model before measuring")
    step.add_argument("--rounds", type=int, default=30, help="measured steps of each model")
    step.add_argument("--json", type=Path, help="write the rows there as well, with commit, machine and date")
    return parser.parse_args()


def main():
    args = arguments()
    with configurator.one_line_errors():
        models = args.models.split(",")
        if BASELINE not in models or min(args.rounds, args.warmup, args.micro_batch_size) < 1:
            raise ValueError(f"--models must contain {BASELINE}; --rounds, --warmup, --micro_batch_size be 1 or more")
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
        device, dtype, compiled = (
            distributed.pick_device(args.device),
            getattr(torch, args.dtype),
            args.compile == "True",
        )
        if compiled and not distributed.can_compile(device):
            raise ValueError(
                "--compile=True needs a C++ compiler and Python's headers: install them, or --compile=False"
            )
        keys = ("vocab_size", "block_size", "num_hidden_layers", "num_attention_heads", "head_dim", "hidden_size")
        size = {key: getattr(args, key) for key in keys}
        built = {s: training_step(s, size, args.micro_batch_size, device, dtype, compiled) for s in models}
    seconds = measure({stem: step for stem, (step, _) in built.items()}, args.warmup, args.rounds)
    rows = rows_of(seconds, {stem: n for stem, (_, n) in built.items()}, args.micro_batch_size * args.block_size)
    if args.json:
        args.json.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(markdown(rows))


if __name__ == "__main__":
    main()
