"""Format durations, counts, sizes and dtypes for people."""

import torch


def format_duration(seconds: float) -> str:
    """Format seconds as 1:05 or 2:03:09."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_count(number: float) -> str:
    """Format a number as 912, 27.6K, 1.2M or 3.0G."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        # 999.95K would be rounded to 1000.0K
        if number >= 0.9995 * size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def format_bytes(count: float) -> str:
    """Format a number of bytes as 71 bytes, 2.6 KiB or 3.54 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:,.3g} TiB"


def format_dtype(dtype: torch.dtype) -> str:
    """Format torch.bfloat16 as bfloat16."""
    return str(dtype).removeprefix("torch.")
