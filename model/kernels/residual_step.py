"""The step between two sublayers (see `step_kernels`) as operators that torch can compile and
differentiate.
"""

import torch

from model.kernels.launch import Launch, launch_of, options_of, share
from model.kernels.step_kernels import backward_kernel, forward_kernel
from model.kernels.tiles import dense, rows_and_columns


def runs(kernel: str, base, kernel_size: int) -> tuple[int, tuple[int, int, int], Launch]:
    """(sequences, their `share`, launch): without a token convolution the batch is one sequence."""
    B, T = base.shape[:2]
    sequences, tokens = (1, B * T) if kernel_size == 1 else (B, T)
    launch = launch_of(kernel, base.shape[3], base.shape[2], kernel_size)
    return sequences, share(base.device, launch, sequences, tokens, kernel_size), launch


@torch.library.custom_op("ddl::residual_step", mutates_args=())
def residual_step(
    state: torch.Tensor,
    base: torch.Tensor,
    hs: list[torch.Tensor],
    us: list[torch.Tensor],
    h: torch.Tensor | None,
    y: torch.Tensor | None,
    z: torch.Tensor | None,
    read: torch.Tensor,
    norm: torch.Tensor,
    gate: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    value: torch.Tensor | None,
    value_bias: torch.Tensor | None,
    k_eps: float,
    norm_eps: float,
    value_form: str,
    value_scale: float,
    value_constant: float,
    value_input: str,
    erase: bool,
    store: bool,
    with_x_in: bool,
    carry: torch.Tensor | None,
    context_dtype: torch.dtype,
) -> list[torch.Tensor]:
    """One step; `step_kernels` has its equations.

    state (B, T, v, d): carries the gradient, its memory is not read. base (B, T, v, d) with hs (B,
    T, d) and us (B, T, v) fp32: the last stored state and the writes since. h (B, T, d), y (B, T)
    and z (B, T, v) fp32: the write, or None (only a read). read (K, v, d); norm (d,); gate (d,),
    (1,), value (v, d), (v,): heads on what is read, or None. value_form "raw", "sigmoid" (scale *
    sigmoid(z)) or "constant"; value_input "residual" or "context".

    Returns [state (no memory unless `store`), context (B, T, d) in context_dtype, x_in (B, T, d),
    gate logit (B, T), value logits (B, T, v), n (B, T), delta (B, T, v), u (B, T, v), rho (B, T),
    carry]; what was not asked for is empty. carry (B, K - 1, d) fp32: what the tokens before add to
    the reads of these, for generation; it has no gradient.
    """
    results = results_of(base, h, read, gate, value, store, with_x_in, carry, context_dtype)
    new_state, context, x_in, gate_logit, value_logit, n, delta, u, rho, new_carry = results
    v, d = base.shape[2:]
    sequences, (tokens, chunk, chunks), launch = runs("step forward", base, len(read))
    forward_kernel[(sequences * chunks,)](
        base, *rows_and_columns(base), tuple(dense(*hs)), tuple(us), *dense(h, y, z),
        *dense(read, norm, gate, gate_bias, value, value_bias, carry), new_carry,
        new_state if store else None, x_in if keeps_x_in(read, with_x_in, carry) else None,
        context, gate_logit, value_logit, n, delta, u, rho,
        tokens, chunk, chunks, k_eps**2, norm_eps, value_scale, value_constant,
        D=d, V=v, K=len(read), VALUE=value_form, VALUE_INPUT=value_input, ERASE=erase, RELOAD=launch.reload,
        **options_of(launch, base),
    )  # fmt: skip
    return results


def no_memory(state):
    """A state that is not stored still has a place in the graph, for its gradient: one number, seen
    from everywhere.

    Nobody reads it. On a GPU it is not even written: that would be a launch.
    """
    tensor = state.new_empty_strided(state.shape, (0, 0, 0, 0))
    if not state.is_cuda:
        tensor.as_strided((1,), (1,)).zero_()
    return tensor


def keeps_x_in(read, with_x_in: bool, carry) -> bool:
    """The backward pass has no cheap way to a read over several tokens: it is kept."""
    return with_x_in or (len(read) > 1 and carry is None)


def results_of(
    base, h, read, gate, value, store: bool, with_x_in: bool, carry, context_dtype
) -> list[torch.Tensor]:
    """Tensors for what `residual_step` returns."""
    B, T, v, d = base.shape

    def fp32(wanted, *shape):
        return base.new_empty(shape if wanted else (0,), dtype=torch.float32)

    state = base.new_empty((B, T, v, d)) if store else no_memory(base)
    context = base.new_empty((B, T, d), dtype=context_dtype)
    x_in = base.new_empty((B, T, d) if keeps_x_in(read, with_x_in, carry) else (0,))
    logits = fp32(gate is not None, B, T), fp32(value is not None, B, T, v)
    write = h is not None
    writes = fp32(write, B, T), fp32(write, B, T, v), fp32(write, B, T, v)
    new_carry = base.new_empty((0,)) if carry is None else torch.empty_like(carry)
    return [state, context, x_in, *logits, *writes, fp32(True, B, T), new_carry]


@residual_step.register_fake
def _(state, base, hs, us, h, y, z, read, norm, gate, gate_bias, value, value_bias, k_eps, norm_eps,
      value_form, value_scale, value_constant, value_input, erase, store, with_x_in, carry, context_dtype):  # fmt: skip
    return results_of(base, h, read, gate, value, store, with_x_in, carry, context_dtype)


