"""Fused kernels for GPUs (Triton): the steps of DDL, RoPE with its norms, and SwiGLU's gradient.

`model/ddl.py`, `block.py` and `layers.py` define what the kernels compute. `use(model)` puts fused
kernels into a model, which itself knows only its `stream` and the functions of `products.py` that
kernels may replace. They run compiled on CUDA devices. With TRITON_INTERPRET=1 in the environment
they run interpreted on a CPU, slowly, for tests.
"""

import importlib
import importlib.util
import os
from dataclasses import dataclass

import torch
from torch import nn
from torch._functorch import config as functorch_config

from ..block import Add, Block, Direct, Site, Stream
from ..ddl import ChannelConvRead, DeltaRewrite, SingleChannelRead, TokenConvRead
from ..gpt import GPT, GPTConfig
from ..layers import CausalSelfAttention, RMSNorm
from ..products import JoinedAttention, JoinedMLP, swiglu

# compute capability of the GPUs (H100, H200) on which `auto` uses the kernels
MEASURED_CAPABILITY = (9, 0)


@dataclass
class FusedParts:
    """The classes of a stream that is fused.

    A model must have these exactly, because a subclass may compute something else.
    """

    reads: set[type]
    writes: set[type]


# torch.compile fuses the addition with the RMSNorm that follows
ADDITIVE = FusedParts(reads={Direct}, writes={Add})
# DeltaStream: a write, the next read, its RMSNorm, and the projections to the next gate and write
# value are one kernel
DELTA = FusedParts(reads={SingleChannelRead, ChannelConvRead, TokenConvRead}, writes={DeltaRewrite})


def get_fused_parts(model: GPT) -> FusedParts:
    """Return the parts that a model must have to be fused; its first write decides for which stream.

    A model of another stream has parts that are neither's.
    """
    first_write = model.transformer.h[0].sites[0].write
    return ADDITIVE if type(first_write) in ADDITIVE.writes else DELTA


def reason_not_fused(model: GPT) -> str | None:
    """Return why the stream of a model is not fused; None if it is, or needs no kernel of ours."""
    parts = get_fused_parts(model)
    for block in model.transformer.h:
        if type(block).forward is not Block.forward:
            name = type(block).__name__
            return f"the forward method of {name}, block {block.layer}, has no fused kernel"
        for site in block.sites:
            unfused = find_unfused(site, parts, model.config)
            if unfused is not None:
                return f"{unfused} of block {block.layer}, site {site.name}, has no fused kernel"
    if type(model.readout) not in parts.reads or type(model.ln_f) is not RMSNorm:
        return (
            f"the readout {type(model.readout).__name__} with the norm {type(model.ln_f).__name__} "
            "has no fused kernel"
        )
    if parts is DELTA:
        from .stream import reason_option_not_fused  # this module needs triton

        return reason_option_not_fused(model.config)
    return None


def find_unfused(site: Site, parts: FusedParts, config: GPTConfig) -> str | None:
    """Return the first part of a site that is not fused; None if all are."""
    read = type(site.read)
    write = type(site.write)
    is_fused = {
        f"the class {type(site).__name__}": type(site) is Site,
        f"the write {write.__name__}": write in parts.writes,
        f"the read {read.__name__}": read in parts.reads,
        f"the norm {type(site.norm).__name__}": type(site.norm) is RMSNorm,
        "the input of the sublayer": site.inputs is None,
        "the norm after the write": site.post_write is None,
        # the fused stream takes the options of every write from the model's configuration
        "the config of the write": getattr(site.write, "config", config) == config,
        "the branch_mult of the write": getattr(site.write, "branch_mult", config.branch_mult)
        == config.branch_mult,
    }
    return next((part for part, fused in is_fused.items() if not fused), None)


