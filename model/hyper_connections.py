"""Hyper-Connections (arXiv 2409.19606) and their manifold-constrained form, mHC (arXiv 2512.24880).

The state is n streams of width d, H (B, T, n, d), which start as the embedding each. A site reads
one mixture of them, x_in = sum_i read_i H_i, mixes them among themselves and adds the sublayer's
output h to each with a weight, H'_j = sum_i mix_ij H_i + write_j h. The readout is their sum. The
three weightings are a site's own; they are learned numbers (static), or functions of the token's
state besides (dynamic). All of them are computed in at least fp32.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from model.block import Block, Past
from model.gpt import GPTConfig
from model.layers import LayerNorm, at_least_fp32, linear_fp32
from model.options import option
from model.parameters import OUTPUT, Rule, constant, linear, normal


@dataclass
class StreamsConfig(GPTConfig):
    """Keys of Hyper-Connections (HC and mHC)."""

    columns_key: ClassVar[str | None] = "hc_streams"

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
        "False uses the learned weights alone (static Hyper-Connections)",
    )
    hc_scale_outputs: bool = option(
        False,
        "divide the initial output matrices of attention and MLP by sqrt(hc_streams), as in the "
        "HC paper",
        initial=True,
    )


@dataclass
class ManifoldConfig(StreamsConfig):
    """Keys of Manifold-Constrained Hyper-Connections (mHC)."""

    mhc_mix: Literal["sinkhorn", "identity", "permutations", "kronecker"] = option(
        "sinkhorn",
        "matrix that mixes the residual streams; sinkhorn is a doubly stochastic matrix from the "
        "Sinkhorn-Knopp algorithm (mHC); identity does not mix; permutations is a convex "
        "combination of all permutation matrices (mHC-lite); kronecker is a Kronecker product of "
        "doubly stochastic 2 x 2 matrices (KromHC)",
    )
    mhc_readout: Literal["sum", "sigmoid"] = option(
        "sum",
        "readout of the residual streams before the final norm; sum adds them up, sigmoid weights "
        "them by input-dependent sigmoid gates (as in DeepSeek-V4)",
    )
    mhc_iterations: int = option(
        20,
        "number of Sinkhorn-Knopp iterations, each of which normalizes the rows and the columns",
        low=1,
    )
    mhc_rows_last: bool = option(
        True,
        "normalize the rows of the mixing matrix last, so that the weights into each stream sum "
        "to 1, as in the mHC paper; False normalizes the columns last, so that the weights out of "
        "each stream sum to 1",
        before=False,
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
        if self.mhc_mix == "sinkhorn":
            return
        for key in ("mhc_iterations", "mhc_rows_last"):
            if getattr(self, key) != getattr(ManifoldConfig, key):
                raise ValueError(
                    f"{key}={getattr(self, key)} has no effect with mhc_mix={self.mhc_mix}; omit "
                    "one of them"
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
        }[self.mhc_mix]


def weighted_sum(weights, streams):
    """sum_i weights_i H_i (B, T, d) of streams (B, T, n, d); weights (B, T, n) or (n,)."""
    return sum(weights[..., i, None] * streams[:, :, i] for i in range(streams.shape[2]))


class Connection(nn.Module):
    """The read of one site, and the weights with which its write mixes the streams.

    A subclass has weights(streams), streams (B, T, n, d) in at least fp32 -> read (B, T, n), write
    (B, T, n) and mix (B, T, n, n), or the same without (B, T).
    """

    def __init__(self, config: StreamsConfig):
        super().__init__()
        self.streams, self.hidden_size = config.hc_streams, config.hidden_size

    def elementwise_flops(self) -> int:
        return 2 * self.streams * self.hidden_size

    def forward(self, state, past: Past | None = None, mixes: bool = True, weighs: bool = True):
        """state (B, T, n, d) -> x_in (B, T, d), write and mix; without `mixes` mix is the identity,
        without `weighs` write is 1 (for analyses).
        """
        streams = state.to(at_least_fp32(state.dtype))
        read, write, mix = self.weights(streams)
        if not mixes:
            mix = torch.eye(self.streams, dtype=mix.dtype, device=mix.device).expand_as(mix)
        return weighted_sum(read, streams), write if weighs else torch.ones_like(write), mix


class MixAndAdd(nn.Module):
    """The write: H'_j = sum_i mix_ij H_i + write_j h."""

    fused = "mix_and_add"

    def __init__(self, config: StreamsConfig):
        super().__init__()
        self.streams, self.hidden_size = config.hc_streams, config.hidden_size

    def elementwise_flops(self) -> int:
        return 2 * self.streams * (self.streams + 1) * self.hidden_size

    def forward(self, state, h, taken, c, past: Past | None = None):
        _, write, mix = taken
        streams = state.to(write.dtype)
        mixed = sum(mix[..., i, :, None] * streams[:, :, i, None] for i in range(self.streams))
        return (mixed + write[..., None] * h.unsqueeze(2)).to(state.dtype)

    def statistics(self, state, h, taken, c, written) -> dict:
        """Of each token (B, T): how much of itself a stream keeps, the mean of mix_ii, and how far
        the streams that mix into one are from summing to 1, the largest |sum_i mix_ij - 1|.
        """
        mix = taken[2].expand(*state.shape[:2], -1, -1)
        kept = mix.diagonal(dim1=-2, dim2=-1).mean(-1)
        return {"mix_kept": kept, "mix_error": (mix.sum(-2) - 1).abs().amax(-1)}


