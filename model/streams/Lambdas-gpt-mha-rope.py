"""Lambdas, value residuals (arXiv 2410.17897) and U-net skips, as in modded-nanogpt.

Before a block, x = a x + b x_0, where x_0 is the embedding (nanochat, modded-nanogpt), or x = a x
(lambda_gain), the additive stream with one learned factor per block on the stream only. The values
of attention are (1 - g) v + g v_0, where v_0 are the values of block 0 (ResFormer, arXiv
2410.17897); every second block adds an embedding of the tokens to its values. Each block of the
second half adds the output of a block of the first half, in reverse order. The state is x, followed
by those of x_0, v_0 and the outputs of the first half that the keys ask for.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import nn

from configurator import option

from ..block import Add, Block, Copies, Direct, First, Past
from ..gpt import GPT, GPTConfig
from ..layers import CausalSelfAttention, Positions
from ..parameters import Rule, constant
from ..precision import at_least_fp32, for_product


@dataclass
class LambdasConfig(GPTConfig):
    """Keys of lambdas, value residuals and U-net skip connections."""

    lambda_input: bool = option(
        True,
        "mix the token embedding x_0 into the input of each block, x = a x + b x_0, with learned "
        "scalars that start at a = 1 and b = 0",
    )
    lambda_gain: bool = option(
        False,
        "multiply the input of each block by a learned scalar, x = a x, that starts at a = 1, "
        "without the token embedding; a control for lambda_input, which also has this scalar",
    )
    lambda_values: Literal["none", "layer", "head"] = option(
        "layer",
        "value residual, which mixes the attention values of the first block into those of each "
        "later block, with a learned weight that starts at 0.5; layer has one weight per block, "
        "head has one per attention head, none disables it",
    )
    lambda_value_embeddings: bool = option(
        False,
        "add learned token embeddings, which start at zero, to the attention values of every "
        "second block, counted back from the last one",
    )
    lambda_skips: bool = option(
        False,
        "U-net skip connections, which add the outputs of the first half of the blocks to the "
        "inputs of the second half, in reverse order, with learned factors that start at 1",
    )

    def __post_init__(self):
        super().__post_init__()
        has_lambda = (
            self.lambda_input
            or self.lambda_gain
            or self.lambda_values != "none"
            or self.lambda_value_embeddings
            or self.lambda_skips
        )
        if not has_lambda:
            raise ValueError(
                "lambda_values=none with lambda_input=False leaves the additive model; use "
                "--model=gpt-mha-rope"
            )


class BlockInput(nn.Module):
    """The read of attention: maps the state to a tuple of x, mixed, and the rest of the state.

    x = a x + b x_0, after the skip connection x + skip * (output of an earlier block), if any;
    with lambda_gain, x = a x.
    """

    def __init__(self, config: LambdasConfig, pops_skip: bool):
        super().__init__()
        self.mixes_embedding = config.lambda_input
        self.has_gain = config.lambda_gain
        self.pops_skip = pops_skip
        self.rules = {}
        if self.mixes_embedding:
            self.add_scalar("a", start=1.0, lr_scale=0.01)
            self.add_scalar("b", start=0.0, lr_scale=1.0)
        elif self.has_gain:
            self.add_scalar("a", start=1.0, lr_scale=0.01)
        if self.pops_skip:
            self.add_scalar("skip", start=1.0, lr_scale=1.0)

    def add_scalar(self, name: str, start: float, lr_scale: float) -> None:
        """Add a learned scalar; lr_scale is a factor on its learning rate."""
        self.register_parameter(name, nn.Parameter(torch.empty(1)))
        self.rules[name] = Rule(constant(start), lr_scale=lr_scale)

    def forward(
        self, state: tuple[torch.Tensor, ...], past: Past | None = None
    ) -> tuple[torch.Tensor, ...]:
        x = state[0].to(at_least_fp32(state[0].dtype))
        # the last tensor is the output of the latest block whose skip connection is still open
        if self.pops_skip:
            x = x + self.skip * state[-1]
        if self.mixes_embedding:
            x = self.a * x + self.b * state[1]
        elif self.has_gain:
            x = self.a * x
        return x.to(state[0].dtype), *state[1:]


class LambdasWrite(Add):
    """The additive write to x, and the changes of the rest of the state.

    Args:
        pops_skip: whether it drops the last tensor, the output of an earlier block
        first_values: function of c that gives the values of block 0, which it appends; or None
        pushes_skip: whether it appends the new x, the output of the block
    """

    def __init__(
        self,
        config: LambdasConfig,
        pops_skip: bool = False,
        first_values: Callable[[torch.Tensor], torch.Tensor] | None = None,
        pushes_skip: bool = False,
    ):
        super().__init__(config)
        self.pops_skip = pops_skip
        self.first_values = first_values
        self.pushes_skip = pushes_skip

    def forward(
        self,
        state: tuple[torch.Tensor, ...],
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> tuple[torch.Tensor, ...]:
        # x_in is the entire tuple that the read returned
        x = super().forward(x_in[0], h, None, c)
        rest = x_in[1:-1] if self.pops_skip else x_in[1:]
        if self.first_values is not None:
            rest = (*rest, self.first_values(c).to(x.dtype))
        if self.pushes_skip:
            rest = (*rest, x)
        return x, *rest


class ChangedValues(NamedTuple):
    """The input c of `LambdasAttention`, and the function that changes its values."""

    # (B, T, d)
    c: torch.Tensor

    # from and to values (B, T, H, head_dim)
    change: Callable[[torch.Tensor], torch.Tensor]


class LambdasAttention(CausalSelfAttention):
    """Attention that uses changed values; the cache stores them as well."""

    def project(self, x: ChangedValues) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().project(for_product(x.c, self.c_q.weight))
        return q, k, x.change(v).to(v.dtype)


class LambdasBlock(Block):
    def __init__(self, config: LambdasConfig, layer: int):
        super().__init__(config, layer)
        num_layers = config.num_hidden_layers
        has_value_residual = config.lambda_values != "none"
        pops_skip = config.lambda_skips and layer >= num_layers - num_layers // 2
        pushes_skip = config.lambda_skips and layer < num_layers // 2

        self.begin = BlockInput(config, pops_skip)
        self.g = None
        self.embedding = None
        # index of v_0 in the state: after x, and x_0 if it is kept
        self.first_values_index = 2 if config.lambda_input else 1
        if has_value_residual and layer > 0:
            num_weights = self.attn.num_heads if config.lambda_values == "head" else 1
            self.g = nn.Parameter(torch.empty(num_weights))
            self.rules = {"g": Rule(constant(0.5))}
        # every second block, counted back from the last
        if config.lambda_value_embeddings and (num_layers - 1 - layer) % 2 == 0:
            self.embedding = nn.Embedding(config.vocab_size, self.attn.c_v.out_features)
            self.embedding.rules = {"weight": Rule(constant(0.0), decay=True)}

        attn, mlp = self.sites
        changes_values = self.g is not None or self.embedding is not None
        appends_values = has_value_residual and layer == 0
        attn_write = LambdasWrite(
            config,
            pops_skip=pops_skip,
            first_values=self.compute_values if appends_values else None,
        )
        attn = replace(attn, read=self.begin, write=attn_write)
        if changes_values:
            self.attn = LambdasAttention(config)
            attn = replace(attn, sublayer=self.attn, inputs=self.attention_inputs)
        mlp = replace(mlp, read=Direct(), write=LambdasWrite(config, pushes_skip=pushes_skip))
        self.sites = (attn, mlp)

    def compute_values(self, c: torch.Tensor) -> torch.Tensor:
        """Return the values of attention, (B, T, H * head_dim)."""
        return self.attn.c_v(for_product(c, self.attn.c_v.weight))

    def attention_inputs(
        self, c: torch.Tensor, x_in: tuple[torch.Tensor, ...], positions: Positions
    ) -> ChangedValues:
        """Return c, with a change of the values by those of block 0 and by the token embedding."""

        def change_values(v: torch.Tensor) -> torch.Tensor:
            # v = (1 - g) v + g v_0
            if self.g is not None:
                first_values = x_in[self.first_values_index].view_as(v).to(v.dtype)
                v = torch.lerp(v, first_values, self.g.to(v.dtype)[:, None])
            if self.embedding is not None:
                v = v + positions.embed(self.embedding).view_as(v).to(v.dtype)
            return v

        return ChangedValues(c, change_values)


def copies_of_embedding(config: LambdasConfig) -> Copies:
    """Return the expander: x, and x_0 if it is kept, are the embedding."""
    return Copies(2 if config.lambda_input else 1)


class Model(GPT):
    Config = LambdasConfig
    Expander = staticmethod(copies_of_embedding)
    Block = LambdasBlock
    Readout = First
