"""What tests of report and others share."""

import json
import math

from helpers import SMALL, sign


def write_run(folder, losses, val=2.0, **run_config):
    """A run folder with two bytes per training token and a validation every second step."""
    folder.mkdir(parents=True)
    records = []
    for step, loss in enumerate(losses, 1):
        common = {"step": step, "tokens": 10 * step, "flops": 1e6 * step, "seconds": 0.5 * step}
        records.append({**common, "loss": loss})
        if step % 2 == 0:
            records.append({**common, "val_loss": val, "val_bits_per_byte": val / math.log(2) / 4})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    checkpoint = folder / "checkpoints" / "step_00000004"
    checkpoint.mkdir(parents=True)
    state = {
        "step": 4,
        "seconds": 2.0,
        "run_config": run_config,
        "model": "gpt-mha-rope",
        "model_config": SMALL,
        "corpus": {"train": {"bytes": 20, "tokens": 10}},
    }
    (checkpoint / "state.json").write_text(json.dumps(state))
    sign(checkpoint)
    return folder
