"""The cost of a model: operations per token and size of the state.

It is counted while the model runs once on fake tensors, which have shapes but no data. As this is
the first time that a stream runs, it is also checked that its reads and writes return tensors of
the right shape.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, NoReturn

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_leaves

from .block import Site, State, Stream, count_state_numbers
from .gpt import GPT, without_initialization
from .layers import Positions


def flops_per_token(model: GPT) -> int:
    """Return the floating-point operations of a training step per token.

    The count assumes sequences of block_size tokens, and a multiply-add is two operations. It
    includes matrix products, attention over the entire context (as is usual), and the reads and
    writes of the residual stream, but not norms, activation functions and the optimizer. The
    backward pass counts as two forward passes.
    """
    block_size = model.config.block_size
    forward_pass = count_forward_pass(model, block_size)
    model = forward_pass.model
    parts = [model.input_embed, model.readout]
    for site in model.sites:
        parts += [site.read, site.sublayer, site.write, site.post_write]
    elementwise_flops = sum(
        part.elementwise_flops() for part in parts if hasattr(part, "elementwise_flops")
    )
    return 3 * (forward_pass.matrix_flops + elementwise_flops * block_size) // block_size


def state_bytes_per_token(model: GPT, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes of the residual state of one token, in dtype, where it is largest."""
    states = count_forward_pass(model, num_tokens=1).states
    return max(count_state_numbers(state) for state in states) * dtype.itemsize


def check_stream(model: GPT) -> None:
    """Run the model once, on a token without data.

    Raises:
        ValueError: a read does not return x_in (B, T, d), or a write does not return a state
    """
    count_forward_pass(model, num_tokens=1)


def count_attention_flops(
    query_shape: torch.Size, key_shape: torch.Size, value_shape: torch.Size, *_, **__
) -> int:
    """Return the operations of attention over the whole context, as for torch's other kernels."""
    from torch.utils.flop_counter import sdpa_flop_count

    return sdpa_flop_count(query_shape, key_shape, value_shape)


# torch's counter has no formula for the attention kernel of CPUs
ATTENTION = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: count_attention_flops}


class ForwardPass(NamedTuple):
    """A forward pass of one sequence."""

    # the model on the CPU, with fake parameters if possible
    model: GPT

    # operations of its matrix products
    matrix_flops: int

    # the state after each block
    states: list[State]


def count_forward_pass(model: GPT, num_tokens: int) -> ForwardPass:
    """Run a model of the same class and config for one sequence of num_tokens tokens.

    It is another model, on fake tensors, because the parameters of this one may be sharded, and its
    stream may be fused.
    """
    try:
        with FakeTensorMode():
            fake_model = without_initialization(model.variant)(model.config)
            return run_forward_pass(fake_model, num_tokens)
    except DataDependentOutputException:
        # the model looks at the values of its tensors, so it needs real ones
        return run_forward_pass(model.variant(model.config), num_tokens)


@torch.no_grad()
def run_forward_pass(model: GPT, num_tokens: int) -> ForwardPass:
    # it imports Triton, which takes 0.15 s; generating and evaluating do without it
    from torch.utils.flop_counter import FlopCounterMode

    states = []
    for layer in model.transformer.h:
        layer.register_forward_hook(lambda module, inputs, output: states.append(output[0]))
    counter = FlopCounterMode(display=False, custom_mapping=ATTENTION)
    checking_stream = CheckingStream(num_tokens, model.config.hidden_size)
    with counter, model.through(checking_stream):
        model(torch.zeros(1, num_tokens, dtype=torch.int64))
    return ForwardPass(model, counter.get_total_flops(), states)


class CheckingStream(Stream):
    """Runs one sequence, and checks the shapes that reads and writes return.

    Raises:
        ValueError: a read does not return x_in (B, T, d), or a write does not return a state
    """

    def __init__(self, num_tokens: int, hidden_size: int):
        self.state_shape = (1, num_tokens)  # of its first two axes
        self.x_in_shape = (1, num_tokens, hidden_size)

    def read(
        self, site: Site, state: State, cache: dict | None, positions: Positions
    ) -> tuple[State, torch.Tensor, torch.Tensor | tuple]:
        return super().read(replace(site, read=self.checked_read(site)), state, cache, positions)

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
        c: torch.Tensor,
        x_in: torch.Tensor | tuple,
        cache: dict | None,
    ) -> tuple[State, torch.Tensor | None]:
        new_state, extra_loss = super().write(site, state, h, c, x_in, cache)
        tensors = tree_leaves(new_state)
        is_state = bool(tensors) and all(
            torch.is_tensor(tensor) and tensor.shape[:2] == self.state_shape for tensor in tensors
        )
        if not is_state:
            expected = "the new state, a tensor (B, T, ...) or a tuple of them"
            refuse_output(site, site.write, new_state, expected)
        return new_state, extra_loss


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
