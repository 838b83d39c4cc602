"""Fused residual steps for GPUs (Triton).

`model/ddl.py` and `model/block.py` define what the kernels compute. `use(model)` puts fused
kernels into a model, which itself knows only its `stream` and the functions of `products.py` that
kernels may replace. They run compiled on CUDA devices. With TRITON_INTERPRET=1 in the environment
they run interpreted on a CPU, slowly, for tests.
"""

import enum
import importlib
import importlib.util
import os
from typing import NamedTuple

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


class FusedForm(enum.Enum):
    """What serves a model instead of the plain operations."""

    # the plain stream: torch.compile fuses the addition with the RMSNorm that follows
    ADDITIVE = "additive"

    # DeltaStream: a write, the next read, its RMSNorm, and the projections to the next gate and
    # write value are one kernel
    DELTA = "delta"


# (type(read), type(write), type(norm)) of a site -> the fused form that serves it. Classes must be
# these exactly, because a subclass may compute something else. All sites of a model must have the
# same form.
SITES: dict[tuple[type, type, type], FusedForm] = {
    (Direct, Add, RMSNorm): FusedForm.ADDITIVE,
    (SingleChannelRead, DeltaRewrite, RMSNorm): FusedForm.DELTA,
    (ChannelConvRead, DeltaRewrite, RMSNorm): FusedForm.DELTA,
    (TokenConvRead, DeltaRewrite, RMSNorm): FusedForm.DELTA,
}

# (type(readout), type(ln_f)) of a model -> the fused form that serves it
READOUTS: dict[tuple[type, type], FusedForm] = {
    (Direct, RMSNorm): FusedForm.ADDITIVE,
    (SingleChannelRead, RMSNorm): FusedForm.DELTA,
    (ChannelConvRead, RMSNorm): FusedForm.DELTA,
    (TokenConvRead, RMSNorm): FusedForm.DELTA,
}

# Value channels d_v that DeltaStream supports.
VALUE_CHANNELS = (1, 2, 4, 8)

# The only value of each of these keys that DeltaStream supports. Most other values of the first three
# need more of the state than x_in, which is all that the kernel passes on. It has no gate on x_in, no
# other normalization of k, and no second gate.
DELTA_OPTIONS = {
    "ddl_k_branch": "mlp",
    "ddl_k_input": "read",
    "ddl_beta_input": "context",
    "ddl_k_norm": "guarded",
    "ddl_erase_gate": "shared",
}


class Choice(NamedTuple):
    """The fused form of a model, or the reason why it has none."""

    form: FusedForm | None
    reason: str | None = None  # a sentence without its period; None if there is a form


def choose_form(model: GPT) -> Choice:
    """Choose the fused form that serves the model on a device that runs kernels."""
    forms = []
    for block in model.transformer.h:
        if type(block).forward is not Block.forward:
            return Choice(
                None,
                f"the forward method of {type(block).__name__}, block {block.layer}, has no fused "
                "kernel",
            )
        for site in block.sites:
            reason = reason_site_is_plain(site, model.config)
            if reason is not None:
                return Choice(None, reason)
            forms.append(SITES[classes_of_site(site)])
            if forms[-1] is not forms[0]:
                return Choice(
                    None,
                    f"the write {type(site.write).__name__} of block {block.layer}, site "
                    f"{site.name}, has no fused kernel that combines with those of the model's "
                    "first site",
                )
    form = forms[0]
    if READOUTS.get((type(model.readout), type(model.ln_f))) is not form:
        return Choice(
            None,
            f"the readout {type(model.readout).__name__} with the norm {type(model.ln_f).__name__} "
            "has no fused kernel that combines with those of the model's sites",
        )
    reason = reason_options_are_plain(model.config) if form is FusedForm.DELTA else None
    return Choice(form if reason is None else None, reason)


def classes_of_site(site: Site) -> tuple[type, type, type]:
    """Return the key of a site in `SITES`."""
    return type(site.read), type(site.write), type(site.norm)


