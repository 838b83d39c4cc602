"""The models as one would write them from docs and papers: one torch call per equation, nothing fused or tuned.

It is a peer for speed (bench.py) and an oracle for values. It shares no code with `model/` and has the same parameter
names, so that a state dict of either can be loaded into the other. It covers the models of the paper with all keys at
their defaults, except sizes, muP and RoPE. The state is X (B, T, d, d_v), in the order of the paper's indices and in
the dtype of the activations, like that of the models. Statistics, gates and dot products are at least in fp32.
"""

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from model.gpt import GPTConfig


def fp32(x: torch.Tensor) -> torch.Tensor:
    """Convert to fp32, or keep fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def make_linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a linear layer without a bias."""
    return nn.Linear(in_features, out_features, bias=False)


def apply_in_fp32(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Apply a layer without autocast."""
    with torch.autocast(x.device.type, enabled=False):
        return layer(fp32(x))


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(fp32(x), self.weight.shape, self.weight, eps=1e-5).to(x.dtype)


def make_rotary_tables(
    config: "GPTConfig", num_tokens: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, (T, 1, rotary_dim / 2) each, on the device of `like` and in its dtype."""
    half = int(config.head_dim * config.rope_ratio) // 2
    exponent = -torch.arange(half, device=like.device, dtype=fp32(like).dtype) / max(half, 1)
    frequency = config.rope_base**exponent
    angle = torch.arange(num_tokens, device=like.device)[:, None, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the half-split rotary embedding to the first features of x (B, T, H, head_dim)."""
    half = cos.shape[-1]
    x1, x2, rest = fp32(x).split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos, rest), dim=-1)


class Attention(nn.Module):
    """Causal multi-head attention with rotary embedding and, by default, normalized queries and keys."""

    def __init__(self, config: "GPTConfig"):
        super().__init__()
        self.num_heads = config.num_attention_heads
        inner_size = config.num_attention_heads * config.head_dim
        self.c_q = make_linear(config.hidden_size, inner_size)
        self.c_k = make_linear(config.hidden_size, inner_size)
        self.c_v = make_linear(config.hidden_size, inner_size)
        self.c_proj = make_linear(inner_size, config.hidden_size)
        self.q_rms = RMSNorm(config.head_dim) if config.use_qk_rmsnorm else nn.Identity()
        self.k_rms = RMSNorm(config.head_dim) if config.use_qk_rmsnorm else nn.Identity()

    def forward(self, c, rotary_tables):
        cos, sin = rotary_tables
        # (B, T, H, head_dim)
        q = self.c_q(c).unflatten(-1, (self.num_heads, -1))
        k = self.c_k(c).unflatten(-1, (self.num_heads, -1))
        v = self.c_v(c).unflatten(-1, (self.num_heads, -1))
        q = self.q_rms(rotate(q, cos, sin)).to(v.dtype)
        k = self.k_rms(rotate(k, cos, sin)).to(v.dtype)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, head_dim)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """A SwiGLU MLP of 8/3 times the width."""

    def __init__(self, config: "GPTConfig"):
        super().__init__()
        inner_size = 8 * config.hidden_size // 3
        self.c_fc1 = make_linear(config.hidden_size, inner_size)
        self.c_fc2 = make_linear(config.hidden_size, inner_size)
        self.c_proj = make_linear(inner_size, config.hidden_size)

    def forward(self, c, rotary_tables):
        return self.c_proj(F.silu(self.c_fc1(c)) * self.c_fc2(c))


class SingleChannelRead(nn.Module):
    """x_in is the state, which has one value channel."""

    def __init__(self, config: "GPTConfig"):
        super().__init__()

    def forward(self, X):
        return X.squeeze(3)


class ChannelRead(nn.Module):
    """A convolution over the d_v value channels of each feature, then a weighted sum of its results."""

    def __init__(self, config: "GPTConfig"):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size, config.ddl_value_channels))
        self.read = nn.Parameter(torch.empty(config.ddl_value_channels))

    def forward(self, X):
        value_channels = X.shape[3]
        padding = (value_channels - 1) // 2
        padded = F.pad(fp32(X), (padding, value_channels - 1 - padding))
        windows = padded.unfold(3, value_channels, 1)  # (B, T, d, d_v, kernel size)
        return ((windows * self.weight.unsqueeze(1)).sum(4) * self.read).sum(3)


class CausalConv(nn.Module):
    """A depthwise convolution over tokens, (B, T, in_channels) -> (B, T, out_channels).

    shape: of its weight, (out_channels, [1,] kernel size).
    """

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self, x):
        weight = self.weight.view(self.weight.shape[0], 1, -1)
        out = F.conv1d(x.transpose(1, 2), weight, padding=weight.shape[2] - 1, groups=x.shape[2])
        return out[..., : x.shape[1]].transpose(1, 2)


class TokenRead(nn.Module):
    """A convolution over tokens of the d * d_v channels, then a weighted sum over value channels."""

    def __init__(self, config: "GPTConfig"):
        super().__init__()
        channels = config.hidden_size * config.ddl_value_channels
        self.shortconv = CausalConv(channels, config.ddl_state_shortconv_kernel_size or 4)
        self.read = nn.Parameter(torch.empty(config.ddl_value_channels))

    def forward(self, X):
        convolved = self.shortconv(X.flatten(2)).unflatten(2, X.shape[2:])
        return (fp32(convolved) * self.read).sum(3)


class Repeat(nn.Module):
    """x (B, T, d) in each of the d_v value channels."""

    def __init__(self, config: "GPTConfig"):
        super().__init__()
        self.value_channels = config.ddl_value_channels

    def forward(self, x):
        return x.unsqueeze(3).repeat(1, 1, 1, self.value_channels)


class EmbeddingConv(nn.Module):
    """Channel i * d_v + j is a convolution over tokens of feature i."""

    def __init__(self, config: "GPTConfig"):
        super().__init__()
        num_channels = config.hidden_size * config.ddl_value_channels
        self.conv = CausalConv(num_channels, 1, config.input_embed_shortconv_kernel_size)

    def forward(self, x):
        return self.conv(x).unflatten(2, (x.shape[2], -1))


class Rewrite(nn.Module):
    """X' = X + beta k (v - X^T k)^T."""

    def __init__(self, config: "GPTConfig"):
        super().__init__()
        self.config = config
        self.beta = nn.Linear(config.hidden_size, 1)
        self.v_proj = nn.Linear(config.hidden_size, config.ddl_value_channels)

    def forward(self, X, h, x_in, c):
        d = X.shape[2]
        khat = F.rms_norm(fp32(h), (d,), eps=self.config.ddl_k_eps**2 / d)
        beta = 2 * apply_in_fp32(self.beta, c).sigmoid()  # (B, T, 1)
        t = (
            self.config.ddl_v_sigmoid_scale * apply_in_fp32(self.v_proj, x_in).sigmoid()
        )  # (B, T, v)
        p = (khat.unsqueeze(3) * fp32(X)).sum(2) / math.sqrt(d)  # (B, T, v)
        r = beta * (t - p) / math.sqrt(d)
        return (X + khat.unsqueeze(3) * r.unsqueeze(2)).to(X.dtype)


class Block(nn.Module):
    """X' = X + F(norm(X)), twice."""

    def __init__(self, config: "GPTConfig"):
        super().__init__()
        self.ln_1 = RMSNorm(config.hidden_size)
        self.ln_2 = RMSNorm(config.hidden_size)
        self.attn = Attention(config)
        self.mlp = MLP(config)

    def forward(self, X, rotary_tables):
        X = X + self.attn(self.ln_1(X), rotary_tables)
        return X + self.mlp(self.ln_2(X), rotary_tables)


class DeltaBlock(Block):
    """Compress, process and rewrite the state, twice. `read` is the class of the compressor."""

    def __init__(self, config: "GPTConfig", read: type[nn.Module]):
        super().__init__(config)
        self.compress = read(config)
        self.ddl_attn = Rewrite(config)
        self.ddl_mlp = Rewrite(config)

    def forward(self, X, rotary_tables):
        for norm, sublayer, rewrite in (
            (self.ln_1, self.attn, self.ddl_attn),
            (self.ln_2, self.mlp, self.ddl_mlp),
        ):
            x_in = self.compress(X)
            c = norm(x_in)
            X = rewrite(X, sublayer(c, rotary_tables), x_in, c)
        return X


READS = {
    "DDL-vdim1-gpt-mha-rope": SingleChannelRead,
    "DDL-gpt-mha-rope": TokenRead,
    "DDL-gpt-mha-rope-EC": TokenRead,
    "DDL-gpt-mha-rope-CC": ChannelRead,
    "DDL-gpt-mha-rope-CC-EC": ChannelRead,
}


class Transcription(nn.Module):
    """The transcription of a model: logits, loss = transcription(ids, targets).

    Its weights are not initialized: load those of a model.

    Args:
        model_name: the additive baseline or one of READS
        config: of the model, from which all sizes are read

    Raises:
        ValueError: the model has no transcription
    """

    def __init__(self, model_name: str, config: "GPTConfig"):
        super().__init__()
        if model_name != "gpt-mha-rope" and model_name not in READS:
            raise ValueError(f"{model_name} has no transcription")
        self.config = config
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        if model_name in READS:
            read = READS[model_name]
            expand = EmbeddingConv if model_name.endswith("-EC") else Repeat
            self.input_embed = expand(config)
            self.readout = read(config)
            blocks = [DeltaBlock(config, read) for _ in range(config.num_hidden_layers)]
        else:
            self.input_embed = nn.Identity()
            self.readout = nn.Identity()
            blocks = [Block(config) for _ in range(config.num_hidden_layers)]
        self.ln_f = RMSNorm(config.hidden_size)
        self.transformer.h = nn.ModuleList(blocks)
        self.lm_head = make_linear(config.hidden_size, config.vocab_size)
        self.lm_head.weight = self.transformer.wte.weight

    def num_parameters(self) -> int:
        """Return the number of parameters; the shared embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, ids, targets=None):
        """Return (logits (B, T, vocab_size), None) of ids (B, T), or with targets (B, T) (None, loss)."""
        x = self.transformer.wte(ids)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))
        rotary_tables = make_rotary_tables(self.config, ids.shape[1], x)
        X = self.input_embed(x)
        for block in self.transformer.h:
            X = block(X, rotary_tables)
        logits = fp32(self.lm_head(self.ln_f(self.readout(X))))
        if self.config.mup:
            logits = logits * (self.config.hidden_size_base / self.config.hidden_size)
        if targets is None:
            return logits, None
        return None, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
