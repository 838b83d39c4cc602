"""Residual streams whose steps are fused kernels; `model.kernels.use` puts them into a model.

A write waits until the next site reads: both are one pass over the state then. So what blocks hand
on is the state before the write, and the write.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from model.block import Stream
from model.decoding import get_or_create_buffer
from model.kernels import add_norm as additive
from model.kernels.expand import expand
from model.kernels.residual_step import residual_step
from model.kernels.tiles import DTYPES
from model.layers import RMSNorm, compute_dtype, linear_fp32
from model.residual import EmbeddingConv, OnlyColumn


def check_dtype(x) -> None:
    """ValueError: a dtype that the kernels, which compute in fp32, would lose digits of."""
    if x.dtype not in DTYPES:
        raise ValueError(f"kernels compute in float32, the model is {x.dtype}: give kernels=off")


class AdditiveState(NamedTuple):
    """x (B, T, d) and the sublayer's output that is yet to be added, None at the start.

    h is what the products are computed in, bfloat16 for example, whatever x is kept in.
    """

    x: torch.Tensor
    h: torch.Tensor | None


class AdditiveStream(Stream):
    """X' = X + h and the norm that follows in one kernel.

    h has its factor, if any, in fp32 before.
    """

    def __init__(self, config):
        self.mult = config.branch_mult

    def begin(self, model, x, cache):
        check_dtype(x)
        return AdditiveState(x.contiguous(), None)

    def norm(self, state: AdditiveState, norm: RMSNorm):
        dtype = compute_dtype(norm.weight)
        h = (
            None
            if state.h is None
            else state.h.to(dtype if self.mult == 1 else torch.float32).contiguous()
        )
        x, context, _ = additive.add_norm(state.x, h, norm.weight, norm.eps, dtype)
        return AdditiveState(state.x if h is None else x, None), context

    def read(self, site, state, cache, positions):
        state, context = self.norm(state, site.norm)
        return state, context, None

    def write(self, site, state, h, c, aux, cache):
        return AdditiveState(state.x, h if self.mult == 1 else self.mult * h.float()), None

    def finish(self, model, state, cache):
        return self.norm(state, model.ln_f)[1]


class DeltaState(NamedTuple):
    """A state (B, T, v, d) as it is kept: the last stored one, the writes since, and the write that
    waits.

    gradient: has the shape of the state and takes its gradient; its memory is that of `stored`, or
    none. stored: the last state in memory. hs (B, T, d), us (B, T, v): the writes since then, state
    + h u^T each. h, gate_logit (B, T), value_logit (B, T, v): the write that waits; None: none
    does.
    """

    gradient: torch.Tensor
    stored: torch.Tensor
    hs: tuple = ()
    us: tuple = ()
    h: torch.Tensor | None = None
    gate_logit: torch.Tensor | None = None
    value_logit: torch.Tensor | None = None


def permuted(taps):
    """taps (d, v, K) -> (K, v, d), the current token's first, as a view: copied once, with what
    follows, on a GPU.
    """
    return taps.flip(-1).permute(2, 1, 0)


def weights_of(read, state):
    """e (K, v, d) in fp32, x_in[t] = sum_s sum_j e[s, j] X[t - s, j]; its first entry weighs the
    current token.
    """
    if isinstance(read, OnlyColumn):
        return state.new_ones((1, 1, state.shape[-1]), dtype=torch.float32)
    return read.weights(permuted).float().contiguous()


def multiplied(logit, mult: float):
    """The logit at which a gate is `mult`, at most 1, times what it is at this one: m sigmoid(y) =
    sigmoid(result).
    """
    return math.log(mult) + F.logsigmoid(logit) - torch.log1p(-mult * logit.sigmoid())


class DeltaStream(Stream):
    """Each write, the next read, its norm and its heads in one kernel (see step_kernels).

    interval: sublayers between states that are kept for the backward pass; those between are made
    again.
    """

    def __init__(self, config, interval: int):
        self.interval = interval
        self.k_map, self.gate_is_linear = config.ddl_map == "k", config.ddl_beta_single_linear
        self.reads_x_in = not self.k_map and config.ddl_value_channels > 1
        self.constant = config.ddl_v_constant
        form = "constant" if self.constant else "sigmoid" if config.ddl_v_sigmoid else "raw"
        self.k_eps, self.mult = float(config.k_guard), config.branch_mult
        self.options = (
            form, float(config.ddl_v_sigmoid_scale), float(config.ddl_v_constant_value), config.ddl_v_input,
            config.ddl_update == "delta",
        )  # fmt: skip

    def begin(self, model, x, cache):
        check_dtype(x)
        if type(model.input_embed) is EmbeddingConv and cache is None:
            # (d, v, K)
            taps = model.input_embed.conv.weight.squeeze(1).unflatten(0, (x.shape[-1], -1))
            state = expand(x.contiguous(), permuted(taps).float().contiguous())
        else:
            state = super().begin(model, x, cache)
        return DeltaState(state, state.detach())

    def step(
        self, state: DeltaState, read, norm: RMSNorm, rewrite, cache, slot: str, last: bool = False
    ):
        """(new state, context, (x_in, gate logit, value logit)); each of the three None where it is
        made elsewhere.
        """
        weights = weights_of(read, state.stored)
        heads = [None, None, None, None]
        if rewrite is not None and self.gate_is_linear:
            heads[:2] = rewrite.beta.weight.view(-1), rewrite.beta.bias
        if rewrite is not None and self.k_map and not self.constant:
            bias = rewrite.v_proj.bias
            heads[2:] = (
                rewrite.v_proj.weight,
                weights.new_zeros(len(rewrite.v_proj.weight)) if bias is None else bias,
            )
        with_x_in = rewrite is not None and self.reads_x_in
        writes = state.h is not None
        store = writes and not last and len(state.hs) + 1 >= self.interval
        carry = None
        if cache is not None and len(weights) > 1:
            shape = (len(state.stored), len(weights) - 1, state.stored.shape[-1])
            carry = get_or_create_buffer(cache, slot, shape, state.stored, torch.float32)
        new, context, x_in, gate_logit, value_logit, _, _, u, _, new_carry = residual_step(
            state.gradient, state.stored, list(state.hs), list(state.us), state.h, state.gate_logit, state.value_logit,
            weights, norm.weight, *heads, self.k_eps, norm.eps, *self.options, store, with_x_in, carry,
            compute_dtype(norm.weight),
        )  # fmt: skip
        if carry is not None:
            carry.copy_(new_carry)
        if store:
            state = DeltaState(new, new.detach())
        elif writes:
            state = DeltaState(new, state.stored, (*state.hs, state.h.detach()), (*state.us, u))
        else:
            state = DeltaState(new, state.stored)
        return state, context, (x_in if with_x_in else None, gate_logit, value_logit)

    def read(self, site, state, cache, positions):
        return self.step(state, site.read, site.norm, site.write, cache, f"{site.name}.read")

    def write(self, site, state, h, c, aux, cache):
        rewrite, (x_in, gate_logit, value_logit) = site.write, aux
        if not self.gate_is_linear:
            gate_logit = linear_fp32(
                rewrite.beta_out, linear_fp32(rewrite.beta_in, c).tanh()
            ).squeeze(-1)
        source = h
        if not self.k_map:
            source = rewrite.direction_branch(c if x_in is None else x_in)
            value_logit = linear_fp32(rewrite.v_proj, h)
        source = source.to(compute_dtype(site.norm.weight)).contiguous()
        if self.mult != 1:
            gate_logit = multiplied(gate_logit, self.mult)
        value_logit = None if self.constant else value_logit
        return state._replace(h=source, gate_logit=gate_logit, value_logit=value_logit), None

    def finish(self, model, state, cache):
        _, context, _ = self.step(
            state, model.readout, model.ln_f, None, cache, "readout", last=True
        )
        return context
