"""The residual stream of Deep Delta Learning (DDL, arXiv 2601.00417).

The residual state X in R^{d x d_v} of a token has d_v value channels of width d. A site compresses
it to a vector x_in, which the sublayer processes, and rewrites it:

    x_in = compress(X)                      SingleChannelRead, TokenConvRead or ChannelConvRead
    c = norm(x_in)
    h = F(c)                                attention or MLP
    k = h / |h|                             the direction, in R^d
    beta = 2 sigmoid(w . c + b)             the gate, in (0, 2)
    v = W_v x_in                            the write value, in R^{d_v}; sigmoid(w_v . x_in) if d_v = 1
    X' = X + beta k (v^T - k^T X)           DeltaRewrite

as the paper's text of January 29, 2026 has it. The keys in ddl_config.py select other forms: those of
the authors' code (config/authors.py), of the paper's other versions, and controls.

The state is stored as (B, T, d_v, d), the transpose of the paper's (B, T, d, d_v), so that features
are contiguous and every operation below runs along them. Equations and sections in docstrings are
those of the paper's version of January 29, 2026. In that of July 2026, equation 6 is equation 2.2.

On an H100 or H200, model/kernels computes the same in fused kernels, and DeltaRewrite.forward is not
called; --kernels=off runs the code of this file.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from .block import Block, Past, delay_each, fold_once
from .config import GPTConfig
from .ddl_config import (
    ChannelConvConfig,
    DeltaConfig,
    EmbeddingConvConfig,
    ValueChannelsConfig,
)
from .parameters import FIXED, HIDDEN, INPUT, OUTPUT, Rule, constant, linear, normal, one_hot
from .precision import at_least_fp32, for_product, linear_fp32

# ---- the write ----


class DeltaRewrite(nn.Module):
    """The write of Deep Delta Learning: X' = X + beta k (v^T - k^T X) (section 2.2, equation 6)."""

    ranges: ClassVar = {"beta": (0.0, 2.0)}

    def __init__(self, config: DeltaConfig):
        super().__init__()
        self.config = config
        self.rules = {}
        # The order of the parameters is that of these lines. It decides the last bits of the gradient
        # norm.
        self.add_gate()
        self.add_direction()
        self.add_value()

    def forward(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> torch.Tensor:
        """Return the new state X'; `Stream.write` calls it.

        Args:
            state: X (B, T, d_v, d)
            h: sublayer output (B, T, d)
            x_in: compressed state (B, T, d)
            c: normalized x_in (B, T, d)
            past: not used, because the write reads no earlier tokens
        """
        # k_hat = sqrt(d) k with k = k~ / ||k~||, where k~ = h in the k-Map (equation 3)
        k_hat = self.direction(state, h, x_in, c)
        # by default, beta = 2 sigmoid(w . c + b)
        beta = self.gate(state, x_in, c)
        # by default, v = W x_in, or sigmoid(w . x_in) if d_v = 1
        v = self.value(h, x_in, c)
        # what is multiplied into the update is no part of the gate that `statistics` returns
        branch_mult = self.config.branch_mult
        if branch_mult != 1:
            beta = branch_mult * beta
        # X' = X + beta k (v^T - k^T X) (equation 6)
        return delta_rewrite(state, k_hat, beta, v, erase=self.config.erases)

    # The layers of k, beta and v belong to the write itself, so that a checkpoint has
    # `ddl_attn.v_proj.weight`, as those of the authors' code do. Therefore k, beta and v are methods,
    # not modules.

    def direction(
        self, state: torch.Tensor, h: torch.Tensor, x_in: torch.Tensor, c: torch.Tensor
    ) -> torch.Tensor:
        """Return k_hat = sqrt(d) k (B, T, d) in at least fp32, where ||k|| = 1 (equation 3, B.1).

        In the k-Map, k is the sublayer output h, normalized. In the v-Map, a branch of its own
        computes it: an MLP, or attention over the value channels.
        """
        config = self.config
        if config.ddl_map == "k":
            k_tilde = h
        elif config.ddl_k_branch == "attention":
            k_tilde = self.direction_by_attention(state)
        elif config.ddl_k_input != "read":
            k_tilde = self.direction_by_mlp(pool(state, config.ddl_k_input))
        elif config.ddl_value_channels == 1:
            k_tilde = self.direction_by_mlp(c)
        else:
            k_tilde = self.direction_by_mlp(x_in)
        return normalize_direction(k_tilde, config)

    def gate(self, state: torch.Tensor, x_in: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """Return the gate beta (B, T, 1), in (0, 2) and at least fp32 (equation 8, B.2)."""
        x = self.gate_input(state, x_in, c)
        if self.config.ddl_beta_single_linear:
            logit = linear_fp32(self.beta, x)
        else:
            logit = linear_fp32(self.beta_out, linear_fp32(self.beta_in, x).tanh())
        return 2 * logit.sigmoid()

    def value(self, h: torch.Tensor, x_in: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """Return the write value v (B, T, d_v), in at least fp32.

        It is linear in x_in or c in the k-Map, and in the sublayer output h in the v-Map, with or
        without a sigmoid that bounds it; or it is a constant.
        """
        config = self.config
        if config.constant_value is not None:
            return x_in.new_full(
                (*x_in.shape[:2], config.ddl_value_channels),
                config.constant_value,
                dtype=at_least_fp32(x_in.dtype),
            )
        if config.ddl_map == "v":
            value_input = h
        elif config.ddl_v_input == "residual":
            value_input = x_in
        else:
            value_input = c
        v = linear_fp32(self.v_proj, value_input)
        if config.ddl_v_sigmoid:
            return config.ddl_v_sigmoid_scale * v.sigmoid()
        return v

    def gate_input(self, state: torch.Tensor, x_in: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """Return what the gate is computed from, (B, T, d) or (B, T, d_v * d)."""
        # G(X) in equation 8 may be a convolution; here, that is the compressor, with output x_in.
        if self.config.ddl_beta_input == "context":
            return c
        if self.config.ddl_beta_input == "residual":
            return x_in
        return pool(state, self.config.ddl_beta_input)

    def direction_by_mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Return k~ = k_out silu(k_in x), (B, T, d)."""
        return self.k_out(F.silu(self.k_in(for_product(x, self.k_in.weight))))

    def direction_by_attention(self, state: torch.Tensor) -> torch.Tensor:
        """Return k~ = k_out sum_j a_j X[:, j], (B, T, d).

        a = softmax_j(k_query . (k_key X[:, j]) / sqrt(d))
        """
        x = state.to(at_least_fp32(state.dtype))
        # k_query . (k_key X) = (k_key^T k_query) . X, so the value channels meet one vector instead
        # of a matrix
        query = self.k_query.to(x.dtype) @ self.k_key.weight.to(x.dtype)
        scores = (x * query).sum(-1) / math.sqrt(x.shape[-1])
        attended = (x * scores.softmax(-1).unsqueeze(-1)).sum(2).to(state.dtype)
        return self.k_out(for_product(attended, self.k_out.weight))

    def add_gate(self) -> None:
        """Register the layer of beta, or its two layers; the bias starts where beta is ddl_beta_init."""
        config = self.config
        d = config.hidden_size
        input_size = d * config.ddl_value_channels if config.ddl_beta_input == "flat" else d
        # the bounds keep the logit finite for a gate of 0 or 2
        probability = min(max(config.beta_start / 2, 1e-6), 1 - 1e-6)
        bias_rule = Rule(constant(math.log(probability) - math.log1p(-probability)))
        start = config.matrix_start()
        input_rule = Rule(start, OUTPUT, decay=True)
        if config.ddl_beta_single_linear:
            self.beta = linear(input_size, 1, input_rule, bias_rule)
            return
        hidden_size = config.ddl_beta_hidden_size
        self.beta_in = linear(input_size, hidden_size, input_rule)
        self.beta_out = linear(hidden_size, 1, Rule(start, FIXED, decay=True), bias_rule)

    def add_direction(self) -> None:
        """Register the branch of k in the v-Map; the k-Map has none."""
        config = self.config
        if config.ddl_map == "k":
            return
        d = config.hidden_size
        start = config.matrix_start()
        if config.ddl_k_branch == "attention":
            matrix_rule = Rule(start, HIDDEN, decay=True)
            self.k_query = nn.Parameter(torch.empty(d))
            self.rules["k_query"] = Rule(constant(0.0))
            self.k_key = linear(d, d, matrix_rule)
            self.k_out = linear(d, d, matrix_rule)
            return
        input_size = d * config.ddl_value_channels if config.ddl_k_input == "flat" else d
        hidden_size = config.ddl_k_hidden_size
        # With init=spectral, the start of k_out does not depend on d.
        out_kind = INPUT if config.init == "normal" else FIXED
        in_rule = Rule(start, OUTPUT, decay=True)
        out_rule = Rule(start, out_kind, decay=True)
        self.k_in = linear(input_size, hidden_size, in_rule)
        self.k_out = linear(hidden_size, d, out_rule)

    def add_value(self) -> None:
        """Register the layer of v; the erase alone has no value, and no layer for it."""
        config = self.config
        if config.ddl_update == "erase_only":
            return
        d = config.hidden_size
        bias_rule = None
        if config.ddl_v_bias:
            # as in a layer of torch, so that the value channels differ from the first step on
            bound = 1 / math.sqrt(d)
            bias_rule = Rule(partial(nn.init.uniform_, a=-bound, b=bound))
        weight_rule = Rule(config.matrix_start(), OUTPUT, decay=True)
        self.v_proj = linear(d, config.ddl_value_channels, weight_rule, bias_rule)
        # With a constant value the layer stays in the state dict, but it is not trained.
        self.v_proj.requires_grad_(not config.ddl_v_constant)

    def statistics(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        written: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Return, for each token (B, T), the gate and the RMS of v - k^T X before and after."""
        k_hat = self.direction(state, h, x_in, c)
        v = self.value(h, x_in, c)
        return {
            "beta": self.gate(state, x_in, c).squeeze(-1),
            "discrepancy_before": (v - project_onto_k(state, k_hat)).square().mean(-1).sqrt(),
            "discrepancy_after": (v - project_onto_k(written, k_hat)).square().mean(-1).sqrt(),
        }


def delta_rewrite(
    state: torch.Tensor,
    k_hat: torch.Tensor,
    beta: torch.Tensor,
    v: torch.Tensor,
    erase: bool = True,
) -> torch.Tensor:
    """Return X' = X + beta k (v^T - k^T X) (equation 6).

    It is computed in at least fp32 and returned in the dtype of the state.

    Args:
        state: X (B, T, d_v, d)
        k_hat: sqrt(d) k (B, T, d), in at least fp32; its RMS is 1
        beta: the gate (B, T, 1)
        v: the write value (B, T, d_v)
        erase: False leaves out the erase, X' = X + beta k v^T
    """
    x = state.to(k_hat.dtype)
    k_hat = k_hat.unsqueeze(2)  # (B, T, 1, d): one direction for all value channels
    # k = scale * k_hat; the factor stays outside the dot products, as in the authors' code
    scale = 1 / math.sqrt(k_hat.shape[-1])
    if erase:
        v = v - (x * k_hat).sum(-1) * scale  # v^T - k^T X
    update = beta * v  # (B, T, d_v)
    return (x + (update * scale).unsqueeze(-1) * k_hat).to(state.dtype)


def normalize_direction(k_tilde: torch.Tensor, config: DeltaConfig) -> torch.Tensor:
    """Return k_hat = sqrt(d) k of the unnormalized direction k~ (B, T, d) (equation 3).

    k = k~ / sqrt(||k~||^2 + eps^2), or k~ / (||k~|| + eps) with ddl_k_norm=shifted.
    """
    k_tilde = k_tilde.to(at_least_fp32(k_tilde.dtype))
    d = k_tilde.shape[-1]
    eps = config.k_guard
    # rms_norm divides by sqrt(mean(k~^2) + eps^2 / d), which is sqrt(||k~||^2 + eps^2) / sqrt(d)
    k_hat = F.rms_norm(k_tilde, (d,), eps=eps**2 / d)
    if config.ddl_k_norm == "shifted":
        norm = torch.linalg.vector_norm(k_tilde, dim=-1, keepdim=True)
        k_hat = k_hat * ((norm.square() + eps**2).sqrt() / (norm + eps))
    return k_hat


def project_onto_k(state: torch.Tensor, k_hat: torch.Tensor) -> torch.Tensor:
    """Return k^T X (B, T, d_v) of a state (B, T, d_v, d), where k_hat (B, T, d) is sqrt(d) k."""
    return (state.to(k_hat.dtype) * k_hat.unsqueeze(2)).sum(-1) / math.sqrt(k_hat.shape[-1])


def pool(state: torch.Tensor, form: str) -> torch.Tensor:
    """Return Pool(X) of a state (B, T, d_v, d), in at least fp32 (equation 8, appendix B.1).

    form: "mean" over the value channels, (B, T, d); or "flat", one value channel after the other,
        (B, T, d_v * d)
    """
    x = state.to(at_least_fp32(state.dtype))
    return x.mean(2) if form == "mean" else x.flatten(2)


# ---- reads and expanders ----


def taps_first(weights: torch.Tensor) -> torch.Tensor:
    """Rearrange convolution weights (d, d_v, K) to (K, d_v, d), with the current token's tap first.

    Features are last and contiguous, as they are in the state.
    """
    # A permuted view would give the same numbers, but torch.compile lays out what is multiplied
    # with it, the state, in the order of the view; features would no longer be contiguous, and no
    # loop would be vectorized. The compiler sees through `contiguous`, but not through `stack`.
    rows = torch.stack(weights.flatten(1).unbind(1))  # (d_v * K, d)
    return rows.unflatten(0, weights.shape[1:]).transpose(0, 1).flip(0)


class Repeat(nn.Module):
    """Expander that repeats the embedding (B, T, d) in each vector of the state, (B, T, d_v, d).

    The number of vectors is the value of the config's `expansion_key`.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.num_copies = getattr(config, config.expansion_key)

    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        return x.unsqueeze(2).expand(-1, -1, self.num_copies, -1)


class Taps(nn.Module):
    """Holds the weight of a convolution under the name `<owner>.weight`."""

    def __init__(self, *shape: int, start: Callable):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.rules = {"weight": Rule(start, decay=True)}


class EmbeddingConv(nn.Module):
    """Expander (EC): a causal depthwise convolution over tokens, (B, T, d) -> (B, T, d_v, d).

        X[t, j, i] = sum_s conv.weight[i * d_v + j, 0, K-1-s] x[t-s, i]

    It starts as the identity, which repeats the embedding in each value channel.
    """

    def __init__(self, config: EmbeddingConvConfig):
        super().__init__()
        self.value_channels = config.ddl_value_channels
        num_filters = config.hidden_size * self.value_channels
        kernel_size = config.input_embed_shortconv_kernel_size
        self.conv = Taps(num_filters, 1, kernel_size, start=partial(one_hot, index=-1))

    def weights(self) -> torch.Tensor:
        """Return the filters (K, d_v, d); the first entry weights the current token."""
        filters = self.conv.weight.squeeze(1).unflatten(0, (-1, self.value_channels))  # (d, d_v, K)
        return taps_first(filters)

    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        weights = fold_once(past, self.weights).to(at_least_fp32(x.dtype))
        delayed = delay_each([x] * len(weights), past)
        taps = (tap.unsqueeze(2) * weight for tap, weight in zip(delayed, weights))
        return reduce(add, taps).to(x.dtype)


class SingleChannelRead(nn.Module):
    """Read of a state with d_v = 1: its only value channel, (B, T, 1, d) -> (B, T, d)."""

    def __init__(self, config: DeltaConfig):
        super().__init__()

    def forward(self, state: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        return state.squeeze(2)


class TokenConvRead(nn.Module):
    """Compressor (TC): a causal depthwise convolution over tokens, then a sum over value channels.

    x_in[t, i] = sum_s sum_j e[s, j, i] X[t-s, j, i]
    e[s, j, i] = read[j] * shortconv.weight[i * d_v + j, K-1-s]
    """

    def __init__(self, config: ValueChannelsConfig):
        super().__init__()
        num_filters = config.hidden_size * config.ddl_value_channels
        kernel_size = config.ddl_state_shortconv_kernel_size or 4
        start = make_conv_start(config, kernel_size, identity_tap=kernel_size - 1)
        self.shortconv = Taps(num_filters, kernel_size, start=start)
        self.read = nn.Parameter(torch.empty(config.ddl_value_channels))
        self.rules = {"read": Rule(constant(config.read_start))}

    def weights(self, arrange: Callable = taps_first) -> torch.Tensor:
        """Return e (K, d_v, d) in at least fp32; its first entry weights the current token.

        arrange: function from (d, d_v, K) to (K, d_v, d), with the current token's tap first
        """
        taps = self.shortconv.weight.unflatten(0, (-1, self.read.shape[0]))  # (d, d_v, K)
        return arrange(taps) * self.read.to(at_least_fp32(self.read.dtype))[:, None]

    def forward(self, state: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        return read_value_channels(state, fold_once(past, self.weights), past)


class ChannelConvRead(nn.Module):
    """Compressor (CC): a weighted sum over value channels, x_in[t, i] = sum_j w[i, j] X[t, j, i].

    With ddl_cc_read=folded, as in the texts, w (d, d_v) is itself the parameter; it starts as a random
    pair that is folded, or at ddl_state_read_init (1 / d_v). With ddl_cc_read=pair, as in the authors'
    code, w follows from two parameters: `weight` (d, K), a padded convolution over the value channels,
    and `read` (d_v,), which sums its d_v results.
    """

    def __init__(self, config: ChannelConvConfig):
        super().__init__()
        self.config = config
        self.pair = config.ddl_cc_read == "pair"
        self.causal = config.ddl_state_dv_shortconv_causal
        value_channels = config.ddl_value_channels
        kernel_size = config.ddl_state_shortconv_kernel_size or value_channels
        if kernel_size > value_channels:
            raise ValueError(
                f"ddl_state_shortconv_kernel_size={kernel_size} is larger than "
                f"ddl_value_channels={value_channels}, over which this compressor convolves; give "
                f"at most {value_channels}"
            )
        if kernel_size != value_channels and not self.pair:
            raise ValueError(
                f"ddl_state_shortconv_kernel_size={kernel_size} differs from "
                f"ddl_value_channels={value_channels}, but the compressor of this model is one "
                "weight for each value channel; omit the key"
            )
        self.weight = nn.Parameter(torch.empty(config.hidden_size, kernel_size))
        # The tap that maps a value channel to itself: the last one if causal, else the middle one.
        identity_tap = kernel_size - 1 if self.causal else (kernel_size - 1) // 2
        start = make_conv_start(config, kernel_size, identity_tap=identity_tap)
        if self.pair:
            self.read = nn.Parameter(torch.empty(value_channels))
            self.rules = {
                "weight": Rule(start, decay=True),
                "read": Rule(constant(config.read_start)),
            }
        else:
            # the read starts as the mean of the value channels, unless the convolution is random
            folded_start = constant(config.read_start)
            if config.conv_start == "normal":
                folded_start = partial(self.start_folded, conv_start=start)
            self.rules = {"weight": Rule(folded_start, decay=True)}

    def start_folded(self, weight: torch.Tensor, conv_start: Callable) -> None:
        """Initialize the folded weight (d, d_v) as a pair would start, folded."""
        conv_start(weight)
        read = weight.new_full((weight.shape[1],), self.config.read_start)
        weight.copy_(fold_channel_conv(weight, read))

    def weights(self, arrange: Callable = taps_first) -> torch.Tensor:
        """Return w as one tensor (1, d_v, d); arrange: as in TokenConvRead.weights."""
        # The convolution and the read vector are linear, so both are folded into one weight.
        weight = self.weight
        if self.pair:
            weight = fold_channel_conv(self.weight, self.read, self.causal)
        return arrange(weight.unsqueeze(2))

    def forward(self, state: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        return read_value_channels(state, fold_once(past, self.weights), past)


def make_conv_start(config: ValueChannelsConfig, kernel_size: int, identity_tap: int) -> Callable:
    """Return the function that initializes the convolution of a compressor in place.

    identity_tap: index of the tap that is 1 with ddl_state_conv_init=identity
    """
    if config.conv_start == "mean":
        return constant(1 / kernel_size)
    if config.conv_start == "normal":
        return normal(config.hidden_init_std)
    return partial(one_hot, index=identity_tap)


def fold_channel_conv(
    weight: torch.Tensor, read: torch.Tensor, causal: bool = False
) -> torch.Tensor:
    """Fold a convolution over value channels and the read vector that follows into one weight.

        w[i, u] = sum_j read[j] * weight[i, u - j + shift], where weight is 0 outside 0..K-1

    Args:
        weight: (d, K)
        read: (d_v,)
        causal: whether shift is K-1 instead of (K-1) // 2

    Returns:
        w (d, d_v), in at least fp32
    """
    dtype = at_least_fp32(weight.dtype)
    kernel_size = weight.shape[1]
    value_channels = len(read)
    shift = kernel_size - 1 if causal else (kernel_size - 1) // 2
    padded = F.pad(read.to(dtype), (kernel_size, kernel_size))
    # The row of a tap holds, along u, what the tap is multiplied by: read[u - tap + shift].
    rows = [padded[kernel_size + shift - tap :][:value_channels] for tap in range(kernel_size)]
    return sum(weight[:, tap, None].to(dtype) * rows[tap] for tap in reversed(range(kernel_size)))


def read_value_channels(
    state: torch.Tensor, weights: torch.Tensor, past: Past | None = None
) -> torch.Tensor:
    """Return x_in (B, T, d), in at least fp32, of a state (B, T, d_v, d) and weights (K, d_v, d)."""
    dtype = at_least_fp32(state.dtype)  # only what enters a GEMM is rounded
    x = state.to(dtype)  # once, so that the gradients of the taps add up in fp32
    weights = weights.to(dtype)
    # Each tap sums over the value channels first, so that only vectors of width d are shifted over
    # tokens and cached.
    if past is not None and x.shape[1] == 1:
        # as the sums below, in fewer operations, whose overhead counts if one token is decoded
        sums = list((x.unsqueeze(2) * weights).sum(3).unbind(2))
    else:
        sums = [(x * weight).sum(2) for weight in weights]
    # `sum` would begin with 0, and so add once more
    return reduce(add, delay_each(sums, past))


# ---- the block ----


class DeltaBlock(Block):
    """Compress, process, rewrite: one compressor for the block, one rewrite for each site.

    A variant may replace both classes, which are called with the config.
    """

    Compressor: Callable = SingleChannelRead
    Write: Callable = DeltaRewrite

    def __init__(self, config: DeltaConfig, layer: int):
        super().__init__(config, layer)
        self.compress = self.Compressor(config)
        self.ddl_attn = self.Write(config)
        self.ddl_mlp = self.Write(config)
        attn, mlp = self.sites
        self.sites = (
            replace(attn, read=self.compress, write=self.ddl_attn),
            replace(mlp, read=self.compress, write=self.ddl_mlp),
        )
