"""The residual connection of nGPT (arXiv 2410.01131), without the other parts of nGPT.

    X' = L2(X + |alpha| * (L2(F(norm(X))) - X))    with a learned alpha for each channel

L2 gives a vector, also the embedding, the length sqrt(d), so that its mean square is 1. nGPT's
length is 1, which is the same here, as reads are normalized. nGPT also normalizes all weights,
learns scales of queries, keys, the MLP and the logits, and has no norm before F.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..block import Add, Direct, Past, WritingBlock
from ..gpt import GPT, GPTConfig
from ..parameters import Rule, constant
from ..precision import at_least_fp32


def normalize(x: torch.Tensor) -> torch.Tensor:
    """Return x (B, T, d) with a mean square of 1, in at least fp32."""
    # 1e-6 is added to the sum of squares, as in transformers' Dory
    eps = 1e-6 / x.shape[-1]
    return F.rms_norm(x.to(at_least_fp32(x.dtype)), x.shape[-1:], eps=eps)


class NormalizedEmbedding(Direct):
    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        return normalize(x).to(x.dtype)


class SphereWrite(Add):
    """The write X' = L2(X + |alpha| * (L2(h) - X))."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.alpha = nn.Parameter(torch.empty(config.hidden_size))
        # Dory trains s, which starts at 0.0177, where alpha = 0.05 s / 0.0177; an AdamW step on s
        # moves alpha by 0.05 / 0.0177 times the learning rate
        self.rules = {"alpha": Rule(constant(0.05), lr_scale=0.05 / 0.0177)}

    def forward(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> torch.Tensor:
        x = state.to(at_least_fp32(state.dtype))
        alpha = self.alpha.abs().to(x.dtype)
        return normalize(torch.lerp(x, normalize(h), alpha)).to(state.dtype)


class SphereBlock(WritingBlock):
    Write = SphereWrite


class Model(GPT):
    Expander = NormalizedEmbedding
    Block = SphereBlock
