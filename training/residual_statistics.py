"""What the residual stream of a model does: gates, discrepancies and sizes, from one pass over a few sequences."""

import torch
from torch import nn


@torch.no_grad()
def residual_statistics(model: nn.Module, ids: torch.Tensor, autocast) -> dict[str, list[float]]:
    """{statistic: a number per block, first block first}, over all tokens of ids (B, T).

    `state_rms` is the root mean square of the state after each block. A write that has a method `statistics` (inputs
    as its forward, then the state it wrote; see DeltaRewrite) adds its own as `<site>.<statistic>`.
    """
    found: dict[str, list[float]] = {}

    def record(name, value):
        found.setdefault(name, []).append(float(value))

    def after_block(_module, _inputs, state):
        record("state_rms", state.float().square().mean().sqrt())

    def after_write(site):
        def hook(module, inputs, state):
            for name, value in module.statistics(*inputs, state).items():
                record(f"{site}.{name}", value)

        return hook

    hooks = []
    for block in model.transformer.h:
        hooks.append(block.register_forward_hook(after_block))
        for name, module in block.named_modules():
            if hasattr(module, "statistics"):
                hooks.append(module.register_forward_hook(after_write(name)))
    try:
        with autocast, model.plain_stream():
            model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return found
