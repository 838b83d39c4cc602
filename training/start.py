"""Where a run begins: afresh, at a checkpoint of its own, or with the weights of a folder
(`init_from`).

Such a folder is a run of ours, an exported one, or the paper's released code. It decides the
variant and its keys; the optimizer, the step and the data begin afresh. A run that goes on takes
them from its own checkpoint, and the folder may be gone.
"""

import contextlib
import dataclasses
import fcntl
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

from data import tokenizer
from model import model_class, released, weights
from model.keys import Key, keys_of, values_before
from training import checkpoint, distributed, optimizer

NANOGPT = {
    "scratch": "leave it out to start anew",
    "resume": "give --resume=auto to go on with a run",
}
SCHEDULE = ("max_steps", "decay_steps")  # what of it may change when a run goes on
GONE = {"max_epochs", "tensorboard"}  # older runs have them; neither says how a step is computed


def lock(out: Path) -> TextIO:
    """Hold the run folder, which is made where needed, as long as the result is open.

    ValueError: another process trains there.
    """
    out.mkdir(parents=True, exist_ok=True)
    file = open(out / "lock", "a")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        fix = "another process trains there: end it, or give another --out_dir"
        raise ValueError(f"out_dir={out}: {fix}") from error
    except OSError:
        pass  # a file system without locks
    return file


def saved_state(resume: str | None, out_dir: str | None) -> dict:
    """state.json of the run that goes on; {} for one that begins, or has no checkpoint yet."""
    if resume not in (None, "auto"):
        return checkpoint.read_state(checkpoint.find(resume))
    for path in reversed(checkpoint.all_of(Path(out_dir)) if resume and out_dir else []):
        with contextlib.suppress(ValueError):  # damaged: the one before it counts
            return checkpoint.read_state(path)
    return {}


def find(config, settings: dict, corpus: dict) -> Path | None:
    """The checkpoint to go on from, None for a fresh run.

    ValueError: the run folder holds something else, or the run was begun with other settings, or
    with another corpus.
    """
    out = Path(config.out_dir)
    if config.resume is None:
        if out.is_file():
            raise ValueError(f"out_dir={out} is a file: give a folder")
        if out.exists() and any(out.iterdir()):
            fix = "continue it with --resume=auto, or give another --out_dir"
            raise ValueError(f"out_dir={out} is not empty: {fix}")
        return None
    newest = checkpoint.newest(out)
    begin = newest if config.resume == "auto" else checkpoint.find(config.resume)
    if begin is None and checkpoint.all_of(out):
        fix = "give another --out_dir, or empty it"
        raise ValueError(f"out_dir={out} has no checkpoint that is whole: {fix}")
    if newest and newest.resolve() != begin.resolve():
        what = f"out_dir={out} has {newest.name}, not {begin}, as its newest"
        raise ValueError(f"{what}: give another --out_dir")
    if begin is None:
        return None
    saved = checkpoint.read_state(begin)
    if saved["corpus"] != corpus:
        what = f"is not the corpus that {begin} was trained on (shards or meta.json differ)"
        fix = "prepare that one again, or give another --out_dir without --resume"
        raise ValueError(f"dataset={config.dataset} {what}: {fix}")
    refuse_change(saved, settings, type(config), begin, "another --out_dir without --resume")
    return begin


def refuse_change(saved: dict, settings: dict, run: type, where: Path, otherwise: str) -> None:
    """ValueError: a key of the run with state.json `saved` had a value that it has no longer.

    settings: all keys of the run and of its model. run: the dataclass of the run's keys, some of
    which may change. A key that the checkpoint lacks had the value of before it came in.
    """
    schemas, keys = (run, model_class(saved["model"]).Config), keys_of(run)
    before = {key: value for each in schemas for key, value in dataclasses.asdict(each()).items()}
    before |= {**values_before(*schemas), **saved["model_config"], **saved["run_config"]}
    for name in sorted((before.keys() | settings.keys()) - GONE):
        old, new = before.get(name), settings.get(name)
        if old != new and not (name in keys and keys[name].changeable):
            what = f"{name}={new!r}, but {where} was trained with {old!r}"
            raise ValueError(f"{what}: give that value, or {otherwise}")