def reason_site_is_plain(site: Site, config: GPTConfig) -> str | None:
    """Return why no fused kernel computes a site of a model, or None if one does."""
    place = f"of block {site.layer}, site {site.name},"
    read, write, norm = classes_of_site(site)
    if type(site) is not Site:
        return f"the class {type(site).__name__} {place} has no fused kernel"
    if write not in {served_write for _, served_write, _ in SITES}:
        return f"the write {write.__name__} {place} has no fused kernel"
    if (read, write) not in {(served_read, served_write) for served_read, served_write, _ in SITES}:
        return f"the read {read.__name__} {place} has no fused kernel"
    if site.norm is None:
        return f"the missing norm {place} has no fused kernel"
    if (read, write, norm) not in SITES:
        return f"the norm {norm.__name__} {place} has no fused kernel"
    if site.inputs is not None:
        return f"the separate inputs of the sublayer {place} have no fused kernel"
    if site.read_positions:
        return f"the read {read.__name__} {place} depends on positions and has no fused kernel"
    if site.post_write is not None:
        return (
            f"the norm {type(site.post_write).__name__} after the write {place} has no fused kernel"
        )
    # an extra loss depends on every state, and the kernels skip some
    if hasattr(site.write, "extra_loss"):
        return f"the extra loss of the write {write.__name__} {place} has no fused kernel"
    # the fused stream takes the options of every write from the model's configuration
    if getattr(site.write, "config", config) != config:
        return (
            f"the write {write.__name__} {place} has other options than the model, and therefore "
            "no fused kernel"
        )
    if getattr(site.write, "branch_mult", config.branch_mult) != config.branch_mult:
        return (
            f"the write {write.__name__} {place} has a branch_mult of its own, and therefore no "
            "fused kernel"
        )
    return None


def reason_options_are_plain(config: GPTConfig) -> str | None:
    """Return why DeltaStream does not support the options of a model, or None if it does."""
    if config.ddl_value_channels not in VALUE_CHANNELS:
        return (
            f"ddl_value_channels={config.ddl_value_channels} has no fused kernel (1, 2, 4 and 8 "
            "have one)"
        )
    if config.branch_mult > 1:
        return (
            f"residual_branch_mult={config.branch_mult:g} has no fused kernel (values of at most 1 "
            "have one)"
        )
    for key, supported in DELTA_OPTIONS.items():
        if config.ddl_map == "k" and key in ("ddl_k_branch", "ddl_k_input"):
            continue  # these keys have no effect there
        value = getattr(config, key)
        if value != supported:
            return f"{key}={value} has no fused kernel ({key}={supported} has one)"
    return None


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
        setting: "off"; "auto", which fuses what it can on GPUs like the one on which the kernels
            were measured; or "on", which fuses what it can wherever kernels run, and requires that
            the stream is fused
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
    if reason_not_here is None:
        form, reason = choose_form(model)
    else:
        form, reason = None, reason_not_here
    if reason is not None and setting == "on":
        raise ValueError(f"kernels=on: {reason}; use kernels=auto or kernels=off")

    model.use_stream(make_stream(form, model.config, state_checkpoint_interval))
    # attention and the MLP are the same in every stream, and are fused in those that are not
    use_heads_kernel(model, reason_not_here is None)
    use_swiglu_kernel(model, reason_not_here is None)
    if form is not None and torch.__version__.startswith("2.12."):
        # This version alone gives the gradient of a graph's output the strides of the output. A
        # state that is not stored has strides of 0, and memory of such strides cannot be written.
        functorch_config.guess_tangent_strides_as_outputs = False
    return reason


def describe(model: GPT, reason_not_fused: str | None) -> str:
    """Return a line on which parts of a model use fused kernels.

    reason_not_fused: what `use` returned
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
    reason = f" ({reason_not_fused})" if reason_not_fused else ""
    return f"fused kernels: {', '.join(names) or 'none'}{reason}"


def make_stream(
    form: FusedForm | None, config: GPTConfig, state_checkpoint_interval: int
) -> Stream:
    """Return the stream of a fused form; the plain stream for None."""
    if form is FusedForm.DELTA:
        from .stream import DeltaStream  # this module needs triton

        return DeltaStream(config, state_checkpoint_interval)
    return Stream()


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
