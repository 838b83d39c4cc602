"""Residual streams whose steps are fused kernels; `model.kernels.use` puts them into a model.

A write waits until the next site reads, because the two are then one pass over the state. The state
that blocks hand on is therefore the state before a write, together with that write.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from ..block import Site, Stream
from ..cache import get_or_create_buffer
from ..ddl import DeltaRewrite, SingleChannelRead
from ..ddl_config import DeltaConfig
from ..gpt import GPT
from ..layers import RMSNorm
from ..precision import compute_dtype, linear_fp32
from .residual_step import StepOutput, residual_step
from .tiles import check_dtype


class DeltaState(NamedTuple):
    """The state of the Delta stream, and the write that waits.

    The state is the last stored one with the writes since, X + k~ u^T for each.
    """

    # (B, T, d_v, d), takes the gradient of the state; its memory is that of `stored` or none
    gradient: torch.Tensor

    # (B, T, d_v, d), the last state that is in memory
    stored: torch.Tensor

    # the directions k~ (B, T, d) of the writes since then
    directions: tuple[torch.Tensor, ...] = ()

    # their updates u (B, T, d_v), in fp32
    updates: tuple[torch.Tensor, ...] = ()

    # the write that waits: k~ (B, T, d), and the logits of beta (B, T) and of v (B, T, d_v) in
    # fp32. None if there is no write, value_logit also if v is constant.
    direction: torch.Tensor | None = None
    gate_logit: torch.Tensor | None = None
    value_logit: torch.Tensor | None = None


class DeltaRead(NamedTuple):
    """What the kernel computes for the next write.

    None stands for what the write does not need, or computes by itself.
    """

    x_in: torch.Tensor | None  # (B, T, d)
    gate_logit: torch.Tensor | None  # (B, T) fp32
    value_logit: torch.Tensor | None  # (B, T, d_v) fp32


class DeltaProjections(NamedTuple):
    """The parameters of the gate and value projections that the kernel computes for the next write."""

    gate_weight: torch.Tensor | None = None  # (d,)
    gate_bias: torch.Tensor | None = None  # (1,)
    value_weight: torch.Tensor | None = None  # (d_v, d)
    value_bias: torch.Tensor | None = None  # (d_v,)


def arrange_taps(taps: torch.Tensor) -> torch.Tensor:
    """Return a view (K, d_v, d) of taps (d, d_v, K), with the current token's first.

    It is a view so that it is copied once, together with the operations that follow.
    """
    return taps.flip(-1).permute(2, 1, 0)


def get_read_weights(read: nn.Module, state: torch.Tensor) -> torch.Tensor:
    """Return the weights e (K, d_v, d) of a read in fp32, with the current token's first.

    x_in[t] = sum_s sum_j e[s, j] X[t - s, j]
    """
    if isinstance(read, SingleChannelRead):
        return state.new_ones((1, 1, state.shape[-1]), dtype=torch.float32)
    return read.weights(arrange_taps).float().contiguous()


def scale_gate(logit: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the logit y' of a gate that is scaled: sigmoid(y') = factor * sigmoid(y).

    factor: above 0, at most 1
    """
    # log(factor sigmoid(y) / (1 - factor sigmoid(y))), in a form that is accurate for large |y|
    return math.log(factor) + F.logsigmoid(logit) - torch.log1p(-factor * logit.sigmoid())


