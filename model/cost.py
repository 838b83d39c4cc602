"""The cost of a model: its operations per token, and the parameters that it does not use.

A model runs once on fake tensors, which have shapes but no values. As this is the first time that
a stream runs, what its reads and writes return is checked as well.
"""

from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from .block import Site, State, Stream
from .gpt import GPT


class Cost(NamedTuple):
    """What a token costs."""

    flops: int  # floating-point operations of a training step
    unused_parameters: tuple[str, ...]  # names of those that the loss does not depend on


# a run asks for the cost of its model several times
known_costs: dict[tuple, Cost] = {}


def count_cost(model: GPT) -> Cost:
    """Run a model of the same class and config once on fake tensors, and return what it costs.

    It is another model, because the parameters of this one may be sharded, and its stream may be
    fused.

    Raises:
        ValueError: a read does not return x_in (B, T, d), or a write does not return a state
    """
    key = (model.variant, repr(model.config))
    if key not in known_costs:
        # attention as matrix products, which torch's counter knows on every device
        with FakeTensorMode(), sdpa_kernel(SDPBackend.MATH):
            known_costs[key] = run_once(model.variant(model.config))
    return known_costs[key]


def flops_per_token(model: GPT) -> int:
    """Return the floating-point operations of a training step per token of a full context.

    As in the field, they are those of matrix products and attention alone, attention counts
    the whole context, and the backward pass counts as two forward passes.
    """
    return count_cost(model).flops


def run_once(model: GPT) -> Cost:
    """Run a model for one sequence of block_size tokens, and return what a token costs."""
    # it imports Triton, which takes 0.15 s; generating and evaluating do without it
    from torch.utils.flop_counter import FlopCounterMode

    block_size = model.config.block_size
    stream = CheckingStream((1, block_size, model.config.hidden_size))
    with FlopCounterMode(display=False) as counter, model.through(stream):
        ids = torch.zeros(1, block_size, dtype=torch.int64)
        logits = model.logits(model.hidden(ids))
    # which parameters have a gradient does not depend on the loss, as long as it reads all logits
    logits.sum().backward()
    return Cost(
        flops=3 * counter.get_total_flops() // block_size,
        unused_parameters=tuple(
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ),
    )


class CheckingStream(Stream):
    """Checks the shapes of what reads and writes return."""

    def __init__(self, x_in_shape: tuple[int, int, int]):
        """x_in_shape: (B, T, d)"""
        self.x_in_shape = x_in_shape

    def read(
        self, site: Site, state: State, cache: dict | None
    ) -> tuple[State, torch.Tensor | tuple, torch.Tensor]:
        read_output = site.read(state, None)
        x_in = read_output[0] if isinstance(read_output, tuple) else read_output
        if not torch.is_tensor(x_in) or x_in.shape != self.x_in_shape:
            raise ValueError(
                f"the read of block {site.layer}, {site.name}, returns {describe_shapes(x_in)}; it "
                f"must return x_in (B, T, d), here {self.x_in_shape}"
            )
        c = x_in if site.norm is None else site.norm(x_in)
        return state, read_output, c

    def write(
        self,
        site: Site,
        state: State,
        h: torch.Tensor,
        x_in: torch.Tensor | tuple,
        c: torch.Tensor,
        cache: dict | None,
    ) -> State:
        new_state = super().write(site, state, h, x_in, c, cache)
        for tensor in tree_leaves(new_state):
            if not torch.is_tensor(tensor) or tensor.shape[:2] != self.x_in_shape[:2]:
                raise ValueError(
                    f"the write of block {site.layer}, {site.name}, returns "
                    f"{describe_shapes(new_state)}; it must return the new state, a tensor "
                    "(B, T, ...) or a tuple of them"
                )
        return new_state


def describe_shapes(output: object) -> str:
    """Return the shapes of the tensors of what a read or write returned."""
    return ", ".join(
        str(tuple(leaf.shape)) if torch.is_tensor(leaf) else repr(leaf)
        for leaf in tree_leaves(output)
    )
