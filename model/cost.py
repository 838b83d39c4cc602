"""What a model costs, counted from the model itself: it runs once, on fake tensors, which have no data."""

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from model import block


def attention_flops(query, key, value, *_, **__) -> int:
    """Of the CPU's attention, for which torch has no formula; it counts the whole context, as for the others."""
    return sdpa_flop_count(query, key, value)


ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}


def counted_pass(cls, config, tokens: int):
    """(the model on the CPU, the operations of its matrix products in a forward pass, its states after each block)."""
    try:
        with FakeTensorMode():
            return forward_pass(type(cls.__name__, (cls,), {"init_weights": lambda self: None})(config), tokens)
    except DataDependentOutputException:  # it looks at the values of its tensors
        return forward_pass(cls(config), tokens)


@torch.no_grad()
def forward_pass(model, tokens: int):
    states = []
    for each in model.transformer.h:
        each.register_forward_hook(lambda _, __, output: states.append(output[0]))
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        model(torch.zeros(1, tokens, dtype=torch.int64))
    return model, counter.get_total_flops(), states


def forward_flops(cls, config) -> int:
    """Operations of a forward pass over block_size tokens: matrix products, and what the stream's parts declare."""
    model, products, _ = counted_pass(cls, config, config.block_size)
    sites = [site for each in model.transformer.h for site in each.sites]
    parts = [part for site in sites for part in (site.read, site.write, site.after)]
    parts += [model.input_embed, model.readout]
    elementwise = sum(part.elementwise_flops() for part in parts if hasattr(part, "elementwise_flops"))
    return products + elementwise * config.block_size


def state_size(cls, config) -> int:
    """Numbers in one token's state where it is largest."""
    return max(map(block.state_size, counted_pass(cls, config, 1)[2]))
