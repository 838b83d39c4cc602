"""Lambdas, value residuals (arXiv 2410.17897) and U-net skips, as in modded-nanogpt.

Before a block, x = a x + b x_0, where x_0 is the embedding (nanochat, modded-nanogpt). The values
of attention are (1 - g) v + g v_0, where v_0 are the values of block 0 (ResFormer, arXiv
2410.17897); every second block adds an embedding of the tokens to its values. Each block of the
second half adds the output of a block of the first half, in reverse order. The state is x, followed
by those of x_0, v_0 and the outputs of the first half that the keys ask for.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from model.block import Add, Block, Copies, Direct, First
from model.gpt import GPT, GPTConfig
from model.layers import AttentionInputs, at_least_fp32, for_product
from model.options import option
from model.parameters import Rule, constant


@dataclass
class LambdasConfig(GPTConfig):
    """Keys of lambdas, value residuals and U-net skip connections."""

    lambda_input: bool = option(
        True,
        "mix the token embedding x_0 into the input of each block, x = a x + b x_0, with learned "
        "scalars that start at a = 1 and b = 0",
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
            or self.lambda_values != "none"
            or self.lambda_value_embeddings
            or self.lambda_skips
        )
        if not has_lambda:
            raise ValueError(
                "lambda_values=none with lambda_input=False leaves the additive model; use "
                "--model=gpt-mha-rope"
            )


class Begin(nn.Module):
    """The attention's read: x as the block begins with it, then the rest of the state."""

    def __init__(self, config: LambdasConfig, pops: bool):
        super().__init__()
        starts = {"a": (1.0, 0.01), "b": (0.0, 1.0)} if config.lambda_input else {}
        starts |= {"skip": (1.0, 1.0)} if pops else {}
        self.names, self.hidden_size = tuple(starts), config.hidden_size
        self.rules = {name: Rule(constant(at), rate=rate) for name, (at, rate) in starts.items()}
        for name in starts:
            self.register_parameter(name, nn.Parameter(torch.empty(1)))

    def elementwise_flops(self) -> int:
        return 2 * len(self.names) * self.hidden_size

    def forward(self, state, past=None):
        x = state[0].to(at_least_fp32(state[0].dtype))
        x = x + self.skip * state[-1] if "skip" in self.names else x
        x = self.a * x + self.b * state[1] if "a" in self.names else x
        return x.to(state[0].dtype), *state[1:]


class Write(Add):
    """x + h, and the rest: without the output that was taken up, with v_0, with x."""

    takes_branch_mult = True

    def __init__(self, config: LambdasConfig, pops=False, values=None, pushes=False):
        super().__init__(config)
        self.pops, self.values, self.pushes = pops, values, pushes

    def forward(self, state, h, taken, c, past=None):
        x = super().forward(taken[0], h, None, c)
        rest = taken[1:-1] if self.pops else taken[1:]
        rest = (*rest, self.values(c).to(x.dtype)) if self.values else rest
        return (x, *rest, x) if self.pushes else (x, *rest)


class LambdasBlock(Block):
    def __init__(self, config: LambdasConfig, layer: int):
        super().__init__(config, layer)
        (attn, mlp), layers, shares = self.sites, config.num_hidden_layers, config.lambda_values
        pops = config.lambda_skips and layer >= layers - layers // 2
        self.begin, self.g, self.embedding = Begin(config, pops), None, None
        self.place = 1 + config.lambda_input  # of v_0 in the state
        if shares != "none" and layer:
            self.g = nn.Parameter(torch.empty(self.attn.num_heads if shares == "head" else 1))
            self.rules = {"g": Rule(constant(0.5))}
        if config.lambda_value_embeddings and (layers - 1 - layer) % 2 == 0:
            self.embedding = nn.Embedding(config.vocab_size, self.attn.c_v.out_features)
            self.embedding.rules = {"weight": Rule(constant(0.0), decay=True, rounded=True)}
        first = self.first_values if shares != "none" and not layer else None
        inputs = self.inputs if self.g is not None or self.embedding is not None else None
        attn = replace(attn, read=self.begin, inputs=inputs, write=Write(config, pops, first))
        pushes = config.lambda_skips and layer < layers // 2
        self.sites = attn, replace(mlp, read=Direct(), write=Write(config, pushes=pushes))

    def first_values(self, c):
        return self.attn.c_v(for_product(c, self.attn.c_v.weight))

    def inputs(self, c, taken, positions):
        def change(v):
            if self.g is not None:
                first = taken[self.place].view_as(v).to(v.dtype)
                v = torch.lerp(v, first, self.g.to(v.dtype)[:, None])
            if self.embedding is not None:
                v = v + positions.embed(self.embedding).view_as(v).to(v.dtype)
            return v

        return AttentionInputs(c, c, c, change)


class Model(GPT):
    Config, Block, Readout = LambdasConfig, LambdasBlock, First
    Expander = staticmethod(lambda config: Copies(1 + config.lambda_input))
    forms = (
        {"lambda_values": "head", "lambda_value_embeddings": True},
        {"lambda_input": False, "lambda_values": "none", "lambda_skips": True},
    )

    @torch.no_grad()
    def from_additive(self) -> None:
        for name, parameter in self.transformer.h.named_parameters():
            if name.endswith((".g", ".skip")):
                parameter.zero_()