def rate_jump(begin: Path, config) -> str | None:
    """A note where a run that goes on has another learning rate there than it was to have."""
    saved = checkpoint.read_state(begin)
    step, before = saved["step"], SimpleNamespace(**{**vars(config), **saved["run_config"]})
    old = optimizer.get_learning_rate(min(step, before.max_steps - 1), before)
    new = optimizer.get_learning_rate(step, config)
    if abs(new - old) <= 0.01 * old:
        return None
    advice = "go on from a checkpoint before the fall began, --resume=CHECKPOINT"
    if config.schedule != "wsd":
        advice = "a schedule that shall be prolonged is --schedule=wsd, before its fall"
    values = {key: (getattr(config, key), getattr(before, key)) for key in SCHEDULE}
    pairs = [f"{key}={a} (before: {b})" for key, (a, b) in values.items() if a != b]
    jump = f"with {', '.join(pairs)} the learning rate goes from {old:.3g} to {new:.3g}"
    fresh = f"a fresh schedule is that of a new run, --init_from={begin} --out_dir=..."
    return f"note: {jump} in the middle of the run, after step {step}: {advice}; {fresh}"


def refuse_other_scales(model, config, begin: Path) -> None:
    """ValueError: learning rates would be multiplied by other factors (muP, rules) than before."""
    now = optimizer.get_lr_scales(model, config.optimizer == "muon")
    before = checkpoint.read_state(begin).get("lr_scales", optimizer.get_legacy_lr_scales(model))
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name, 1.0), now.get(name, 1.0)
        if not math.isclose(old, new):
            was = f"{begin} was trained with the learning rate of {name} times {old:g}"
            now = f"this code would take {new:g} (muP, its rule, optimizer={config.optimizer})"
            fix = f"begin a run with its weights and a fresh optimizer, --init_from={begin}"
            raise ValueError(f"{was}, {now}: finish it with the code that began it, or {fix}")


# ---- the weights of a folder ----


ADDITIVE = "gpt-mha-rope"


def model_of(folder: str, stem: str | None = None) -> dict:
    """{"model": its stem, model keys} of the folder `init_from`; of an additive model, from which
    another `stem` can begin, the keys alone. ValueError: none, or damaged, or it cannot.
    """
    if folder in NANOGPT and not Path(folder).exists():
        raise ValueError(f"init_from={folder}: {NANOGPT[folder]}")
    path, theirs, config, _ = checkpoint.described(Path(folder))
    decided = vars(weights.examined(path, theirs, config, released.fold).config)
    if theirs == ADDITIVE and stem not in (None, ADDITIVE):
        model_class(stem)  # says it where there is none
        return decided
    return {"model": theirs, **decided}


def merged(given: dict, decided: dict, keys: dict[str, Key]) -> dict:
    """The keys a user gave, over those that the folder decides. ValueError: they contradict it."""
    different = {name for name in given.keys() & decided.keys() if given[name] != decided[name]}
    free = {name for name in different if keys.get(name, Key()).free}
    initial = {name for name in different if keys.get(name, Key()).initial}
    for name in sorted(different - free - initial):
        theirs = f"init_from={given['init_from']} has {decided[name]!r}"
        raise ValueError(f"{name}={given[name]!r}, but {theirs}: leave the key out")
    if initial and distributed.rank() == 0:
        names = ", ".join(sorted(initial))
        print(f"note: {names}: no effect with init_from, which brings weights", file=sys.stderr)
    return {**given, **decided, **{name: given[name] for name in free}}


def load(model, folder: str, corpus: Path) -> None:
    """Fill the model with the folder's weights.

    ValueError: they do not fit, or another tokenizer made the corpus's tokens.
    """
    path, stem, config, _ = checkpoint.described(Path(folder))
    if (path / "tokenizer.json").exists():  # released folders have none
        theirs, ours = tokenizer.describe(path), tokenizer.describe(corpus)
        if not tokenizer.same_tokens(theirs, ours):
            what = f"init_from={folder} reads tokens of {theirs['name']}, {corpus} has other ones"
            fix = "prepare the corpus with that tokenizer"
            raise ValueError(f"{what}, of {ours['name']}: {fix}")
    if stem == ADDITIVE and model.variant is not model_class(ADDITIVE):
        additive = weights.read_model(path, stem, config, released.fold)
        model.load_state_dict(additive.state_dict(), strict=False)
        try:
            model.from_additive()
        except ValueError as error:
            raise ValueError(f"init_from={folder} is an additive model: {error}") from None
    else:
        weights.fill(model, path, fold=released.fold)
