"""Delta residual streams: a state X of v columns of width d, read, processed and rewritten (arXiv
2601.00417).

The state is stored as (B, T, v, d), the transpose of the paper's (B, T, d, v): features stay
contiguous, so that every operation below runs along them. Readers and expanders are causal
convolutions over tokens with weights per channel; `delay` hands each of them its left context, from
zeros in training and from the cache in generation.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from model.block import Block, Past, delay
from model.gpt import GPTConfig
from model.layers import at_least_fp32, for_product, linear_fp32
from model.options import option
from model.parameters import FIXED, HIDDEN, INPUT, OUTPUT, Rule, constant, linear, normal


@dataclass
class DeltaConfig(GPTConfig):
    """Keys of Deep Delta Learning (DDL)."""

    columns_key: ClassVar[str | None] = "ddl_value_channels"

    ddl_value_channels: int = option(
        1,
        "number of value channels d_v of the state X in R^{d x d_v}",
        low=1,
    )
    ddl_beta_init: float | Literal["1/L"] = option(
        1.0,
        "initial value of the gate beta; 0 leaves the state unchanged, 1 overwrites and 2 reflects "
        "the component of the state along k; 1/L means 1 / num_hidden_layers",
        low=0,
        high=2,
        initial=True,
    )
    ddl_beta_single_linear: bool = option(
        True,
        "compute the logit of the gate beta with one linear layer; False uses two linear layers "
        "with a tanh in between",
    )
    ddl_beta_hidden_size: int = option(
        128,
        "hidden size of the two-layer gate",
        low=1,
        counts_with=("ddl_beta_single_linear", False),
    )
    ddl_beta_input: Literal["context", "residual", "mean", "flat"] = option(
        "context",
        "input of the gate beta; context is the normalized context c, residual is the compressed "
        "state x_in, mean is the mean of X over the value channels, flat is X flattened to one "
        "vector",
    )
    ddl_k_eps: float = option(
        1e-5,
        "epsilon in the normalization of the direction k; see ddl_k_norm",
        low=0,
    )
    ddl_k_norm: Literal["guarded", "shifted"] = option(
        "guarded",
        "normalization of the direction k; guarded is k~ / sqrt(||k~||^2 + ddl_k_eps^2), "
        "shifted is k~ / (||k~|| + ddl_k_eps)",
    )
    ddl_v_sigmoid: bool = option(
        True,
        "replace the write value v by ddl_v_sigmoid_scale * sigmoid(v), which bounds it",
    )
    ddl_v_sigmoid_scale: float = option(
        4.0,
        "factor on the sigmoid of the write value v",
        counts_with=("ddl_v_sigmoid", True),
    )
    ddl_v_constant: bool = option(
        False,
        "write the constant ddl_v_constant_value instead of a learned write value v",
    )
    ddl_v_constant_value: float = option(
        2.0,
        "constant write value v",
        counts_with=("ddl_v_constant", True),
    )
    ddl_v_input: Literal["residual", "context"] = option(
        "residual",
        "input of the linear layer for the write value v in the k-Map; residual is the compressed "
        "state x_in, context is the normalized context c",
    )
    ddl_v_bias: bool = option(
        True,
        "add a bias in the linear layer for the write value v",
    )
    ddl_map: Literal["k", "v"] = option(
        "k",
        "role of the sublayer output h; k (k-Map) makes h the direction k, and computes the write "
        "value v from ddl_v_input; v (v-Map) computes the write value v from h, and the direction "
        "k in a branch of its own, ddl_k_branch",
    )
    ddl_k_branch: Literal["mlp", "attention"] = option(
        "mlp",
        "branch that computes the direction k in the v-Map; mlp applies an MLP to ddl_k_input, "
        "attention attends over the value channels of X with a learned query",
    )
    ddl_k_input: Literal["read", "mean", "flat"] = option(
        "read",
        "input of the MLP for the direction k in the v-Map; read is the compressed state x_in, or "
        "the normalized context c if d_v = 1; mean is the mean of X over the value channels; flat "
        "is X flattened to one vector",
    )
    ddl_k_hidden_size: int = option(
        128,
        "hidden size of the MLP for the direction k in the v-Map",
        low=1,
        counts_with=("ddl_map", "v"),
    )
    ddl_update: Literal["delta", "write_only"] = option(
        "delta",
        "update of the state; delta is X' = X + beta k (v^T - k^T X), which erases before it "
        "writes; write_only is X' = X + beta k v^T, a control without the erase",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.ddl_k_branch == "attention" and self.ddl_map != "v":
            raise ValueError(
                "ddl_k_branch=attention has no effect with ddl_map=k, where the direction k is the "
                "sublayer output; add --ddl_map=v or omit ddl_k_branch"
            )
        if self.ddl_k_branch == "attention" and self.ddl_value_channels == 1:
            raise ValueError(
                "ddl_k_branch=attention attends over the value channels, but ddl_value_channels "
                "is 1; use --ddl_k_branch=mlp"
            )
        if self.ddl_map == "v" and self.ddl_v_constant:
            raise ValueError(
                "ddl_v_constant=True with ddl_map=v leaves the sublayer outputs unused; omit one "
                "of them"
            )
        if self.ddl_k_input != "read" and self.ddl_map != "v":
            raise ValueError(
                f"ddl_k_input={self.ddl_k_input} has no effect with ddl_map=k, where the direction "
                "k is the sublayer output; add --ddl_map=v or omit ddl_k_input"
            )
        if self.ddl_k_input != "read" and self.ddl_k_branch == "attention":
            raise ValueError(
                f"ddl_k_input={self.ddl_k_input} has no effect with ddl_k_branch=attention, which "
                "attends over X; omit one of them"
            )
        if not self.ddl_v_bias and self.ddl_v_constant:
            raise ValueError(
                "ddl_v_bias=False has no effect with ddl_v_constant=True; omit one of them"
            )
        if self.ddl_v_input == "context" and self.ddl_v_constant:
            raise ValueError(
                "ddl_v_input=context has no effect with ddl_v_constant=True; omit one of them"
            )
        if self.ddl_v_input == "context" and self.ddl_map == "v":
            raise ValueError(
                "ddl_v_input=context has no effect with ddl_map=v, which computes the write value "
                "v from the sublayer output; omit one of them"
            )

    @property
    def beta_start(self) -> float:
        """Return the gate beta at initialization."""
        return 1 / self.num_hidden_layers if self.ddl_beta_init == "1/L" else self.ddl_beta_init

    def notes(self) -> list[str]:
        """Return a warning if the first gradient is likely to be too large to train."""
        # The erase bounds the state, so each sublayer changes a constant fraction of it, and these
        # changes multiply over depth. The factor 0.4 was measured (docs/variants.md).
        num_sublayers = 2 * self.num_hidden_layers
        beta = self.branch_mult * self.beta_start
        growth = 0.4 * num_sublayers * beta / math.sqrt(self.hidden_size)
        if growth <= 3 or self.ddl_update != "delta":
            return []
        return [
            f"with ddl_beta_init={self.ddl_beta_init}, the first gradient of "
            f"{self.num_hidden_layers} blocks of width {self.hidden_size} may be about "
            f"e^{growth:.0f} times too large to train; try --ddl_beta_init=1/L"
        ]

    @property
    def k_guard(self) -> float:
        """Return the epsilon of the direction k: ddl_k_eps, or a tiny number in place of 0."""
        # 1e-15 changes only the direction of a zero vector, which becomes zero instead of NaN.
        return max(self.ddl_k_eps, 1e-15)


@dataclass
class SingleColumnConfig(DeltaConfig):
    """Keys of DDL with one value channel (d_v = 1)."""

    def __post_init__(self):
        super().__post_init__()
        if self.ddl_value_channels != 1:
            raise ValueError(
                f"ddl_value_channels={self.ddl_value_channels}, but this model has one value "
                "channel; for more, use --model=DDL-gpt-mha-rope"
            )


@dataclass
class ColumnsConfig(GPTConfig):
    """Keys of models with several value channels (d_v > 1)."""

    columns_key: ClassVar[str | None] = "ddl_value_channels"

    ddl_value_channels: int = option(
        4,
        "number of value channels d_v of the state X in R^{d x d_v}",
        low=1,
    )
    ddl_state_shortconv_kernel_size: int | None = option(
        None,
        "kernel size of the convolution in the compressor, which maps X to x_in (default: 4 for a "
        "convolution over tokens, ddl_value_channels for one over value channels)",
        low=1,
    )
    ddl_state_read_init: float | None = option(
        None,
        "initial value of the read vector, with which the compressor sums over the value channels "
        "(default: 1 / ddl_value_channels)",
        initial=True,
    )
    ddl_state_conv_init: Literal["mean", "normal", "identity"] | None = option(
        None,
        "initialization of the convolution in the compressor; mean averages over the kernel; "
        "normal draws from N(0, hidden_init_std_factor / sqrt(hidden_size)); identity passes on "
        "the current token or value channel (default: mean with init=spectral, normal with "
        "init=normal)",
        initial=True,
    )

    @property
    def conv_start(self) -> str:
        """Return how the convolution in the compressor is initialized."""
        if self.ddl_state_conv_init is not None:
            return self.ddl_state_conv_init
        return "mean" if self.init == "spectral" else "normal"

    @property
    def read_start(self) -> float:
        """Return the initial value of the read vector."""
        if self.ddl_state_read_init is not None:
            return self.ddl_state_read_init
        return 1 / self.ddl_value_channels


@dataclass
class ExpandedConfig(ColumnsConfig, DeltaConfig):
    """Keys of DDL with several value channels (d_v > 1)."""


@dataclass
class ColumnConvConfig(ExpandedConfig):
    """Keys of the compressor over value channels (CC)."""

    ddl_cc_read: Literal["pair", "folded"] = option(
        "pair",
        "parameters of the compressor; pair is a convolution over value channels followed by a "
        "read vector, folded is a single weight for each feature and value channel",
        before="folded",
    )
    ddl_state_dv_shortconv_causal: bool = option(
        False,
        "make the convolution over value channels causal",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.ddl_cc_read == "folded" and self.ddl_state_dv_shortconv_causal:
            raise ValueError(
                "ddl_state_dv_shortconv_causal=True has no effect with ddl_cc_read=folded, which "
                "has no convolution; use --ddl_cc_read=pair or omit the key"
            )


@dataclass
class EmbeddingConvConfig(ExpandedConfig):
    """Keys of the embedding convolution (EC)."""

    input_embed_shortconv_kernel_size: int = option(
        4,
        "kernel size, in tokens, of the causal convolution that expands the embedding into the "
        "value channels",
        low=1,
    )


@dataclass
class EmbeddingColumnConvConfig(EmbeddingConvConfig, ColumnConvConfig):
    """Keys of DDL with both convolutions (CC and EC)."""


def features_last(weights):
    """weights (d, v, K) as parameters keep them -> (K, v, d), the current token's tap first."""
    # A permuted view would do, but torch.compile lays out what it multiplies with, the state, as
    # the view is: features would no longer be contiguous, and no loop vectorised. It sees through
    # `contiguous`, not through `stack`.
    rows = torch.stack(weights.flatten(1).unbind(1))  # (v * K, d)
    return rows.unflatten(0, weights.shape[1:]).transpose(0, 1).flip(0)


