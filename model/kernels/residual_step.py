"""The Delta stream's step as operators that torch compiles and differentiates.

`step_kernels.py` has the equations. Notation in shapes: B batch, T tokens, d hidden_size, d_v value
channels, K tokens that a read covers.
"""

from typing import Any, NamedTuple

import torch

from .launch import KernelLaunch, choose_launch, launch_options, split_into_chunks
from .step_kernels import backward_kernel, forward_kernel
from .tiles import contiguous, get_state_strides


class StepOutput(NamedTuple):
    """The results of `residual_step`. Those that were not asked for are empty tensors."""

    # X' (B, T, d_v, d). If it is not stored, it has no memory, and only carries the gradient.
    new_state: torch.Tensor

    # c (B, T, d) in context_dtype
    context: torch.Tensor

    # (B, T, d) in the dtype of the state; also there if the backward pass needs it
    x_in: torch.Tensor

    # logits of beta (B, T) and of the write value v (B, T, d_v) of the next write, in fp32
    next_gate_logit: torch.Tensor
    next_value_logit: torch.Tensor

    # For the backward pass and for later steps, in fp32 and without gradients: n = 1 / |k~| (B, T),
    # delta = v - k^T X (B, T, d_v), u = n beta delta (B, T, d_v), and rho (B, T).
    inverse_norm: torch.Tensor
    delta: torch.Tensor
    update: torch.Tensor
    inverse_rms: torch.Tensor

    # (B, K - 1, d) fp32, for the next call
    new_carry: torch.Tensor


