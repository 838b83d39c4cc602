"""Hyper-Connections (arXiv 2409.19606) and their manifold-constrained form, mHC (arXiv 2512.24880).

The state is n streams of width d, H (B, T, n, d), each of which starts as the embedding. A site
reads a weighted sum of them, and its write mixes them and adds the sublayer output h to each:

    x_in = sum_i read_i H_i
    H'_j = sum_i mix_ij H_i + write_j h

The readout is their sum. Each site has weights of its own: learned numbers (static) or, in
addition, functions of the state of the token (dynamic). They are computed in at least fp32.
"""

import itertools
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

from .block import Block, Past
from .config import GPTConfig
from .layers import LayerNorm
from .parameters import OUTPUT, Rule, constant, linear, normal, one_hot
from .precision import at_least_fp32, linear_fp32


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
    hc_scale_outputs: bool = option(
        False,
        "divide the initial attention and MLP output matrices by sqrt(hc_streams), as in the "
        "HC paper",
    )


@dataclass
class ManifoldConfig(StreamsConfig):
    """Keys of Manifold-Constrained Hyper-Connections (mHC)."""

    mhc_mix: Literal["sinkhorn", "identity", "permutations", "kronecker", "orthogonal"] = option(
        "sinkhorn",
        "matrix that mixes the residual streams; sinkhorn is a doubly stochastic matrix from the "
        "Sinkhorn-Knopp algorithm (mHC); identity does not mix (iHC, as in Hunyuan V4); "
        "permutations is a convex combination of all permutation matrices (mHC-lite); kronecker is "
        "a Kronecker product of doubly stochastic 2 x 2 matrices (KromHC); orthogonal is a "
        "rotation of four streams by a pair of unit quaternions (oHC)",
    )
    mhc_readout: Literal["sum", "mean", "sigmoid"] = option(
        "sum",
        "readout of the residual streams before the final norm; sum adds them up, mean averages "
        "them (as in GLM-5.3), sigmoid weights them by input-dependent sigmoid gates (as in "
        "DeepSeek-V4 and Hunyuan V4)",
    )
    mhc_iterations: int = option(
        20,
        "number of Sinkhorn-Knopp iterations of mhc_mix=sinkhorn, each of which normalizes the rows "
        "and the columns",
        low=1,
    )
    mhc_rows_last: bool = option(
        True,
        "with mhc_mix=sinkhorn, normalize the rows of the mixing matrix last, so that the weights into each stream sum "
        "to 1, as in the mHC paper; False normalizes the columns last, so that the weights out of "
        "each stream sum to 1",
    )
    mhc_read_eps: float = option(
        0.0,
        "constant added to the sigmoids of the reads and of mhc_readout=sigmoid (1e-6 in "
        "DeepSeek-V4, GLM-5.3 and Hunyuan V4)",
        low=0,
        below=0.5,
    )
    mhc_write_eps: float = option(
        0.0,
        "constant added to the writes (1e-6 in Hunyuan V4)",
        low=0,
        below=0.5,
    )
    mhc_write_magnitude: float = option(
        2.0,
        "upper limit of the writes, the factor on their sigmoid",
        above=0,
    )
    mhc_norm_eps: float = option(
        1e-6,
        "eps of the RMSNorm from which the weights of a connection are computed (1e-6 in "
        "DeepSeek-V4, 1e-5 in GLM-5.3 and Hunyuan V4)",
        above=0,
    )
    mhc_read_dtype: Literal["float32", "state"] = option(
        "float32",
        "dtype of what is read from the streams; state rounds it to the dtype of the streams (as "
        "in DeepSeek-V4, GLM-5.3 and Hunyuan V4)",
    )
    mhc_write_dtype: Literal["float32", "state"] = option(
        "float32",
        "dtype in which the streams are mixed and written; float32 rounds the result once, state "
        "rounds the weights and every term to the dtype of the streams (as in DeepSeek-V4 and "
        "GLM-5.3)",
    )
    mhc_scale_init: float = option(
        0.01,
        "initial factor on the input-dependent terms of the weights (1 in DeepSeek-V4 and "
        "GLM-5.3); with mhc_mix=orthogonal, the factor of the rotation starts at 0",
    )
    mhc_maps_init_std: float | None = option(
        None,
        "standard deviation of the initial maps from the streams to the weights (0.02 in "
        "DeepSeek-V4 and GLM-5.3, 0.006 in Hunyuan V4; default: hidden_init_std_factor / "
        "sqrt(hc_streams * hidden_size)); 0 would keep all streams equal",
        above=0,
    )
    mhc_bias_init: Literal["additive", "zeros"] = option(
        "additive",
        "initial biases of the weights; additive starts close to the additive stream, with reads "
        "of 1/hc_streams and hardly any mixing; zeros starts with reads of 1/2 and even mixing (as "
        "in DeepSeek-V4 and GLM-5.3)",
    )
    mhc_readout_bias_init: Literal["zeros", "mean"] = option(
        "zeros",
        "initial biases of mhc_readout=sigmoid; zeros weights each stream by 1/2, mean by "
        "1/hc_streams (as in Hunyuan V4)",
    )

    def __post_init__(self):
        super().__post_init__()
        n = self.hc_streams
        # The initial bias of the reads, -log(n - 1), would be infinite.
        if n == 1:
            raise ValueError("hc_streams=1 leaves mHC no streams to mix; give 2 or more")
        if self.mhc_mix == "permutations" and n > 5:
            raise ValueError(
                f"hc_streams={n} with mhc_mix=permutations needs a logit for each of the n! "
                "permutations; give 5 streams or fewer"
            )
        is_power_of_two = n & (n - 1) == 0
        if self.mhc_mix == "kronecker" and not is_power_of_two:
            raise ValueError(
                f"hc_streams={n} with mhc_mix=kronecker does not factor into 2 x 2 matrices; give "
                "a power of two"
            )
        if self.mhc_mix == "orthogonal" and n != 4:
            raise ValueError(
                f"hc_streams={n} with mhc_mix=orthogonal: a pair of quaternions rotates four "
                "streams; give hc_streams=4"
            )
        if self.mhc_mix == "orthogonal" and self.mhc_bias_init == "zeros":
            raise ValueError(
                "mhc_bias_init=zeros with mhc_mix=orthogonal would normalize quaternions of zeros; "
                "omit mhc_bias_init"
            )

    @property
    def mix_logits(self) -> int:
        """Return the number of logits per token that the mixing matrix is computed from."""
        n = self.hc_streams
        return {
            "sinkhorn": n * n,
            "identity": 0,
            "permutations": math.factorial(n),
            "kronecker": 2 * (n.bit_length() - 1),
            "orthogonal": 8,
        }[self.mhc_mix]

    @property
    def maps_init_std(self) -> float:
        """Return the standard deviation of the initial maps from the streams to the weights."""
        if self.mhc_maps_init_std is not None:
            return self.mhc_maps_init_std
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

    def __init__(self, config: StreamsConfig, rounded: bool = False):
        """rounded: whether x_in is rounded to the dtype of the state"""
        super().__init__()
        self.num_streams = config.hc_streams
        self.rounded = rounded

    def forward(self, state: torch.Tensor, past: Past | None = None) -> ConnectionOutput:
        """Read from a state (B, T, n, d)."""
        streams = state.to(at_least_fp32(state.dtype))
        weights = self.weights(streams)
        x_in = weighted_sum(weights.read, streams)
        # The write needs the weights as well. They are passed on, because they are functions of the
        # state before the write.
        return ConnectionOutput(
            x_in=x_in.to(state.dtype) if self.rounded else x_in,
            write=weights.write,
            mix=weights.mix,
        )


