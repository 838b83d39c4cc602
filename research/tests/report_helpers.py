"""Write run folders as train.py does, in milliseconds, and compute means by hand."""

import json
import math

import numpy as np
from helpers import SMALL, write_checksums

from research import runs

CORPUS = {
    "tokenizer": "gpt2",
    "vocab_size": 260,
    "source": "a text",
    "val": {"bytes": 800, "tokens": 200},
    "train": {"bytes": 4000, "tokens": 1000},
}
BASE = "gpt-mha-rope"
DDL = "DDL-gpt-mha-rope"


def write_lines(folder, lines):
    """Write lines, each a dict or a text, as metrics.jsonl of a folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "metrics.jsonl").write_text("".join(f"{text}\n" for text in texts))
    return folder


def write_checkpoint(folder, step, **state):
    """Write a checkpoint that has a state.json and checksums, but no tensors."""
    path = folder / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "state.json").write_text(json.dumps({"step": step, **state}))
    write_checksums(path)


def write_run(
    folder,
    model_name=BASE,
    seed=0,
    val=2.0,
    steps=4,
    corpus=CORPUS,
    config=SMALL,
    scores=None,
    **settings,
):
    """Write a run with the losses 4, 3, 2, 1, and `val` at every second step; return its folder.

    scores: more `val_*` of each evaluation, in place of bits per byte. settings: of the run.
    """
    if scores is None:
        scores = {"val_bits_per_byte": val / math.log(2) / 4}
    lines = []
    for step in range(1, steps + 1):
        common = {"step": step, "tokens": 10 * step, "flops": 1e6 * step, "seconds": 6 + 0.5 * step}
        lines.append(
            {
                **common,
                "loss": 5.0 - step,
                "tokens_per_second": 90.0 + step,
                "memory": 1000 + step,
                "grad_norm": 1.0,
            }
        )
        if step % 2 == 0:
            lines.append({**common, "val_loss": val, **scores})
    write_lines(folder, lines)
    write_checkpoint(
        folder,
        steps,
        model=model_name,
        model_config=config,
        run_config={
            "model": model_name,
            "seed": seed,
            "max_steps": 4,
            "global_batch_size": 4,
            **settings,
        },
        corpus=corpus,
    )
    return folder


def edit_state(folder, **changes):
    """Change keys in the state.json of a run's only checkpoint."""
    [path] = folder.glob("checkpoints/*/state.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    write_checksums(path.parent)


def load(*paths):
    """Return the frame of runs, all of which can be read."""
    loaded, error_lines = runs.load(paths)
    assert not error_lines
    return loaded


# the 97.5% quantile of Student's distribution with n - 1 degrees of freedom, from a table
STUDENT_QUANTILES = {2: 12.706205, 3: 4.302653, 4: 3.182446}


def by_hand(values):
    """Return the mean and half the 95% interval as a textbook computes them."""
    n = len(values)
    mean = math.fsum(values) / n
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, STUDENT_QUANTILES[n] * deviation / math.sqrt(n)


def smoothed_by_hand(values):
    """Return the centered moving average over 2% of the values."""
    half_window = max(len(values) // 100, 1)
    means = []
    for index in range(len(values)):
        means.append(np.mean(values[max(index - half_window, 0) : index + half_window + 1]))
    return means
