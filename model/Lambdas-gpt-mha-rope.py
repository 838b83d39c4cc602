"""What speed runs add to the additive stream: learned shares of the embedding, values of block 0, U-net skips.

Before a block x = a x + b x_0, x_0 being the embedding (nanochat, modded-nanogpt). Values are
(1 - g) v + g v_0, v_0 block 0's (ResFormer, arXiv 2410.17897); every second block's have an
embedding of the tokens added. The second half of the blocks takes up the first half's outputs, in
the other order. The state is x, then, as they are asked for, x_0, v_0 and outputs.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import nn

from model.block import Add, Block, Copies, Direct, First
from model.gpt import GPT, GPTConfig
from model.layers import AttentionInputs, at_least_fp32, for_product
from model.parameters import Rule, constant


@dataclass
class LambdasConfig(GPTConfig):
    """Keys of the learned shares."""

    lambda_input: Annotated[bool, "x = a x + b x_0 before a block; a starts at 1, b at 0"] = True
    lambda_values: Annotated[
        Literal["none", "layer", "head"], "a share g of block 0's values, which starts at 0.5"
    ] = "layer"
    lambda_value_embeddings: Annotated[
        bool, "every second block, the last too, adds embeddings, from 0, to its values"
    ] = False
    lambda_skips: Annotated[
        bool, "blocks of the second half add outputs of the first, times a factor from 1"
    ] = False

    def __post_init__(self):
        super().__post_init__()
        kept = self.lambda_input, self.lambda_value_embeddings, self.lambda_skips
        if self.lambda_values == "none" and not any(kept):
            off = "lambda_values=none, lambda_input=False"
            raise ValueError(f"{off}: no lambda is left: give --model=gpt-mha-rope")


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
