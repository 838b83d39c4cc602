"""Where a run is resumed: its checkpoint, and the settings that it was trained with."""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch

from configurator import collect_options
from model import model_class
from training import checkpoint, metrics
from training.checkpoint import TrainState
from training.config import TrainConfig

# Keys that say what one call of train.py does; a resumed run does not take them from the saved one.
KEYS_OF_A_CALL = ("out_dir", "resume", "dry_run", "max_seconds", "profile_steps")


class Location(NamedTuple):
    """Which folder a run writes, and what it resumes: known before its settings."""

    out_dir: str
    resume: str | None  # as the key
    dry_run: bool


def saved_settings(state: dict) -> dict[str, object]:
    """Return all keys of a saved run and of its model; an empty dict if nothing is resumed.

    Keys that were added after the run was saved have their default.
    """
    if not state:
        return {}
    model_config_class = model_class(state["model"]).Config
    options = collect_options(TrainConfig, model_config_class)
    run_config = dict(state["run_config"])
    # what the key tracker was before there were several
    if run_config.pop("wandb_log", False):
        run_config["tracker"] = "wandb"
    # it was True or False before there was auto
    if "cuda_graphs" in run_config:
        run_config["cuda_graphs"] = options["cuda_graphs"].convert(run_config["cuda_graphs"])
    return {
        # lowest precedence first
        **{name: option.default for name, option in options.items()},
        **state["model_config"],
        **run_config,
        "model": state["model"],
    }


def check_unchanged(
    settings: dict[str, object],
    saved: dict[str, object],
    location: Path | str,
    alternative: str = "start a new run with another --out_dir and without --resume",
    also_fixed: Collection[str] = (),
) -> None:
    """Raise ValueError if settings differ from those of a saved run; the message lists all of them.

    Args:
        settings: the settings to resume with, or the subset that a user gives
        saved: all settings of the saved run; the keys that are changeable may differ
        location: where that run is saved
        alternative: what else to do, as the end of the message
        also_fixed: changeable keys that may not differ either
    """
    options = collect_options(TrainConfig, model_class(saved["model"]).Config)
    # a run of a later version may have keys that this one cannot honor
    unknown_keys = [
        f"{name}={value!r}"
        for name, value in sorted(saved.items())
        if name not in options and value is not None
    ]
    if unknown_keys:
        raise ValueError(
            f"{location} was trained by another version of this code, with keys that this one does "
            f"not have: {', '.join(unknown_keys)}; resume it with that version, or {alternative}"
        )
    may_differ = {name for name in options if options[name].changeable} - set(also_fixed)
    differences = [
        f"{name}={saved.get(name)!r} (not {value!r})"
        for name, value in sorted(settings.items())
        if value != saved.get(name) and name not in may_differ
    ]
    if differences:
        raise ValueError(
            f"{location} was trained with {', '.join(differences)}; to resume it, omit these keys "
            f"or give the same values; or {alternative}"
        )


def find_checkpoint(location: Location) -> Path | None:
    """Return the checkpoint to resume from, which is verified; None for a new run.

    Raises:
        ValueError: the run folder is not empty, has no valid checkpoint, or has a later one
    """
    out_dir = Path(location.out_dir)
    if location.resume is None:
        if out_dir.is_file():
            raise ValueError(f"out_dir={out_dir} is a file; give a folder")
        if out_dir.exists() and any(out_dir.iterdir()) and not location.dry_run:
            raise ValueError(
                f"out_dir={out_dir} is not empty; resume that run with --resume=auto, or give "
                "another --out_dir"
            )
        return None
    chosen = None
    if location.resume != "auto":
        try:
            chosen = checkpoint.find(location.resume, also_accepted=", or auto", to_resume=True)
        except ValueError as error:
            raise ValueError(f"resume={location.resume}: {error}") from error
        newest = checkpoint.list_checkpoints(out_dir)[-1:]
        if not newest or newest[0].resolve() == chosen.resolve():
            return chosen
    # a damaged checkpoint is skipped for the one before it
    latest = checkpoint.find_latest(out_dir, to_resume=True)
    if location.resume == "auto":
        chosen = latest
    if chosen is None and checkpoint.list_checkpoints(out_dir):
        raise ValueError(
            f"out_dir={out_dir} has no checkpoint that can be resumed; give another --out_dir"
        )
    # otherwise training would overwrite later checkpoints of the same folder one by one
    if latest is not None and latest.resolve() != chosen.resolve():
        raise ValueError(
            f"resume={location.resume}, but out_dir={out_dir} has another latest checkpoint, "
            f"{latest.name}; to continue that run, give --resume=auto; to branch off from {chosen}, "
            "give another --out_dir"
        )
    return chosen


def check_device(
    config: TrainConfig, device: torch.device, saved_state: dict, resume_checkpoint: Path | None
) -> None:
    """Raise ValueError if a run on a GPU would continue on the CPU, because torch finds no GPU."""
    was_on_gpu = saved_state.get("trained_on", {}).get("device") == "cuda"
    if was_on_gpu and config.device == "auto" and device.type == "cpu":
        raise ValueError(
            f"device=auto: {resume_checkpoint} was trained on a GPU, but torch finds none on this "
            "machine; resume the run where there is one, or give --device=cpu"
        )


def check_corpus(saved_corpus: dict, corpus: dict, dataset: str, resume_checkpoint: Path) -> None:
    """Raise ValueError if the data are not those that the resumed run was trained on.

    Args:
        saved_corpus, corpus: `Corpus.identity` of both
    """
    if corpus != saved_corpus:
        raise ValueError(
            f"dataset={dataset} is not the corpus that {resume_checkpoint} was trained on (shards "
            "or meta.json differ); prepare that corpus again, or start a new run with another "
            "--out_dir and without --resume"
        )


def load_state(
    saved_state: dict, resume_checkpoint: Path | None, config: TrainConfig
) -> TrainState:
    """Return the counters of a run; an evaluation is done if metrics.jsonl has it."""
    state = TrainState.load(saved_state, resume_checkpoint, config)
    if state.evaluated:
        return state
    # <run>/checkpoints/step_00001000 belongs to <run>
    metrics_file = resume_checkpoint.absolute().parents[1] / "metrics.jsonl"
    # a run that branches off does not repeat the evaluations of its first step
    is_branch = not checkpoint.belongs_to(resume_checkpoint, config.out_dir)
    evaluation = metrics.find_evaluation(metrics_file, state.step)
    if evaluation is not None and checkpoint.evaluates_same_sequences(saved_state, config):
        state.best_val_loss = evaluation.get("best_val_loss")
    state.evaluated = is_branch or evaluation is not None
    return state


def describe_changed_settings(state: dict, config: TrainConfig) -> list[str]:
    """Return a note that lists the keys whose values differ from those of the resumed run, if any.

    state: state.json of the run that is resumed; {} for a new run
    """
    if not state:
        return []
    saved = saved_settings(state)
    changes = [
        f"{name}={getattr(config, name)} (was {saved[name]})"
        for name in collect_options(TrainConfig)
        if name not in KEYS_OF_A_CALL and getattr(config, name) != saved[name]
    ]
    if not changes:
        return []
    return [
        f"the command or its config file changes {', '.join(changes)}; to keep a value, give it on "
        "the command line"
    ]
