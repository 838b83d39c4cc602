"""Other residual streams as one would write them from their papers: one torch call per equation (see transcription.py).

The same parameter names as the models', and none of their code. Their keys at their defaults, numbers of streams and of
blocks aside.
"""

import torch
import torch.nn.functional as F
from torch import nn

from research.benchmarks.transcription import (
    MLP,
    Attention,
    Block,
    fp32,
    fp32_linear,
    nothing,
    rms_norm,
)


class Streams(nn.Module):
    """x (B, T, d) in each of the n streams of H (B, T, n, d)."""

    def __init__(self, config):
        super().__init__()
        self.streams = config.hc_streams

    def forward(self, x):
        return x.unsqueeze(2).repeat(1, 1, self.streams, 1)


class Sum(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, H):
        return fp32(H).sum(2)


class HyperConnection(nn.Module):
    def __init__(self, config):
        super().__init__()
        n = config.hc_streams
        self.read, self.write, self.mix = (
            nn.Parameter(torch.empty(*shape)) for shape in ((n,), (n,), (n, n))
        )
        self.norm, self.maps = (
            nn.LayerNorm(config.hidden_size),
            nn.Linear(config.hidden_size, 2 + n, bias=False),
        )
        self.write_scale, self.scale = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))

    def forward(self, H):
        dynamic = fp32_linear(self.maps, self.norm(fp32(H))).tanh()
        write = self.write + self.write_scale * dynamic[..., 0]
        return (
            self.read + self.scale * dynamic[..., 1],
            write,
            self.mix + self.scale * dynamic[..., 2:],
        )


class ManifoldConnection(nn.Module):
    def __init__(self, config):
        super().__init__()
        n = config.hc_streams
        self.n, self.iterations, size = n, config.mhc_iterations, n * config.hidden_size
        self.rows_last = config.mhc_rows_last
        self.maps = nn.Linear(size, 2 * n + n * n, bias=False)
        self.bias, self.scales = (
            nn.Parameter(torch.empty(2 * n + n * n)),
            nn.Parameter(torch.empty(3)),
        )

    def forward(self, H):
        z = fp32(H).flatten(2)
        maps = fp32_linear(self.maps, F.rms_norm(z, z.shape[-1:], eps=1e-6))
        parts = zip(
            self.scales, *(x.split((self.n, self.n, self.n**2), -1) for x in (maps, self.bias))
        )
        read, write, mix = (scale * logits + bias for scale, logits, bias in parts)
        mix = mix.unflatten(-1, (self.n, self.n)).softmax(-1) + 1e-6
        for iteration in range(self.iterations):
            if iteration:
                mix = mix / (mix.sum(-1, keepdim=True) + 1e-6)
            mix = mix / (mix.sum(-2, keepdim=True) + 1e-6)
        return read.sigmoid(), 2 * write.sigmoid(), mix if self.rows_last else mix.mT


class HyperBlock(Block):
    """H_j <- sum_i mix_ij H_i + write_j F(norm(sum_i read_i H_i)), twice."""

    Connection = HyperConnection

    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        self.hc_attn, self.hc_mlp = self.Connection(config), self.Connection(config)

    def forward(self, H, tables):
        for norm, sublayer, connection in (
            (self.ln_1, self.attn, self.hc_attn),
            (self.ln_2, self.mlp, self.hc_mlp),
        ):
            read, write, mix = connection(H)
            h = sublayer(norm((read.unsqueeze(-1) * fp32(H)).sum(2)), tables)
            mixed = (mix.unsqueeze(-1) * fp32(H).unsqueeze(3)).sum(2)
            H = (mixed + write.unsqueeze(-1) * h.unsqueeze(2)).to(H.dtype)
        return H


class ManifoldBlock(HyperBlock):
    Connection = ManifoldConnection


class DepthAttention(nn.Module):
    """sum_i a_i V_i, a = softmax(w . RMSNorm(V_i)), over the last run's sum as well where it is not finished."""

    def __init__(self, config):
        super().__init__()
        self.query = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, sources):
        V = fp32(torch.stack(sources))  # (sources, B, T, d)
        a = (F.rms_norm(V, V.shape[-1:], eps=1e-5) * self.query).sum(-1).softmax(0)
        return (a.unsqueeze(-1) * V).sum(0)


class Sources(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x):
        return [x]


class AttnResBlock(Block):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        self.depth_attn, self.depth_mlp = DepthAttention(config), DepthAttention(config)
        sites = 2 * config.num_hidden_layers
        self.run, self.layer = -(-sites // min(config.attn_res_blocks or sites, sites)), layer

    def forward(self, sources, tables):
        for m, norm, sublayer, attend in (
            (2 * self.layer, self.ln_1, self.attn, self.depth_attn),
            (2 * self.layer + 1, self.ln_2, self.mlp, self.depth_mlp),
        ):
            h = sublayer(norm(attend(sources)), tables).to(sources[0].dtype)
            sources = [*sources, h] if m % self.run == 0 else [*sources[:-1], sources[-1] + h]
        return sources


class MGTWrite(nn.Module):
    def __init__(self, config):
        super().__init__()
        d = config.hidden_size
        self.gate, self.gate_norm = nn.Linear(d, d, bias=False), nn.LayerNorm(d)
        self.beta, self.alpha = nn.Linear(d, d), nn.Parameter(torch.empty(1))

    def forward(self, X, h):
        G = self.gate_norm(fp32(self.gate(X))).sigmoid()
        beta = fp32(self.beta(X)).tanh()
        return (X + beta * (h * G - self.alpha * X)).to(X.dtype)


class MGTBlock(nn.Module):
    """The full arm: X' = X + beta * (F(LN(X)) * G - alpha X), twice."""

    def __init__(self, config, layer: int):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)
        self.attn, self.mlp = Attention(config), MLP(config)
        self.write_attn, self.write_mlp = MGTWrite(config), MGTWrite(config)

    def forward(self, X, tables):
        X = self.write_attn(X, self.attn(self.ln_1(fp32(X)).to(X.dtype), tables))
        return self.write_mlp(X, self.mlp(self.ln_2(fp32(X)).to(X.dtype), tables))


def layer_norm(config):
    return nn.LayerNorm(config.hidden_size)


# stem: what makes the state, a block, the readout and the final norm
STREAMS = {
    "HC-gpt-mha-rope": (Streams, HyperBlock, Sum, rms_norm),
    "mHC-gpt-mha-rope": (Streams, ManifoldBlock, Sum, rms_norm),
    "AttnRes-gpt-mha-rope": (Sources, AttnResBlock, DepthAttention, rms_norm),
    "MGT-gpt-mha": (nothing, MGTBlock, nothing, layer_norm),
}