class DeltaStream(Stream):
    """Compute each write, the next read, its norm and its heads in one kernel (`step_kernels`)."""

    def __init__(self, config: DeltaConfig, state_checkpoint_interval: int):
        """state_checkpoint_interval: number of sublayers from one stored state to the next"""
        self.state_checkpoint_interval = state_checkpoint_interval
        self.branch_mult = config.branch_mult
        self.is_k_map = config.ddl_map == "k"
        self.gate_is_linear = config.ddl_beta_single_linear
        self.value_is_constant = config.constant_value is not None
        # the v-Map's branch for the direction k reads x_in, or c if d_v = 1
        self.branch_reads_x_in = not self.is_k_map and config.ddl_value_channels > 1

        # how the kernel computes the write
        self.k_eps = float(config.k_guard)
        if self.value_is_constant:
            self.value_form = "constant"
        elif config.ddl_v_sigmoid:
            self.value_form = "sigmoid"
        else:
            self.value_form = "raw"
        self.value_scale = float(config.ddl_v_sigmoid_scale)
        self.value_constant = 0.0
        if self.value_is_constant:
            self.value_constant = float(config.constant_value)
        self.value_input = config.ddl_v_input
        self.erase = config.erases

    def begin(self, model: GPT, x: torch.Tensor, cache: dict | None) -> DeltaState:
        check_dtype(x)
        state = super().begin(model, x, cache)
        # kernels read `stored`; autograd sees only `gradient`
        return DeltaState(gradient=state, stored=state.detach())

    def step(
        self,
        state: DeltaState,
        *,
        read: nn.Module,
        norm: RMSNorm,
        next_write: DeltaRewrite | None,
        cache: dict | None,
        cache_slot: str,
    ) -> tuple[DeltaState, DeltaRead, torch.Tensor]:
        """Perform the write that waits, and read the state.

        Args:
            next_write: the write that follows; None for the readout
            cache_slot: name of the buffer in which the cache keeps what these tokens add to the
                reads of later ones

        Returns:
            The new state, what the next write gets, and the normalized input c (B, T, d).
        """
        read_weights = get_read_weights(read, state.stored)
        projections = self.get_projections(next_write, read_weights)
        return_x_in = next_write is not None and self.branch_reads_x_in
        has_write = state.direction is not None
        # the state of the readout is not stored, because no later step reads it
        num_writes = len(state.directions) + 1
        store_state = (
            has_write and next_write is not None and num_writes >= self.state_checkpoint_interval
        )
        carry = None
        kernel_size = len(read_weights)
        if cache is not None and kernel_size > 1:
            batch_size, _, _, width = state.stored.shape
            carry = get_or_create_buffer(
                cache,
                cache_slot,
                (batch_size, kernel_size - 1, width),
                state.stored,
                torch.float32,
            )
        output = StepOutput(
            *residual_step(
                state=state.gradient,
                stored_state=state.stored,
                directions=list(state.directions),
                updates=list(state.updates),
                direction=state.direction,
                gate_logit=state.gate_logit,
                value_logit=state.value_logit,
                read_weights=read_weights,
                norm_weight=norm.weight,
                gate_weight=projections.gate_weight,
                gate_bias=projections.gate_bias,
                value_weight=projections.value_weight,
                value_bias=projections.value_bias,
                k_eps=self.k_eps,
                norm_eps=norm.eps,
                value_form=self.value_form,
                value_scale=self.value_scale,
                value_constant=self.value_constant,
                value_input=self.value_input,
                erase=self.erase,
                store_state=store_state,
                return_x_in=return_x_in,
                carry=carry,
                context_dtype=compute_dtype(norm.weight),
            )
        )
        if carry is not None:
            # in place, because compiled generation and CUDA graphs use the same buffer in each call
            carry.copy_(output.new_carry)
        # The gradient of a write belongs to this step alone. Later steps replay the write from
        # tensors that are detached.
        if store_state:
            new_state = DeltaState(gradient=output.new_state, stored=output.new_state.detach())
        elif has_write:
            new_state = DeltaState(
                gradient=output.new_state,
                stored=state.stored,
                directions=(*state.directions, state.direction.detach()),
                updates=(*state.updates, output.update),
            )
        else:
            new_state = DeltaState(gradient=output.new_state, stored=state.stored)
        read_output = DeltaRead(
            x_in=output.x_in if return_x_in else None,
            gate_logit=output.next_gate_logit,
            value_logit=output.next_value_logit,
        )
        return new_state, read_output, output.context

    def get_projections(
        self, next_write: DeltaRewrite | None, read_weights: torch.Tensor
    ) -> DeltaProjections:
        """Return the projections of the next write that the kernel computes."""
        projections = DeltaProjections()
        if next_write is None:
            return projections
        if self.gate_is_linear:
            projections = projections._replace(
                gate_weight=next_write.beta.weight.view(-1), gate_bias=next_write.beta.bias
            )
        # the v-Map computes v from the sublayer's output
        if self.is_k_map and not self.value_is_constant:
            bias = next_write.v_proj.bias
            if bias is None:
                bias = read_weights.new_zeros(len(next_write.v_proj.weight))
            projections = projections._replace(
                value_weight=next_write.v_proj.weight, value_bias=bias
            )
        return projections

    def read(
        self, site: Site, state: DeltaState, cache: dict | None
    ) -> tuple[DeltaState, DeltaRead, torch.Tensor]:
        return self.step(
            state,
            read=site.read,
            norm=site.norm,
            next_write=site.write,
            cache=cache,
            cache_slot=f"{site.name}.read",
        )

    def write(
        self,
        site: Site,
        state: DeltaState,
        h: torch.Tensor,
        x_in: DeltaRead,
        c: torch.Tensor,
        cache: dict | None,
    ) -> DeltaState:
        """Compute what the kernel left of the write of h, which then waits for the next read."""
        read_output = x_in
        rewrite = site.write
        gate_logit = read_output.gate_logit
        value_logit = read_output.value_logit
        # beta from the two-layer gate
        if not self.gate_is_linear:
            hidden = linear_fp32(rewrite.beta_in, c).tanh()
            gate_logit = linear_fp32(rewrite.beta_out, hidden).squeeze(-1)
        # k-Map: h is the direction k~; v-Map: h gives the value, and a branch gives k~
        direction = h
        if not self.is_k_map:
            branch_input = c if read_output.x_in is None else read_output.x_in
            direction = rewrite.direction_by_mlp(branch_input)
            value_logit = linear_fp32(rewrite.v_proj, h)
        direction = direction.to(compute_dtype(site.norm.weight)).contiguous()
        if self.branch_mult != 1:
            gate_logit = scale_gate(gate_logit, self.branch_mult)
        if self.value_is_constant:
            value_logit = None
        return state._replace(direction=direction, gate_logit=gate_logit, value_logit=value_logit)

    def finish(self, model: GPT, state: DeltaState, cache: dict | None) -> torch.Tensor:
        _, _, context = self.step(
            state,
            read=model.readout,
            norm=model.ln_f,
            next_write=None,
            cache=cache,
            cache_slot="readout",
        )
        return context
