"""Where a run begins: afresh, at a checkpoint of its own, or with the weights of a folder (`init_from`).

Such a folder is a run of ours, an exported one, or the paper's released code. It decides the variant and its keys; the
optimizer, the step and the data begin afresh. A run that goes on takes them from its own checkpoint, and the folder
may be gone.
"""

import contextlib
import fcntl
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

from data import tokenizer
from model import released, weights
from model.keys import Key, keys_of
from training import checkpoint, distributed, optimizer

NANOGPT = {"scratch": "leave it out to start anew", "resume": "give --resume=auto to go on with a run"}
# What a run without a checkpoint may have left in its folder.
LEFT = {"metrics.jsonl", "status.json", "checkpoints", "wandb", "tensorboard", "nonfinite", "loss.png", "loss.html"}
LEFT |= {"losses.npz"}
GONE = {"max_epochs", "tensorboard"}  # keys that older runs had; none of them says how a step is computed


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


def progress_at(start: Path | None, out: Path) -> dict:
    """What a run carries from step to step besides weights and optimizer, and keeps in state.json."""
    counters = {"step": 0, "seconds": 0.0, "evaluated": True, "best_val_loss": None, "skipped": 0}
    progress = {**counters, "spikes": {}, "wandb_id": None}
    if start:
        saved = checkpoint.read_state(start)
        progress |= {key: saved[key] for key in progress if key in saved}
        if not start.resolve().is_relative_to(out.resolve()):
            progress["wandb_id"] = None  # a branch is a run of its own
    return progress


def find(config, settings: dict, corpus: dict, defaults) -> Path | None:
    """The checkpoint to continue from, None for a fresh run. ValueError: the run folder or checkpoint forbids it.

    `defaults(stem)` are all keys of a run as they were where the checkpoint, which is older than some, lacks them.
    """
    out = Path(config.out_dir)
    if config.resume is None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"out_dir={out} is not empty: continue it with --resume=auto, or give another --out_dir")
        return None
    start = find_in(out) if config.resume == "auto" else find_elsewhere(config.resume, out)
    if start is not None:
        saved = checkpoint.read_state(start)
        if saved["corpus"] != corpus:
            raise ValueError(
                f"dataset={config.dataset} is not the corpus that {start} was trained on (shards or meta.json differ): "
                "prepare that one again, or give another --out_dir without --resume"
            )
        before = {**defaults(saved["model"]), **saved["model_config"], **saved["run_config"]}
        before = {key: value for key, value in before.items() if key not in GONE}
        refuse_change(before, settings, keys_of(type(config)), start, "another --out_dir without --resume")
    return start


def find_in(out: Path) -> Path | None:
    """The newest checkpoint of the run's own folder. ValueError: all are damaged, or the folder is something else's."""
    start = checkpoint.newest(out)
    if start is None and checkpoint.all_of(out):
        raise ValueError(f"out_dir={out} has no checkpoint that is whole: give another --out_dir, or empty it")
    if start is None and out.exists() and any(file.name.removesuffix(".tmp") not in LEFT for file in out.iterdir()):
        raise ValueError(f"out_dir={out} holds other files and no checkpoint: give another --out_dir")
    return start


def find_elsewhere(resume: str, out: Path) -> Path:
    """The checkpoint that `resume` names. ValueError: there is none, or the run folder has another one."""
    start, last = checkpoint.find(resume), checkpoint.newest(out)
    if last and last.resolve() != start.resolve():
        raise ValueError(f"out_dir={out} has {last.name}, not {start}, as its newest: give another --out_dir")
    return start


def refuse_change(before: dict, settings: dict, keys: dict[str, Key], where: Path, otherwise: str) -> None:
    """ValueError: the run in `where` had another value `before` of a key that may not change where a run goes on."""
    fixed = {name for name in before.keys() | settings.keys() if name not in keys or not keys[name].changeable}
    for name in sorted(fixed):
        old, new = before.get(name), settings.get(name)
        if old != new:
            raise ValueError(f"{name}={new!r}, but {where} was trained with {old!r}: give that value, or {otherwise}")


