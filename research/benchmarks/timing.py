"""Time functions in turns, and compute how they compare and how much that varies."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def measure(
    functions: dict[Any, Callable[[], object]], warmup: int, rounds: int
) -> dict[Any, list[float]]:
    """Return the seconds of each function in each round.

    A round calls every function once, so that other load on the machine affects all of them alike.

    Args:
        functions: return when their work is done, on a GPU too
        warmup: calls of each function before the first round
    """
    for function in functions.values():
        for _ in range(warmup):
            function()
    seconds = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def repeat_and_synchronize(
    function: Callable[[], object], repeats: int, device: torch.device
) -> Callable[[], None]:
    """Return a function that calls `function` repeatedly, and returns when the device is done."""

    def run_repeats() -> None:
        for _ in range(repeats):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run_repeats


def compute_speed_ratios(
    key: str, baseline_seconds: list[float], seconds: list[float]
) -> dict[str, float]:
    """Return the percentiles of the speed relative to a baseline, round by round."""
    return compute_percentiles(
        key, [baseline / own for baseline, own in zip(baseline_seconds, seconds)]
    )


def compute_percentiles(key: str, values: list[float]) -> dict[str, float]:
    """Return the median as `key`, and the 10th and 90th percentile as `key_p10` and `key_p90`."""
    median, low, high = np.percentile(values, (50, 10, 90)).tolist()
    return {key: median, f"{key}_p10": low, f"{key}_p90": high}


def format_spread(row: dict[str, Any], key: str, number_format: str) -> str:
    """Format what `compute_percentiles` returned as `median (10th to 90th percentile)`."""
    median, low, high = (
        format(row[name], number_format) for name in (key, f"{key}_p10", f"{key}_p90")
    )
    return f"{median} ({low} to {high})"


class Clock:
    """Measures the seconds of single calls.

    On a GPU these are the seconds that the GPU takes, with a cache that has none of the data.
    Python needs longer to launch an operator (about 90 microseconds) than the GPU to run it. So the
    GPU first sleeps until all calls are queued, and then runs them one after the other without
    waiting. (Replaying a CUDA graph would also do, but it measures fixed addresses, and every call
    would have to be captured.) Before each call the GPU reads more than its cache can hold. It only
    reads, because written data would be on its way to memory during the call.
    """

    MAX_CYCLES = 2**32  # about two seconds

    def __init__(self, device: torch.device):
        self.device = device
        self.sleep_cycles = 2**24  # about eight milliseconds
        if device.type == "cuda":
            cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
            # of four bytes each, so that they are four times the size of the cache
            self.cache_filler = torch.ones(cache_bytes, device=device)

    def measure(self, functions: dict[str, Callable[[], object]]) -> dict[str, float]:
        """Return the seconds of one call of each function, which are called one after the other."""
        if self.device.type != "cuda":
            return {name: self._measure_on_host(function) for name, function in functions.items()}
        while True:
            was_asleep, events = self._queue(functions)
            torch.cuda.synchronize(self.device)
            if was_asleep:
                return {
                    name: start.elapsed_time(end) / 1000 for name, (start, end) in events.items()
                }
            # the GPU awoke before the last call was queued
            self.sleep_cycles *= 2
            if self.sleep_cycles > self.MAX_CYCLES:
                raise RuntimeError(
                    f"{', '.join(functions)} cannot be queued: one of them waits for the GPU"
                )

    def _queue(
        self, functions: dict[str, Callable[[], object]]
    ) -> tuple[bool, dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]]:
        """Queue all calls behind a sleep of the GPU.

        Returns:
            whether the GPU still slept when the last call was queued, and the events before and
            after each call
        """
        torch.cuda._sleep(self.sleep_cycles)
        awake = torch.cuda.Event()
        awake.record()
        events = {}
        for name, function in functions.items():
            self.cache_filler.sum()
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            events[name] = (start, end)
        return not awake.query(), events

    @staticmethod
    def _measure_on_host(function: Callable[[], object]) -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
