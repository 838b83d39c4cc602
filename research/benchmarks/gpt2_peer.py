"""GPT-2 as its paper describes it (Radford et al. 2019; the block of Vaswani et al. 2017, with its norms moved).

Learned positions; x + F(LayerNorm(x)) for attention and an MLP of four times the width with the tanh form of GELU;
biases in every layer and norm; a LayerNorm before the output layer, which shares the embedding. Weights start at
N(0, 0.02), those of the layers that write to the stream at N(0, 0.02 / sqrt(2L)), biases at zero. No dropout: less than
an epoch is trained. How its parameters start and decay is said as in `model/`, so that what trains those trains this.
"""

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from model.parameters import Rule, constant, linear, normal

STD = 0.02


def dense(inputs: int, outputs: int, std: float = STD) -> nn.Linear:
    return linear(inputs, outputs, Rule(normal(std), decay=True), Rule(constant(0.0)))


def embedding(rows: int, width: int) -> nn.Embedding:
    table = nn.Embedding(rows, width)
    table.rules = {"weight": Rule(normal(STD), decay=True)}
    return table


def layer_norm(width: int) -> nn.LayerNorm:
    norm = nn.LayerNorm(width, eps=1e-5)
    norm.rules = {"weight": Rule(constant(1.0)), "bias": Rule(constant(0.0))}
    return norm


class Attention(nn.Module):
    def __init__(self, d: int, heads: int, std: float):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (dense(d, d) for _ in range(3))
        self.out = dense(d, d, std)

    def forward(self, x):
        split = [
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, heads, T, d / heads)
            for layer in (self.query, self.key, self.value)
        ]
        y = F.scaled_dot_product_attention(*split, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, d: int, heads: int, std: float):
        super().__init__()
        self.norm_1, self.attention = layer_norm(d), Attention(d, heads, std)
        self.norm_2, self.up, self.down = layer_norm(d), dense(d, 4 * d), dense(4 * d, d, std)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """logits, loss = model(ids, targets), as `model.gpt.GPT` has them; config: its sizes by a `GPTConfig`'s names."""

    def __init__(self, config):
        super().__init__()
        d, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
        self.config = SimpleNamespace(mup_scale=1.0)
        self.tokens, self.places = embedding(config.vocab_size, d), embedding(config.block_size, d)
        blocks = (Block(d, heads, STD / math.sqrt(2 * layers)) for _ in range(layers))
        self.blocks, self.norm = nn.ModuleList(blocks), layer_norm(d)
        for module in self.modules():
            for name, rule in getattr(module, "rules", {}).items():
                rule.start(getattr(module, name))

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def forward(self, ids, targets=None, return_logits: bool = False):
        """ids, targets: int64 (B, T); targets of -1 do not count. With targets, the mean loss in nats, in fp32."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits, None
        logits_of_all = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits_of_all, targets.flatten(), ignore_index=-1)
        return (logits if return_logits else None), loss
