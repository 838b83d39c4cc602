"""The cost of a model: operations per token and size of the state.

It is counted while the model runs once on fake tensors, which have shapes but no data. As this is
the first time that a stream runs, it is also checked that its reads and writes return tensors of
the right shape, and which parameters get a gradient.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, NoReturn

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_leaves

from .block import Site, State, Stream, count_state_numbers
from .gpt import GPT, without_initialization


class Cost(NamedTuple):
    """What a token costs."""

    flops: int  # floating-point operations of a training step
    state_numbers: int  # numbers in the residual state, where it is largest
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
        try:
            with FakeTensorMode():
                fake_model = without_initialization(model.variant)(model.config)
                known_costs[key] = run_once(fake_model)
        except DataDependentOutputException:
            # the model looks at the values of its tensors, so it needs real ones
            known_costs[key] = run_once(model.variant(model.config))
    return known_costs[key]


def flops_per_token(model: GPT) -> int:
    """Return the floating-point operations of a training step per token.

    The count assumes sequences of block_size tokens, and a multiply-add is two operations. It
    includes matrix products, attention over the entire context (as is usual), and the reads and
    writes of the residual stream, but not norms, activation functions and the optimizer. The
    backward pass counts as two forward passes.
    """
    return count_cost(model).flops


def state_bytes_per_token(model: GPT, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes of the residual state of one token, in dtype, where it is largest."""
    return count_cost(model).state_numbers * dtype.itemsize


def count_attention_flops(
    query_shape: torch.Size, key_shape: torch.Size, value_shape: torch.Size, *_, **__
) -> int:
    """Return the operations of attention over the whole context, as for torch's other kernels."""
    from torch.utils.flop_counter import sdpa_flop_count

    return sdpa_flop_count(query_shape, key_shape, value_shape)


# torch's counter has no formula for the attention kernel of CPUs
ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: count_attention_flops}


def run_once(model: GPT) -> Cost:
    """Run a model for one sequence of block_size tokens, and return what a token costs."""
    # it imports Triton, which takes 0.15 s; generating and evaluating do without it
    from torch.utils.flop_counter import FlopCounterMode

    block_size = model.config.block_size
    states = []
    for layer in model.transformer.h:
        layer.register_forward_hook(lambda module, inputs, output: states.append(output))
    counter = FlopCounterMode(display=False, custom_mapping=ATTENTION)
    checking_stream = CheckingStream(block_size, model.config.hidden_size)
    with counter, model.through(checking_stream):
        ids = torch.zeros(1, block_size, dtype=torch.int64)
        hidden = model.hidden(ids)
        logits = model.logits(hidden)
    # which parameters have a gradient does not depend on the loss, as long as it reads all logits
    logits.sum().backward()

    parts = [model.input_embed, model.readout]
    for site in model.sites:
        parts += [site.read, site.sublayer, site.write, site.post_write]
    elementwise_flops = sum(
        part.elementwise_flops() for part in parts if hasattr(part, "elementwise_flops")
    )
    matrix_flops = counter.get_total_flops()
    return Cost(
        flops=3 * (matrix_flops + elementwise_flops * block_size) // block_size,
        state_numbers=max(count_state_numbers(state) for state in states),
        unused_parameters=tuple(
            name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.grad is None
        ),
    )


class CheckingStream(Stream):
    """Runs one sequence, and checks the shapes that reads and writes return.

    Raises:
        ValueError: a read does not return x_in (B, T, d), or a write does not return a state
    """

    def __init__(self, num_tokens: int, hidden_size: int):
        self.state_shape = (1, num_tokens)  # of its first two axes
        self.x_in_shape = (1, num_tokens, hidden_size)

    def read(
        self, site: Site, state: State, cache: dict | None
    ) -> tuple[State, torch.Tensor | tuple, torch.Tensor]:
        return super().read(replace(site, read=self.checked_read(site)), state, cache)

    def checked_read(self, site: Site) -> Callable:
        """Return the read of the site, with a check of what it returns."""

        def read(*args, **kwargs) -> torch.Tensor | tuple:
            read_output = site.read(*args, **kwargs)
            x_in = read_output[0] if isinstance(read_output, tuple) else read_output
            if not torch.is_tensor(x_in) or x_in.shape != self.x_in_shape:
                expected = f"x_in (B, T, d), here {self.x_in_shape}"
                refuse_output(site, site.read, x_in, expected)
            return read_output

        return read

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
        tensors = tree_leaves(new_state)
        is_state = bool(tensors) and all(
            torch.is_tensor(tensor) and tensor.shape[:2] == self.state_shape for tensor in tensors
        )
        if not is_state:
            expected = "the new state, a tensor (B, T, ...) or a tuple of them"
            refuse_output(site, site.write, new_state, expected)
        return new_state


def refuse_output(site: Site, part: Callable, output: object, expected: str) -> NoReturn:
    """Raise ValueError for what a read or write returned."""
    shapes = [
        str(tuple(leaf.shape)) if torch.is_tensor(leaf) else repr(leaf)
        for leaf in tree_leaves(output)
    ]
    raise ValueError(
        f"{type(part).__name__} of block {site.layer}, {site.name}, returns "
        f"{', '.join(shapes) or output}; it must return {expected}"
    )
