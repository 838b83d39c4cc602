"""The Delta stream's step between two sublayers, in one pass over the state (Triton).

A step is the write of one site and then the read, RMSNorm, gate head and value head of the next.
For one token let X be the state, with d_v value channels of width d; k~ the direction, which is the
sublayer's output in the k-Map; v the write value (arXiv 2601.00417); and e[s] the weights of the
read for the token s positions back, s = 0 .. K - 1. Then

    n = 1 / sqrt(|k~|^2 + eps^2)        k = n k~
    delta = v - k^T X                   r = beta delta          X' = X + k r^T
    x_in[t] = sum_s sum_j e[s, j] X'[t - s, j]
    rho = 1 / sqrt(mean(x_in^2) + eps)  chat = rho x_in         c = g chat
    y = w . c + b                       z = W x_in + b_z        (or W c + b_z)

where y and z are the logits of the next write's beta and v. Without erasing, delta = v.
`model/ddl.py` computes the same in plain operations and is the oracle of the tests. Here
everything is computed in fp32. The state is rounded to its dtype where it would be stored, and the
read sees the rounded state.

States that are not stored. A step stores X' or leaves it out. If it is left out, the direction k~
and the update u = n r of each write since the last stored state are kept in its place. A later step
replays these writes, X = round(X + k~ u^T), which needs no reductions and gives the same bits. The
gradient still flows from step to step, through a tensor of the state's shape that has no memory if
the state is not stored.

Backward. Let G' = dL/dX', and gc, gy and gz be the gradients of c, y and z. With a = dL/dx_in,

    gamma = gc + gy w (+ W^T gz)        q = gamma g
    a = rho (q - mean(q chat) chat) (+ W^T gz)
    M[t] = G' + sum_s e[s] a[t + s]     psi = k^T M
    gX = M - beta k psi^T               gv = beta psi           gbeta = psi . delta
    gk~ = n (M r - beta X' psi - k kappa)
    kappa = psi . (r - beta p) - beta r . psi                   p = v - delta

This needs X' but not X. It also needs x_in, which is recomputed from X' if the read covers one
token, and was kept by the forward pass if it covers several. Each program sums the gradients of the
parameters over its own tokens in fp32, and these sums are added in a fixed order, so that the bits
are the same every time.

Constants: D, BLOCK, P, V and K as in `tiles.py`; STAGES, PREFETCH and RELOAD as in
`launch_table.py`; VALUE_FORM, VALUE_INPUT and ERASE as in `residual_step.py`.
"""

import triton
import triton.language as tl

from .tiles import (
    add_scaled,
    add_zero,
    contract_columns,
    dot_blocks,
    load_numbers,
    load_vector,
    load_vectors,
    multiply,
    multiply_add,
    multiply_add_columns,
    prefetch,
    reload_vectors,
    round_to,
    scale,
    sigmoid,
    store_numbers,
    store_vectors,
    sum_blocks,
    sum_scaled_columns,
    to_numbers,
    zero_vectors,
)


