"""Fused residual steps for GPUs (Triton). `model/residual.py` and `model/gpt.py` define what they compute.

`use(model)` puts them into a model, which knows nothing of them but its `stream`. They run compiled on CUDA devices,
and on a CPU with TRITON_INTERPRET=1 in the environment: slowly, to be tested.
"""

import importlib.util
import os

import torch

from model.gpt import Block, Direct, Heads, RMSNorm, Stream
from model.residual import ColumnConvRead, DeltaBlock, DeltaRewrite, OnlyColumn, TokenConvRead

READS = {OnlyColumn, ColumnConvRead, TokenConvRead}


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
    block, config = model.transformer.h[0], model.config
    if not known(model):
        return f"there are none for the residual stream of {type(model).__module__}"
    if isinstance(block, DeltaBlock) and config.ddl_value_channels not in (1, 2, 4, 8):
        return f"they know 1, 2, 4 and 8 columns, ddl_value_channels is {config.ddl_value_channels}"
    if isinstance(block, DeltaBlock) and config.ddl_k_branch == "attention":
        return "ddl_k_branch=attention needs the whole state"
    return None


def known(model) -> bool:
    """Whether the kernels compute what this model's classes do: a subclass may read or write in a way of its own."""
    if type(model.ln_f) is not RMSNorm or len({isinstance(block, DeltaBlock) for block in model.transformer.h}) > 1:
        return False
    readouts = READS if isinstance(model.transformer.h[0], DeltaBlock) else {Direct}
    return type(model.readout) in readouts and all(known_block(block, model.config) for block in model.transformer.h)


def known_block(block, config) -> bool:
    if {type(block.ln_1), type(block.ln_2)} != {RMSNorm} or type(block).forward is not Block.forward:
        return False
    if not isinstance(block, DeltaBlock):
        return type(block) is Block
    own = all(getattr(type(block), name) is getattr(DeltaBlock, name) for name in ("read_state", "write_state"))
    writes = block.ddl_attn, block.ddl_mlp
    plain = all(type(write) is DeltaRewrite and write.config == config for write in writes)
    return own and plain and type(block.compress) in READS


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
    stream, heads = Stream(), Heads()
    if not why:
        from model.kernels import lowering, rope
        from model.kernels import stream as fused

        lowering.register()
        additive = type(model.transformer.h[0]) is Block
        stream = fused.AdditiveStream() if additive else fused.DeltaStream(model.config, state_interval)
        whole = all(rope.serves(block.attn, model.config) for block in model.transformer.h)
        heads = rope.FusedHeads() if whole else heads
    model.use_stream(stream)
    model.use_heads(heads)
    return why