@torch.library.custom_op("ddl::residual_step", mutates_args=())
def residual_step(
    state: torch.Tensor,
    stored_state: torch.Tensor,
    directions: list[torch.Tensor],
    updates: list[torch.Tensor],
    direction: torch.Tensor | None,
    gate_logit: torch.Tensor | None,
    value_logit: torch.Tensor | None,
    read_weights: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_weight: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    value_weight: torch.Tensor | None,
    value_bias: torch.Tensor | None,
    k_eps: float,
    norm_eps: float,
    value_form: str,
    value_scale: float,
    value_constant: float,
    value_input: str,
    erase: bool,
    store_state: bool,
    return_x_in: bool,
    carry: torch.Tensor | None,
    context_dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Write to the state, and read the next sublayer's input and the logits of its write.

    Args:
        state: (B, T, d_v, d), takes the gradient of the state before the write; its memory is not
            read
        stored_state: (B, T, d_v, d), the last state that was stored
        directions: the direction k~ (B, T, d) of each write since then
        updates: the update u (B, T, d_v) fp32 of each write since then
        direction: k~ (B, T, d) of the write; None if this step only reads
        gate_logit: logit of beta (B, T) fp32
        value_logit: logit of the write value v (B, T, d_v) fp32; None if v is constant
        read_weights: e (K, d_v, d) fp32, the first entry for the current token
        norm_weight: g (d,)
        gate_weight, gate_bias: w (d,) and b (1,), the gate head of the next write, which reads c;
            None if the logit is computed elsewhere
        value_weight, value_bias: W (d_v, d) and b_z (d_v,), the value head of the next write; None
            if the logit is computed elsewhere
        k_eps: epsilon in the norm of k~
        norm_eps: epsilon of the RMSNorm
        value_form: how v follows from its logit z: "raw" is z, "sigmoid" is value_scale *
            sigmoid(z), and "constant" is value_constant
        value_input: what the value head reads: "residual" is x_in, "context" is c
        erase: whether the write erases, delta = v - k^T X; if not, delta = v
        store_state: whether X' is stored
        return_x_in: whether x_in is returned
        carry: (B, K - 1, d) fp32, in cached generation what earlier tokens add to the reads of
            these; None for zeros. It has no gradient.
        context_dtype: dtype of the context c

    Returns:
        The fields of `StepOutput`, as a list, because operators return no other classes.
    """
    output = allocate_output(
        stored_state=stored_state,
        has_write=direction is not None,
        read_weights=read_weights,
        has_gate=gate_weight is not None,
        has_value=value_weight is not None,
        store_state=store_state,
        return_x_in=return_x_in,
        carry=carry,
        context_dtype=context_dtype,
    )
    launch = plan_launch("step forward", stored_state, kernel_size=len(read_weights))
    results = output._asdict()
    # the kernel stores these only if it is given memory for them
    if not store_state:
        results["new_state"] = None
    if not keeps_x_in(read_weights, return_x_in, carry):
        results["x_in"] = None
    forward_kernel[launch.grid](
        stored_state=stored_state,
        directions=tuple(contiguous(earlier) for earlier in directions),
        updates=tuple(updates),
        direction=contiguous(direction),
        gate_logit=contiguous(gate_logit),
        value_logit=contiguous(value_logit),
        read_weights=contiguous(read_weights),
        norm_weight=contiguous(norm_weight),
        gate_weight=contiguous(gate_weight),
        gate_bias=contiguous(gate_bias),
        value_weight=contiguous(value_weight),
        value_bias=contiguous(value_bias),
        carry=contiguous(carry),
        k_eps_squared=k_eps**2,
        norm_eps=norm_eps,
        value_scale=value_scale,
        value_constant=value_constant,
        VALUE_FORM=value_form,
        VALUE_INPUT=value_input,
        ERASE=erase,
        **results,
        **launch.arguments,
    )
    return list(output)


def plan_launch(kernel: str, stored_state: torch.Tensor, kernel_size: int) -> KernelLaunch:
    """Return the launch of a kernel over a state (B, T, d_v, d), and the arguments that follow."""
    batch_size, sequence_length, num_value_channels, width = stored_state.shape
    # if a read covers one token, chunks may cross the ends of sequences
    if kernel_size == 1:
        num_sequences = 1
        num_tokens = batch_size * sequence_length
    else:
        num_sequences = batch_size
        num_tokens = sequence_length
    launch = choose_launch(kernel, width, num_value_channels, kernel_size)
    chunks = split_into_chunks(
        stored_state.device,
        launch,
        num_sequences=num_sequences,
        num_tokens=num_tokens,
        kernel_size=kernel_size,
    )
    strides = get_state_strides(stored_state)
    return KernelLaunch(
        grid=(num_sequences * chunks.num_chunks,),
        arguments={
            "token_stride": strides.token,
            "channel_stride": strides.channel,
            "num_tokens": num_tokens,
            **chunks._asdict(),
            "D": width,
            "V": num_value_channels,
            "K": kernel_size,
            "RELOAD": launch.reload,
            **launch_options(launch, stored_state),
        },
    )


def keeps_x_in(read_weights: torch.Tensor, return_x_in: bool, carry: torch.Tensor | None) -> bool:
    """Return whether x_in is stored.

    The backward pass recomputes the read of one token, but has no cheap way to one of several
    tokens. A step with a carry has no backward pass.
    """
    return return_x_in or (len(read_weights) > 1 and carry is None)


def allocate_output(
    *,
    stored_state: torch.Tensor,
    has_write: bool,
    read_weights: torch.Tensor,
    has_gate: bool,
    has_value: bool,
    store_state: bool,
    return_x_in: bool,
    carry: torch.Tensor | None,
    context_dtype: torch.dtype,
) -> StepOutput:
    """Allocate what `residual_step` returns."""
    batch_size, num_tokens, num_value_channels, width = stored_state.shape
    of_tokens = (batch_size, num_tokens)
    of_channels = (batch_size, num_tokens, num_value_channels)
    of_features = (batch_size, num_tokens, width)

    def allocate_fp32(shape: tuple[int, ...], is_needed: bool) -> torch.Tensor:
        return stored_state.new_empty(shape if is_needed else (0,), dtype=torch.float32)

    if store_state:
        new_state = stored_state.new_empty(stored_state.shape)
    else:
        new_state = allocate_without_memory(stored_state)
    has_x_in = keeps_x_in(read_weights, return_x_in, carry)
    return StepOutput(
        new_state=new_state,
        context=stored_state.new_empty(of_features, dtype=context_dtype),
        x_in=stored_state.new_empty(of_features if has_x_in else (0,)),
        next_gate_logit=allocate_fp32(of_tokens, has_gate),
        next_value_logit=allocate_fp32(of_channels, has_value),
        inverse_norm=allocate_fp32(of_tokens, has_write),
        delta=allocate_fp32(of_channels, has_write),
        update=allocate_fp32(of_channels, has_write),
        inverse_rms=allocate_fp32(of_tokens, True),
        new_carry=stored_state.new_empty((0,)) if carry is None else torch.empty_like(carry),
    )


def allocate_without_memory(state: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a state's shape whose elements are all the same number in memory.

    It stands for a state that is not stored, and gives its gradient a place in the graph.
    """
    tensor = state.new_empty_strided(state.shape, (0, 0, 0, 0))
    # Nothing reads the number. On a GPU it stays undefined, because filling it would be a launch.
    if not state.is_cuda:
        tensor.as_strided((1,), (1,)).zero_()
    return tensor


@residual_step.register_fake
def _(
    state,
    stored_state,
    directions,
    updates,
    direction,
    gate_logit,
    value_logit,
    read_weights,
    norm_weight,
    gate_weight,
    gate_bias,
    value_weight,
    value_bias,
    k_eps,
    norm_eps,
    value_form,
    value_scale,
    value_constant,
    value_input,
    erase,
    store_state,
    return_x_in,
    carry,
    context_dtype,
):
    output = allocate_output(
        stored_state=stored_state,
        has_write=direction is not None,
        read_weights=read_weights,
        has_gate=gate_weight is not None,
        has_value=value_weight is not None,
        store_state=store_state,
        return_x_in=return_x_in,
        carry=carry,
        context_dtype=context_dtype,
    )
    return list(output)


class StepGradients(NamedTuple):
    """The results of `residual_step_backward`. Those that do not exist are empty tensors."""

    state: torch.Tensor  # of the state before the write, (B, T, d_v, d)
    direction: torch.Tensor  # (B, T, d)
    gate_logit: torch.Tensor  # (B, T) fp32
    value_logit: torch.Tensor  # (B, T, d_v) fp32
    parameters: torch.Tensor  # fp32, those of `ParameterGradients` one after the other


class ParameterGradients(NamedTuple):
    """The gradients of parameters, in the order in which the kernel lays them out in memory."""

    read_weights: torch.Tensor
    norm_weight: torch.Tensor
    gate_weight: torch.Tensor
    value_weight: torch.Tensor
    value_bias: torch.Tensor
    gate_bias: torch.Tensor


@torch.library.custom_op("ddl::residual_step_backward", mutates_args=())
def residual_step_backward(
    grad_new_state: torch.Tensor | None,
    grad_context: torch.Tensor,
    grad_x_in: torch.Tensor | None,
    grad_next_gate_logit: torch.Tensor | None,
    grad_next_value_logit: torch.Tensor | None,
    stored_state: torch.Tensor,
    directions: list[torch.Tensor],
    updates: list[torch.Tensor],
    direction: torch.Tensor | None,
    gate_logit: torch.Tensor | None,
    value_logit: torch.Tensor | None,
    inverse_norm: torch.Tensor,
    delta: torch.Tensor,
    x_in: torch.Tensor,
    inverse_rms: torch.Tensor,
    read_weights: torch.Tensor,
    norm_weight: torch.Tensor,
    gate_weight: torch.Tensor | None,
    value_weight: torch.Tensor | None,
    value_form: str,
    value_scale: float,
    value_constant: float,
    value_input: str,
    erase: bool,
) -> list[torch.Tensor]:
    """Return the gradients of `residual_step`, whose arguments and results these are.

    stored_state, directions and updates are those of the state after the write. None for a gradient
    stands for zeros.

    Returns:
        The fields of `StepGradients`, as a list.
    """
    gradients = allocate_gradients(
        stored_state=stored_state,
        direction=direction,
        gate_logit=gate_logit,
        value_logit=value_logit,
        read_weights=read_weights,
        gate_weight=gate_weight,
        value_weight=value_weight,
        value_form=value_form,
    )
    launch = plan_launch("step backward", stored_state, kernel_size=len(read_weights))
    (num_programs,) = launch.grid
    num_parameters = gradients.parameters.numel()
    # the rows of the programs begin at multiples of 64 bytes, so that vectors are stored whole
    row_size = -(-num_parameters // 16) * 16
    sums = stored_state.new_empty((num_programs, row_size), dtype=torch.float32)
    backward_kernel[launch.grid](
        grad_new_state=contiguous(grad_new_state),
        grad_x_in=contiguous(grad_x_in),
        grad_context=contiguous(grad_context),
        grad_next_gate_logit=contiguous(grad_next_gate_logit),
        grad_next_value_logit=contiguous(grad_next_value_logit),
        stored_state=stored_state,
        directions=tuple(contiguous(earlier) for earlier in directions),
        updates=tuple(updates),
        direction=contiguous(direction),
        gate_logit=contiguous(gate_logit),
        value_logit=contiguous(value_logit),
        inverse_norm=inverse_norm,
        delta=delta,
        x_in=x_in,
        inverse_rms=inverse_rms,
        read_weights=contiguous(read_weights),
        norm_weight=contiguous(norm_weight),
        gate_weight=contiguous(gate_weight),
        value_weight=contiguous(value_weight),
        grad_state=gradients.state,
        grad_direction=gradients.direction,
        grad_gate_logit=gradients.gate_logit,
        grad_value_logit=gradients.value_logit,
        sums=sums,
        value_scale=value_scale,
        value_constant=value_constant,
        VALUE_FORM=value_form,
        VALUE_INPUT=value_input,
        ERASE=erase,
        TOTAL=row_size,
        **launch.arguments,
    )
    return list(gradients._replace(parameters=sums[:, :num_parameters].sum(0)))


def parameter_sizes(
    read_weights: torch.Tensor, gate_weight: torch.Tensor | None, value_weight: torch.Tensor | None
) -> list[int]:
    """Return how many numbers each field of `ParameterGradients` has."""
    _, num_value_channels, width = read_weights.shape
    has_gate = gate_weight is not None
    has_value = value_weight is not None
    return [
        read_weights.numel(),
        width,  # norm_weight
        width if has_gate else 0,  # gate_weight
        num_value_channels * width if has_value else 0,  # value_weight
        num_value_channels if has_value else 0,  # value_bias
        1 if has_gate else 0,  # gate_bias
    ]


def allocate_gradients(
    *,
    stored_state: torch.Tensor,
    direction: torch.Tensor | None,
    gate_logit: torch.Tensor | None,
    value_logit: torch.Tensor | None,
    read_weights: torch.Tensor,
    gate_weight: torch.Tensor | None,
    value_weight: torch.Tensor | None,
    value_form: str,
) -> StepGradients:
    """Allocate what `residual_step_backward` returns."""

    def allocate_fp32(logit: torch.Tensor | None) -> torch.Tensor:
        return stored_state.new_empty((0,) if logit is None else logit.shape, dtype=torch.float32)

    if direction is None:
        grad_direction = stored_state.new_empty((0,))
    else:
        grad_direction = direction.new_empty(direction.shape)
    num_parameters = sum(parameter_sizes(read_weights, gate_weight, value_weight))
    return StepGradients(
        state=stored_state.new_empty(stored_state.shape),
        direction=grad_direction,
        gate_logit=allocate_fp32(gate_logit),
        value_logit=allocate_fp32(None if value_form == "constant" else value_logit),
        parameters=stored_state.new_empty((num_parameters,), dtype=torch.float32),
    )


@residual_step_backward.register_fake
def _(
    grad_new_state,
    grad_context,
    grad_x_in,
    grad_next_gate_logit,
    grad_next_value_logit,
    stored_state,
    directions,
    updates,
    direction,
    gate_logit,
    value_logit,
    inverse_norm,
    delta,
    x_in,
    inverse_rms,
    read_weights,
    norm_weight,
    gate_weight,
    value_weight,
    value_form,
    value_scale,
    value_constant,
    value_input,
    erase,
):
    gradients = allocate_gradients(
        stored_state=stored_state,
        direction=direction,
        gate_logit=gate_logit,
        value_logit=value_logit,
        read_weights=read_weights,
        gate_weight=gate_weight,
        value_weight=value_weight,
        value_form=value_form,
    )
    return list(gradients)


def setup_context(ctx: Any, inputs: tuple, output: list[torch.Tensor]) -> None:
    (
        _state,
        stored_state,
        directions,
        updates,
        direction,
        gate_logit,
        value_logit,
        read_weights,
        norm_weight,
        gate_weight,
        gate_bias,
        value_weight,
        value_bias,
        _k_eps,
        _norm_eps,
        ctx.value_form,
        ctx.value_scale,
        ctx.value_constant,
        ctx.value_input,
        ctx.erase,
        store_state,
        ctx.return_x_in,
        carry,
        ctx.context_dtype,
    ) = inputs
    output = StepOutput(*output)
    if carry is not None:
        raise ValueError(
            "a step with a carry from earlier tokens is for cached generation and has no "
            "gradients; call it under torch.no_grad()"
        )
    # a gradient of zeros would be read from memory, and None costs nothing
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(
        output.inverse_norm,
        output.delta,
        output.update,
        output.inverse_rms,
        output.new_carry,
    )
    ctx.num_directions = len(directions)
    ctx.gate_bias_dtype = None if gate_bias is None else gate_bias.dtype
    ctx.value_bias_dtype = None if value_bias is None else value_bias.dtype

    # the backward pass needs the state after the write
    if store_state:
        stored_state = output.new_state
        directions = []
        updates = []
    elif direction is not None:
        directions = [*directions, direction]
        updates = [*updates, output.update]
    ctx.save_for_backward(
        direction,
        gate_logit,
        value_logit,
        output.inverse_norm,
        output.delta,
        output.x_in,
        output.inverse_rms,
        read_weights,
        norm_weight,
        gate_weight,
        value_weight,
        stored_state,
        *directions,
        *updates,
    )


def backward(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[object, ...]:
    grads = StepOutput(*grads)
    (
        direction,
        gate_logit,
        value_logit,
        inverse_norm,
        delta,
        x_in,
        inverse_rms,
        read_weights,
        norm_weight,
        gate_weight,
        value_weight,
        stored_state,
        *writes,
    ) = ctx.saved_tensors
    num_writes = len(writes) // 2
    directions = writes[:num_writes]
    updates = writes[num_writes:]

    # Gradients of results that do not reach the loss are None. The kernel has no form without these
    # three.
    grad_context = grads.context
    if grad_context is None:
        batch_size, num_tokens, _, width = stored_state.shape
        grad_context = stored_state.new_zeros(
            (batch_size, num_tokens, width), dtype=ctx.context_dtype
        )
    grad_next_gate_logit = grads.next_gate_logit
    if gate_weight is not None and grad_next_gate_logit is None:
        grad_next_gate_logit = torch.zeros_like(inverse_rms)
    grad_next_value_logit = grads.next_value_logit
    if value_weight is not None and grad_next_value_logit is None:
        grad_next_value_logit = inverse_rms.new_zeros(stored_state.shape[:3])

    gradients = StepGradients(
        *residual_step_backward(
            grad_new_state=grads.new_state,
            grad_context=grad_context,
            grad_x_in=grads.x_in if ctx.return_x_in else None,
            grad_next_gate_logit=grad_next_gate_logit,
            grad_next_value_logit=grad_next_value_logit,
            stored_state=stored_state,
            directions=directions,
            updates=updates,
            direction=direction,
            gate_logit=gate_logit,
            value_logit=value_logit,
            inverse_norm=inverse_norm,
            delta=delta,
            x_in=x_in,
            inverse_rms=inverse_rms,
            read_weights=read_weights,
            norm_weight=norm_weight,
            gate_weight=gate_weight,
            value_weight=value_weight,
            value_form=ctx.value_form,
            value_scale=ctx.value_scale,
            value_constant=ctx.value_constant,
            value_input=ctx.value_input,
            erase=ctx.erase,
        )
    )
    parameters = ParameterGradients(
        *gradients.parameters.split(parameter_sizes(read_weights, gate_weight, value_weight))
    )
    gate_weight_gradient = None
    gate_bias_gradient = None
    if gate_weight is not None:
        gate_weight_gradient = parameters.gate_weight.to(gate_weight.dtype)
        gate_bias_gradient = parameters.gate_bias.to(ctx.gate_bias_dtype)
    value_weight_gradient = None
    value_bias_gradient = None
    if value_weight is not None:
        value_weight_gradient = parameters.value_weight.view_as(value_weight).to(value_weight.dtype)
        value_bias_gradient = parameters.value_bias.to(ctx.value_bias_dtype)
    num_directions = ctx.num_directions
    # in the order of the operator's arguments
    return (
        none_if_empty(gradients.state),
        None,  # stored_state
        [None] * num_directions,  # directions
        [None] * num_directions,  # updates
        none_if_empty(gradients.direction),
        none_if_empty(gradients.gate_logit),
        none_if_empty(gradients.value_logit),
        parameters.read_weights.view_as(read_weights).to(read_weights.dtype),
        parameters.norm_weight.to(norm_weight.dtype),
        gate_weight_gradient,
        gate_bias_gradient,
        value_weight_gradient,
        value_bias_gradient,
        *[None] * 11,  # options, from k_eps to context_dtype
    )


def none_if_empty(gradient: torch.Tensor) -> torch.Tensor | None:
    """Return a gradient; None for the empty one of an argument that was not given."""
    return gradient if gradient.numel() else None


residual_step.register_autograd(backward, setup_context=setup_context)
