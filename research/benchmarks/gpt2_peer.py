"""GPT-2 as its paper describes it (Radford et al. 2019; the block of Vaswani et al. 2017 with its norms moved).

It has learned positions; x + F(LayerNorm(x)) for attention and an MLP of four times the width with the tanh
form of GELU; biases in every layer and norm; and a LayerNorm before the output layer, which shares its weight
with the embedding. Weights start at N(0, 0.02), those of the layers that write to the residual stream at
N(0, 0.02 / sqrt(2L)), and biases at zero. There is no dropout, because less than an epoch is trained. The rules of
its parameters are those of `model/`, so that the training code of our models trains this one.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from model.gpt import GPTConfig
from model.parameters import Rule, constant, linear, normal

STD = 0.02


def make_linear(in_features: int, out_features: int, std: float = STD) -> nn.Linear:
    """Return a linear layer with a bias."""
    return linear(in_features, out_features, Rule(normal(std), decay=True), Rule(constant(0.0)))


def make_embedding(num_rows: int, width: int) -> nn.Embedding:
    """Return an embedding, which decays as GPT-2's does."""
    table = nn.Embedding(num_rows, width)
    table.rules = {"weight": Rule(normal(STD), decay=True)}
    return table


def make_layer_norm(width: int) -> nn.LayerNorm:
    """Return a LayerNorm with weight and bias."""
    norm = nn.LayerNorm(width, eps=1e-5)
    norm.rules = {"weight": Rule(constant(1.0)), "bias": Rule(constant(0.0))}
    return norm


class Attention(nn.Module):
    """Causal multi-head attention; `std` is that of its output layer."""

    def __init__(self, d: int, num_heads: int, std: float):
        super().__init__()
        self.num_heads = num_heads
        self.query = make_linear(d, d)
        self.key = make_linear(d, d)
        self.value = make_linear(d, d)
        self.out = make_linear(d, d, std)

    def forward(self, x):
        q = self.split_heads(self.query(x))
        k = self.split_heads(self.key(x))
        v = self.split_heads(self.value(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))

    def split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape (B, T, d) to (B, num_heads, T, d / num_heads)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """Attention and MLP with the norms before them."""

    def __init__(self, d: int, num_heads: int, std: float):
        super().__init__()
        self.norm_1 = make_layer_norm(d)
        self.attention = Attention(d, num_heads, std)
        self.norm_2 = make_layer_norm(d)
        self.up = make_linear(d, 4 * d)
        self.down = make_linear(4 * d, d, std)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


@dataclass(frozen=True)
class PeerConfig:
    """The key of a model's config that the training code reads."""

    mup_scale: float = 1.0


class GPT2(nn.Module):
    """GPT-2 with the interface of `model.gpt.GPT`: logits, loss = model(ids, targets).

    config: has the sizes; its other keys are not used.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        d = config.hidden_size
        num_layers = config.num_hidden_layers
        output_std = STD / math.sqrt(2 * num_layers)
        self.config = PeerConfig()
        self.tokens = make_embedding(config.vocab_size, d)
        self.positions = make_embedding(config.block_size, d)
        self.blocks = nn.ModuleList(
            Block(d, config.num_attention_heads, output_std) for _ in range(num_layers)
        )
        self.norm = make_layer_norm(d)
        for module in self.modules():
            for name, rule in getattr(module, "rules", {}).items():
                rule.start(getattr(module, name))

    def num_parameters(self) -> int:
        """Return the number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, ids, targets=None, return_logits: bool = False):
        """Return (logits, None), or with targets (None, or the logits with return_logits, and the loss).

        ids and targets are int64 (B, T), and targets of -1 do not count. The loss is the mean in nats, in
        fp32.
        """
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits, None
        fp32_logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(fp32_logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return (logits if return_logits else None), loss