class HyperConnection(Connection):
    """HC's: learned weights, plus, where dynamic, s tanh of linear maps of each normed stream.

    Equations 10 to 13. `maps` has in its rows W_b, W_m and W_r: of stream i they give write_i,
    read_i and mix_i1 .. mix_in.
    """

    def __init__(self, config: HyperConfig, site: int):
        super().__init__(config)
        n = config.hc_streams
        self.read, self.write = nn.Parameter(torch.empty(n)), nn.Parameter(torch.empty(n))
        self.mix = nn.Parameter(torch.empty(n, n))
        self.rules = {"read": Rule(partial(one_hot, at=site % n)), "write": Rule(constant(1.0))}
        self.rules |= {"mix": Rule(nn.init.eye_)}
        self.dynamic = config.hc_dynamic
        if self.dynamic:
            self.norm = LayerNorm(config.hidden_size)
            self.maps = linear(config.hidden_size, 2 + n, Rule(constant(0.0), OUTPUT, decay=True))
            for name in ("write_scale", "scale"):
                self.register_parameter(name, nn.Parameter(torch.empty(1)))
                self.rules[name] = Rule(constant(0.01))

    def weights(self, streams):
        if not self.dynamic:
            return self.read, self.write, self.mix
        maps = linear_fp32(self.maps, self.norm(streams)).tanh()  # (B, T, n, 2 + n)
        read, mix = self.scale * maps[..., 1], self.scale * maps[..., 2:]
        write = self.write_scale * maps[..., 0]
        return self.read + read, self.write + write, self.mix + mix


def one_hot(parameter, at: int) -> None:
    nn.init.zeros_(parameter)[at] = 1.0


class ConnectedBlock(Block):
    """A connection for each site; sites are counted through all blocks."""

    Connection: type[Connection]

    def __init__(self, config: StreamsConfig, layer: int):
        super().__init__(config, layer)
        self.hc_attn = self.Connection(config, 2 * layer)
        self.hc_mlp = self.Connection(config, 2 * layer + 1)
        write, (attn, mlp) = MixAndAdd(config), self.sites
        attn = replace(attn, read=self.hc_attn, write=write)
        self.sites = attn, replace(mlp, read=self.hc_mlp, write=write)


class HyperBlock(ConnectedBlock):
    Connection = HyperConnection

    def __init__(self, config: HyperConfig, layer: int):
        super().__init__(config, layer)
        if config.hc_scale_outputs:
            for last in (self.attn.c_proj, self.mlp.c_proj):
                rule = last.rules["weight"]
                start = partial(shrunk, start=rule.start, by=math.sqrt(config.hc_streams))
                last.rules = {"weight": rule._replace(start=start)}


def shrunk(parameter, start, by: float) -> None:
    start(parameter)
    parameter.div_(by)


class SumOfStreams(nn.Module):
    """Readout: the sum of the streams, in at least fp32."""

    fused = "sum_of_streams"

    def __init__(self, config: StreamsConfig):
        super().__init__()
        self.size = config.hc_streams * config.hidden_size

    def elementwise_flops(self) -> int:
        return self.size

    def forward(self, state, past: Past | None = None):
        return state.to(at_least_fp32(state.dtype)).sum(2)


