"""The models as one would write them from docs and papers: one torch call per equation, nothing fused, nothing tuned.

A peer for speed (bench.py) and an oracle for values. It shares no code with `model/` and carries the same parameter
names, so that either loads the other's state dict. It covers the keys of the stems at their defaults, sizes, muP and
RoPE aside, of the paper's stems. The state is X (B, T, d, v), in the order of
the paper's indices and in the dtype of the activations, as the model's is. Statistics, gates and dot products are in at
least fp32.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


def fp32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def fp32_linear(layer: nn.Linear, x):
    with torch.autocast(x.device.type, enabled=False):
        return layer(fp32(x))


class RMSNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(fp32(x), self.weight.shape, self.weight, eps=1e-5).to(x.dtype)


def rotary_tables(config, tokens: int, like):
    """cos and sin, (T, 1, rotary_dim / 2) each."""
    half = int(config.head_dim * config.rope_ratio) // 2
    frequency = config.rope_base ** (
        -torch.arange(half, device=like.device, dtype=fp32(like).dtype) / max(half, 1)
    )
    angle = torch.arange(tokens, device=like.device)[:, None, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Half-split rotary embedding of the first features of x (B, T, H, head_dim)."""
    half = cos.shape[-1]
    x1, x2, rest = fp32(x).split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos, rest), dim=-1)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads, inner = config.num_attention_heads, config.num_attention_heads * config.head_dim
        self.c_q, self.c_k, self.c_v = (linear(config.hidden_size, inner) for _ in range(3))
        self.c_proj = linear(inner, config.hidden_size)
        self.q_rms, self.k_rms = (
            RMSNorm(config.head_dim) if config.use_qk_rmsnorm else nn.Identity() for _ in range(2)
        )

    def forward(self, c, tables):
        q, k, v = (
            layer(c).unflatten(-1, (self.heads, -1)) for layer in (self.c_q, self.c_k, self.c_v)
        )
        q = self.q_rms(rotate(q, *tables)).to(v.dtype)
        k = self.k_rms(rotate(k, *tables)).to(v.dtype)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, head_dim)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, inner = config.hidden_size, 8 * config.hidden_size // 3
        self.c_fc1, self.c_fc2, self.c_proj = linear(d, inner), linear(d, inner), linear(inner, d)

    def forward(self, c, tables):
        return self.c_proj(F.silu(self.c_fc1(c)) * self.c_fc2(c))


class SingleChannelRead(nn.Module):
    """x_in = X of the state with one column."""

    def __init__(self, config):
        super().__init__()

    def forward(self, X):
        return X.squeeze(3)


class ColumnRead(nn.Module):
    """A convolution over the v columns of each feature, then a weighted sum of its v results."""

    def __init__(self, config):
        super().__init__()
        columns = config.ddl_value_channels
        self.weight = nn.Parameter(torch.empty(config.hidden_size, columns))
        self.read = nn.Parameter(torch.empty(columns))

    def forward(self, X):
        before = (X.shape[3] - 1) // 2
        windows = F.pad(fp32(X), (before, X.shape[3] - 1 - before)).unfold(
            3, X.shape[3], 1
        )  # (B, T, d, v, taps)
        return ((windows * self.weight.unsqueeze(1)).sum(4) * self.read).sum(3)


