"""A block and its two sites: how a sublayer reads from the residual stream and writes to it.

A variant gives its sites a read and a write of its own; the rest of the repository meets sites, not
variants.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from model.decoding import kept
from model.layers import MLP, CausalSelfAttention, RMSNorm, at_least_fp32


class Past(NamedTuple):
    """Where a read, write, expander or readout keeps what it needs of earlier tokens."""

    cache: dict
    slot: str


def past(cache: dict | None, slot: str) -> Past | None:
    """None outside cached evaluation: then a call begins at the first token."""
    return None if cache is None else Past(cache, slot)


def delay(x, tokens: int, past: Past | None = None):
    """x (B, T, ...) shifted `tokens` later; zeros, or the call before's tail, enter on the left.

    The one way to look at earlier tokens. A module that calls it several times does so with
    different `tokens`.
    """
    if tokens == 0:
        return x
    shape = (x.shape[0], tokens, *x.shape[2:])
    if past is None:
        tail = x.new_zeros(shape)
    else:
        tail = kept(past.cache, f"{past.slot}.{tokens}", shape, x)
    x = torch.cat((tail, x), dim=1)
    if past is not None:
        tail.copy_(x[:, -tokens:])
    return x[:, :-tokens]


class Direct(nn.Module):
    """Expander, read and readout of a stream that is (B, T, d) itself."""

    fused = "identity"

    def __init__(self, config=None):
        super().__init__()

    def forward(self, x, past: Past | None = None):
        return x


class Copies(Direct):
    """Expander of a state that is a tuple: the embedding, so many times."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def forward(self, x, past: Past | None = None):
        return (x,) * self.count


class First(Direct):
    """Read or readout of a state that is a tuple: its first part."""

    def forward(self, x, past: Past | None = None):
        return x[0]


class Add(nn.Module):
    """The additive write: X' = X + h."""

    fused = "add"
    takes_branch_mult = True

    def __init__(self, config):
        super().__init__()
        self.hidden_size, self.branch_mult = config.hidden_size, config.branch_mult

    def elementwise_flops(self) -> int:
        return self.hidden_size

    def forward(self, state, h, x_in, c, past: Past | None = None):
        if self.branch_mult == 1:
            return state + h
        dtype = at_least_fp32(state.dtype)
        return (state.to(dtype) + self.branch_mult * h.to(dtype)).to(state.dtype)


@dataclass(frozen=True, eq=False)
class Site:
    """Where a sublayer F meets the stream: x_in = read(X), c = norm(x_in), h = F(c), X' =
    after(write(X, h, x_in, c)).

    name: "attn" or "mlp", unique in its block, the layer-th from 0. norm, after: None for none.
    read(state, past) -> x_in (B, T, d), or a tuple that begins with it, which the write gets as it
    is, in x_in's place. read_positions: the read gets the call's `Positions` (model/layers.py) as
    well, read(state, past, positions): which tokens these are, and where. inputs(c, x_in,
    positions) -> what the sublayer gets in c's place, x_in as the write gets it: `AttentionInputs`,
    for queries, keys and values of inputs apart, or other values. None for both: neither.
    write(state, h, x_in, c, past) -> the new state. A write may have, besides,

        statistics(state, h, x_in, c, written) -> {name: (B, T)}   what metrics.jsonl and the page show of each token
        extra_loss(state, h, x_in, c, written) -> a scalar   what training minimises as well (GPT.forward)
        ranges = {statistic: (low, high)}   between which its numbers lie, for colours

    and a read, write, after, expander or readout `elementwise_flops()`: operations a token that are
    no matrix products. What analyses look at beside the statistics is in
    research/analysis/parts.py.
    """

    name: str
    layer: int
    sublayer: nn.Module
    norm: nn.Module | None
    read: Callable
    write: Callable
    after: nn.Module | None = None
    inputs: Callable | None = None
    read_positions: bool = False

    def given(self, c, x_in, positions):
        """What the sublayer is called with for c."""
        return c if self.inputs is None else self.inputs(c, x_in, positions)


class Stream:
    """How a model meets its residual stream: every step by itself (model/kernels fuses them).

    `begin` gives the state that the blocks hand on, `finish` the normed readout.
    """

    def begin(self, model, x, cache: dict | None):
        return model.input_embed(x, past(cache, "input_embed"))

    def read(self, site: Site, state, cache: dict | None, positions):
        """(state, the sublayer's normed input c (B, T, d), what the write needs of the read)."""
        where = {"positions": positions} if site.read_positions else {}
        taken = site.read(state, past(cache, f"{site.name}.read"), **where)
        x_in = taken[0] if isinstance(taken, tuple) else taken
        return state, x_in if site.norm is None else site.norm(x_in), taken

    def write(self, site: Site, state, h, c, x_in, cache: dict | None):
        """(new state, the site's extra loss or None)."""
        written, loss = site.write(state, h, x_in, c, past(cache, f"{site.name}.write")), None
        if hasattr(site.write, "extra_loss"):
            loss = site.write.extra_loss(state, h, x_in, c, written)
        return written if site.after is None else site.after(written), loss

    def finish(self, model, state, cache: dict | None):
        return model.ln_f(model.readout(state, past(cache, "readout")))


class Block(nn.Module):
    """An attention and an MLP site; here X' = X + F(norm(X)) over a state (B, T, d).

    A variant gives `sites` other reads, writes or norms (`dataclasses.replace`), which it assigns
    to the block as well where they have parameters; `layer` counts blocks from 0. For every read
    and write, expander and readout:

    - A state is a tensor or a tuple of tensors, of batch and tokens first: (B, T, ...).
    - A token depends on itself and earlier ones, and on those by `delay` alone, which knows the cache.
    - Where they look at earlier tokens, zero goes to zero: the left padding of shorter prompts is zeros, and must stay.
    - Tensors only, no Python branching on data: torch.compile makes one graph of the whole model.
    """

    stream = Stream()

    def __init__(self, config, layer: int):
        super().__init__()
        self.layer = layer
        self.ln_1 = RMSNorm(config.hidden_size)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = RMSNorm(config.hidden_size)
        self.mlp = MLP(config)
        attn = Site("attn", layer, self.attn, self.ln_1, read=Direct(), write=Add(config))
        self.sites = attn, Site("mlp", layer, self.mlp, self.ln_2, read=Direct(), write=Add(config))

    def forward(self, state, positions, cache: dict | None = None):
        """state -> (new state, the sum of the sites' extra losses, None without any)."""
        losses = []
        for site in self.sites:
            state, c, taken = self.stream.read(site, state, cache, positions)
            h = site.sublayer(site.given(c, taken, positions), positions, cache)
            state, loss = self.stream.write(site, state, h, c, taken, cache)
            losses += [] if loss is None else [loss]
        return state, sum(losses) if losses else None


class WritingBlock(Block):
    """A block whose sites have writes of their own, `Write(config)`: write_attn and write_mlp."""

    Write: Callable

    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        self.write_attn, self.write_mlp = self.Write(config), self.Write(config)
        attn, mlp = self.sites
        self.sites = replace(attn, write=self.write_attn), replace(mlp, write=self.write_mlp)


def state_size(state) -> int:
    """Numbers in one token's state; state: a tensor or a tuple of tensors, each (B, T, ...)."""
    return sum(tensor.numel() // tensor.shape[:2].numel() for tensor in tree_leaves(state))
