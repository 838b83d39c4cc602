"""Format durations, sizes and dtypes for people."""

import torch


def format_duration(seconds: float) -> str:
    """Format seconds as 1:05 or 2:03:09."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


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
