"""Time functions in turns, and say how they compare and how far that spreads."""

import statistics
import time

from training.metrics import duration

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
            print(f"  {what}: warmed up {name} ({number}/{len(steps)}) in {elapsed:.0f} s", flush=True)
    started = shown = time.perf_counter()
    for done in range(1, rounds + 1):
        for name, step in steps.items():
            before = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - before)
        now = time.perf_counter()
        if now - shown > PROGRESS_SECONDS and done < rounds:
            left = duration((now - started) / done * (rounds - done))
            print(f"  {what}: round {done}/{rounds}, {left} left", flush=True)
            shown = now
    return seconds


def compared(key: str, base: list[float], own: list[float]) -> dict[str, float]:
    """Speed relative to base by the rounds' ratios: their median under `key`, 10th and 90th percentile beside it."""
    ratios = sorted(b / o for b, o in zip(base, own))
    low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
    return {key: statistics.median(ratios), f"{key}_p10": low, f"{key}_p90": high}
