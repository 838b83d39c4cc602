"""Delta residual streams: a state X of v columns of width d, read, processed and rewritten (arXiv 2601.00417).

The state is stored as (B, T, v, d), the transpose of the paper's (B, T, d, v): features stay contiguous, so that every
operation below runs along them. Readers and expanders are causal convolutions over tokens with weights per channel;
`delay` hands each of them its left context, from zeros in training and from the cache in generation.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import nn

from model.gpt import Block, GPTConfig, at_least, at_least_fp32


@dataclass
class DeltaConfig(GPTConfig):
    """Keys of every DDL model."""

    ddl_value_channels: Annotated[int, "columns v of the state X (d x v)"] = 1
    ddl_beta_init: Annotated[float, "gate beta at initialisation, 0 (identity) to 2 (reflection)"] = 1.0
    ddl_beta_single_linear: Annotated[bool, "gate by one linear layer; False: two with a tanh between"] = True
    ddl_beta_hidden_size: Annotated[int, "hidden width of the two-layer gate"] = 128
    ddl_k_eps: Annotated[float, "guard of the unit direction: k = k~ / sqrt(|k~|^2 + eps^2)"] = 1e-5
    ddl_v_sigmoid: Annotated[bool, "squash the write value: scale * sigmoid(value)"] = True
    ddl_v_sigmoid_scale: Annotated[float, "scale of the squashed write value"] = 4.0
    ddl_v_constant: Annotated[bool, "write a constant instead of a learned value"] = False
    ddl_v_constant_value: Annotated[float, "that constant"] = 2.0
    ddl_v_input: Annotated[Literal["residual", "context"], "write value from x_in or from the normed context"] = (
        "residual"
    )
    ddl_update: Annotated[Literal["delta", "write_only"], "erase and write, or write alone (matched control)"] = "delta"

    def __post_init__(self):
        super().__post_init__()
        at_least(self, 0, "ddl_k_eps")
        if not 0 <= self.ddl_beta_init <= 2:
            raise ValueError(f"ddl_beta_init={self.ddl_beta_init}: give a number from 0 to 2")


@dataclass
class SingleColumnConfig(DeltaConfig):
    """Keys of the one-column model."""

    def __post_init__(self):
        super().__post_init__()
        if self.ddl_value_channels != 1:
            raise ValueError(
                f"ddl_value_channels={self.ddl_value_channels}: this model has one column; "
                "take --model=DDL-gpt-mha-rope for more"
            )


@dataclass
class TokenConvConfig(DeltaConfig):
    """Keys of models whose state is read by a convolution over tokens."""

    ddl_value_channels: Annotated[int, "columns v of the state X (d x v)"] = 4
    ddl_state_shortconv_kernel_size: Annotated[int | None, "tokens the read looks at; None: 4"] = None
    ddl_state_read_init: Annotated[float | None, "start of the read vector over columns; None: 1/v"] = None
    ddl_state_conv_init: Annotated[Literal["normal", "identity"], "start of the read convolution"] = "normal"

    @property
    def kernel_size(self) -> int:
        return self.ddl_state_shortconv_kernel_size or 4


def delay(x, tokens: int, cache: dict | None, slot: str):
    """x (B, T, ...) shifted `tokens` positions later: what enters on the left is zeros, or the cached tail."""
    if tokens == 0:
        return x
    past = cache.get(slot) if cache is not None else None
    if past is None:
        past = x.new_zeros(x.shape[0], tokens, *x.shape[2:])
    x = torch.cat((past, x), dim=1)
    if cache is not None:
        cache[slot] = x[:, -tokens:]
    return x[:, :-tokens]


class Repeat(nn.Module):
    """Expander: the embedding (B, T, d) in each of the v columns, (B, T, v, d)."""

    def __init__(self, config: DeltaConfig):
        super().__init__()
        self.value_channels = config.ddl_value_channels

    def forward(self, x, cache: dict | None = None, slot: str = ""):
        return x.unsqueeze(2).expand(-1, -1, self.value_channels, -1)


class OnlyColumn(nn.Module):
    """Read of the d_v = 1 state: its single column, (B, T, 1, d) -> (B, T, d)."""

    def __init__(self, config: DeltaConfig):
        super().__init__()

    def forward(self, state, cache: dict | None = None, slot: str = ""):
        return state.squeeze(2)


class Taps(nn.Module):
    """Holds one convolution weight under the name `<owner>.weight`."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class TokenConvRead(nn.Module):
    """Compressor: causal depthwise convolution over tokens, then a weighted sum over columns.

    x_in[t, i] = sum_s sum_j e[s, j, i] X[t-s, j, i] with e[s, j, i] = read[j] * shortconv.weight[i*v + j, K-1-s].
    """

    def __init__(self, config: TokenConvConfig):
        super().__init__()
        self.config = config
        self.shortconv = Taps(config.hidden_size * config.ddl_value_channels, config.kernel_size)
        self.read = nn.Parameter(torch.empty(config.ddl_value_channels))

    def init_parameters(self) -> tuple[str, ...]:
        config, weight = self.config, self.shortconv.weight
        if config.ddl_state_conv_init == "identity":
            nn.init.zeros_(weight)[:, -1] = 1.0
        else:
            nn.init.normal_(weight, std=config.hidden_init_std)
        start = config.ddl_state_read_init
        nn.init.constant_(self.read, 1 / config.ddl_value_channels if start is None else start)
        return "shortconv.weight", "read"

    def weights(self):
        """e, the whole read as one (K, v, d) tensor; its first entry weighs the current token."""
        taps = self.shortconv.weight.unflatten(0, (-1, self.read.shape[0]))  # (d, v, K)
        return taps.flip(-1).permute(2, 1, 0) * self.read[:, None]

    def forward(self, state, cache: dict | None = None, slot: str = ""):
        return read_columns(state, self.weights(), cache, slot)


