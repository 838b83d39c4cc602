"""Muse Spark's residual gate: X' = a X + b n(F(norm(X))), with learned a and b for each channel.

b = sigmoid(g / 0.3), with g from N(0, 0.02), and a = sqrt(max(1 - b^2, 0.001)). n is an RMSNorm
without a weight; it normalizes w * h at the MLP's site, with a learned w that starts at 1. As the
embedding is normalized too, a write keeps the mean square of the state if its update is not
correlated with the state. This is the stream of `MuseSparkTextModel` of transformers.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from ..block import Add, Block, Direct, Past
from ..gpt import GPT, GPTConfig
from ..parameters import Rule, constant, normal
from ..precision import at_least_fp32


class NormalizedEmbedding(Direct):
    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        return F.rms_norm(x.to(at_least_fp32(x.dtype)), x.shape[-1:], eps=1e-5).to(x.dtype)


class GatedWrite(Add):
    """The write X' = a X + b n(h), or a X + b n(w * h) if it scales the output."""

    def __init__(self, config: GPTConfig, scales_output: bool):
        super().__init__(config)
        self.gate = nn.Parameter(torch.empty(config.hidden_size))
        self.rules = {"gate": Rule(normal(0.02))}
        self.output_scale = None
        if scales_output:
            self.output_scale = nn.Parameter(torch.empty(config.hidden_size))
            self.rules["output_scale"] = Rule(constant(1.0))

    def forward(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> torch.Tensor:
        dtype = at_least_fp32(state.dtype)
        update = h.to(dtype) if self.output_scale is None else self.output_scale * h.to(dtype)
        b = (self.gate / 0.3).sigmoid()
        # 1 - b as a sigmoid, which is exact where it is small
        a = ((-self.gate / 0.3).sigmoid() * (1 + b)).clamp(min=1e-3).sqrt()
        return (a * state + b * F.rms_norm(update, h.shape[-1:], eps=1e-8)).to(state.dtype)


class MuseSparkBlock(Block):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__(config, layer)
        self.write_attn = GatedWrite(config, scales_output=False)
        self.write_mlp = GatedWrite(config, scales_output=True)
        attn, mlp = self.sites
        self.sites = (replace(attn, write=self.write_attn), replace(mlp, write=self.write_mlp))


class Model(GPT):
    Expander = NormalizedEmbedding
    Block = MuseSparkBlock