@torch.library.custom_op("ddl::residual_step_backward", mutates_args=())
def residual_step_backward(
    grad_state: torch.Tensor | None,
    grad_context: torch.Tensor,
    grad_x_in: torch.Tensor | None,
    grad_gate: torch.Tensor | None,
    grad_value: torch.Tensor | None,
    base: torch.Tensor,
    hs: list[torch.Tensor],
    us: list[torch.Tensor],
    h: torch.Tensor | None,
    y: torch.Tensor | None,
    z: torch.Tensor | None,
    n: torch.Tensor,
    delta: torch.Tensor,
    x_in: torch.Tensor,
    rho: torch.Tensor,
    read: torch.Tensor,
    norm: torch.Tensor,
    gate: torch.Tensor | None,
    value: torch.Tensor | None,
    value_form: str,
    value_scale: float,
    value_constant: float,
    value_input: str,
    erase: bool,
) -> list[torch.Tensor]:
    """Gradients [state, h, y, z, the parameters' in one fp32 vector]; empty where there is nothing.

    base, hs, us: the state after the write, as in `residual_step`.
    """
    v, d = base.shape[2:]
    results = gradients_of(base, h, y, z, read, gate, value, value_form)
    sequences, (tokens, chunk, chunks), launch = runs("step backward", base, len(read))
    numbers = results[-1].numel()
    # Rows begin at 64 bytes, so that vectors can be stored whole.
    sums = base.new_empty((sequences * chunks, -(-numbers // 16) * 16), dtype=torch.float32)
    backward_kernel[(sequences * chunks,)](
        *dense(grad_state, grad_x_in, grad_context, grad_gate, grad_value),
        base, *rows_and_columns(base), tuple(dense(*hs)), tuple(us), *dense(h, y, z), n, delta, x_in, rho,
        *dense(read, norm, gate, value), *results[:4], sums,
        tokens, chunk, chunks, value_scale, value_constant,
        D=d, V=v, K=len(read), VALUE=value_form, VALUE_INPUT=value_input, ERASE=erase, TOTAL=sums.shape[1],
        RELOAD=launch.reload, **options_of(launch, base),
    )  # fmt: skip
    return [*results[:4], sums[:, :numbers].sum(0)]


def parameter_sizes(read, gate, value) -> list[int]:
    """Numbers in the gradients of read, norm, gate, value and the biases of value and gate, one
    after the other.
    """
    columns, d = read.shape[1:]
    sizes = [read.numel(), d, d if gate is not None else 0]
    sizes += [columns * d, columns] if value is not None else [0, 0]
    return [*sizes, int(gate is not None)]


def gradients_of(base, h, y, z, read, gate, value, value_form: str) -> list[torch.Tensor]:
    """Tensors for what `residual_step_backward` returns."""
    grad_y = base.new_empty((0,) if y is None else y.shape, dtype=torch.float32)
    grad_z = base.new_empty(
        (0,) if z is None or value_form == "constant" else z.shape, dtype=torch.float32
    )
    grad_h = base.new_empty((0,)) if h is None else h.new_empty(h.shape)
    parameters = base.new_empty((sum(parameter_sizes(read, gate, value)),), dtype=torch.float32)
    return [base.new_empty(base.shape), grad_h, grad_y, grad_z, parameters]


@residual_step_backward.register_fake
def _(grad_state, grad_context, grad_x_in, grad_gate, grad_value, base, hs, us, h, y, z, n, delta, x_in, rho, read,
      norm, gate, value, value_form, value_scale, value_constant, value_input, erase):  # fmt: skip
    return gradients_of(base, h, y, z, read, gate, value, value_form)


def setup_context(ctx, inputs, output):
    (_, base, hs, us, h, y, z, read, norm, gate, gate_bias, value, value_bias, _, _, *options) = (
        inputs
    )
    state, _, x_in, _, _, n, delta, u, rho, carry = output
    options, store, ctx.with_x_in, carried, ctx.context_dtype = options[:5], *options[5:]
    if carried is not None:
        raise ValueError(
            "a step that carries reads over is for generation, without gradients: call it under "
            "no_grad"
        )
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(n, delta, u, rho, carry)
    ctx.options, ctx.count = options, len(hs)
    ctx.types = [
        None if p is None else (p.dtype, p.shape)
        for p in (read, norm, gate, gate_bias, value, value_bias)
    ]
    if store:
        after = [state]
    elif h is not None:
        after = [base, *hs, h, *us, u]
    else:
        after = [base, *hs, *us]
    ctx.save_for_backward(h, y, z, n, delta, x_in, rho, read, norm, gate, value, *after)


def backward(ctx, grads):
    grad_state, grad_context, grad_x_in, grad_gate, grad_value, *_ = grads
    h, y, z, n, delta, x_in, rho, read, norm, gate, value, base, *writes = ctx.saved_tensors
    count = len(writes) // 2
    if grad_context is None:
        grad_context = base.new_zeros((*base.shape[:2], base.shape[3]), dtype=ctx.context_dtype)
    if gate is not None and grad_gate is None:
        grad_gate = torch.zeros_like(rho)
    if value is not None and grad_value is None:
        grad_value = rho.new_zeros(base.shape[:3])
    found = residual_step_backward(
        grad_state, grad_context, grad_x_in if ctx.with_x_in else None, grad_gate, grad_value,
        base, writes[:count], writes[count:], h, y, z, n, delta, x_in, rho, read, norm, gate, value, *ctx.options,
    )  # fmt: skip
    state, h, y, z, sums = (gradient if gradient.numel() else None for gradient in found)
    parts = sums.split(parameter_sizes(read, gate, value))
    in_order = (parts[place] for place in (0, 1, 2, 5, 3, 4))
    parameters = [
        kind and part.view(kind[1]).to(kind[0]) for part, kind in zip(in_order, ctx.types)
    ]
    return state, None, [None] * ctx.count, [None] * ctx.count, h, y, z, *parameters, *[None] * 11


residual_step.register_autograd(backward, setup_context=setup_context)
