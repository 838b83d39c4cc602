"""Trackers to which the records of a run are logged in addition: one adapter each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from training.checkpoint import TrainState
from training.config import TrainConfig


class Tracker(NamedTuple):
    """A run of a tracker."""

    id: str | None  # by which a resumed run continues it; None if the run folder is enough
    log: Callable[[dict], object]  # of a flat record
    finish: Callable[[], object]


def start(run_folder: Path, config: TrainConfig, settings: dict, state: TrainState) -> Tracker:
    """Start a run of the tracker that the key names, or continue the one that the state names.

    Raises:
        ValueError: the package is not installed, or it cannot start the run
    """
    adapters = {"wandb": start_wandb, "trackio": start_trackio, "tensorboard": start_tensorboard}
    try:
        return adapters[config.tracker](run_folder, config, settings, state)
    except Exception as error:  # no login, no connection, or a project that does not exist
        reason = str(error).strip().partition("\n")[0]
        advice = " (WANDB_MODE=offline needs no login)" if config.tracker == "wandb" else ""
        raise ValueError(
            f"tracker={config.tracker} cannot start ({reason}){advice}; omit the key, or correct it, "
            "and repeat the command with --resume=auto"
        ) from error


def start_wandb(
    run_folder: Path, config: TrainConfig, settings: dict, state: TrainState
) -> Tracker:
    """Log to Weights & Biases."""
    import wandb

    run = wandb.init(
        project=config.wandb_project,
        name=config.wandb_run_name,
        dir=run_folder,
        id=state.wandb_id,
        resume="allow",  # continue the run of this id if there is one
        config=settings,
    )
    # Curves over the steps of training, and not over the number of calls of `log`. `log` gets no
    # `step`, because a resumed run repeats an evaluation that was interrupted, and Weights & Biases
    # drops what is logged for a step that it has already.
    run.define_metric("*", step_metric="step")
    return Tracker(run.id, run.log, run.finish)


def start_trackio(
    run_folder: Path, config: TrainConfig, settings: dict, state: TrainState
) -> Tracker:
    """Log to trackio's local database."""
    import trackio

    # it finds the run to continue by name
    run = trackio.init(
        project=config.wandb_project,
        name=state.wandb_id or config.wandb_run_name,
        resume="allow" if state.wandb_id else "never",
        config=settings,
        embed=False,
    )
    return Tracker(run.name, lambda record: run.log(record, step=record["step"]), run.finish)


def start_tensorboard(
    run_folder: Path, config: TrainConfig, settings: dict, state: TrainState
) -> Tracker:
    """Write TensorBoard's files to the run folder."""
    from torch.utils.tensorboard import SummaryWriter

    # what an earlier start has logged of later steps is dropped
    purge_step = state.step + 1 if state.step else 0
    writer = SummaryWriter(run_folder / "tensorboard", purge_step=purge_step)
    writer.add_text("settings", f"```\n{json.dumps(settings, indent=1)}\n```", state.step)

    def log(record: dict) -> None:
        for key, value in record.items():
            if key != "step":
                writer.add_scalar(key, value, record["step"])

    return Tracker(None, log, writer.close)


def flatten(record: dict) -> dict:
    """Flatten nested dicts and lists to keys such as "outer/inner/07", which trackers plot."""
    flat = {}
    for key, value in record.items():
        if isinstance(value, list):
            value = {f"{index:02d}": item for index, item in enumerate(value)}
        if isinstance(value, dict):
            flat |= {f"{key}/{inner}": item for inner, item in flatten(value).items()}
        else:
            flat[key] = value
    return flat
