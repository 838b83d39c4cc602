"""Fused residual steps for GPUs (Triton).

`model/residual.py` and `model/block.py` define what they compute.

`use(model)` puts them into a model, which knows nothing of them but its `stream`. They run compiled
on CUDA devices, and on a CPU with TRITON_INTERPRET=1 in the environment: slowly, to be tested.
"""

import importlib
import importlib.util
import os

import torch

from model.block import Block, Site, Stream
from model.hyper_connections import sinkhorn_knopp
from model.kernels import lowering
from model.layers import CausalSelfAttention, Heads

# The reads that the steps of each write know, by their classes' `fused`.
READS = {"add": {"identity"}, "delta_rewrite": {"only_column", "column_conv", "token_conv"}}
# Of these the compiler fuses the passes over the state; Sinkhorn-Knopp, which it cannot, is a
# kernel.
READS |= {"mix_and_add": {"manifold_connection", "sum_of_streams", "weighed_streams"}}

# Of keys of the delta rewrite, the values that its steps know; pooled inputs need the whole state.
KNOWN = {
    "ddl_k_branch": "mlp",
    "ddl_k_input": "read",
    "ddl_k_norm": "guarded",
    "ddl_beta_input": "context",
}


def form_of(module) -> str | None:
    """The name of the module's fused form, None without.

    A subclass may compute something else: it names its own.
    """
    return vars(type(module)).get("fused")


def unavailable(device: torch.device | str) -> str | None:
    """Why kernels cannot run there, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return None if torch.device(device).type == "cuda" else "they need a CUDA device"
    triton, numpy = (
        tuple(map(int, importlib.import_module(name).__version__.split(".")[:2]))
        for name in ("triton", "numpy")
    )
    if triton < (3, 7) and numpy >= (2, 5):
        return "the interpreter of Triton before 3.7 does not work with numpy 2.5 (pip install 'numpy<2.5')"
    return None


def missing(model, device: torch.device | str) -> str | None:
    """Why the kernels cannot serve this model there, or None."""
    if why := unavailable(device):
        return why
    if unknown := without_form(model):
        return f"there are none for {unknown}"
    if write_form(model) == "mix_and_add" and importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed (pip install liger-kernel)"
    return unknown_option(model.config) if write_form(model) == "delta_rewrite" else None


def unknown_option(config) -> str | None:
    """The first key of a delta rewrite whose value the kernels do not compute, as a sentence; None:
    they know all.
    """
    if config.ddl_value_channels not in (1, 2, 4, 8):
        return f"they know 1, 2, 4 and 8 columns, ddl_value_channels is {config.ddl_value_channels}"
    if config.branch_mult > 1:
        return f"they know a residual_branch_mult of at most 1, it is {config.branch_mult:g}"
    for key, known in KNOWN.items():
        if (value := getattr(config, key)) != known:
            return f"there are none for {key}={value}"
    return None


def write_form(model) -> str | None:
    """The form of the first block's first write; `without_form` says whether all are alike."""
    return form_of(model.transformer.h[0].sites[0].write)


def without_form(model) -> str | None:
    """The first part of the model's stream that the kernels do not compute, None: they compute all
    of it.
    """
    reads = READS.get(write_form(model), set())
    if form_of(model.ln_f) != "rms_norm" or form_of(model.readout) not in reads:
        return f"the readout ({type(model.readout).__name__}, {type(model.ln_f).__name__}) of this model"
    for block in model.transformer.h:
        if type(block).forward is not Block.forward:
            return f"the forward pass of {type(block).__name__}, block {block.layer}"
        for site in block.sites:
            alike = form_of(site.write) == write_form(model) and known_write(
                site.write, model.config
            )
            for what, part, known in (
                (
                    "site",
                    site,
                    type(site) is Site and site.inputs is None and not site.read_positions,
                ),
                ("write", site.write, alike),
                ("read", site.read, form_of(site.read) in reads),
                ("norm", site.norm, form_of(site.norm) == "rms_norm"),
                ("norm after the write", site.post_write, site.post_write is None),
            ):
                if not known:
                    return f"the {what} ({type(part).__name__}) of block {block.layer}, site {site.name}"
    return None


def known_write(write, config) -> bool:
    """Delta rewrites share the model's options; one with an extra loss needs the states, which the
    kernels skip.
    """
    return getattr(write, "config", config) == config and not hasattr(write, "extra_loss")


def use(
    model,
    setting: str = "auto",
    device: torch.device | str = "cuda",
    state_checkpoint_interval: int = 2,
) -> str | None:
    """Give the model its fused stream and heads, or take them away.

    Returns why its stream is not fused, or None.

    setting: "on", "off", or "auto" (what can be fused is). state_checkpoint_interval: sublayers between states
    kept for the backward pass; those between are made again. ValueError: "on" where the stream
    cannot be.
    """
    nowhere = "kernels=off" if setting == "off" else unavailable(device)
    if setting == "auto" and torch.device(device).type != "cuda":
        nowhere = "they need a CUDA device"  # interpreted ones only on request
    why = nowhere or missing(model, device)
    if why and setting == "on":
        raise ValueError(f"kernels=on: {why}; give kernels=off, or auto")
    stream, heads, balance = Stream(), Heads(), sinkhorn_knopp
    if not nowhere:  # the heads are the same in every stream
        from model.kernels import rope

        attentions = [
            module for module in model.modules() if isinstance(module, CausalSelfAttention)
        ]
        heads = (
            rope.FusedHeads()
            if all(rope.serves(each, model.config) for each in attentions)
            else heads
        )
    if not why:
        if write_form(model) == "mix_and_add":
            from model.kernels.sinkhorn import sinkhorn_knopp as balance
        else:
            stream = fused_stream(model, state_checkpoint_interval)
    model.use_stream(stream)
    model.use_heads(heads)
    for read in (site.read for block in model.transformer.h for site in block.sites):
        if form_of(read) == "manifold_connection":
            read.balance = balance
    lowering.register()  # last: every operator that the model may call is there by now
    return why


def fused_stream(model, state_checkpoint_interval: int) -> Stream:
    from model.kernels.stream import AdditiveStream, DeltaStream

    config = model.config
    return (
        AdditiveStream(config)
        if write_form(model) == "add"
        else DeltaStream(config, state_checkpoint_interval)
    )
