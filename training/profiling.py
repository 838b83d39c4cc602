"""A trace of a few training steps (`profile_steps`)."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity

from training.config import PROFILE_WARMUP_STEPS, TrainConfig
from utils import errors


def start_profiler(
    config: TrainConfig, device: torch.device, first_step: int
) -> torch.profiler.profile:
    """Start a profiler whose `step` is to be called after every training step.

    It skips the first steps of a process, in which the model is compiled and the allocator grows.
    Then it records `profile_steps` steps and writes them to a file in the run folder.

    first_step: the first step of this process, counted from 1
    """
    path = (
        Path(config.out_dir) / "profile" / f"step_{first_step + PROFILE_WARMUP_STEPS:08d}.json.gz"
    )

    def write(profiler: torch.profiler.profile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        errors.say(f"profile written to {path}; open it at https://ui.perfetto.dev")

    on_gpu = device.type == "cuda"
    profiler = torch.profiler.profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        # it traces the step before the first one as well, but discards it
        schedule=torch.profiler.schedule(
            wait=PROFILE_WARMUP_STEPS - 1, warmup=1, active=config.profile_steps, repeat=1
        ),
        on_trace_ready=write,
        # one cycle; the default, False, warns that the events of earlier cycles are discarded
        acc_events=True,
    )
    profiler.start()
    return profiler