# Forty small steps in turn, which the compiler would copy into each other: to it they are one
# operation.
@torch.library.custom_op("ddl::sinkhorn_knopp", mutates_args=())
def sinkhorn_knopp(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """exp(logits) (..., n, n) made doubly stochastic: a softmax over rows, then columns and rows
    divided by their sums in turn, columns last; eps is added to every sum. Columns sum to one to
    rounding, rows as nearly as `iterations` allow: whether a stream's incoming weights are the
    columns or the rows is for the caller to say.
    """
    return tokens_first(normalisations(logits, iterations, eps)[-1][0], logits)


@sinkhorn_knopp.register_fake
def _(logits, iterations, eps):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@torch.library.custom_op("ddl::sinkhorn_knopp_backward", mutates_args=())
def sinkhorn_knopp_backward(
    gradient: torch.Tensor, logits: torch.Tensor, iterations: int, eps: float
) -> torch.Tensor:
    """With y = x / s, s = sum x + eps, the gradient by x is (g - sum(g y)) / s."""
    # The steps are made again: to keep forty of them would cost what this operation saves.
    (start, _, _), *steps = normalisations(logits, iterations, eps)
    g = tokens_last(gradient)
    for y, total, axis in reversed(steps):
        g = (g - (g * y).sum(axis, keepdim=True)) / total
    softmax = start - eps
    return tokens_first(softmax * (g - (g * softmax).sum(1, keepdim=True)), logits)


@sinkhorn_knopp_backward.register_fake
def _(gradient, logits, iterations, eps):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def normalisations(logits, iterations: int, eps: float) -> list[tuple]:
    """The matrices (n, n, tokens) step by step, with the sums that divided each, and their axis."""
    matrix = tokens_last(logits).softmax(1) + eps
    steps = [(matrix, None, None)]
    for axis in [0, *[1, 0] * (iterations - 1)]:
        total = matrix.sum(axis, keepdim=True) + eps
        matrix = matrix / total
        steps.append((matrix, total, axis))
    return steps


def tokens_last(matrices):
    """(..., n, n) -> (n, n, tokens): a step then runs along tokens."""
    return matrices.flatten(0, -3).permute(1, 2, 0).contiguous()


def tokens_first(matrices, like):
    return matrices.permute(2, 0, 1).reshape(like.shape).contiguous()


def keep_logits(ctx, inputs, output) -> None:
    logits, *ctx.settings = inputs
    ctx.save_for_backward(logits)


def gradient_by_logits(ctx, gradient):
    return sinkhorn_knopp_backward(gradient, *ctx.saved_tensors, *ctx.settings), None, None


sinkhorn_knopp.register_autograd(gradient_by_logits, setup_context=keep_logits)


class ManifoldConnection(Connection):
    """mHC's: read in (0, 1), write in (0, 2) and a doubly stochastic mix, from the normed streams
    together (eqs. 7, 8).

    With z = RMSNorm(vec(H)) (n d,): read = sigmoid(a z phi + b), write = 2 sigmoid(a z phi + b) and
    mix = Sinkhorn-Knopp(a z phi + b), each with an a, a phi and a b of its own: in this order in
    `scales`, in the rows of `maps.weight` and in `bias`. A column of mix, the weights that come
    into one stream, sums to one; the paper writes mix^T, whose rows do. With mhc_rows_last=False
    mix^T = Sinkhorn-Knopp(a z phi + b).

    mhc_mix: "permutations" is sum_i softmax(a z phi + b)_i P_i over all n! permutation matrices
    (mHC-lite, arXiv 2601.05732), "kronecker" the product of mixes of two streams, each softmaxed
    from two logits (KromHC, arXiv 2601.21579); "identity" has no third part.
    """

    fused = "manifold_connection"
    EPS = 1e-6  # of the norm, and of Sinkhorn-Knopp's sums
    balance = staticmethod(sinkhorn_knopp)  # `model/kernels` has one in a single launch

    def __init__(self, config: ManifoldConfig, site: int):
        super().__init__(config)
        n = self.streams
        self.sizes, self.iterations = (n, n, config.mix_logits), config.mhc_iterations
        self.rows_last, self.kind = config.mhc_rows_last, config.mhc_mix
        start = normal(config.hidden_init_std / math.sqrt(n))
        self.maps = linear(n * config.hidden_size, sum(self.sizes), Rule(start, OUTPUT, decay=True))
        self.bias = nn.Parameter(torch.empty(sum(self.sizes)))
        self.scales = nn.Parameter(torch.empty(3 if config.mix_logits else 2))
        self.rules = {"bias": Rule(self.start), "scales": Rule(constant(0.01))}

    def start(self, bias) -> None:
        """Close to the additive stream: read 1/n and write 1 each, mix the identity but exp(-8)."""
        pre, post, res = bias.split(self.sizes)
        pre.fill_(-math.log(self.streams - 1))
        post.zero_()
        res.fill_(-8)
        if self.kind == "sinkhorn":
            res[:: self.streams + 1] = 0
        elif self.kind == "permutations":  # the first one is the identity
            res[0] = 0
        else:
            res[::2] = 0

    def weights(self, streams):
        n, z = self.streams, streams.flatten(2)
        maps = linear_fp32(self.maps, F.rms_norm(z, z.shape[-1:], eps=self.EPS))  # (B, T, 2n + n^2)
        scales = torch.cat([scale.expand(size) for scale, size in zip(self.scales, self.sizes)])
        pre, post, res = (scales * maps + self.bias).split(self.sizes, dim=-1)
        if self.kind == "sinkhorn":
            mix = self.balance(res.unflatten(-1, (n, n)), self.iterations, self.EPS)
            mix = mix if self.rows_last else mix.mT
        else:
            makes = {"permutations": of_permutations, "kronecker": of_pairs, "identity": identity}
            mix = makes[self.kind](res, n)
        return pre.sigmoid(), 2 * post.sigmoid(), mix


def identity(logits, n: int):
    return torch.eye(n, dtype=logits.dtype, device=logits.device).expand(*logits.shape[:-1], n, n)


def of_permutations(logits, n: int):
    """softmax(logits (..., n!)) -> (..., n, n), a sum of permutation matrices, the identity first."""
    orders = torch.tensor(list(itertools.permutations(range(n))), device=logits.device)
    matrices = F.one_hot(orders, n).to(logits.dtype).flatten(1)
    return (logits.softmax(-1) @ matrices).unflatten(-1, (n, n))


def of_pairs(logits, n: int):
    """logits (..., 2 log2 n) -> (..., n, n): for each pair the mix [[a, b], [b, a]], a + b = 1."""
    mix = logits.new_ones(*logits.shape[:-1], 1, 1)
    for pair in logits.unflatten(-1, (-1, 2)).softmax(-1).unbind(-2):
        factor = torch.stack((pair, pair.flip(-1)), dim=-2)  # (..., 2, 2)
        mix = mix[..., :, None, :, None] * factor[..., None, :, None, :]
        mix = mix.flatten(-2).flatten(-3, -2)
    return mix


class ManifoldBlock(ConnectedBlock):
    Connection = ManifoldConnection


class WeighedStreams(nn.Module):
    """Readout: sum_i sigmoid(a z phi + b)_i H_i, z = RMSNorm(vec(H)), as DeepSeek-V4 has it."""

    fused = "weighed_streams"

    def __init__(self, config: ManifoldConfig):
        super().__init__()
        n, self.hidden_size = config.hc_streams, config.hidden_size
        start = normal(config.hidden_init_std / math.sqrt(n))
        self.maps = linear(n * config.hidden_size, n, Rule(start, OUTPUT, decay=True))
        self.bias, self.scale = nn.Parameter(torch.empty(n)), nn.Parameter(torch.empty(1))
        self.rules = {"bias": Rule(constant(0.0)), "scale": Rule(constant(0.01))}

    def elementwise_flops(self) -> int:
        return 2 * len(self.bias) * self.hidden_size

    def forward(self, state, past: Past | None = None):
        streams = state.to(at_least_fp32(state.dtype))
        z = streams.flatten(2)
        maps = linear_fp32(self.maps, F.rms_norm(z, z.shape[-1:], eps=ManifoldConnection.EPS))
        return weighted_sum((self.scale * maps + self.bias).sigmoid(), streams)


def manifold_readout(config: ManifoldConfig) -> nn.Module:
    return (WeighedStreams if config.mhc_readout == "sigmoid" else SumOfStreams)(config)
