"""Streams with one fault each, the check of contract.py that finds it, and what its message
says.
"""

from dataclasses import replace

import torch
from torch import nn

from model import kernels
from model.block import Add, Block, Direct, delay
from model.gpt import GPT
from model.layers import RMSNorm
from model.parameters import Rule, constant
from model.residual import DeltaBlock, DeltaRewrite, Repeat, SingleChannelConfig, SingleChannelRead


def additive(read=Direct, write=Add, **members):
    """A model whose sites have this read and this write, classes that are made with the config."""

    class OtherBlock(Block):
        def __init__(self, config, layer):
            super().__init__(config, layer)
            self.parts = nn.ModuleList(
                nn.ModuleList((read(config), write(config))) for _ in self.sites
            )
            self.sites = tuple(
                replace(site, read=r, write=w) for site, (r, w) in zip(self.sites, self.parts)
            )

    return type("Model", (GPT,), {"Block": OtherBlock, **members})


def delta(first, later):
    """A model with one column whose writes are `first` in block 0 and `later` after it."""

    class OtherBlock(DeltaBlock):
        def __init__(self, config, layer):
            super().__init__(config, layer)
            self.ddl_attn, self.ddl_mlp = ((later if layer else first)(config) for _ in self.sites)
            writes = self.ddl_attn, self.ddl_mlp
            self.sites = tuple(
                replace(site, write=write) for site, write in zip(self.sites, writes)
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


class TwoRules(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = NeverFilled(config)
        self.rules = {"inner.gate": Rule(constant(1.0))}

    def forward(self, *arguments):
        return self.inner(*arguments)


class Ahead(Direct):
    def forward(self, x, past=None):
        return x + 0.1 * x.roll(-1, 1)


class WithoutCache(Direct):
    def forward(self, x, past=None):
        return x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class FromZero(Direct):
    def forward(self, x, past=None):
        return x + delay(x + 1, 1, past)


def wrong_state_bytes(self, dtype=torch.bfloat16):
    return 2 * GPT.state_bytes_per_token(self, dtype)


class Doubled(DeltaRewrite):
    def forward(self, state, h, x_in, c, past=None):
        return super().forward(state, 2 * h + x_in, x_in, c, past)


# a claim that is not true
kernels.SITES[SingleChannelRead, Doubled, RMSNorm] = kernels.FusedForm.DELTA


class Penalised(Add):
    def extra_loss(self, state, h, x_in, c, written):
        return h.square().mean()


def all_losses(self, ids, targets=None, cache=None, return_logits=False):
    logits, loss = GPT.forward(self, ids, targets, cache, return_logits)
    extra = self.hidden_and_extra_loss(ids)[1]
    return logits, None if loss is None else loss + extra


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


BROKEN = {
    "forgets an initialisation": (
        additive(write=Gated),
        "rules",
        r"parts\.0\.1\.gate has no rule: give its Gated",
    ),
    "a rule that fills nothing": (
        additive(write=NeverFilled),
        "rules",
        r"rule of .*gate leaves numbers as they were",
    ),
    "two rules": (additive(write=TwoRules), "rules", r"parts\.0\.1\.inner\.gate has two rules"),
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
    "wrong state bytes": (
        additive(state_bytes_per_token=wrong_state_bytes),
        "costs",
        r"is 80, the state has 40",
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
    "side loss in the loss": (
        additive(write=Penalised, forward=all_losses),
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
