"""What tests of runs and others share."""

import json
import math
import random

from research.reporting import runs


def lines_of_a_run(steps, seed=0):
    """Training with skipped steps, evaluations, statistics."""
    draw, lines = random.Random(seed), []
    for step in range(1, steps + 1):
        common = {"step": step, "tokens": 8 * step, "flops": 10**15 * step, "seconds": 0.5 * step + 7}
        numbers = {key: draw.uniform(1, 9) for key in ("loss", "grad_norm", "lr", "tokens_per_second", "mfu")}
        lines.append(
            {**common, **({"skipped": True} if step % 17 == 0 else numbers | {"memory": draw.randrange(9**9)})}
        )
        if step % 50 == 0:
            lines.append({**common, "residual": {"attn.state_rms": [draw.random(), draw.random()]}})
        if step % 20 == 0:
            scores = {"val_loss": draw.uniform(1, 9), "val_perplexity": 7.0, "best_val_loss": 1.0, "val_sequences": 12}
            lines.append({**common, **scores, **({"val_accuracy": 0.5} if step % 40 == 0 else {})})
    return lines


def write(folder, lines):
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(line + "\n" if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def only(*paths):
    """The one run that is there."""
    found, faults = runs.load([str(path) for path in paths])
    assert not faults
    [run] = found
    return run


def naive_curve(lines, points):
    """Means over `points` equal groups of the training lines, by loops over what json reads."""
    training = [line for line in lines if "loss" in line]
    members = {}
    for index, line in enumerate(training):
        members.setdefault(math.floor(index * points / len(training)), []).append(line)
    rows = []
    for group in members.values():
        keys = ("step", "tokens", "flops", "seconds", "loss", "grad_norm", "tokens_per_second")
        row = {key: math.fsum(line[key] for line in group) / len(group) for key in keys}
        rows.append(row | {"memory": max(line["memory"] for line in group)})
    return rows
