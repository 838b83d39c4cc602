"""MUDDFormer (arXiv 2502.12170): input-dependent dense connections to all earlier blocks.

Let h_0 be the embedding, h_1, ..., h_(l+1) the outputs of blocks 0 to l, and x the last of them.
After block l, w = W2 gelu(W1 rms_norm(x)) + b, and input c of the next block is sum_j w_cj h_j. The
inputs, which the paper calls ways, are those of queries, keys, values and the residual stream; the
readout has the last one alone. With W2 = 0, and b = 1 for x and 0 for the others, the model starts
as the additive one. The state is the tuple of the ways, followed by h_0, h_1, ...
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ..block import Add, Block, Copies, First, Past
from ..gpt import GPT, GPTConfig
from ..layers import AttentionInputs, Positions, RMSNorm
from ..parameters import FIXED, OUTPUT, Rule, constant, linear, normal, one_hot
from ..precision import at_least_fp32, linear_fp32

NUM_WAYS = 4


class AddToLastWay(Add):
    """The additive write to the last way, the residual stream; it drops the other ways."""

    def __init__(self, config: GPTConfig, num_ways: int):
        super().__init__(config)
        self.num_ways = num_ways

    def forward(
        self,
        state: tuple[torch.Tensor, ...],
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> tuple[torch.Tensor, ...]:
        residual = state[self.num_ways - 1]
        outputs = state[self.num_ways :]
        return super().forward(residual, h, x_in, c, past), *outputs


class DenseConnection(nn.Module):
    """Maps (x, h_0, ..., h_l) to (the ways, h_0, ..., h_l, x)."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        is_last_block = layer == config.num_hidden_layers - 1
        num_ways = 1 if is_last_block else NUM_WAYS
        d = config.hidden_size
        self.static = nn.Parameter(torch.empty(num_ways, layer + 2))  # b
        self.rules = {"static": Rule(partial(one_hot, index=-1))}
        size = self.static.numel()
        self.first = linear(d, size, Rule(normal(config.hidden_init_std), OUTPUT, decay=True))  # W1
        self.second = linear(size, size, Rule(constant(0.0), FIXED, decay=True))  # W2

    def forward(self, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, *earlier_outputs = state
        outputs = (*earlier_outputs, x)
        x_fp32 = x.to(at_least_fp32(x.dtype))
        normed = F.rms_norm(x_fp32, x.shape[-1:], eps=1e-6)
        dynamic = linear_fp32(self.second, F.gelu(linear_fp32(self.first, normed)))
        # w_cj: the weight of output j in way c
        weights = dynamic.unflatten(-1, self.static.shape) + self.static  # (B, T, ways, outputs)
        weights = weights.unsqueeze(-1)
        # One output after the other, so that each is read once for all ways.
        sums = [torch.zeros_like(x_fp32) for _ in self.static]
        for j, output in enumerate(outputs):
            output_fp32 = output.to(x_fp32.dtype)
            sums = [
                torch.addcmul(way_sum, weights[:, :, way, j], output_fp32)
                for way, way_sum in enumerate(sums)
            ]
        return *(way_sum.to(x.dtype) for way_sum in sums), *outputs


def read_qkv(state: tuple[torch.Tensor, ...], past: Past | None = None) -> tuple[torch.Tensor, ...]:
    """Return the ways of queries, keys and values."""
    return state[:3]


class MUDDBlock(Block):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__(config, layer)
        self.dense = DenseConnection(config, layer)
        # ln_1 normalizes the way of the queries
        self.ln_k = RMSNorm(config.hidden_size)
        self.ln_v = RMSNorm(config.hidden_size)
        attn, mlp = self.sites
        self.sites = (
            replace(
                attn,
                read=read_qkv,
                inputs=self.attention_inputs,
                write=AddToLastWay(config, NUM_WAYS),
            ),
            replace(mlp, read=First(), write=AddToLastWay(config, 1), post_write=self.dense),
        )

    def attention_inputs(
        self, c: torch.Tensor, qkv: tuple[torch.Tensor, ...], positions: Positions
    ) -> AttentionInputs:
        """Return the normalized ways; c is that of the queries."""
        return AttentionInputs(query=c, key=self.ln_k(qkv[1]), value=self.ln_v(qkv[2]))


def first_state(config: GPTConfig) -> nn.Module:
    """Return the expander: the ways and h_0 are all the embedding."""
    return Copies(NUM_WAYS + 1)


class Model(GPT):
    Expander = staticmethod(first_state)
    Block = MUDDBlock
    Readout = First
