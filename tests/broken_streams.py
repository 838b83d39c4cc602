"""Streams with one fault each, with the check of contract.py that finds it and its message."""

from dataclasses import replace

import torch
from torch import nn

from model.block import Add, Block, WritingBlock, delay
from model.gpt import GPT
from model.parameters import Rule


def with_sites(**changes) -> type[GPT]:
    """Return the additive model whose sites have other fields, such as `read` or `write`."""

    class ChangedBlock(Block):
        def __init__(self, config, layer):
            super().__init__(config, layer)
            self.sites = tuple(replace(site, **changes) for site in self.sites)

    return type("Model", (GPT,), {"Block": ChangedBlock})


def with_write(write: type[nn.Module], **members) -> type[GPT]:
    """Return a model class whose writes are modules of this class.

    members: further attributes of the model class
    """
    block = type("OtherBlock", (WritingBlock,), {"Write": write})
    return type("Model", (GPT,), {"Block": block, **members})


class NeverFilled(Add):
    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.empty(config.hidden_size))
        self.rules = {"gate": Rule(lambda gate: None)}


class Unused(NeverFilled):
    def __init__(self, config):
        super().__init__(config)
        self.rules = {"gate": Rule(nn.init.zeros_)}


class SharedWrite(Block):
    """Gives its sites writes that the block does not own."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.sites = tuple(replace(site, write=Unused(config)) for site in self.sites)


def read_without_cache(x, past=None):
    return x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def read_from_zero(x, past=None):
    return x + delay(x + 1, 1, past)


class Penalized(GPT):
    def forward(self, ids, targets=None, cache=None, return_logits=False):
        logits, loss = super().forward(ids, targets, cache, return_logits)
        return logits, None if loss is None else loss + 0.01


def branching_write(state, h, x_in, c, past=None):
    return state + h if h.norm() < 1e3 else state


class Summed(Add):
    def statistics(self, state, h, x_in, c, written):
        return {"h_rms": h.square().mean().sqrt()}


def widened_write(state, h, x_in, c, past=None):
    return state.float() + h.float()


# name of the fault: (model class, name of the check, regular expression of its message)
BROKEN = {
    "a rule that fills nothing": (
        with_write(NeverFilled),
        "rules",
        r"rule of .*gate leaves numbers as they were",
    ),
    "no part of the block": (
        type("Model", (GPT,), {"Block": SharedWrite}),
        "rules",
        "but it is not a submodule of its block",
    ),
    "breaks the cache": (
        with_sites(read=read_without_cache),
        "cache",
        "with the cache it computes something else",
    ),
    "makes something of zeros": (
        with_sites(read=read_from_zero),
        "cache",
        "of the zeros before a shorter prompt",
    ),
    "a parameter without a gradient": (
        with_write(Unused),
        "costs",
        "the loss does not depend on transformer.h.0.write_attn.gate",
    ),
    "a penalty in the loss": (Penalized, "losses", "cross-entropy of its logits"),
    "breaks the graph": (
        with_sites(write=branching_write),
        "compiled",
        "torch.compile must break the graph",
    ),
    "a statistic of all tokens": (
        with_write(Summed),
        "statistics",
        "is no number for each token",
    ),
    "a wider state": (
        with_sites(write=widened_write),
        "autocast",
        r"attn, changes the state from \(torch.bfloat16",
    ),
}
