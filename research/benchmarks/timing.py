"""Time functions in turns, and say how they compare and how far that spreads."""

import time

import numpy as np
import torch

from utils.units import format_duration

PROGRESS_SECONDS = 10  # between two lines about a long measurement


def measure(steps: dict, warmup: int, rounds: int, what: str = "step") -> dict[str, list[float]]:
    """Seconds of each function in each round: a round calls every one once, so that what else the machine does falls
    on all alike. They return when their work is done, on a GPU too.
    """
    seconds = {name: [] for name in steps}
    for number, (name, step) in enumerate(steps.items(), 1):
        started = time.perf_counter()
        for _ in range(warmup):
            step()
        if (elapsed := time.perf_counter() - started) > 1:
            print(
                f"  {what}: warmed up {name} ({number}/{len(steps)}) in {elapsed:.0f} s", flush=True
            )
    started = shown = time.perf_counter()
    for done in range(1, rounds + 1):
        for name, step in steps.items():
            before = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - before)
        now = time.perf_counter()
        if now - shown > PROGRESS_SECONDS and done < rounds:
            left = format_duration((now - started) / done * (rounds - done))
            print(f"  {what}: round {done}/{rounds}, {left} left", flush=True)
            shown = now
    return seconds


def waiting(function, times: int, device: torch.device):
    """A function that calls `function` so many times and returns when the device has done it all."""

    def turn():
        for _ in range(times):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return turn


def compared(key: str, base: list[float], own: list[float]) -> dict[str, float]:
    """Speed relative to base by the rounds' ratios: their median under `key`, 10th and 90th percentile beside it."""
    return percentiles(key, [b / o for b, o in zip(base, own)])


def percentiles(key: str, values: list[float]) -> dict[str, float]:
    """Their median under `key`, 10th and 90th percentile beside it."""
    middle, low, high = np.percentile(values, (50, 10, 90)).tolist()
    return {key: middle, f"{key}_p10": low, f"{key}_p90": high}


def spread(row: dict, key: str, form: str) -> str | None:
    """The median and (10th to 90th percentile) that `percentiles` made, as text; None where the row has none."""
    if key not in row:
        return None
    middle, *ends = (
        format(row[name], form) for name in (key, f"{key}_p10", f"{key}_p90") if name in row
    )
    return (
        f"{middle} ({' to '.join(ends)})" if ends else middle
    )  # older figures of speed have the median alone


class Clock:
    """Seconds of single calls: on a GPU those that the GPU takes, from a cache that holds nothing of theirs.

    Python needs longer to launch an operator (about 90 microseconds) than the GPU to run it. So the GPU first sleeps,
    until all calls are queued behind that, and goes from one to the next without waiting. (Replaying a CUDA graph would
    do as well, but measures fixed addresses and needs a capture of every call.) Before each call it reads more than its
    cache holds. It only reads: what it had written would be on its way to memory during the call.
    """

    MOST_CYCLES = 2**32  # about two seconds

    def __init__(self, device: torch.device):
        self.device, self.cycles = device, 2**24  # about eight milliseconds
        if device.type == "cuda":
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self.other = torch.ones(cache, device=device)  # four bytes each: four times the cache

    def seconds(self, functions: dict) -> dict[str, float]:
        """Of one call of each function, one after the other."""
        if self.device.type != "cuda":
            return {name: self._by_host(function) for name, function in functions.items()}
        while True:
            asleep, events = self._queue(functions)
            torch.cuda.synchronize(self.device)
            if asleep:
                return {
                    name: start.elapsed_time(end) / 1000 for name, (start, end) in events.items()
                }
            self.cycles *= 2  # it awoke before the last call was queued
            if self.cycles > self.MOST_CYCLES:
                raise RuntimeError(
                    f"{', '.join(functions)} cannot be queued: one of them waits for the GPU"
                )

    def _queue(self, functions: dict) -> tuple[bool, dict]:
        """(whether the GPU still slept when the last call was queued, {name: (event before, event after)})."""
        torch.cuda._sleep(self.cycles)
        awake, events = torch.cuda.Event(), {}
        awake.record()
        for name, function in functions.items():
            self.other.sum()
            events[name] = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            events[name][0].record()
            function()
            events[name][1].record()
        return not awake.query(), events

    @staticmethod
    def _by_host(function) -> float:
        started = time.perf_counter()
        function()
        return time.perf_counter() - started