class MixAndAdd(nn.Module):
    """The write H'_j = sum_i mix_ij H_i + write_j h."""

    def __init__(self, config: StreamsConfig, rounded: bool = False):
        """rounded: whether the weights and each of the two terms are rounded to the state's dtype"""
        super().__init__()
        self.num_streams = config.hc_streams
        self.rounded = rounded

    def forward(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        connection: ConnectionOutput,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> torch.Tensor:
        _, write, mix = connection
        if self.rounded:
            mix = mix.to(state.dtype).to(mix.dtype)
        # H'_j = sum_i mix_ij H_i + write_j h
        streams = state.to(write.dtype)
        mixed = sum(mix[..., i, :, None] * streams[:, :, i, None] for i in range(self.num_streams))
        if self.rounded:
            # DeepSeek-V4 mixes by a matrix product, which adds up in fp32 and rounds its result
            mixed = mixed.to(state.dtype)
            write = write.to(state.dtype)
            h = h.to(state.dtype)
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
    """A block in which each site has a connection `Connection(config, site)`.

    All sites share one write, `Write(config)`, which must have no parameters.
    """

    Connection: Callable
    Write: Callable = MixAndAdd

    def __init__(self, config: StreamsConfig, layer: int):
        super().__init__(config, layer)
        # sites are counted through all blocks
        self.hc_attn = self.Connection(config, 2 * layer)
        self.hc_mlp = self.Connection(config, 2 * layer + 1)
        write = self.Write(config)
        attn, mlp = self.sites
        self.sites = (
            replace(attn, read=self.hc_attn, write=write),
            replace(mlp, read=self.hc_mlp, write=write),
        )


class HyperBlock(ConnectedBlock):
    """A block of HC."""

    Connection = HyperConnection

    def __init__(self, config: HyperConfig, layer: int):
        super().__init__(config, layer)
        if config.hc_scale_outputs:
            for output_matrix in (self.attn.c_proj, self.mlp.c_proj):
                rule = output_matrix.rules["weight"]
                start = partial(
                    start_divided, start=rule.start, divisor=math.sqrt(config.hc_streams)
                )
                output_matrix.rules = {"weight": rule._replace(start=start)}


def start_divided(parameter: torch.Tensor, start: Callable, divisor: float) -> None:
    """Initialize the parameter by `start`, and divide it."""
    start(parameter)
    parameter.div_(divisor)


class SumOfStreams(nn.Module):
    """Readout: the sum of the streams, in at least fp32."""

    def __init__(self, config: StreamsConfig, rounded: bool = False):
        """rounded: whether the sum is rounded to the dtype of the state"""
        super().__init__()
        self.rounded = rounded

    def forward(self, state: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        total = self.combine(state.to(at_least_fp32(state.dtype)))
        return total.to(state.dtype) if self.rounded else total

    def combine(self, streams: torch.Tensor) -> torch.Tensor:
        """Return one stream (B, T, d) for the streams (B, T, n, d)."""
        return streams.sum(2)


class MeanOfStreams(SumOfStreams):
    """Readout: the mean of the streams, in at least fp32, as in GLM-5.3."""

    def combine(self, streams: torch.Tensor) -> torch.Tensor:
        return streams.mean(2)


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
    mix^T = Sinkhorn-Knopp(a z phi + b).

    The key mhc_mix selects other mixing matrices. With "permutations", mix =
    sum_i softmax(a z phi + b)_i P_i over all n! permutation matrices (mHC-lite, arXiv 2601.05732).
    With "kronecker" it is the Kronecker product of mixing matrices of two streams, each from a
    softmax of two logits (KromHC, arXiv 2601.21579). With "identity" there is no third part (iHC).
    With "orthogonal" it rotates four streams by two unit quaternions (oHC, `mix_orthogonal`).

    Production models add mhc_read_eps to the reads and mhc_write_eps to the writes, and have
    mhc_write_magnitude in place of 2.

    site: index of the site, counted through all blocks
    """

    EPS = 1e-6  # of the sums of Sinkhorn-Knopp

    def __init__(self, config: ManifoldConfig, site: int):
        super().__init__(config, rounded=config.mhc_read_dtype == "state")
        n = self.num_streams
        self.kind = config.mhc_mix
        self.iterations = config.mhc_iterations
        self.rows_last = config.mhc_rows_last
        self.norm_eps = config.mhc_norm_eps
        self.read_eps = config.mhc_read_eps
        self.write_eps = config.mhc_write_eps
        self.write_magnitude = config.mhc_write_magnitude
        self.scale_init = config.mhc_scale_init
        self.bias_init = config.mhc_bias_init
        self.sizes = (n, n, config.mix_logits)  # of the parts read, write and mix
        maps_rule = Rule(normal(config.maps_init_std), OUTPUT, decay=True)
        self.maps = linear(n * config.hidden_size, sum(self.sizes), maps_rule)
        self.bias = nn.Parameter(torch.empty(sum(self.sizes)))
        self.scales = nn.Parameter(torch.empty(3 if config.mix_logits else 2))
        self.rules = {
            "bias": Rule(self.start_bias),
            "scales": Rule(self.start_scales),
        }

    def start_scales(self, scales: torch.Tensor) -> None:
        """Initialize the factors on z phi; that of quaternions is 0, so that they do not rotate."""
        scales.fill_(self.scale_init)
        if self.kind == "orthogonal":
            scales[2] = 0

    def start_bias(self, bias: torch.Tensor) -> None:
        """Initialize close to the additive stream: reads of 1/n, writes of 1, mix near identity."""
        if self.bias_init == "zeros":
            bias.zero_()
            return
        read_bias, write_bias, mix_bias = bias.split(self.sizes)
        read_bias.fill_(-math.log(self.num_streams - 1))
        write_bias.zero_()
        if self.kind == "orthogonal":
            # the quaternions p and q are 1
            mix_bias.zero_()
            mix_bias[::4] = 1
            return
        mix_bias.fill_(-8)
        if self.kind == "sinkhorn":
            mix_bias[:: self.num_streams + 1] = 0  # the diagonal
        elif self.kind == "permutations":
            mix_bias[0] = 0  # the identity is the first permutation
        else:
            mix_bias[::2] = 0  # a of each [[a, b], [b, a]]

    def weights(self, streams: torch.Tensor) -> ConnectionWeights:
        # z = RMSNorm(vec(H)): all streams of a token as one vector of n d numbers
        z = streams.flatten(2)
        z = F.rms_norm(z, z.shape[-1:], eps=self.norm_eps)
        scales = torch.cat([scale.expand(size) for scale, size in zip(self.scales, self.sizes)])
        logits = scales * linear_fp32(self.maps, z) + self.bias
        read_logits, write_logits, mix_logits = logits.split(self.sizes, dim=-1)
        return ConnectionWeights(
            read=read_logits.sigmoid() + self.read_eps,
            write=self.write_magnitude * write_logits.sigmoid() + self.write_eps,
            mix=self.compute_mix(mix_logits),
        )

    def compute_mix(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the mixing matrix (B, T, n, n) of its logits (B, T, config.mix_logits)."""
        n = self.num_streams
        if self.kind == "sinkhorn":
            mix = sinkhorn_knopp(logits.unflatten(-1, (n, n)), self.iterations, self.EPS)
            return mix if self.rows_last else mix.mT
        if self.kind == "permutations":
            return mix_permutations(logits, n)
        if self.kind == "kronecker":
            return mix_kronecker(logits)
        if self.kind == "orthogonal":
            return mix_orthogonal(logits)
        identity = torch.eye(n, dtype=logits.dtype, device=logits.device)
        return identity.expand(*logits.shape[:-1], n, n)


def mix_permutations(logits: torch.Tensor, n: int) -> torch.Tensor:
    """Return (..., n, n), the sum of all permutation matrices weighted by softmax(logits).

    logits: (..., n!), that of the identity first
    """
    permutations = torch.tensor(list(itertools.permutations(range(n))), device=logits.device)
    matrices = F.one_hot(permutations, n).to(logits.dtype).flatten(1)
    # autocast would round the weights, whose sums over a row and over a column must be 1
    with torch.autocast(logits.device.type, enabled=False):
        return (logits.softmax(-1) @ matrices).unflatten(-1, (n, n))


def mix_kronecker(logits: torch.Tensor) -> torch.Tensor:
    """Return (..., n, n), the Kronecker product of matrices [[a, b], [b, a]] with a + b = 1.

    logits: (..., 2 log2 n), two for each matrix
    """
    mix = logits.new_ones(*logits.shape[:-1], 1, 1)
    for pair in logits.unflatten(-1, (-1, 2)).softmax(-1).unbind(-2):
        factor = torch.stack((pair, pair.flip(-1)), dim=-2)  # (..., 2, 2)
        mix = mix[..., :, None, :, None] * factor[..., None, :, None, :]
        mix = mix.flatten(-2).flatten(-3, -2)
    return mix


def mix_orthogonal(logits: torch.Tensor) -> torch.Tensor:
    """Return a mixing matrix (..., 4, 4) that rotates four streams by a pair of quaternions.

    The four streams of a feature are one quaternion x, and the mixed streams are p x conj(q) with
    unit quaternions p and q, as in oHC (arXiv 2609.02672): every rotation of four dimensions, SO(4),
    is such a product. We know only the abstract of that paper. How p and q follow from the state is
    ours: each consists of four logits, divided by their norm.

    logits: (..., 8), those of p first; p = q = (1, 0, 0, 0) does not mix
    """
    p, q = F.normalize(logits.unflatten(-1, (2, 4)), dim=-1).unsqueeze(-2).unbind(-3)
    conjugate_of_q = torch.cat((q[..., :1], -q[..., 1:]), dim=-1)
    # Row i of the matrix is what becomes of the unit vector of stream i.
    unit_vectors = torch.eye(4, dtype=logits.dtype, device=logits.device)
    return quaternion_product(quaternion_product(p, unit_vectors), conjugate_of_q)


def quaternion_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the Hamilton product x y of quaternions (..., 4), whose real part comes first."""
    a, b, c, d = x.unbind(-1)
    e, f, g, h = y.unbind(-1)
    return torch.stack(
        (
            a * e - b * f - c * g - d * h,
            a * f + b * e + c * h - d * g,
            a * g - b * h + c * e + d * f,
            a * h + b * g - c * f + d * e,
        ),
        dim=-1,
    )


def manifold_write(config: ManifoldConfig) -> MixAndAdd:
    """Return the write of mHC, rounded as mhc_write_dtype says."""
    return MixAndAdd(config, rounded=config.mhc_write_dtype == "state")


class ManifoldBlock(ConnectedBlock):
    """A block of mHC."""

    Connection = ManifoldConnection
    Write = staticmethod(manifold_write)


class WeightedStreams(nn.Module):
    """Readout: sum_i (sigmoid(a z phi + b)_i + eps) H_i with z = RMSNorm(vec(H)).

    It is the readout of DeepSeek-V4 and Hunyuan V4, where eps is mhc_read_eps.
    """

    def __init__(self, config: ManifoldConfig):
        super().__init__()
        n = config.hc_streams
        self.norm_eps = config.mhc_norm_eps
        self.read_eps = config.mhc_read_eps
        self.rounded = config.mhc_read_dtype == "state"
        maps_rule = Rule(normal(config.maps_init_std), OUTPUT, decay=True)
        self.maps = linear(n * config.hidden_size, n, maps_rule)
        self.bias = nn.Parameter(torch.empty(n))
        self.scale = nn.Parameter(torch.empty(1))
        bias_init = -math.log(n - 1) if config.mhc_readout_bias_init == "mean" else 0.0
        self.rules = {
            "bias": Rule(constant(bias_init)),
            "scale": Rule(constant(config.mhc_scale_init)),
        }

    def forward(self, state: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        streams = state.to(at_least_fp32(state.dtype))
        z = streams.flatten(2)
        z = F.rms_norm(z, z.shape[-1:], eps=self.norm_eps)
        weights = (self.scale * linear_fp32(self.maps, z) + self.bias).sigmoid() + self.read_eps
        x = weighted_sum(weights, streams)
        return x.to(state.dtype) if self.rounded else x


def manifold_readout(config: ManifoldConfig) -> nn.Module:
    """Return the readout that mhc_readout selects."""
    if config.mhc_readout == "sigmoid":
        return WeightedStreams(config)
    readout_class = MeanOfStreams if config.mhc_readout == "mean" else SumOfStreams
    return readout_class(config, rounded=config.mhc_read_dtype == "state")
