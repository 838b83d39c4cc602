"""Controls for other streams: the additive state X (B, T, d) with its norms in other places.

With n and n' as norms of a site, l as the index of its block and L as the number of blocks:

    sandwich   X' = X + n'(F(n(X)))               Peri-LN (arXiv 2502.02732)
    lns        X' = X + F(n(X) / sqrt(l + 1))     LayerNorm Scaling (arXiv 2502.05795)
    keel       X' = n'(2L X + F(n(X)))            KEEL (arXiv 2601.19895)
    post       X' = n(X + F(X))                   Post-LN (arXiv 1706.03762)
    deepnorm   X' = n((2L)^(1/4) X + F(X))        DeepNorm (arXiv 2203.00555)

In KEEL the first attention site writes X + F(n(X)), and the first MLP site n'(X + F(n(X))). The norm
of DeepNorm is a LayerNorm, the others are RMSNorms. The final norm stays. These are five of the
designs that DepthBench (arXiv 2609.32534) compares, as its code has them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import nn

from configurator import option

from ..block import Add, Block, Past
from ..gpt import GPT, GPTConfig
from ..layers import LayerNorm, Positions, RMSNorm
from ..precision import at_least_fp32


@dataclass
class NormPlacementConfig(GPTConfig):
    """Keys of the controls with norms in other places."""

    norm_placement: Literal["sandwich", "lns", "keel", "post", "deepnorm"] = option(
        "sandwich",
        "where the norms of a sublayer are; sandwich norms its input and its output (Peri-LN), lns "
        "divides its normalized input by sqrt(block), blocks counted from 1 (LayerNorm Scaling), "
        "keel norms its input and the scaled state plus its output (KEEL), post norms the state "
        "plus its output (Post-LN), deepnorm does so with a scaled state, LayerNorm and smaller "
        "initial matrices (DeepNorm)",
    )


class PlacedAdd(Add):
    """The write X' = factor * X + norm(h), without a norm factor * X + h."""

    def __init__(
        self, config: NormPlacementConfig, factor: float = 1.0, norm: nn.Module | None = None
    ):
        super().__init__(config)
        self.factor = factor
        self.norm = nn.Identity() if norm is None else norm

    def forward(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> torch.Tensor:
        dtype = at_least_fp32(state.dtype)
        update = self.branch_mult * self.norm(h.to(dtype))
        return (self.factor * state.to(dtype) + update).to(state.dtype)


def divide(
    c: torch.Tensor, x_in: torch.Tensor, positions: Positions, divisor: float
) -> torch.Tensor:
    """Return the input of a sublayer: c divided by a constant."""
    return c / divisor


def start_divided(parameter: torch.Tensor, start: Callable, divisor: float) -> None:
    """Initialize the parameter by `start`, and divide it."""
    start(parameter)
    parameter.div_(divisor)


class NormPlacementBlock(Block):
    def __init__(self, config: NormPlacementConfig, layer: int):
        super().__init__(config, layer)
        d = config.hidden_size
        num_sites = 2 * config.num_hidden_layers
        attn, mlp = self.sites
        if config.norm_placement == "sandwich":
            self.write_attn = PlacedAdd(config, norm=RMSNorm(d))
            self.write_mlp = PlacedAdd(config, norm=RMSNorm(d))
            attn = replace(attn, write=self.write_attn)
            mlp = replace(mlp, write=self.write_mlp)
        elif config.norm_placement == "lns":
            scale = partial(divide, divisor=math.sqrt(layer + 1))
            attn = replace(attn, inputs=scale)
            mlp = replace(mlp, inputs=scale)
        elif config.norm_placement == "keel":
            write = PlacedAdd(config, factor=1 if layer == 0 else num_sites)
            self.post_mlp = RMSNorm(d)
            mlp = replace(mlp, write=write, post_write=self.post_mlp)
            if layer > 0:
                self.post_attn = RMSNorm(d)
                attn = replace(attn, write=write, post_write=self.post_attn)
        elif config.norm_placement == "post":
            attn = replace(attn, norm=None, post_write=self.ln_1)
            mlp = replace(mlp, norm=None, post_write=self.ln_2)
        else:
            self.ln_1 = LayerNorm(d)
            self.ln_2 = LayerNorm(d)
            write = PlacedAdd(config, factor=num_sites**0.25)
            attn = replace(attn, norm=None, write=write, post_write=self.ln_1)
            mlp = replace(mlp, norm=None, write=write, post_write=self.ln_2)
            self.start_smaller(config)
        self.sites = (attn, mlp)

    def start_smaller(self, config: NormPlacementConfig) -> None:
        """Divide the initial matrices that DepthBench divides, in place of output matrices alone."""
        divisor = (8 * config.num_hidden_layers) ** 0.25
        start = partial(start_divided, start=config.matrix_start(), divisor=divisor)
        mlp_matrices = (self.mlp.c_fc1, self.mlp.c_fc2, self.mlp.c_proj)
        for matrix in (self.attn.c_v, self.attn.c_proj, *mlp_matrices):
            matrix.rules = {"weight": matrix.rules["weight"]._replace(start=start)}


class Model(GPT):
    Config = NormPlacementConfig
    Block = NormPlacementBlock
