"""Fused residual steps for GPUs (Triton). `model/residual.py` and `model/gpt.py` define what they compute.

`use(model)` puts them into a model, which knows nothing of them but its `stream`. They run compiled on CUDA devices,
and on a CPU with TRITON_INTERPRET=1 in the environment: slowly, to be tested.
"""

import importlib.util
import os

import torch

from model.gpt import Block, Stream


def unavailable(device: torch.device | str) -> str | None:
    """Why kernels cannot run there, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if torch.device(device).type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "they need a CUDA device"
    return None


def missing(model, device: torch.device | str) -> str | None:
    """Why the kernels cannot serve this model there, or None."""
    if why := unavailable(device):
        return why
    config = model.config
    if type(model.transformer.h[0]) is Block:
        return None
    if not hasattr(config, "ddl_value_channels"):
        return f"there are none for this residual stream ({type(model.transformer.h[0]).__module__})"
    if config.ddl_value_channels not in (1, 2, 4, 8):
        return f"they know 1, 2, 4 and 8 columns, ddl_value_channels is {config.ddl_value_channels}"
    if config.ddl_k_branch == "attention":
        return "ddl_k_branch=attention needs the whole state"
    return None


def use(model, setting: str = "auto", device: torch.device | str = "cuda", state_interval: int = 2) -> str | None:
    """Give the model its fused stream, or take it away. Returns why not, or None where the kernels serve it.

    setting: "on", "off", or "auto" (on where they can be). state_interval: sublayers between states kept for the
    backward pass; those between are made again. ValueError: "on" where they cannot be.
    """
    why = "kernels=off" if setting == "off" else missing(model, device)
    if setting == "auto" and torch.device(device).type != "cuda":
        why = "they need a CUDA device"  # interpreted ones only on request
    if why and setting == "on":
        raise ValueError(f"kernels=on: {why}; give kernels=off, or auto")
    if why:
        stream = Stream()
    else:
        from model.kernels import stream as fused

        additive = type(model.transformer.h[0]) is Block
        stream = fused.AdditiveStream() if additive else fused.DeltaStream(model.config, state_interval)
    model.use_stream(stream)
    return why
