"""Hyper-Connections (arXiv 2409.19606) and their manifold-constrained form, mHC (arXiv 2512.24880).

The state is n streams of width d, H (B, T, n, d), each of which starts as the embedding. A site
reads a weighted sum of them, and its write mixes them and adds the sublayer output h to each:

    x_in = sum_i read_i H_i
    H'_j = sum_i mix_ij H_i + write_j h

The readout is their sum. Each site has weights of its own: learned numbers (static) or, in
addition, functions of the state of the token (dynamic). They are computed in at least fp32.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from configurator import option

from ..block import Block, Past
from ..config import GPTConfig
from ..layers import LayerNorm
from ..parameters import OUTPUT, Rule, constant, linear, normal, one_hot
from ..precision import at_least_fp32, linear_fp32


@dataclass
class StreamsConfig(GPTConfig):
    """Keys of several residual streams (HC, mHC and Gated Residual)."""

    expansion_key: ClassVar[str | None] = "hc_streams"

    hc_streams: int = option(
        4,
        "number n of residual streams, the expansion rate",
        low=1,
    )


@dataclass
class HyperConfig(StreamsConfig):
    """Keys of unconstrained Hyper-Connections (HC)."""

    hc_dynamic: bool = option(
        True,
        "add input-dependent terms to the learned connection weights (dynamic Hyper-Connections); "
        "False uses only the learned weights (static Hyper-Connections)",
    )


@dataclass
class ManifoldConfig(StreamsConfig):
    """Keys of Manifold-Constrained Hyper-Connections (mHC)."""

    mhc_mix: Literal["sinkhorn", "identity"] = option(
        "sinkhorn",
        "matrix that mixes the residual streams; sinkhorn is a doubly stochastic matrix from the "
        "Sinkhorn-Knopp algorithm (mHC); identity does not mix (iHC, as in Hunyuan V4)",
    )
    mhc_readout: Literal["sum", "sigmoid"] = option(
        "sum",
        "readout of the residual streams before the final norm; sum adds them up, sigmoid weights "
        "them by input-dependent sigmoid gates (as in DeepSeek-V4 and Hunyuan V4)",
    )
    mhc_iterations: int = option(
        20,
        "number of Sinkhorn-Knopp iterations of mhc_mix=sinkhorn, each of which normalizes the rows "
        "and the columns",
        low=1,
    )
    mhc_rows_last: bool = option(
        True,
        "with mhc_mix=sinkhorn, normalize the rows of the mixing matrix last, so that the weights "
        "into each stream sum to 1, as in the mHC paper; False normalizes the columns last, so that "
        "the weights out of each stream sum to 1",
    )

    def __post_init__(self):
        super().__post_init__()
        # The initial bias of the reads, -log(n - 1), would be infinite.
        if self.hc_streams == 1:
            raise ValueError("hc_streams=1 leaves mHC no streams to mix; give 2 or more")

    @property
    def mix_logits(self) -> int:
        """Return the number of logits per token that the mixing matrix is computed from."""
        return self.hc_streams**2 if self.mhc_mix == "sinkhorn" else 0

    @property
    def maps_init_std(self) -> float:
        """Return the standard deviation of the initial maps from the streams to the weights."""
        return self.hidden_init_std / math.sqrt(self.hc_streams)


def weighted_sum(weights: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """Return sum_i weights_i H_i (B, T, d) of streams (B, T, n, d); weights (B, T, n) or (n,)."""
    return sum(weights[..., i, None] * streams[:, :, i] for i in range(streams.shape[2]))


class ConnectionWeights(NamedTuple):
    """The weights of a site: (B, T, n), (B, T, n) and (B, T, n, n), or the same without (B, T)."""

    read: torch.Tensor
    write: torch.Tensor
    mix: torch.Tensor


class ConnectionOutput(NamedTuple):
    """What the read of a site returns: x_in (B, T, d), and the weights for its write."""

    x_in: torch.Tensor
    write: torch.Tensor
    mix: torch.Tensor


class Connection(nn.Module):
    """The read of a site, which also computes the weights of its write.

    A subclass has a method `weights(streams)` from streams (B, T, n, d), in at least fp32, to
    ConnectionWeights.
    """

    def __init__(self, config: StreamsConfig):
        super().__init__()
        self.num_streams = config.hc_streams

    def forward(self, state: torch.Tensor, past: Past | None = None) -> ConnectionOutput:
        """Read from a state (B, T, n, d)."""
        streams = state.to(at_least_fp32(state.dtype))
        weights = self.weights(streams)
        # The write needs the weights as well. They are passed on, because they are functions of the
        # state before the write.
        return ConnectionOutput(
            x_in=weighted_sum(weights.read, streams),
            write=weights.write,
            mix=weights.mix,
        )


class MixAndAdd(nn.Module):
    """The write H'_j = sum_i mix_ij H_i + write_j h."""

    def __init__(self, config: StreamsConfig):
        super().__init__()
        self.num_streams = config.hc_streams

    def forward(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        connection: ConnectionOutput,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> torch.Tensor:
        _, write, mix = connection
        # H'_j = sum_i mix_ij H_i + write_j h
        streams = state.to(write.dtype)
        mixed = sum(mix[..., i, :, None] * streams[:, :, i, None] for i in range(self.num_streams))
        return (mixed + write[..., None] * h.unsqueeze(2)).to(state.dtype)

    def statistics(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        connection: ConnectionOutput,
        c: torch.Tensor,
        written: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Return, for each token (B, T), statistics of the mixing matrix.

        `mix_kept` is the mean weight mix_ii with which a stream keeps itself, and `mix_error` the
        largest |sum_i mix_ij - 1|, the distance of the weights into a stream from summing to 1.
        """
        mix = connection.mix.expand(*h.shape[:2], -1, -1)
        return {
            "mix_kept": mix.diagonal(dim1=-2, dim2=-1).mean(-1),
            "mix_error": (mix.sum(-2) - 1).abs().amax(-1),
        }


class HyperConnection(Connection):
    """The connection of HC: learned weights plus, if dynamic, s * tanh of a map of each stream.

    See equations 10 to 13. The rows of `maps` are W_b, W_m and W_r of the paper: from the normalized
    stream i they compute write_i, read_i and mix_i1, ..., mix_in.

    site: index of the site, counted through all blocks
    """

    def __init__(self, config: HyperConfig, site: int):
        super().__init__(config)
        n = config.hc_streams
        self.read = nn.Parameter(torch.empty(n))
        self.write = nn.Parameter(torch.empty(n))
        self.mix = nn.Parameter(torch.empty(n, n))
        self.rules = {
            "read": Rule(partial(one_hot, index=site % n)),
            "write": Rule(constant(1.0)),
            "mix": Rule(nn.init.eye_),
        }
        self.dynamic = config.hc_dynamic
        if self.dynamic:
            self.norm = LayerNorm(config.hidden_size)
            self.maps = linear(config.hidden_size, 2 + n, Rule(constant(0.0), OUTPUT, decay=True))
            self.write_scale = nn.Parameter(torch.empty(1))
            self.rules["write_scale"] = Rule(constant(0.01))
            self.scale = nn.Parameter(torch.empty(1))  # of read and mix
            self.rules["scale"] = Rule(constant(0.01))

    def weights(self, streams: torch.Tensor) -> ConnectionWeights:
        if not self.dynamic:
            return ConnectionWeights(read=self.read, write=self.write, mix=self.mix)
        # row i: the terms of write_i, read_i and mix_i1, ..., mix_in
        maps = linear_fp32(self.maps, self.norm(streams)).tanh()  # (B, T, n, 2 + n)
        return ConnectionWeights(
            read=self.read + self.scale * maps[..., 1],
            write=self.write + self.write_scale * maps[..., 0],
            mix=self.mix + self.scale * maps[..., 2:],
        )


class ConnectedBlock(Block):
    """A block in which each site has a connection `Connection(config, site)` and mixes and adds."""

    Connection: Callable

    def __init__(self, config: StreamsConfig, layer: int):
        super().__init__(config, layer)
        # sites are counted through all blocks
        self.hc_attn = self.Connection(config, 2 * layer)
        self.hc_mlp = self.Connection(config, 2 * layer + 1)
        write = MixAndAdd(config)  # without parameters
        attn, mlp = self.sites
        self.sites = (
            replace(attn, read=self.hc_attn, write=write),
            replace(mlp, read=self.hc_mlp, write=write),
        )


class HyperBlock(ConnectedBlock):
    """A block of HC."""

    Connection = HyperConnection


class SumOfStreams(nn.Module):
    """Readout: the sum of the streams, in at least fp32."""

    def __init__(self, config: StreamsConfig):
        super().__init__()

    def forward(self, state: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        return state.to(at_least_fp32(state.dtype)).sum(2)


def name_operator(name: str) -> str:
    """Return the full name of a custom operator.

    An exported folder has a copy of this module, which transformers may execute in the same process.
    Each copy has names of its own, because registering an operator frees an earlier one of the same
    name, which may be in use.
    """
    if __name__.startswith("model."):
        return f"ddl::{name}"
    return f"ddl::{name}_{re.sub(r'[^0-9A-Za-z]', '_', __package__)}"


# The algorithm is forty small operations in sequence, each of which the compiler would inline into
# the next. As a custom operator it is one operation to the compiler.
@torch.library.custom_op(name_operator("sinkhorn_knopp"), mutates_args=())
def sinkhorn_knopp(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Turn exp(logits) into a doubly stochastic matrix by the Sinkhorn-Knopp algorithm.

    It takes a softmax over rows, and then divides columns and rows by their sums in turn, columns
    last. Columns therefore sum to 1 up to rounding, rows as nearly as the iterations allow. The
    caller decides whether the weights into a stream are a column or a row.

    Args:
        logits: (..., n, n)
        iterations: number of normalizations of rows and columns; the softmax is the first of rows
        eps: added to the softmax and to every sum
    """
    last_step = normalization_steps(logits, iterations, eps)[-1]
    return tokens_first(last_step.matrix, logits)


@sinkhorn_knopp.register_fake
def _(logits, iterations, eps):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op(name_operator("sinkhorn_knopp_backward"), mutates_args=())
def sinkhorn_knopp_backward(
    gradient: torch.Tensor, logits: torch.Tensor, iterations: int, eps: float
) -> torch.Tensor:
    """Return the gradient with respect to the logits.

    A step is y = x / s with s = sum x + eps; its gradient with respect to x is (g - sum(g y)) / s.
    """
    # The steps are recomputed: to store forty matrices would cost what this operator saves.
    first_step, *steps = normalization_steps(logits, iterations, eps)
    grad = tokens_last(gradient)
    for step in reversed(steps):
        dot = (grad * step.matrix).sum(step.dim, keepdim=True)
        grad = (grad - dot) / step.total
    softmax = first_step.matrix - eps
    dot = (grad * softmax).sum(1, keepdim=True)
    return tokens_first(softmax * (grad - dot), logits)


@sinkhorn_knopp_backward.register_fake
def _(gradient, logits, iterations, eps):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


class NormalizationStep(NamedTuple):
    """A step of Sinkhorn-Knopp; total and dim are None for the softmax."""

    # the result (n, n, tokens)
    matrix: torch.Tensor

    # the sums by which the step divided, and the dimension of the sums
    total: torch.Tensor | None
    dim: int | None


def normalization_steps(
    logits: torch.Tensor, iterations: int, eps: float
) -> list[NormalizationStep]:
    """Return all steps of `sinkhorn_knopp`."""
    matrix = tokens_last(logits).softmax(1) + eps
    steps = [NormalizationStep(matrix, total=None, dim=None)]
    for dim in [0, *[1, 0] * (iterations - 1)]:
        total = matrix.sum(dim, keepdim=True) + eps
        matrix = matrix / total
        steps.append(NormalizationStep(matrix, total, dim))
    return steps


def tokens_last(matrices: torch.Tensor) -> torch.Tensor:
    """Return (..., n, n) as (n, n, tokens), so that each operation runs along the tokens."""
    return matrices.flatten(0, -3).permute(1, 2, 0).contiguous()


def tokens_first(matrices: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return (n, n, tokens) in the shape of `like`, (..., n, n)."""
    return matrices.permute(2, 0, 1).reshape(like.shape).contiguous()


def save_logits(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    logits, ctx.iterations, ctx.eps = inputs
    ctx.save_for_backward(logits)


def backward_of_sinkhorn_knopp(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    (logits,) = ctx.saved_tensors
    return sinkhorn_knopp_backward(gradient, logits, ctx.iterations, ctx.eps), None, None


sinkhorn_knopp.register_autograd(backward_of_sinkhorn_knopp, setup_context=save_logits)


class ManifoldConnection(Connection):
    """The connection of mHC (equations 7 and 8), computed from all streams together.

    With z = RMSNorm(vec(H)) (n d,), read = sigmoid(a z phi + b), write = 2 sigmoid(a z phi + b) and
    mix = Sinkhorn-Knopp(a z phi + b), each with its own a, phi and b: parts of `scales`, of the rows
    of `maps.weight` and of `bias`, in this order. A column of mix holds the weights into one stream,
    which sum to 1; the paper writes mix^T, whose rows do. With mhc_rows_last=False,
    mix^T = Sinkhorn-Knopp(a z phi + b). With mhc_mix=identity, mix is the identity matrix, and there
    is no third part (iHC).

    site: index of the site, counted through all blocks
    """

    EPS = 1e-6  # of the sums of Sinkhorn-Knopp

    def __init__(self, config: ManifoldConfig, site: int):
        super().__init__(config)
        n = self.num_streams
        self.mixes = config.mhc_mix == "sinkhorn"
        self.iterations = config.mhc_iterations
        self.rows_last = config.mhc_rows_last
        self.sizes = (n, n, config.mix_logits)  # of the parts read, write and mix
        maps_rule = Rule(normal(config.maps_init_std), OUTPUT, decay=True)
        self.maps = linear(n * config.hidden_size, sum(self.sizes), maps_rule)
        self.bias = nn.Parameter(torch.empty(sum(self.sizes)))
        self.scales = nn.Parameter(torch.empty(3 if config.mix_logits else 2))
        self.rules = {
            "bias": Rule(self.start_bias),
            "scales": Rule(constant(0.01)),
        }

    def start_bias(self, bias: torch.Tensor) -> None:
        """Initialize close to the additive stream: reads of 1/n, writes of 1, mix near identity."""
        read_bias, write_bias, mix_bias = bias.split(self.sizes)
        read_bias.fill_(-math.log(self.num_streams - 1))
        write_bias.zero_()
        mix_bias.fill_(-8)
        mix_bias[:: self.num_streams + 1] = 0  # the diagonal

    def weights(self, streams: torch.Tensor) -> ConnectionWeights:
        z = normalize_together(streams)
        scales = torch.cat([scale.expand(size) for scale, size in zip(self.scales, self.sizes)])
        logits = scales * linear_fp32(self.maps, z) + self.bias
        read_logits, write_logits, mix_logits = logits.split(self.sizes, dim=-1)
        return ConnectionWeights(
            read=read_logits.sigmoid(),
            write=2 * write_logits.sigmoid(),
            mix=self.compute_mix(mix_logits),
        )

    def compute_mix(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the mixing matrix (B, T, n, n) of its logits (B, T, config.mix_logits)."""
        n = self.num_streams
        if not self.mixes:
            identity = torch.eye(n, dtype=logits.dtype, device=logits.device)
            return identity.expand(*logits.shape[:-1], n, n)
        mix = sinkhorn_knopp(logits.unflatten(-1, (n, n)), self.iterations, self.EPS)
        return mix if self.rows_last else mix.mT


def normalize_together(streams: torch.Tensor) -> torch.Tensor:
    """Return z = RMSNorm(vec(H)) (B, T, n * d): all streams of a token as one vector."""
    z = streams.flatten(2)
    return F.rms_norm(z, z.shape[-1:], eps=1e-6)


class ManifoldBlock(ConnectedBlock):
    """A block of mHC."""

    Connection = ManifoldConnection


class WeightedStreams(nn.Module):
    """Readout: sum_i sigmoid(a z phi + b)_i H_i with z = RMSNorm(vec(H)).

    It is the readout of DeepSeek-V4 and Hunyuan V4, which add 1e-6 to the sigmoids.
    """

    def __init__(self, config: ManifoldConfig):
        super().__init__()
        n = config.hc_streams
        maps_rule = Rule(normal(config.maps_init_std), OUTPUT, decay=True)
        self.maps = linear(n * config.hidden_size, n, maps_rule)
        self.bias = nn.Parameter(torch.empty(n))
        self.scale = nn.Parameter(torch.empty(1))
        self.rules = {
            "bias": Rule(constant(0.0)),
            "scale": Rule(constant(0.01)),
        }

    def forward(self, state: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        streams = state.to(at_least_fp32(state.dtype))
        logits = self.scale * linear_fp32(self.maps, normalize_together(streams)) + self.bias
        return weighted_sum(logits.sigmoid(), streams)


def manifold_readout(config: ManifoldConfig) -> nn.Module:
    """Return the readout that mhc_readout selects."""
    if config.mhc_readout == "sigmoid":
        return WeightedStreams(config)
    return SumOfStreams(config)