class CausalConv(nn.Module):
    """Depthwise over tokens, (B, T, channels in) -> (B, T, channels out); weight (channels out, [1,] kernel)."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x):
        weight = self.weight.view(self.weight.shape[0], 1, -1)
        out = F.conv1d(x.transpose(1, 2), weight, padding=weight.shape[2] - 1, groups=x.shape[2])
        return out[..., : x.shape[1]].transpose(1, 2)


class TokenRead(nn.Module):
    """A convolution over tokens of the d*v channels, then a weighted sum over columns."""

    def __init__(self, config):
        super().__init__()
        channels = config.hidden_size * config.ddl_value_channels
        self.shortconv = CausalConv(channels, config.ddl_state_shortconv_kernel_size or 4)
        self.read = nn.Parameter(torch.empty(config.ddl_value_channels))

    def forward(self, X):
        return (fp32(self.shortconv(X.flatten(2)).unflatten(2, X.shape[2:])) * self.read).sum(3)


class Repeat(nn.Module):
    """x (B, T, d) in each of the v columns."""

    def __init__(self, config):
        super().__init__()
        self.columns = config.ddl_value_channels

    def forward(self, x):
        return x.unsqueeze(3).repeat(1, 1, 1, self.columns)


class EmbeddingConv(nn.Module):
    """Channel i*v + j is a convolution over tokens of feature i."""

    def __init__(self, config):
        super().__init__()
        d, v = config.hidden_size, config.ddl_value_channels
        self.conv = CausalConv(d * v, 1, config.input_embed_shortconv_kernel_size)

    def forward(self, x):
        return self.conv(x).unflatten(2, (x.shape[2], -1))


class Rewrite(nn.Module):
    """X' = X + beta k (v - X^T k)^T."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.beta = nn.Linear(config.hidden_size, 1)
        self.v_proj = nn.Linear(config.hidden_size, config.ddl_value_channels)

    def forward(self, X, h, x_in, c):
        d = X.shape[2]
        khat = F.rms_norm(fp32(h), (d,), eps=self.config.ddl_k_eps**2 / d)
        beta = 2 * fp32_linear(self.beta, c).sigmoid()  # (B, T, 1)
        t = self.config.ddl_v_sigmoid_scale * fp32_linear(self.v_proj, x_in).sigmoid()  # (B, T, v)
        p = (khat.unsqueeze(3) * fp32(X)).sum(2) / math.sqrt(d)  # (B, T, v)
        r = beta * (t - p) / math.sqrt(d)
        return (X + khat.unsqueeze(3) * r.unsqueeze(2)).to(X.dtype)


class Block(nn.Module):
    """X' = X + F(norm(X)), twice."""

    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = RMSNorm(config.hidden_size), RMSNorm(config.hidden_size)
        self.attn, self.mlp = Attention(config), MLP(config)

    def forward(self, X, tables):
        X = X + self.attn(self.ln_1(X), tables)
        return X + self.mlp(self.ln_2(X), tables)


class DeltaBlock(Block):
    """Compress - Process - Rewrite, twice."""

    def __init__(self, config, compressor):
        super().__init__(config)
        self.compress = compressor(config)
        self.ddl_attn, self.ddl_mlp = Rewrite(config), Rewrite(config)

    def forward(self, X, tables):
        for norm, sublayer, rewrite in (
            (self.ln_1, self.attn, self.ddl_attn),
            (self.ln_2, self.mlp, self.ddl_mlp),
        ):
            x_in = self.compress(X)
            c = norm(x_in)
            X = rewrite(X, sublayer(c, tables), x_in, c)
        return X


READS = {"DDL-vdim1-gpt-mha-rope": SingleChannelRead}
READS |= {"DDL-gpt-mha-rope": TokenRead, "DDL-gpt-mha-rope-EC": TokenRead}
READS |= {"DDL-gpt-mha-rope-CC": ColumnRead, "DDL-gpt-mha-rope-CC-EC": ColumnRead}


class Transcription(nn.Module):
    """`logits, loss = model(ids, targets)`, as the model of that stem. Weights start unset: load a model's."""

    def __init__(self, stem: str, config):
        """config: the model's own, from which every size is read."""
        super().__init__()
        self.config = config
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        if stem != "gpt-mha-rope" and stem not in READS:
            raise ValueError(f"{stem} has no transcription")
        read = READS.get(stem)
        expand = EmbeddingConv if stem.endswith("-EC") else Repeat
        self.input_embed = expand(config) if read else nn.Identity()
        self.readout = read(config) if read else nn.Identity()
        self.ln_f = RMSNorm(config.hidden_size)
        blocks = (
            DeltaBlock(config, read) if read else Block(config)
            for _ in range(config.num_hidden_layers)
        )
        self.transformer.h = nn.ModuleList(blocks)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.lm_head.weight = self.transformer.wte.weight

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def forward(self, ids, targets=None):
        """ids, targets int64 (B, T) -> (logits (B, T, vocab_size), None), or with targets (None, loss)."""
        x = self.transformer.wte(ids)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))
        tables = rotary_tables(self.config, ids.shape[1], x)
        X = self.input_embed(x)
        for block in self.transformer.h:
            X = block(X, tables)
        logits = fp32(self.lm_head(self.ln_f(self.readout(X))))
        if self.config.mup:
            logits = logits * (self.config.hidden_size_base / self.config.hidden_size)
        if targets is None:
            return logits, None
        return None, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
