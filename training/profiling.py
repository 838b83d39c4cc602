"""Where the time goes: a trace of a few training steps (`profile_steps`), and attention's backend."""

from pathlib import Path

import torch

from training.config import PROFILE_WARMUP_STEPS, TrainConfig


def start_profiler(
    config: TrainConfig, device: torch.device, first_step: int
) -> torch.profiler.profile | None:
    """Start a profiler whose `step` is to be called after every training step.

    It skips the first steps of a process, in which the model is compiled and the allocator grows.
    Then it records `profile_steps` steps and writes them to a file in the run folder.

    Args:
        first_step: the first step of this process, counted from 1

    Returns:
        None if the run has too few steps left to record one.
    """
    first_recorded_step = first_step + PROFILE_WARMUP_STEPS
    if first_recorded_step > config.max_steps:
        print(
            f"note: profile_steps={config.profile_steps} records nothing, because the run ends with "
            f"step {config.max_steps}, and the first step to record is {first_recorded_step}"
        )
        return None
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    path = Path(config.out_dir) / "profile" / f"step_{first_recorded_step:08d}.json.gz"

    def write(profiler: torch.profiler.profile) -> None:
        last_recorded_step = first_step + profiler.step_num - 1
        write_trace(profiler, path, f"steps {first_recorded_step} to {last_recorded_step}")

    profiler = torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(
            wait=PROFILE_WARMUP_STEPS - 1,
            # it traces this step as well, but discards it, because starting to trace takes time
            warmup=1,
            active=config.profile_steps,
            repeat=1,
        ),
        on_trace_ready=write,
        # one cycle; the default, False, warns that the events of earlier cycles are discarded
        acc_events=True,
    )
    profiler.start()
    return profiler


def write_trace(profiler: torch.profiler.profile, path: Path, description: str) -> None:
    """Write what a profiler has recorded, and say how to open it. A failure does not end the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
    except (OSError, RuntimeError) as error:
        print(f"note: the profile of {description} was not written: {error}", flush=True)
        return
    print(
        f"profile of {description} written to {path}; open it at https://ui.perfetto.dev",
        flush=True,
    )
