"""Streams with one fault each, with the check of contract.py that finds it and its message."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from model import kernels
from model.block import Add, Block, Direct, delay
from model.ddl import DeltaBlock, DeltaRewrite, Repeat, SingleChannelRead
from model.ddl_config import SingleChannelConfig
from model.gpt import GPT
from model.parameters import Rule


def additive(read: Callable = Direct, write: Callable = Add, **members) -> type[GPT]:
    """Return a model class whose sites have the read and the write.

    read, write: classes that are called with the config
    members: attributes of the model class
    """

    class OtherBlock(Block):
        def __init__(self, config, layer):
            super().__init__(config, layer)
            self.parts = nn.ModuleList(
                nn.ModuleList((read(config), write(config))) for _ in self.sites
            )
            self.sites = tuple(
                replace(site, read=site_read, write=site_write)
                for site, (site_read, site_write) in zip(self.sites, self.parts)
            )

    return type("Model", (GPT,), {"Block": OtherBlock, **members})


def delta(first: Callable, later: Callable) -> type[GPT]:
    """Return a model class with one value channel.

    first, later: the classes of its writes in block 0 and in the blocks after it
    """

    class OtherBlock(DeltaBlock):
        def __init__(self, config, layer):
            super().__init__(config, layer)
            write = first if layer == 0 else later
            self.ddl_attn = write(config)
            self.ddl_mlp = write(config)
            attn, mlp = self.sites
            self.sites = (
                replace(attn, write=self.ddl_attn),
                replace(mlp, write=self.ddl_mlp),
            )

    classes = {
        "Config": SingleChannelConfig,
        "Expander": Repeat,
        "Block": OtherBlock,
        "Readout": SingleChannelRead,
    }
    return type("Model", (GPT,), classes)


class Gated(Add):
    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, state, h, x_in, c, past=None):
        return state + self.gate * h


class NeverFilled(Gated):
    def __init__(self, config):
        super().__init__(config)
        self.rules = {"gate": Rule(lambda gate: None)}


class Ahead(Direct):
    def forward(self, x, past=None):
        return x + 0.1 * x.roll(-1, 1)


class WithoutCache(Direct):
    def forward(self, x, past=None):
        return x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class FromZero(Direct):
    def forward(self, x, past=None):
        return x + delay(x + 1, 1, past)


class OnePerToken(Direct):
    """Expander to a state of as many vectors as there are tokens."""

    def forward(self, x, past=None):
        return x.unsqueeze(2).expand(-1, -1, x.shape[1], -1)


class FirstVector(Direct):
    def forward(self, x, past=None):
        return x[:, :, 0]


class AddToEach(Add):
    def forward(self, state, h, x_in, c, past=None):
        return super().forward(state, h.unsqueeze(2), x_in, c, past)


class Doubled(DeltaRewrite):
    def forward(self, state, h, x_in, c, past=None):
        return super().forward(state, 2 * h + x_in, x_in, c, past)


# This claims, falsely, that the kernels compute a subclass of the write.
kernels.SUPPORTED_PARTS.add(Doubled)


def penalized_loss(self, ids, targets=None, cache=None, return_logits=False):
    logits, loss = GPT.forward(self, ids, targets, cache, return_logits)
    return logits, None if loss is None else loss + 0.01


class Branching(Add):
    def forward(self, state, h, x_in, c, past=None):
        return state + h if h.norm() < 1e3 else state


class Summed(Add):
    def statistics(self, state, h, x_in, c, written):
        return {"h_rms": h.square().mean().sqrt()}


class Widened(Add):
    def forward(self, state, h, x_in, c, past=None):
        return state.float() + h.float()


class OneGate(Block):
    """Gives its sites a write that the block does not own."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        write = Gated(config)
        self.sites = tuple(replace(site, write=write) for site in self.sites)


# name of the fault: (model class, name of the check, regular expression of its message)
BROKEN = {
    "forgets an initialization": (
        additive(write=Gated),
        "rules",
        r"parts\.0\.1\.gate has no rule: add one to the dict `rules` of its Gated",
    ),
    "a rule that fills nothing": (
        additive(write=NeverFilled),
        "rules",
        r"rule of .*gate leaves numbers as they were",
    ),
    "no part of the block": (
        type("Model", (GPT,), {"Block": OneGate}),
        "rules",
        "but it is not a submodule of its block",
    ),
    "sees the next token": (additive(read=Ahead), "causality", "a token sees later ones"),
    "breaks the cache": (
        additive(read=WithoutCache),
        "cache",
        "with the cache it computes something else",
    ),
    "makes something of zeros": (
        additive(read=FromZero),
        "cache",
        "of the zeros before a shorter prompt",
    ),
    "a state that grows with the context": (
        additive(read=FirstVector, write=AddToEach, Expander=OnePerToken, Readout=FirstVector),
        "costs",
        "grows with the context: 10 numbers, then 160",
    ),
    "a fused write's subclass": (
        delta(Doubled, Doubled),
        "fused",
        "fused form of Doubled computes something else",
    ),
    "differs in a later block": (
        delta(DeltaRewrite, Doubled),
        "fused",
        "form of DeltaRewrite, Doubled computes",
    ),
    "a penalty in the loss": (
        additive(forward=penalized_loss),
        "losses",
        "cross-entropy of its logits",
    ),
    "breaks the graph": (
        additive(write=Branching),
        "compiled",
        "torch.compile must break the graph",
    ),
    "a statistic of all tokens": (
        additive(write=Summed),
        "statistics",
        "is no number for each token",
    ),
    "a wider state": (
        additive(write=Widened),
        "autocast",
        r"attn, changes the state from \(torch.bfloat16",
    ),
}