class Repeat(nn.Module):
    """Expander: the embedding (B, T, d) in each of the v columns (`columns_key`), (B, T, v, d)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.columns = getattr(config, config.columns_key)

    def forward(self, x, past: Past | None = None):
        return x.unsqueeze(2).expand(-1, -1, self.columns, -1)


class Taps(nn.Module):
    """Holds one convolution weight under the name `<owner>.weight`."""

    def __init__(self, *shape: int, start):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.rules = {"weight": Rule(start, decay=True)}


class EmbeddingConv(nn.Module):
    """Expander (EC): a causal depthwise convolution over tokens, (B, T, d) -> (B, T, v, d).

    X[t, j, i] = sum_s conv.weight[i*v + j, 0, K-1-s] x[t-s, i]; it starts as the identity, which is
    repetition.
    """

    fused = "embedding_conv"

    def __init__(self, config: EmbeddingConvConfig):
        super().__init__()
        self.value_channels = config.ddl_value_channels
        channels, K = (
            config.hidden_size * self.value_channels,
            config.input_embed_shortconv_kernel_size,
        )
        self.conv = Taps(channels, 1, K, start=partial(one_tap, at=-1))

    def elementwise_flops(self) -> int:
        return 2 * self.conv.weight.numel()

    def forward(self, x, past: Past | None = None):
        weights = self.conv.weight.squeeze(1).unflatten(0, (-1, self.value_channels))  # (d, v, K)
        weights = features_last(weights).to(at_least_fp32(x.dtype))
        return sum(delay(x, s, past).unsqueeze(2) * w for s, w in enumerate(weights)).to(x.dtype)


class OnlyColumn(nn.Module):
    """Read of the d_v = 1 state: its single column, (B, T, 1, d) -> (B, T, d)."""

    fused = "only_column"

    def __init__(self, config: DeltaConfig):
        super().__init__()

    def forward(self, state, past: Past | None = None):
        return state.squeeze(2)


class TokenConvRead(nn.Module):
    """Compressor (TC): causal depthwise convolution over tokens, then a weighted sum over columns.

    x_in[t, i] = sum_s sum_j e[s, j, i] X[t-s, j, i] with e[s, j, i] = read[j] *
    shortconv.weight[i*v + j, K-1-s].
    """

    fused = "token_conv"

    def __init__(self, config: ColumnsConfig):
        super().__init__()
        channels = config.hidden_size * config.ddl_value_channels
        K = config.ddl_state_shortconv_kernel_size or 4
        self.shortconv = Taps(channels, K, start=start_of_taps(config, K, last=True))
        self.read = nn.Parameter(torch.empty(config.ddl_value_channels))
        self.rules = {"read": Rule(constant(config.read_start))}

    def weights(self, arranged=features_last):
        """e, the whole read as one (K, v, d) tensor in at least fp32; its first entry weighs the
        current token.
        """
        taps = self.shortconv.weight.unflatten(0, (-1, self.read.shape[0]))  # (d, v, K)
        return arranged(taps) * self.read.to(at_least_fp32(self.read.dtype))[:, None]

    def elementwise_flops(self) -> int:
        return 2 * self.shortconv.weight.numel()

    def forward(self, state, past: Past | None = None):
        return read_columns(state, self.weights(), past)


class ColumnConvRead(nn.Module):
    """Compressor (CC): a weighted sum over columns, x_in[t, i] = sum_j w[i, j] X[t, j, i].

    w (d, v) is a parameter itself (`ddl_cc_read=folded`), or, as the paper's code has it, a
    convolution over columns `weight` (d, K) whose v results meet a vector `read` (v,).
    """

    # Convolution and vector make a linear map again, folded into w once where it is used.

    fused = "column_conv"

    def __init__(self, config: ColumnConvConfig):
        super().__init__()
        self.config, columns = config, config.ddl_value_channels
        self.pair = config.ddl_cc_read == "pair"
        kernel_size = config.ddl_state_shortconv_kernel_size or columns
        if kernel_size > columns or (kernel_size != columns and not self.pair):
            what = f"this model's read covers its ddl_value_channels={columns} columns"
            fix = "give no more" if self.pair else "leave the key out"
            raise ValueError(f"ddl_state_shortconv_kernel_size={kernel_size}: {what}; {fix}")
        self.weight = nn.Parameter(torch.empty(config.hidden_size, kernel_size))
        self.causal = config.ddl_state_dv_shortconv_causal
        taps = start_of_taps(config, kernel_size, last=self.causal)
        if self.pair:
            self.read = nn.Parameter(torch.empty(columns))
            read = Rule(constant(config.read_start))
            self.rules = {"weight": Rule(taps, decay=True), "read": read}
        else:
            self.rules = {"weight": Rule(partial(self.start_folded, taps=taps), decay=True)}

    def start_folded(self, weight, taps) -> None:
        taps(weight)
        read = weight.new_full((weight.shape[1],), self.config.read_start)
        weight.copy_(fold_column_conv(weight, read))

    def weights(self, arranged=features_last):
        """w as one (1, v, d) tensor."""
        weight = fold_column_conv(self.weight, self.read, self.causal) if self.pair else self.weight
        return arranged(weight.unsqueeze(2))

    def elementwise_flops(self) -> int:
        return 2 * self.config.hidden_size * self.config.ddl_value_channels

    def forward(self, state, past: Past | None = None):
        return read_columns(state, self.weights(), past)


def start_of_taps(config, taps: int, last: bool):
    """The start of a read's convolution; the identity's 1 is at the last tap, or in the middle."""
    if config.conv_start == "mean":
        return constant(1 / taps)
    if config.conv_start == "normal":
        return normal(config.hidden_init_std)
    return partial(one_tap, at=taps - 1 if last else (taps - 1) // 2)


def one_tap(weight, at: int) -> None:
    """The tap `at`, along the last axis, is 1, the others 0."""
    nn.init.zeros_(weight)[..., at] = 1.0


def fold_column_conv(weight, read, causal: bool = False):
    """A convolution over columns followed by a read vector, as one weight (d, v), in at least fp32.

    weight (d, K), read (v,): w[i, u] = sum_j read[j] * weight[i, u - j + s], zero outside 0..K-1,
    with s = (K-1)//2, or K-1 where it is causal.
    """
    dtype, (size, columns) = at_least_fp32(weight.dtype), (weight.shape[1], len(read))
    shift, padded = size - 1 if causal else (size - 1) // 2, F.pad(read.to(dtype), (size, size))
    # Along u, what tap t is multiplied with is read[u - t + shift].
    rows = [padded[size + shift - t :][:columns] for t in range(size)]
    return sum(weight[:, t, None].to(dtype) * rows[t] for t in reversed(range(size)))


def read_columns(state, weights, past: Past | None = None):
    """state (B, T, v, d), weights (K, v, d) -> x_in (B, T, d) in at least fp32."""
    dtype = at_least_fp32(state.dtype)  # only what enters a GEMM is rounded
    x = state.to(dtype)  # once, so that the taps' gradients meet in fp32
    # Each tap contracts its columns first: only vectors of width d are shifted over tokens, cached.
    taps = [(x * w).sum(2) for w in weights.to(dtype)]
    return sum(delay(tap, s, past) for s, tap in enumerate(taps))


def pooled(state, form: str):
    """Pool(X) of a state (B, T, v, d), in at least fp32 (eq. 8, appendix B.1).

    form: "mean" over the columns, (B, T, d), or "flat", one column after the other, (B, T, v d).
    """
    x = state.to(at_least_fp32(state.dtype))
    return x.mean(2) if form == "mean" else x.flatten(2)


def delta_rewrite(state, khat, beta, value, erase: bool = True):
    """Equation 6: X' = X + beta k (t - k^T X)^T; without `erase`, X' = X + beta k t^T.

    state (B, T, v, d); khat (B, T, d) of RMS 1, k = khat / sqrt(d); beta (B, T, 1); value t
    (B, T, v). Computed in at least fp32, returned in state's dtype.
    """
    x, khat = state.to(khat.dtype), khat.unsqueeze(2)
    scale = 1 / math.sqrt(khat.shape[-1])  # outside the dot products, as in the paper's code
    if erase:
        value = value - (x * khat).sum(-1) * scale
    return (x + (beta * value * scale).unsqueeze(-1) * khat).to(state.dtype)


def read_along(state, khat):
    """k^T X (B, T, v) of a state (B, T, v, d), k = khat / sqrt(d), khat (B, T, d)."""
    return (state.to(khat.dtype) * khat.unsqueeze(2)).sum(-1) / math.sqrt(khat.shape[-1])


class DeltaRewrite(nn.Module):
    """The write of one site and token: X' = X + beta (k t^T - k k^T X) (section 2.2).

    k-Map: the sublayer's output h gives the direction k, x_in or c the value t. v-Map: h gives the
    value, a branch of its own the direction (appendix B.1). The gate beta comes from c, or from the
    state (eq. 8).
    """

    fused = "delta_rewrite"
    takes_branch_mult = True

    def __init__(self, config: DeltaConfig):
        super().__init__()
        self.config, d = config, config.hidden_size
        start, probability = config.matrix_start(), min(max(config.beta_start / 2, 1e-6), 1 - 1e-6)
        output = Rule(start, OUTPUT, decay=True)
        beta_bias = Rule(constant(math.log(probability) - math.log1p(-probability)))
        whole = d * config.ddl_value_channels
        seen = whole if config.ddl_beta_input == "flat" else d
        if config.ddl_beta_single_linear:
            self.beta = linear(seen, 1, output, beta_bias)
        else:
            between = config.ddl_beta_hidden_size
            self.beta_in = linear(seen, between, output)
            self.beta_out = linear(between, 1, Rule(start, FIXED, decay=True), beta_bias)
        if config.ddl_map == "v" and config.ddl_k_branch == "attention":
            self.k_query = nn.Parameter(torch.empty(d))
            self.rules = {"k_query": Rule(constant(0.0))}
            self.k_key = linear(d, d, Rule(start, HIDDEN, decay=True))
            self.k_out = linear(d, d, Rule(start, HIDDEN, decay=True))
        elif config.ddl_map == "v":
            between, kind = config.ddl_k_hidden_size, INPUT if config.init == "normal" else FIXED
            self.k_in = linear(whole if config.ddl_k_input == "flat" else d, between, output)
            self.k_out = linear(between, d, Rule(start, kind, decay=True))
        bound = 1 / math.sqrt(d)
        bias = Rule(partial(nn.init.uniform_, a=-bound, b=bound)) if config.ddl_v_bias else None
        self.v_proj = linear(d, config.ddl_value_channels, output, bias)
        # Beside a constant value it keeps its place in the state dict, but is not trained.
        self.v_proj.requires_grad_(not config.ddl_v_constant)

    def direction_source(self, state, h, x_in, c):
        """k~ (B, T, d): the sublayer's output (k-Map), or a branch of its own (v-Map)."""
        if self.config.ddl_map == "k":
            return h
        if self.config.ddl_k_branch == "attention":
            return self.k_out(self.attended_column(state))
        if self.config.ddl_k_input != "read":
            return self.direction_branch(pooled(state, self.config.ddl_k_input))
        return self.direction_branch(c if self.config.ddl_value_channels == 1 else x_in)

    def direction_branch(self, x):
        """The v-Map's own MLP, (B, T, d)."""
        return self.k_out(F.silu(self.k_in(for_product(x, self.k_in.weight))))

    def attended_column(self, state):
        """sum_j a_j X[:, j], a = softmax_j(k_query . (k_key X[:, j]) / sqrt(d)), (B, T, d)."""
        x = state.to(at_least_fp32(state.dtype))
        # k_query . (k_key X) = (k_key^T k_query) . X: one vector meets the columns, not a matrix.
        query = self.k_query.to(x.dtype) @ self.k_key.weight.to(x.dtype)
        scores = (x * query).sum(-1) / math.sqrt(x.shape[-1])
        return (x * scores.softmax(-1).unsqueeze(-1)).sum(2).to(state.dtype)

    def direction(self, source):
        """khat = sqrt(d) k (B, T, d), k = k~ / sqrt(|k~|^2 + eps^2), or k~ / (|k~| + eps).

        Equation 3, with a guard.
        """
        source = source.to(at_least_fp32(source.dtype))
        d, guard = source.shape[-1], self.config.k_guard
        khat = F.rms_norm(source, (d,), eps=guard**2 / d)
        if self.config.ddl_k_norm == "shifted":
            norm = torch.linalg.vector_norm(source, dim=-1, keepdim=True)
            khat = khat * ((norm.square() + guard**2).sqrt() / (norm + guard))
        return khat

    def gate_source(self, state, x_in, c):
        """What the gate looks at: c, or G(X) of equation 8."""
        form = self.config.ddl_beta_input
        if form == "context":
            return c
        # Its convolution is the only one that the text has: the read.
        return x_in if form == "residual" else pooled(state, form)

    def gate(self, source):
        """beta (B, T, 1): 2 sigmoid(w . source + b), or of tanh(W source) (eq. 8, appendix B.2)."""
        if self.config.ddl_beta_single_linear:
            logit = linear_fp32(self.beta, source)
        else:
            logit = linear_fp32(self.beta_out, linear_fp32(self.beta_in, source).tanh())
        return 2 * logit.sigmoid()

    def write_value(self, h, x_in, c):
        """t (B, T, v) in at least fp32, of x_in or c (k-Map), or the sublayer's output (v-Map)."""
        config = self.config
        if config.ddl_v_constant:
            shape, dtype = (*x_in.shape[:2], config.ddl_value_channels), at_least_fp32(x_in.dtype)
            return x_in.new_full(shape, config.ddl_v_constant_value, dtype=dtype)
        source = h if config.ddl_map == "v" else x_in if config.ddl_v_input == "residual" else c
        value = linear_fp32(self.v_proj, source)
        return config.ddl_v_sigmoid_scale * value.sigmoid() if config.ddl_v_sigmoid else value

    def elementwise_flops(self) -> int:
        """Of k^T X (delta only), the rank-1 write, attention over columns, and means over them."""
        config, size = self.config, self.config.hidden_size * self.config.ddl_value_channels
        write = (4 if config.ddl_update == "delta" else 2) * size
        means = (config.ddl_k_input, config.ddl_beta_input).count("mean")
        return write + (4 * size if config.ddl_k_branch == "attention" else 0) + means * size

    def forward(self, state, h, x_in, c, past=None, force: float | None = None, erase=True):
        """state (B, T, v, d); sublayer output h, read x_in and context c (B, T, d) -> new state.

        force: a gate in the place of the learned one; erase: False leaves the erase out (for
        analyses).
        """
        khat = self.along(state, h, x_in, c)
        beta = self.gate(self.gate_source(state, x_in, c))
        beta = beta if force is None else torch.full_like(beta, force)
        erase, value = erase and self.config.ddl_update == "delta", self.write_value(h, x_in, c)
        return delta_rewrite(state, khat, self.config.branch_mult * beta, value, erase)

    def along(self, state, h, x_in, c):
        """khat (B, T, d)."""
        return self.direction(self.direction_source(state, h, x_in, c))

    ranges: ClassVar = {"beta": (0.0, 2.0)}

    def statistics(self, state, h, x_in, c, written) -> dict:
        """Of each token (B, T): the gate, and the root mean square of t - k^T X before and after
        the write.
        """
        khat, value = self.along(state, h, x_in, c), self.write_value(h, x_in, c)

        def discrepancy(x):
            return (value - read_along(x, khat)).square().mean(-1).sqrt()

        return {
            "beta": self.gate(self.gate_source(state, x_in, c)).squeeze(-1),
            "discrepancy_before": discrepancy(state),
            "discrepancy_after": discrepancy(written),
        }


class DeltaBlock(Block):
    """Compress - Process - Rewrite: one compressor for the block, one rewrite for each site."""

    Compressor = OnlyColumn
    not_additive = "at beta = 0 it is X' = X, and k is normalised"

    def __init__(self, config: DeltaConfig, layer: int):
        super().__init__(config, layer)
        self.compress = self.Compressor(config)
        self.ddl_attn = DeltaRewrite(config)
        self.ddl_mlp = DeltaRewrite(config)
        attn, mlp = self.sites
        attn = replace(attn, read=self.compress, write=self.ddl_attn)
        self.sites = attn, replace(mlp, read=self.compress, write=self.ddl_mlp)