@triton.jit
def replay_state(
    stored_state: tl.tensor,
    token_stride: tl.tensor,
    channel_stride: tl.tensor,
    directions: tl.tuple,
    updates: tl.tuple,
    row: tl.tensor,
    V: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """Return the state of a token: the stored one with the writes since, rounded after each."""
    state = load_vectors(stored_state + row * token_stride, channel_stride, None, V, D, BLOCK)
    for i in tl.static_range(len(directions)):
        u = tl.load(updates[i] + row * V + tl.arange(0, V))
        direction = load_vector(directions[i] + row * D, None, D, BLOCK)
        state = add_update(state, direction, to_numbers(u, V), stored_state)
    return state


@triton.jit
def prefetch_state(
    stored_state: tl.tensor,
    token_stride: tl.tensor,
    channel_stride: tl.tensor,
    directions: tl.tuple,
    row: tl.tensor,
    condition: tl.tensor,
    V: tl.constexpr,
    D: tl.constexpr,
) -> None:
    """Prefetch what `replay_state` will load for a token, if the condition holds."""
    # a repeated embedding has channels at stride 0, and is short enough for the caches
    prefetch(stored_state + row * token_stride, condition & (channel_stride == D), V * D)
    for i in tl.static_range(len(directions)):
        prefetch(directions[i] + row * D, condition, D)


@triton.jit
def add_update(
    state: tl.tuple, direction: tl.tuple, u: tl.tuple, stored_state: tl.tensor
) -> tl.tuple:
    """Return state + direction u^T, rounded to the dtype of stored_state."""
    P: tl.constexpr = len(direction)
    result = ()
    for i in tl.static_range(len(state)):
        piece = tl.fma(direction[i % P], u[i // P], state[i])
        result = result + (round_to(piece, stored_state.dtype.element_ty),)
    return result


@triton.jit
def write_value(
    value_logit: "tl.tensor | None",
    row: tl.tensor,
    value_scale: tl.tensor,
    value_constant: tl.tensor,
    VALUE_FORM: tl.constexpr,
    V: tl.constexpr,
) -> tl.tuple:
    """Return the write value v of a token and its derivative by the logit, V numbers each."""
    value = ()
    slope = ()
    if VALUE_FORM == "constant":
        for i in tl.static_range(V):  # noqa: B007
            value = value + (value_constant,)
            slope = slope + (0.0,)
    else:
        # as a block: Triton pipelines loads of blocks, and not those of single numbers
        logits = tl.load(value_logit + row * V + tl.arange(0, V))
        if VALUE_FORM == "sigmoid":
            fraction = sigmoid(logits)
            value = to_numbers(value_scale * fraction, V)
            # sigmoid(z) sigmoid(-z) is accurate for large |z|, unlike sigmoid(z) (1 - sigmoid(z))
            slope = to_numbers(value_scale * fraction * sigmoid(-logits), V)
        else:
            value = to_numbers(logits, V)
            slope = to_numbers(tl.full((V,), 1.0, tl.float32), V)
    return value, slope


@triton.jit
def write_state(
    state: tl.tuple,
    direction: tl.tuple,
    gate_logit: tl.tensor,
    value_logit: "tl.tensor | None",
    row: tl.tensor,
    stored_state: tl.tensor,
    k_eps_squared: tl.tensor,
    value_scale: tl.tensor,
    value_constant: tl.tensor,
    VALUE_FORM: tl.constexpr,
    ERASE: tl.constexpr,
    V: tl.constexpr,
) -> tl.tuple:
    """Return X' = X + k r^T of a token, then n, delta (V numbers) and u = n r (V numbers)."""
    value, _ = write_value(value_logit, row, value_scale, value_constant, VALUE_FORM, V)
    beta = 2 * sigmoid(tl.load(gate_logit + row + tl.arange(0, 1)))
    # |k~|^2 and k~^T X in one reduction
    factors = direction
    if ERASE:
        factors = direction + state
    sums = sum_blocks(dot_blocks(factors, direction))
    n = tl.rsqrt(sums[0] + k_eps_squared)
    n_beta = n * tl.sum(beta, 0)
    delta = ()
    u = ()
    for j in tl.static_range(V):
        # delta = v - k^T X, and u = n beta delta
        delta = delta + (value[j] - n * sums[1 + j] if ERASE else value[j],)
        u = u + (n_beta * delta[j],)
    return add_update(state, direction, u, stored_state), n, delta, u


@triton.jit
def read_state(
    state: tl.tuple, pending: tl.tuple, e: tl.tuple, V: tl.constexpr, K: tl.constexpr
) -> tl.tuple:
    """Read from the state of a token.

    Args:
        pending: K - 1 vectors, what earlier tokens add to the reads of this and the next tokens
        e: K * V vectors, the weights of the read

    Returns:
        x_in of the token, and `pending` for the token that follows.
    """
    P: tl.constexpr = len(state) // V
    x_in = contract_columns(state, e[: V * P], P)
    new_pending = ()
    for s in tl.static_range(1, K):
        # what this token adds to the read of the token s positions later
        tap = contract_columns(state, e[s * V * P : (s + 1) * V * P], P)
        if s < K - 1:
            tap = add_scaled(pending[s * P : (s + 1) * P], 1, tap)
        new_pending = new_pending + tap
    if K > 1:
        x_in = add_scaled(x_in, 1, pending[:P])
    return x_in, new_pending


@triton.jit
def get_weights(
    source: "tl.tensor | tl.tuple",
    turn: tl.tensor,
    COUNT: tl.constexpr,
    RELOAD: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """Return the pieces of COUNT parameter vectors.

    source: the pieces themselves, which are in registers, or with RELOAD a pointer, from which they
        are loaded again in each turn of the loop
    """
    if RELOAD:
        return reload_vectors(source, turn, COUNT, D, BLOCK)
    else:
        return source


@triton.jit(do_not_specialize=["num_tokens", "chunk_size", "num_chunks"])
def forward_kernel(
    # the state before the write: the last stored state, and the writes since
    stored_state: tl.tensor,
    token_stride: tl.tensor,
    channel_stride: tl.tensor,
    directions: tl.tuple,
    updates: tl.tuple,
    # the write: k~ (rows, D), and the logits of beta (rows,) and v (rows, V). direction is None if
    # there is no write, value_logit if v is constant.
    direction: "tl.tensor | None",
    gate_logit: "tl.tensor | None",
    value_logit: "tl.tensor | None",
    # e (K, V, D) and g (D,), then the heads of the next write: w (D,), b (1,), W (V, D), b_z (V,).
    # A head that is computed elsewhere is None.
    read_weights: tl.tensor,
    norm_weight: tl.tensor,
    gate_weight: "tl.tensor | None",
    gate_bias: "tl.tensor | None",
    value_weight: "tl.tensor | None",
    value_bias: "tl.tensor | None",
    # (sequences, K - 1, D) fp32: what earlier calls add to the reads, and this one to later ones.
    # None stands for zeros.
    carry: "tl.tensor | None",
    new_carry: "tl.tensor | None",
    # results; None if they are not wanted
    new_state: "tl.tensor | None",
    x_in: "tl.tensor | None",
    context: tl.tensor,
    next_gate_logit: "tl.tensor | None",
    next_value_logit: "tl.tensor | None",
    # results that the backward pass needs: n (rows,), delta (rows, V), u (rows, V), rho (rows,)
    inverse_norm: "tl.tensor | None",
    delta: "tl.tensor | None",
    update: "tl.tensor | None",
    inverse_rms: tl.tensor,
    # of a sequence, of a program, and of a sequence
    num_tokens: tl.tensor,
    chunk_size: tl.tensor,
    num_chunks: tl.tensor,
    k_eps_squared: tl.tensor,
    norm_eps: tl.tensor,
    value_scale: tl.tensor,
    value_constant: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    VALUE_FORM: tl.constexpr,
    VALUE_INPUT: tl.constexpr,
    ERASE: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    RELOAD: tl.constexpr,
) -> None:
    P: tl.constexpr = (D + BLOCK - 1) // BLOCK
    # a program computes one chunk of the tokens of one sequence
    sequence = tl.program_id(0) // num_chunks
    first = tl.program_id(0) % num_chunks * chunk_size
    last = tl.minimum(first + chunk_size, num_tokens)

    # the parameters
    e = read_weights
    g = load_vector(norm_weight, None, D, BLOCK)
    if not RELOAD:
        e = load_vectors(read_weights, D, None, K * V, D, BLOCK)
    # Vectors whose dot products with x_in give the logits: c = rho g x_in, so w . c is rho times
    # the product of g w and x_in.
    head_vectors = ()
    if gate_weight is not None:
        head_vectors = head_vectors + multiply(g, load_vector(gate_weight, None, D, BLOCK))
        b = tl.load(gate_bias).to(tl.float32)
    if value_weight is not None:
        W = load_vectors(value_weight, D, None, V, D, BLOCK)
        for j in tl.static_range(V):
            if VALUE_INPUT == "context":
                head_vectors = head_vectors + multiply(g, W[j * P : (j + 1) * P])
            else:
                head_vectors = head_vectors + W[j * P : (j + 1) * P]
        b_z = to_numbers(tl.load(value_bias + tl.arange(0, V)).to(tl.float32), V)

    # what earlier tokens add to the next K - 1 reads
    pending = ()
    if K > 1:
        start = tl.maximum(first - (K - 1), 0)
        if carry is None:
            pending = zero_vectors(K - 1, D, BLOCK)
        else:
            # what earlier calls add reaches the first chunk of a sequence
            sequence_carry = carry + sequence * (K - 1) * D
            pending = load_vectors(sequence_carry, D, start == 0, K - 1, D, BLOCK)
        # The states of the K - 1 tokens before the chunk are part of its first reads, and are
        # therefore computed by this program too.
        for t in tl.range(start, first):
            row = (sequence * num_tokens + t).to(tl.int64)
            state = replay_state(
                stored_state, token_stride, channel_stride, directions, updates, row, V, D, BLOCK
            )
            if direction is not None:
                k_tilde = load_vector(direction + row * D, None, D, BLOCK)
                state, _, _, _ = write_state(
                    state,
                    k_tilde,
                    gate_logit,
                    value_logit,
                    row,
                    stored_state,
                    k_eps_squared,
                    value_scale,
                    value_constant,
                    VALUE_FORM,
                    ERASE,
                    V,
                )
            weights = get_weights(e, t, K * V, RELOAD, D, BLOCK)
            _, pending = read_state(state, pending, weights, V, K)

    for t in tl.range(first, last, num_stages=STAGES):
        # int64, because a state may hold more than 2^31 numbers
        row = (sequence * num_tokens + t).to(tl.int64)
        if PREFETCH > 0:
            prefetch_state(
                stored_state,
                token_stride,
                channel_stride,
                directions,
                row + PREFETCH,
                t + PREFETCH < last,
                V,
                D,
            )
            if direction is not None:
                prefetch(direction + (row + PREFETCH) * D, t + PREFETCH < last, D)

        # X' = X + k r^T
        state = replay_state(
            stored_state, token_stride, channel_stride, directions, updates, row, V, D, BLOCK
        )
        if direction is not None:
            k_tilde = load_vector(direction + row * D, None, D, BLOCK)
            state, n, delta_t, u = write_state(
                state,
                k_tilde,
                gate_logit,
                value_logit,
                row,
                stored_state,
                k_eps_squared,
                value_scale,
                value_constant,
                VALUE_FORM,
                ERASE,
                V,
            )
            tl.store(inverse_norm + row, n)
            store_numbers(delta + row * V, delta_t)
            store_numbers(update + row * V, u)
        if new_state is not None:
            store_vectors(new_state + row * V * D, state, None, D, BLOCK)

        # x_in[t] = sum_s sum_j e[s, j] X'[t - s, j]
        weights = get_weights(e, t, K * V, RELOAD, D, BLOCK)
        x, pending = read_state(state, pending, weights, V, K)

        # rho = 1 / sqrt(mean(x_in^2) + eps), with the products of the heads in the same reduction
        sums = sum_blocks(dot_blocks(x + head_vectors, x))
        rho = tl.rsqrt(sums[0] * (1 / D) + norm_eps)
        tl.store(inverse_rms + row, rho)

        # c = g rho x_in
        c = ()
        for p in tl.static_range(P):
            c = c + (x[p] * rho * g[p],)
        store_vectors(context + row * D, c, None, D, BLOCK)
        if x_in is not None:
            store_vectors(x_in + row * D, x, None, D, BLOCK)

        # y = w . c + b
        if gate_weight is not None:
            tl.store(next_gate_logit + row, rho * sums[1] + b)
        # z = W x_in + b_z, or W c + b_z
        if value_weight is not None:
            head_scale = rho if VALUE_INPUT == "context" else 1.0
            logits = ()
            for j in tl.static_range(V):
                logits = logits + (head_scale * sums[len(sums) - V + j] + b_z[j],)
            store_numbers(next_value_logit + row * V, logits)

    if carry is not None:
        # what the last tokens of a sequence add to the reads of the next call
        sequence_carry = new_carry + sequence * (K - 1) * D
        store_vectors(sequence_carry, pending, last == num_tokens, D, BLOCK)


@triton.jit
def backward_through_norm(
    grad_context: tl.tensor,
    grad_x_in: "tl.tensor | None",
    grad_next_gate_logit: "tl.tensor | None",
    grad_next_value_logit: "tl.tensor | None",
    x: tl.tuple,
    inverse_rms: tl.tensor,
    row: tl.tensor,
    g: "tl.tensor | tl.tuple",
    w: "tl.tensor | tl.tuple | None",
    W: "tl.tensor | tl.tuple | None",
    turn: tl.tensor,
    GATE: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_INPUT: tl.constexpr,
    RELOAD: tl.constexpr,
    V: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """Return a = dL/dx_in, chat, gamma = dL/dc, gy and gz of one token, whose x_in is x."""
    P: tl.constexpr = len(x)
    rho = load_numbers(inverse_rms + row, 1)[0]
    gamma = load_vector(grad_context + row * D, None, D, BLOCK)
    gy = 0.0
    gz = ()
    W_gz = ()
    g = get_weights(g, turn, 1, RELOAD, D, BLOCK)
    # gamma = gc + gy w, plus W^T gz if the value head reads c
    if GATE:
        gy = load_numbers(grad_next_gate_logit + row, 1)[0]
        gamma = add_scaled(gamma, gy, get_weights(w, turn, 1, RELOAD, D, BLOCK))
    if VALUE:
        gz = load_numbers(grad_next_value_logit + row * V, V)
        W_gz = sum_scaled_columns(get_weights(W, turn, V, RELOAD, D, BLOCK), gz, P)
        if VALUE_INPUT == "context":
            gamma = add_scaled(gamma, 1.0, W_gz)
    # a = rho (q - mean(q chat) chat), plus W^T gz if the value head reads x_in
    chat = scale(x, rho)
    q = multiply(gamma, g)
    mean = sum_blocks(dot_blocks(q, chat))[0] * (1 / D)
    a = ()
    for p in tl.static_range(P):
        a = a + (rho * (q[p] - mean * chat[p]),)
    if VALUE and VALUE_INPUT == "residual":
        a = add_scaled(a, 1.0, W_gz)
    if grad_x_in is not None:
        a = add_scaled(a, 1.0, load_vector(grad_x_in + row * D, None, D, BLOCK))
    return a, chat, gamma, gy, gz


@triton.jit(do_not_specialize=["num_tokens", "chunk_size", "num_chunks"])
def backward_kernel(
    # gradients of the forward kernel's results; None stands for zeros
    grad_new_state: "tl.tensor | None",
    grad_x_in: "tl.tensor | None",
    grad_context: tl.tensor,
    grad_next_gate_logit: "tl.tensor | None",
    grad_next_value_logit: "tl.tensor | None",
    # the state after the write: the last stored state, and the writes since
    stored_state: tl.tensor,
    token_stride: tl.tensor,
    channel_stride: tl.tensor,
    directions: tl.tuple,
    updates: tl.tuple,
    # arguments and results of the forward kernel
    direction: "tl.tensor | None",
    gate_logit: "tl.tensor | None",
    value_logit: "tl.tensor | None",
    inverse_norm: "tl.tensor | None",
    delta: "tl.tensor | None",
    x_in: tl.tensor,
    inverse_rms: tl.tensor,
    read_weights: tl.tensor,
    norm_weight: tl.tensor,
    gate_weight: "tl.tensor | None",
    value_weight: "tl.tensor | None",
    # results: gradients of the state before the write, of k~ and of the logits
    grad_state: tl.tensor,
    grad_direction: "tl.tensor | None",
    grad_gate_logit: "tl.tensor | None",
    grad_value_logit: "tl.tensor | None",
    # (programs, TOTAL) fp32: gradients of the parameters, summed over the tokens of each program,
    # in the order of `ParameterGradients`
    sums: tl.tensor,
    num_tokens: tl.tensor,
    chunk_size: tl.tensor,
    num_chunks: tl.tensor,
    value_scale: tl.tensor,
    value_constant: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    VALUE_FORM: tl.constexpr,
    VALUE_INPUT: tl.constexpr,
    ERASE: tl.constexpr,
    TOTAL: tl.constexpr,
    STAGES: tl.constexpr,
    RELOAD: tl.constexpr,
    PREFETCH: tl.constexpr,
) -> None:
    P: tl.constexpr = (D + BLOCK - 1) // BLOCK
    GATE: tl.constexpr = gate_weight is not None
    VALUE: tl.constexpr = value_weight is not None
    sequence = tl.program_id(0) // num_chunks
    first = tl.program_id(0) % num_chunks * chunk_size
    last = tl.minimum(first + chunk_size, num_tokens)

    # the parameters: pieces in registers, or with RELOAD pointers
    e = read_weights
    g = norm_weight
    w = gate_weight
    W = value_weight
    if not RELOAD:
        e = load_vectors(read_weights, D, None, K * V, D, BLOCK)
        g = load_vector(norm_weight, None, D, BLOCK)
        if GATE:
            w = load_vector(gate_weight, None, D, BLOCK)
        if VALUE:
            W = load_vectors(value_weight, D, None, V, D, BLOCK)

    # sums over this program's tokens: for the gradients of e, g, w, W, b and b_z
    sum_e = zero_vectors(K * V, D, BLOCK)
    sum_g = zero_vectors(1, D, BLOCK)
    sum_w = ()
    sum_W = ()
    sum_b = 0.0
    sum_bz = ()
    if GATE:
        sum_w = zero_vectors(1, D, BLOCK)
    if VALUE:
        sum_W = zero_vectors(V, D, BLOCK)
        for i in tl.static_range(V):  # noqa: B007
            sum_bz = sum_bz + (0.0,)

    # The loops run from the last token to the first: the reads of later tokens depend on the state
    # of a token, so their a = dL/dx_in must be known first.
    later_a = zero_vectors(K - 1, D, BLOCK)
    if K > 1:
        # the reads of the K - 1 tokens after the chunk depend on its states
        end = tl.minimum(last + K - 1, num_tokens)
        for turn in tl.range(0, end - last):
            row = (sequence * num_tokens + end - 1 - turn).to(tl.int64)
            a, _, _, _, _ = backward_through_norm(
                grad_context,
                grad_x_in,
                grad_next_gate_logit,
                grad_next_value_logit,
                load_vector(x_in + row * D, None, D, BLOCK),
                inverse_rms,
                row,
                g,
                w,
                W,
                turn,
                GATE,
                VALUE,
                VALUE_INPUT,
                RELOAD,
                V,
                D,
                BLOCK,
            )
            later_a = a + later_a[: (K - 2) * P]

    for turn in tl.range(0, last - first, num_stages=STAGES):
        row = (sequence * num_tokens + last - 1 - turn).to(tl.int64)
        if PREFETCH > 0:
            next_row = row - PREFETCH
            has_next = turn + PREFETCH < last - first
            prefetch_state(
                stored_state, token_stride, channel_stride, directions, next_row, has_next, V, D
            )
            prefetch(grad_context + next_row * D, has_next, D)
            if K > 1:
                prefetch(x_in + next_row * D, has_next, D)
            if grad_new_state is not None:
                prefetch(grad_new_state + next_row * V * D, has_next, V * D)
            if direction is not None:
                prefetch(direction + next_row * D, has_next, D)

        # X' and x_in, which a read of one token gives again at no cost
        state = replay_state(
            stored_state, token_stride, channel_stride, directions, updates, row, V, D, BLOCK
        )
        if K == 1:
            x = contract_columns(state, get_weights(e, turn, V, RELOAD, D, BLOCK), P)
        else:
            x = load_vector(x_in + row * D, None, D, BLOCK)

        # a = dL/dx_in, and the gradients of the norm and of the heads
        a, chat, gamma, gy, gz = backward_through_norm(
            grad_context,
            grad_x_in,
            grad_next_gate_logit,
            grad_next_value_logit,
            x,
            inverse_rms,
            row,
            g,
            w,
            W,
            turn,
            GATE,
            VALUE,
            VALUE_INPUT,
            RELOAD,
            V,
            D,
            BLOCK,
        )
        sum_g = multiply_add(sum_g, gamma, chat)
        if GATE:
            # g is common to all tokens, and multiplies this sum at the end
            sum_w = add_scaled(sum_w, gy, chat)
            sum_b = sum_b + gy
        if VALUE:
            head_input = x if VALUE_INPUT == "residual" else chat
            new_sum_W = ()
            new_sum_bz = ()
            for j in tl.static_range(V):
                new_sum_W = new_sum_W + add_scaled(sum_W[j * P : (j + 1) * P], gz[j], head_input)
                new_sum_bz = new_sum_bz + (sum_bz[j] + gz[j],)
            sum_W = new_sum_W
            sum_bz = new_sum_bz

        # M[t] = G' + sum_s e[s] a[t + s], and the gradient of e[s] is the sum of X'[t] a[t + s]
        all_a = a + later_a
        new_sum_e = ()
        M = zero_vectors(V, D, BLOCK)
        if grad_new_state is not None:
            M = load_vectors(grad_new_state + row * V * D, D, None, V, D, BLOCK)
        for s in tl.static_range(K):
            if RELOAD:
                e_s = reload_vectors(read_weights + s * V * D, turn, V, D, BLOCK)
            else:
                e_s = e[s * V * P : (s + 1) * V * P]
            a_s = all_a[s * P : (s + 1) * P]
            M = multiply_add_columns(M, e_s, a_s)
            sum_e_s = sum_e[s * V * P : (s + 1) * V * P]
            new_sum_e = new_sum_e + multiply_add_columns(sum_e_s, state, a_s)
        sum_e = new_sum_e
        # Triton does not pipeline a loop that hands a value unchanged from turn to turn, so zero is
        # added.
        later_a = add_zero(all_a[: (K - 1) * P])

        if direction is not None:
            k_tilde = load_vector(direction + row * D, None, D, BLOCK)
            n = load_numbers(inverse_norm + row, 1)[0]
            logit = tl.load(gate_logit + row + tl.arange(0, 1))
            beta = tl.sum(2 * sigmoid(logit), 0)
            # 1 - beta / 2, accurate also where it is tiny
            beta_complement = tl.sum(sigmoid(-logit), 0)
            delta_t = load_numbers(delta + row * V, V)
            value, slope = write_value(value_logit, row, value_scale, value_constant, VALUE_FORM, V)
            # psi = k^T M, kappa, and the product psi . delta, which is the gradient of beta
            M_k_tilde = sum_blocks(dot_blocks(M, k_tilde))
            kappa = 0.0
            grad_beta = 0.0
            r = ()
            beta_psi = ()
            for j in tl.static_range(V):
                psi_j = n * M_k_tilde[j]
                r_j = beta * delta_t[j]
                r = r + (r_j,)
                beta_psi = beta_psi + (beta * psi_j,)
                grad_beta += psi_j * delta_t[j]
                kappa += psi_j * r_j
                if ERASE:
                    kappa -= beta * (psi_j * (value[j] - delta_t[j])) + beta * (psi_j * r_j)

            # gk~ = n (M r - beta X' psi - k kappa)
            product = sum_scaled_columns(M, r, P)
            if ERASE:
                for j in tl.static_range(V):
                    product = add_scaled(product, -beta_psi[j], state[j * P : (j + 1) * P])
            grad_k_tilde = ()
            for p in tl.static_range(P):
                grad_k_tilde = grad_k_tilde + (n * (product[p] - n * kappa * k_tilde[p]),)
            store_vectors(grad_direction + row * D, grad_k_tilde, None, D, BLOCK)

            # the derivative of beta = 2 sigmoid(y) is beta (1 - beta / 2)
            tl.store(grad_gate_logit + row, grad_beta * beta * beta_complement)
            # gv = beta psi
            if VALUE_FORM != "constant":
                for j in tl.static_range(V):
                    tl.store(grad_value_logit + row * V + j, beta_psi[j] * slope[j])
            # gX = M - beta k psi^T
            if ERASE:
                grad = ()
                for j in tl.static_range(V):
                    grad = grad + add_scaled(M[j * P : (j + 1) * P], -n * beta_psi[j], k_tilde)
                M = grad
        store_vectors(grad_state + row * V * D, M, None, D, BLOCK)

    # the sums of this program, in the order of `ParameterGradients`
    sums += tl.program_id(0) * TOTAL
    store_vectors(sums, sum_e + sum_g, None, D, BLOCK)
    sums += (K * V + 1) * D
    g = load_vector(norm_weight, None, D, BLOCK)
    if GATE:
        store_vectors(sums, multiply(sum_w, g), None, D, BLOCK)
        sums += D
    if VALUE:
        if VALUE_INPUT == "context":
            for j in tl.static_range(V):
                grad_W_j = multiply(sum_W[j * P : (j + 1) * P], g)
                store_vectors(sums + j * D, grad_W_j, None, D, BLOCK)
        else:
            store_vectors(sums, sum_W, None, D, BLOCK)
        sums += V * D
        store_numbers(sums, sum_bz)
        sums += V
    if GATE:
        tl.store(sums, sum_b)
