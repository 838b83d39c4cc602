"""Where a run begins: afresh, or at a checkpoint, and what may have changed since."""

import fcntl
import os
from pathlib import Path

from training import checkpoint

MAY_CHANGE = {
    *(
        "resume",
        "out_dir",
        "dry_run",
        "dataset",
        "max_steps",
        "max_seconds",
        "micro_batch_size",
        "device",
        "compile",
        "engine",
    ),
    *(
        "activation_checkpointing",
        "kernels",
        "state_interval",
        "deterministic",
        "decay_steps",
        "keep_last",
        "keep_every",
        "skip_nonfinite",
        "statistics_interval",
    ),
    *("eval_full", "eval_interval", "log_interval", "checkpoint_interval"),
    *("wandb_log", "wandb_project", "wandb_run_name", "tensorboard"),
}


class RunLock:
    """Holds the run folder, which it makes where needed, until it is dropped or the process ends.

    ValueError: another process trains there.
    """

    descriptor = None

    def __init__(self, out: Path):
        out.mkdir(parents=True, exist_ok=True)
        self.descriptor = os.open(out, os.O_RDONLY)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"out_dir={out}: another process trains there: end it, or give another --out_dir"
            ) from error
        except OSError:
            pass  # a file system without locks

    def __del__(self):
        if self.descriptor is not None:
            os.close(self.descriptor)


def new_state() -> dict:
    """What a run carries from step to step besides weights and optimizer; it goes into state.json."""
    counters = {"step": 0, "seconds": 0.0, "evaluated": True, "best_val_loss": None, "skipped": 0}
    return {**counters, "spikes": {}, "wandb_id": None}


def find_start(config, settings: dict, corpus: dict, defaults) -> Path | None:
    """The checkpoint to continue from, None for a fresh run. ValueError: the run folder or checkpoint forbids it.

    `defaults(stem)` are all keys of a run at their default: what a key that is newer than the checkpoint had then.
    """
    out = Path(config.out_dir)
    if config.resume is None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"out_dir={out} is not empty: continue it with --resume=auto, or give another --out_dir")
        return None
    if config.resume == "auto":
        start = checkpoint.newest(out)
        own = ("metrics.jsonl", "metrics.jsonl.tmp", "checkpoints", "wandb", "tensorboard", "nonfinite")
        if not checkpoint.all_of(out) and out.exists() and any(file.name not in own for file in out.iterdir()):
            raise ValueError(f"out_dir={out} holds other files and no checkpoint: give another --out_dir")
        if start is None and checkpoint.all_of(out):
            raise ValueError(f"out_dir={out} has no checkpoint that is whole: give another --out_dir, or empty it")
    else:
        start = checkpoint.find(config.resume)
        own = checkpoint.newest(out)
        if own and own.resolve() != start.resolve():
            raise ValueError(f"out_dir={out} has {own.name}, not {start}, as its newest: give another --out_dir")
    if start is not None:
        saved = checkpoint.read_state(start)
        if saved["corpus"] != corpus:
            raise ValueError(
                f"dataset={config.dataset} is not the corpus that {start} was trained on (shards or meta.json differ): "
                "prepare that one again, or give another --out_dir without --resume"
            )
        before = {**defaults(saved["model"]), **saved["model_config"], **saved["run_config"]}
        for key in sorted((before.keys() | settings.keys()) - MAY_CHANGE):
            if before.get(key) != settings.get(key):
                raise ValueError(
                    f"{key}={settings.get(key)!r}, but {start} was trained with {before.get(key)!r}: "
                    "give that value, or another --out_dir without --resume"
                )
    return start
