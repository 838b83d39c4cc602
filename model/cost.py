"""What a model costs, counted from the model itself: it runs once, on fake tensors, which have no
data.

That is also the first time that a stream runs: what its parts give is looked at on the way.
"""

from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from model.block import Stream
from model.block import state_size as size_of


def attention_flops(query, key, value, *_, **__) -> int:
    """Of the CPU's attention, which torch has no formula for; the whole context, as for others."""
    return sdpa_flop_count(query, key, value)


ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}


def counted_pass(cls, config, tokens: int):
    """(the model on the CPU, operations of a pass's matrix products, the state after each block)."""
    bare = type(cls.__name__, (cls,), {"init_weights": lambda self: None})
    try:
        with FakeTensorMode():
            return forward_pass(bare(config), tokens)
    except DataDependentOutputException:  # it looks at the values of its tensors
        return forward_pass(cls(config), tokens)


@torch.no_grad()
def forward_pass(model, tokens: int):
    states = []
    for each in model.transformer.h:
        each.register_forward_hook(lambda _, __, output: states.append(output[0]))
    looking = Looking(tokens, model.config.hidden_size)
    counter = FlopCounterMode(display=False, custom_mapping=ATTENTION)
    with counter, model.through(looking):
        model(torch.zeros(1, tokens, dtype=torch.int64))
    return model, counter.get_total_flops(), states


class Looking(Stream):
    """One sequence's steps. ValueError: a read gives no x_in (B, T, d), or a write no state."""

    def __init__(self, tokens: int, size: int):
        self.shape, self.needed = (1, tokens), (1, tokens, size)

    def read(self, site, state, cache, positions):
        def looked_at(*arguments, **keywords):
            taken = site.read(*arguments, **keywords)
            x_in = taken[0] if isinstance(taken, tuple) else taken
            if not torch.is_tensor(x_in) or x_in.shape != self.needed:
                self.refuse(site, site.read, x_in, f"needed x_in (B, T, d), {self.needed}")
            return taken

        return super().read(replace(site, read=looked_at), state, cache, positions)

    def write(self, site, state, h, c, x_in, cache):
        written, loss = super().write(site, state, h, c, x_in, cache)
        fit = [torch.is_tensor(x) and x.shape[:2] == self.shape for x in tree_leaves(written)]
        if not fit or not all(fit):
            needed = "needed the new state, one or several tensors (B, T, ...)"
            self.refuse(site, site.write, written, needed)
        return written, loss

    def refuse(self, site, part, given, needed: str):
        parts = tree_leaves(given)
        shapes = [str(tuple(x.shape)) if torch.is_tensor(x) else repr(x) for x in parts]
        where = f"{type(part).__name__} of block {site.layer}, {site.name}"
        raise ValueError(f"{where}, returns {', '.join(shapes) or given}: {needed}")


def forward_flops(cls, config) -> int:
    """Operations of a pass over block_size tokens: matrix products, and what parts declare."""
    model, products, _ = counted_pass(cls, config, config.block_size)
    sites = [site for each in model.transformer.h for site in each.sites]
    parts = [part for site in sites for part in (site.read, site.write, site.post_write)]
    parts += [model.input_embed, model.readout]
    declared = [part for part in parts if hasattr(part, "elementwise_flops")]
    elementwise = sum(part.elementwise_flops() for part in declared)
    return products + elementwise * config.block_size


def state_size(cls, config) -> int:
    """Numbers in one token's state where it is largest."""
    return max(map(size_of, counted_pass(cls, config, 1)[2]))