def read_columns(state, weights, cache: dict | None, slot: str):
    """state (B, T, v, d), weights (K, v, d) -> (B, T, d) in state's dtype, summed in at least fp32.

    Each tap contracts its columns first: only vectors of width d are then shifted over tokens and cached.
    """
    taps = [(state * w).sum(2) for w in weights.to(at_least_fp32(state.dtype))]
    return sum(delay(tap, s, cache, f"{slot}.{s}") for s, tap in enumerate(taps)).to(state.dtype)


def delta_rewrite(state, khat, beta, value, erase: bool = True):
    """X' = X + beta k (t - k^T X)^T with k = khat / sqrt(d) (eq. 6); without `erase`, X' = X + beta k t^T.

    state (B, T, v, d); khat (B, T, d) of RMS 1; beta (B, T, 1); value t (B, T, v). Computed in at least fp32,
    returned in state's dtype. The factor 1/sqrt(d) stays outside the dot products.
    """
    x, khat = state.to(khat.dtype), khat.unsqueeze(2)
    scale = 1 / math.sqrt(khat.shape[-1])
    if erase:
        value = value - (x * khat).sum(-1) * scale
    return (x + (beta * value * scale).unsqueeze(-1) * khat).to(state.dtype)


def linear_fp32(layer: nn.Linear, x):
    """`layer(x)` in at least fp32, also under autocast: gates and values must not be rounded before their sigmoid."""
    dtype = at_least_fp32(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(dtype), layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype))


class DeltaRewrite(nn.Module):
    """The write of one site: X' = X + beta(c) k(h) (t(x_in) - k^T X)^T, all of one token (section 2.2, k-Map)."""

    def __init__(self, config: DeltaConfig):
        super().__init__()
        self.config = config
        if config.ddl_beta_single_linear:
            self.beta = nn.Linear(config.hidden_size, 1)
        else:
            self.beta_in = nn.Linear(config.hidden_size, config.ddl_beta_hidden_size, bias=False)
            self.beta_out = nn.Linear(config.ddl_beta_hidden_size, 1)
        # With a constant write value v_proj keeps its place in the state dict but takes no part in training.
        self.v_proj = nn.Linear(config.hidden_size, config.ddl_value_channels).requires_grad_(not config.ddl_v_constant)

    def init_parameters(self) -> tuple[str, ...]:
        config = self.config
        probability = min(max(config.ddl_beta_init / 2, 1e-6), 1 - 1e-6)
        gate = "beta" if config.ddl_beta_single_linear else "beta_out"
        nn.init.constant_(getattr(self, gate).bias, math.log(probability) - math.log1p(-probability))
        bound = 1 / math.sqrt(config.hidden_size)
        nn.init.uniform_(self.v_proj.bias, -bound, bound)
        return f"{gate}.bias", "v_proj.bias"

    def direction(self, source):
        """khat = sqrt(d) k (B, T, d), k = k~ / sqrt(|k~|^2 + eps^2) (eq. 3 with a guard)."""
        source = source.to(at_least_fp32(source.dtype))
        d = source.shape[-1]
        return F.rms_norm(source, (d,), eps=self.config.ddl_k_eps**2 / d)

    def gate(self, c):
        """beta in (0, 2), (B, T, 1) (eq. 8)."""
        if self.config.ddl_beta_single_linear:
            logit = linear_fp32(self.beta, c)
        else:
            logit = linear_fp32(self.beta_out, linear_fp32(self.beta_in, c).tanh())
        return 2 * logit.sigmoid()

    def write_value(self, x_in, c):
        """t (B, T, v) in at least fp32."""
        config = self.config
        if config.ddl_v_constant:
            dtype = at_least_fp32(x_in.dtype)
            return x_in.new_full((*x_in.shape[:2], config.ddl_value_channels), config.ddl_v_constant_value, dtype=dtype)
        value = linear_fp32(self.v_proj, x_in if config.ddl_v_input == "residual" else c)
        return config.ddl_v_sigmoid_scale * value.sigmoid() if config.ddl_v_sigmoid else value

    def forward(self, state, h, x_in, c):
        """state (B, T, v, d); sublayer output h, read x_in and context c (B, T, d) -> new state."""
        erase = self.config.ddl_update == "delta"
        return delta_rewrite(state, self.direction(h), self.gate(c), self.write_value(x_in, c), erase)


class DeltaBlock(Block):
    """Compress - Process - Rewrite: one compressor for the block, one rewrite for each site."""

    Compressor = OnlyColumn

    def __init__(self, config: DeltaConfig):
        super().__init__(config)
        self.compress = self.Compressor(config)
        self.ddl_attn = DeltaRewrite(config)
        self.ddl_mlp = DeltaRewrite(config)

    def read_state(self, site: str, state, cache):
        x_in = self.compress(state, cache, f"compress.{site}")
        return x_in, x_in

    def write_state(self, site: str, state, h, c, aux):
        rewrite = self.ddl_attn if site == "attn" else self.ddl_mlp
        return rewrite(state, h, aux, c)