def reason_unavailable(device: torch.device | str) -> str | None:
    """Return why no kernel can run on a device, or None if kernels can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if os.environ.get("TRITON_INTERPRET") != "1":
        if torch.device(device).type == "cuda":
            return None
        return "fused kernels need a CUDA device"
    if version_of("triton") < (3, 7) and version_of("numpy") >= (2, 4):
        return (
            "the interpreter of Triton before 3.7 does not work with numpy 2.4 (pip install "
            "'numpy<2.4')"
        )
    return None


def reason_not_measured(device: torch.device | str) -> str | None:
    """Return why `auto` leaves the kernels out on a GPU, or None if it uses them."""
    if not torch.cuda.is_available():  # the run is only planned here
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) == MEASURED_CAPABILITY:
        return None
    return (
        f"they were measured on an H200 (compute capability 9.0), and this GPU has {major}.{minor}; "
        "kernels=on uses them here"
    )


def version_of(package: str) -> tuple[int, int]:
    """Return the major and minor version of an installed package."""
    major, minor = importlib.import_module(package).__version__.split(".")[:2]
    return int(major), int(minor)


def use(
    model: GPT,
    setting: str = "auto",
    device: torch.device | str = "cuda",
    state_checkpoint_interval: int = 2,
) -> str | None:
    """Give a model its fused stream, heads and SwiGLU, or take them away.

    Args:
        setting: "off"; "auto", which uses the kernels that have run on a GPU, on GPUs like it; or
            "on", which uses all kernels wherever they run, and requires that the stream is fused
        state_checkpoint_interval: number of sublayers from one state that is stored for the
            backward pass to the next; the states between them are recomputed

    Returns:
        Why the stream of the model is not fused, or None if it is.

    Raises:
        ValueError: the setting is "on", and the stream cannot be fused
    """
    if setting == "off":
        reason_not_here = "kernels=off"
    elif setting == "auto" and torch.device(device).type != "cuda":
        # interpreted kernels are slow, and run only on request
        reason_not_here = "fused kernels need a CUDA device"
    else:
        reason_not_here = reason_unavailable(device)
        if reason_not_here is None and setting == "auto":
            reason_not_here = reason_not_measured(device)
    reason = reason_not_here or reason_not_fused(model)
    if reason is not None and setting == "on":
        raise ValueError(f"kernels=on: {reason}; use kernels=auto or kernels=off")

    stream = Stream()
    if reason is None and get_fused_parts(model) is DELTA:
        from .stream import DeltaStream  # this module needs triton

        stream = DeltaStream(model.config, state_checkpoint_interval)
    model.use_stream(stream)
    # attention and the MLP are the same in every stream, and are fused in those that are not
    use_heads_kernel(model, reason_not_here is None)
    # the kernel of SwiGLU has not run on a GPU in its present form, so `auto` leaves it out
    use_swiglu_kernel(model, reason_not_here is None and setting == "on")
    if reason is None and torch.__version__.startswith("2.12."):
        # This version alone gives the gradient of a graph's output the strides of the output. A
        # state that is not stored has strides of 0, and memory of such strides cannot be written.
        functorch_config.guess_tangent_strides_as_outputs = False
    return reason


def describe(model: GPT, reason: str | None) -> str:
    """Return a line on which parts of a model use fused kernels.

    reason: why the stream is not fused, as `use` returned it
    """
    modules = list(model.modules())
    uses_of_kernels = {
        "residual stream": [type(model.stream) is not Stream],
        "heads of attention": [
            module.fused_heads is not None
            for module in modules
            if isinstance(module, JoinedAttention)
        ],
        "SwiGLU": [module.swiglu is not swiglu for module in modules if type(module) is JoinedMLP],
    }
    names = [name for name, uses in uses_of_kernels.items() if any(uses)]
    note = f" ({reason})" if reason else ""
    return f"fused kernels: {', '.join(names) or 'none'}{note}"


def use_heads_kernel(model: GPT, fused: bool) -> None:
    """Let attention call the kernel of RoPE and norms if it serves every layer of the model."""
    function = None
    attention_layers = [
        module for module in model.modules() if isinstance(module, CausalSelfAttention)
    ]
    if fused:
        from . import rope

        if all(rope.serves(attention, model.config) for attention in attention_layers):
            function = rope.fused_heads
    for attention in attention_layers:
        if isinstance(attention, JoinedAttention):
            attention.fused_heads = function


def use_swiglu_kernel(model: nn.Module, fused: bool) -> None:
    """Let the MLPs call the kernel of SwiGLU's backward pass, or the plain operations again."""
    function = swiglu
    if fused:
        from .swiglu_kernel import fused_swiglu

        function = fused_swiglu
    for module in model.modules():
        if type(module) is JoinedMLP:
            module.swiglu = function
