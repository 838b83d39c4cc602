"""What tests of paper and others share."""

import json
import math

import numpy as np
from helpers import SMALL, sign

from research.reporting import runs

STEPS = 40
CORPUS = {"tokenizer": "gpt2", "vocab_size": 260, "source": "a text", "val": {"bytes": 800, "tokens": 200}}
CORPUS |= {"train": {"bytes": 4000, "tokens": 1000}}


def write_run(folder, stem, seed, better=0.0, steps=STEPS, corpus=CORPUS, size=SMALL, **settings):
    """A run of STEPS steps, evaluated at every tenth, whose loss falls and is lower by `better`."""
    rng = np.random.default_rng([seed, len(stem)])
    lines = []
    for step in range(1, steps + 1):
        common = {"step": step, "tokens": 50 * step, "flops": 3e3 * 50 * step, "seconds": 7.0 + 0.5 * step}
        loss = 3.0 + 2.0 / step - better + 0.1 * rng.standard_normal()
        speed = {"tokens_per_second": 90.0 + rng.random(), "memory": 1000 + step, "grad_norm": 1.0}
        lines.append({**common, "loss": loss, **speed})
        if step % 10 == 0:
            val = {"val_loss": loss, "val_perplexity": math.exp(loss), "val_sequences": 4}
            lines.append({**common, **val, "val_bits_per_byte": loss / math.log(2) / 4})
            values = {"attn.beta_mean": [rng.random(), 1.0], "mlp.beta_mean": [0.5, rng.random()]}
            lines.append({**common, "residual": values} if stem.startswith("DDL") else common)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoint = folder / "checkpoints" / f"step_{steps:08d}"
    checkpoint.mkdir(parents=True)
    run_config = {"model": stem, "seed": seed, "max_steps": STEPS, "global_batch_size": 4, **settings}
    state = {"step": steps, "seconds": 1.0, "run_config": run_config, "model": stem, "model_config": size}
    (checkpoint / "state.json").write_text(json.dumps({**state, "corpus": corpus}))
    sign(checkpoint)
    return folder


def loaded(*folders):
    found, faults = runs.load([str(folder) for folder in folders])
    assert not faults
    return found


BASE, DDL = "gpt-mha-rope", "DDL-gpt-mha-rope"
