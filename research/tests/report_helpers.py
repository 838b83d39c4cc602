"""Run folders as train.py leaves them, made in milliseconds."""

import json
import math

import numpy as np
from helpers import SMALL, write_checksums

from research import runs

CORPUS = {"tokenizer": "gpt2", "vocab_size": 260, "source": "a text"}
CORPUS |= {"val": {"bytes": 800, "tokens": 200}, "train": {"bytes": 4000, "tokens": 1000}}
BASE, DDL = "gpt-mha-rope", "DDL-gpt-mha-rope"


def write_lines(folder, lines):
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def write_checkpoint(folder, step, **state):
    path = folder / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "state.json").write_text(json.dumps({"step": step, **state}))
    write_checksums(path)


def write_run(
    folder, stem=BASE, seed=0, val=2.0, steps=4, corpus=CORPUS, config=SMALL, scores=None, **keys
):
    """Four steps: losses 4, 3, 2, 1, and `val` at every second one. scores: more of `val_*`."""
    lines = []
    for step in range(1, steps + 1):
        common = {"step": step, "tokens": 10 * step, "flops": 1e6 * step, "seconds": 6 + 0.5 * step}
        speed = {"tokens_per_second": 90.0 + step, "memory": 1000 + step, "grad_norm": 1.0}
        lines.append({**common, "loss": 5.0 - step, **speed})
        if step % 2 == 0:
            bits = {} if scores else {"val_bits_per_byte": val / math.log(2) / 4}
            lines.append({**common, "val_loss": val, **bits, **(scores or {})})
    write_lines(folder, lines)
    settings = {"model": stem, "seed": seed, "max_steps": 4, "global_batch_size": 4, **keys}
    state = {"model": stem, "model_config": config, "run_config": settings, "corpus": corpus}
    write_checkpoint(folder, steps, **state)
    return folder


def edit_state(folder, **changes):
    [path] = folder.glob("checkpoints/*/state.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    write_checksums(path.parent)


def load(*paths):
    found, faults = runs.load(paths)
    assert not faults
    return found


STUDENT = {2: 12.706205, 3: 4.302653, 4: 3.182446}  # 97.5% quantile, n - 1 degrees, of a table


def by_hand(values):
    """(mean, half the 95% interval), by the textbook."""
    n, mean = len(values), math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, STUDENT[n] * deviation / math.sqrt(n)


def smoothed_by_hand(values):
    window = max(len(values) // 100, 1)
    return [np.mean(values[max(i - window, 0) : i + window + 1]) for i in range(len(values))]
