"""Fused kernels for GPUs (Triton): the steps of DDL, RoPE with its norms, and SwiGLU's gradient.

`model/ddl.py`, `block.py` and `layers.py` define what the kernels compute. `use(model)` puts fused
kernels into a model, which itself knows only its `stream` and the functions of `products.py` that
kernels may replace. They run compiled on CUDA devices. With TRITON_INTERPRET=1 in the environment
they run interpreted on a CPU, slowly, for tests.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable

import torch
from torch import nn
from torch._functorch import config as functorch_config

from ..block import Add, Block, Direct, Site, Stream
from ..ddl import ChannelConvRead, DeltaRewrite, SingleChannelRead, TokenConvRead
from ..gpt import GPT
from ..layers import CausalSelfAttention, RMSNorm
from ..products import JoinedAttention, JoinedMLP, swiglu

# compute capability of the GPUs (H100, H200) on which `auto` uses the kernels
MEASURED_CAPABILITY = (9, 0)


# What the fused stream of DDL computes: parts of a model, which must be these exactly, because a
# subclass may compute something else; and values of its keys, of which the last two only count in
# the v-Map.
SUPPORTED_PARTS = {
    Block.forward,
    Site,
    SingleChannelRead,
    ChannelConvRead,
    TokenConvRead,
    DeltaRewrite,
    RMSNorm,
}
SUPPORTED_VALUES = {
    "ddl_value_channels": (1, 2, 4, 8),
    "ddl_beta_input": ("context",),
    "ddl_k_norm": ("guarded",),
    "ddl_k_branch": ("mlp",),
    "ddl_k_input": ("read",),
}
V_MAP_KEYS = ("ddl_k_branch", "ddl_k_input")


def is_additive(model: GPT) -> bool:
    """Return whether a model has the additive stream, which torch.compile fuses by itself."""
    return all(type(site.write) is Add and type(site.read) is Direct for site in model.sites)


def reason_not_fused(model: GPT) -> str | None:
    """Return why the stream of a model is not fused; None if it is, or needs no kernel of ours."""
    if is_additive(model):
        return None
    for part in list_parts(model):
        if part not in SUPPORTED_PARTS:
            return f"{part.__qualname__} has no fused kernel"
    config = model.config
    if any(site.write.config != config for site in model.sites):
        return "a write with a config of its own has no fused kernel"
    for key, supported_values in SUPPORTED_VALUES.items():
        value = getattr(config, key)
        has_effect = config.ddl_map == "v" or key not in V_MAP_KEYS
        if has_effect and value not in supported_values:
            supported = ", ".join(map(str, supported_values))
            return f"{key}={value} has no fused kernel (supported: {supported})"
    if config.branch_mult > 1:
        return f"residual_branch_mult={config.branch_mult:g} has no fused kernel (supported: at most 1)"
    return None


def list_parts(model: GPT) -> list[type | Callable]:
    """Return what decides whether a fused stream computes the same as the model."""
    parts = []
    for block in model.transformer.h:
        for site in block.sites:
            parts += [type(site), type(site.write), type(site.read), type(site.norm)]
            parts += [type(part) for part in (site.inputs, site.post_write) if part is not None]
        parts.append(type(block).forward)
    return [*parts, type(model.readout), type(model.ln_f)]


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
    if reason is None and not is_additive(model):
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