def new_rate(begin: Path, config) -> str | None:
    """A note where the run that goes on from a checkpoint has another learning rate there than it was to have."""
    saved = checkpoint.read_state(begin)
    step, before = saved["step"], SimpleNamespace(**{**vars(config), **saved["run_config"]})
    old = optimizer.learning_rate_at(min(step, before.max_steps - 1), before)
    new = optimizer.learning_rate_at(step, config)
    if abs(new - old) <= 0.01 * old:
        return None
    advice = "a schedule that shall be prolonged is --schedule=wsd, whose steps before its fall depend on neither key"
    if config.schedule == "wsd":
        advice = "the fall had begun, or begins in its middle: go on from a checkpoint before it, --resume=CHECKPOINT"
    changed = [key for key in ("max_steps", "decay_steps") if getattr(config, key) != getattr(before, key)]
    keys = ", ".join(f"{key}={getattr(config, key)} (before: {getattr(before, key)})" for key in changed)
    return (
        f"note: with {keys} the learning rate goes from {old:.3g} to {new:.3g} in the middle of the run, after step "
        f"{step}: {advice}; a fresh schedule is that of a new run, --init_from={begin} --out_dir=..."
    )


def refuse_other_scales(model, config, begin: Path) -> None:
    """ValueError: learning rates would be multiplied by other factors, of muP or a parameter's rule, than before."""
    now = optimizer.lr_scales(model, config.optimizer == "muon")
    before = checkpoint.read_state(begin).get("lr_scales", optimizer.lr_scales_before(model))
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name, 1.0), now.get(name, 1.0)
        if not math.isclose(old, new):
            raise ValueError(
                f"{begin} was trained with the learning rate of {name} times {old:g}, this code would take "
                f"{new:g} (muP, its rule, optimizer={config.optimizer}): finish it with the code that began it, or "
                f"begin a run with its weights and a fresh optimizer, --init_from={begin}"
            )


def saved_state(resume: str | None, out_dir: str | None) -> dict:
    """state.json of the run that goes on; {} for one that begins, or has no checkpoint yet."""
    if resume not in (None, "auto"):
        return checkpoint.read_state(checkpoint.find(resume))
    for path in reversed(checkpoint.all_of(Path(out_dir)) if resume and out_dir else []):
        with contextlib.suppress(ValueError):  # damaged: the one before it counts, as for the run
            return checkpoint.read_state(path)
    return {}


# ---- the weights of a folder ----


def model_of(folder: str) -> dict:
    """{"model": stem, model keys} of the folder `init_from`. ValueError: there is none, or it cannot be read."""
    if folder in NANOGPT and not Path(folder).exists():
        raise ValueError(f"init_from={folder}: {NANOGPT[folder]}")
    path, stem, config, _ = checkpoint.described(Path(folder))
    return {"model": stem, **vars(weights.examined(path, stem, config, released.fold).config)}


def merged(given: dict, decided: dict, keys: dict[str, Key]) -> dict:
    """The keys a user gave, over those that the folder decides. ValueError: they contradict it."""
    different = {name for name in given.keys() & decided.keys() if given[name] != decided[name]}
    free, initial = ({n for n in different if getattr(keys.get(n, Key()), fact)} for fact in ("free", "initial"))
    for name in sorted(different - free - initial):
        raise ValueError(
            f"{name}={given[name]!r}, but init_from={given['init_from']} has {decided[name]!r}: leave the key out"
        )
    if initial and distributed.rank() == 0:
        print(f"note: {', '.join(sorted(initial))}: no effect with init_from, which brings weights", file=sys.stderr)
    return {**given, **decided, **{name: given[name] for name in free}}


def load(model, folder: str, corpus: Path) -> None:
    """Fill the model with the folder's weights. ValueError: they do not fit, or another tokenizer made its tokens."""
    path, *_ = checkpoint.described(Path(folder))
    if (path / "tokenizer.json").exists():  # released folders have none
        theirs, ours = tokenizer.describe(path), tokenizer.describe(corpus)
        if not tokenizer.same_tokens(theirs, ours):
            raise ValueError(
                f"init_from={folder} reads tokens of {theirs['name']}, {corpus} has other ones, of {ours['name']}: "
                "prepare the corpus with that tokenizer"
            )
    weights.fill(model, path, fold=released.fold)
