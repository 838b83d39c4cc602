"""The residual stream's step between two sublayers in one pass over the state, forward and backward (Triton).

A step is the delta rewrite of one site, then the next site's read, RMSNorm, gate head and value head. Per token, with
the state X (v columns of width d), k~ = h the sublayer's output, and e the read's weights over s = 0..K-1 tokens back:

    n = 1 / sqrt(|h|^2 + eps^2)    k = n h    delta = t - k^T X    r = beta delta    X' = X + k r^T
    x_in = sum_s sum_j e[s, j] X'[t - s, j]    chat = rho x_in    c = g chat    y = w.c + b    z = W x_in + b

`model/residual.py` defines the same in plain operations and is its oracle. Everything is computed in fp32; the state
is rounded to its dtype where it would be stored, and that rounded state enters the read.

State that is not stored. A step may leave X' in memory or not. If not, what makes it again is kept instead: h and
u = n r of each write since the last stored state, `base`. A later step replays these writes, X = round(X + h u^T),
which needs no reduction and gives the same bits. The gradient still flows from step to step: `state` carries it, a
tensor of the state's shape that has no memory where the state is not stored.

Backward, given G' = dL/dX', gc, gy, gz, with a = dL/dx_in:

    gamma = gc + gy w    q = gamma g    a = rho (q - mean(q chat) chat) + W^T gz    M[t] = G' + sum_s e_s a[t + s]
    psi = k^T M    gX = M - beta k psi^T    gt = beta psi    gbeta = psi.delta
    gh = n (M r - beta X' psi - k kappa),  kappa = psi.(r - beta p) - beta r.psi,  p = t - delta

It needs X' only, never X, and x_in, which is made again from X' where the read looks at one token, and kept where it
looks at several. Parameter gradients are summed by each program over its own run of tokens in fp32 and then over
programs in a fixed order: the same bits every time.
"""

import triton
import triton.language as tl

from model.kernels.tiles import load_columns, load_vector, store_columns, store_vector


@triton.jit
def state_at(base, row_stride, column_stride, hs, us, row, features, mask, columns, D: tl.constexpr, V: tl.constexpr):
    """The state of one token: `base` and the writes since, each rounded as if it had been stored. (BLOCK, V) fp32."""
    state = load_columns(base + row * row_stride, column_stride, features, mask, V)
    for i in tl.static_range(len(hs)):
        h = load_vector(hs[i] + row * D, features, mask)
        u = tl.load(us[i] + row * V + columns)
        state = tl.fma(h[:, None], u[None, :], state).to(base.dtype.element_ty).to(tl.float32)
    return state


@triton.jit
def write_value(z, row, columns, scale, constant, VALUE: tl.constexpr, V: tl.constexpr):
    """(t, dt/dz), each (V,)."""
    if VALUE == "constant":
        value = tl.full((V,), 0.0, tl.float32) + constant
        slope = tl.zeros((V,), tl.float32)
    else:
        value = tl.load(z + row * V + columns)
        slope = tl.full((V,), 1.0, tl.float32)
        if VALUE == "sigmoid":
            # From both ends, so that neither vanishes before it is tiny.
            slope = scale * tl.sigmoid(value) * tl.sigmoid(-value)
            value = scale * tl.sigmoid(value)
    return value, slope


@triton.jit
def read_weights(ptr, features, mask, D: tl.constexpr, V: tl.constexpr, K: tl.constexpr):
    """Tuple of the K tiles e[s], (BLOCK, V) each."""
    weights = ()
    for s in tl.static_range(K):
        weights = weights + (load_columns(ptr + s * V * D, D, features, mask, V),)
    return weights


@triton.jit
def forward_kernel(
    base, row_stride, column_stride, hs, us,  # the state before the write
    h, y, z,  # the write: k~ (rows, D), logits of gate (rows,) and value (rows, V); h None: no write
    read, norm, gate, gate_bias, value, value_bias,  # e (K, V, D), g (D); heads of the next write, None: made elsewhere
    carry, new_carry,  # (sequences, K - 1, D) fp32: what earlier tokens add to the coming reads; None: zeros
    new_state, x_in, context, gate_logit, value_logit,  # results; None: not wanted
    inverse_norm, discrepancy, update, rho,  # n (rows,), delta (rows, V), u = n r (rows, V), rho (rows,)
    tokens, chunk, chunks,  # of a sequence; of a program; programs of a sequence
    k_eps_squared, norm_eps, value_scale, value_constant,
    D: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    VALUE: tl.constexpr, VALUE_INPUT: tl.constexpr, ERASE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    features, columns = tl.arange(0, BLOCK), tl.arange(0, V)
    inside = features < D
    sequence, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * chunk
    last = tl.minimum(first + chunk, tokens)

    e = read_weights(read, features, inside, D, V, K)
    g = load_vector(norm, features, inside)
    if gate is not None:
        w, b = load_vector(gate, features, inside), tl.load(gate_bias).to(tl.float32)
    if value is not None:
        W, b_z = load_columns(value, D, features, inside, V), tl.load(value_bias + columns).to(tl.float32)
    # The K - 1 tokens before the chunk are computed again: their states are part of its first reads.
    start = tl.maximum(first - (K - 1), 0)
    coming = ()  # what the tokens so far add to the next K - 1 reads
    for s in tl.static_range(K - 1):
        if carry is None:
            coming = coming + (tl.zeros((BLOCK,), tl.float32),)
        else:
            coming = coming + (load_vector(carry + (sequence * (K - 1) + s) * D, features, inside & (start == 0)),)

    for t in tl.range(start, last, num_stages=STAGES):
        row = (sequence * tokens + t).to(tl.int64)
        own = t >= first
        mask, mask_columns = inside & own, (columns < V) & own
        state = state_at(base, row_stride, column_stride, hs, us, row, features, inside, columns, D, V)
        if h is not None:
            source = load_vector(h + row * D, features, inside)
            n = 1 / tl.sqrt(tl.sum(source * source, 0) + k_eps_squared)
            delta, _ = write_value(z, row, columns, value_scale, value_constant, VALUE, V)
            if ERASE:
                delta -= n * tl.sum(state * source[:, None], 0)
            u = n * (2 * tl.sigmoid(tl.load(y + row)) * delta)
            state = tl.fma(source[:, None], u[None, :], state).to(base.dtype.element_ty).to(tl.float32)
            tl.store(inverse_norm + row, n, own)
            tl.store(discrepancy + row * V + columns, delta, mask_columns)
            tl.store(update + row * V + columns, u, mask_columns)
        if new_state is not None:
            store_columns(new_state + row * V * D, D, features, mask, state, V)

        later = ()
        x = tl.sum(state * e[0], 1)
        for s in tl.static_range(1, K):
            tap = tl.sum(state * e[s], 1)
            later = later + (coming[s] + tap if s < K - 1 else tap,)
        if K > 1:
            x += coming[0]
        coming = later
        rho_t = 1 / tl.sqrt(tl.sum(x * x, 0) / D + norm_eps)
        c = x * rho_t * g
        tl.store(rho + row, rho_t, own)
        store_vector(context + row * D, features, mask, c)
        if x_in is not None:
            store_vector(x_in + row * D, features, mask, x)
        if gate is not None:
            tl.store(gate_logit + row, tl.sum(c * w, 0) + b, own)
        if value is not None:
            seen = x if VALUE_INPUT == "residual" else c
            tl.store(value_logit + row * V + columns, tl.sum(seen[:, None] * W, 0) + b_z, mask_columns)

    if carry is not None:
        for s in tl.static_range(K - 1):
            store_vector(new_carry + (sequence * (K - 1) + s) * D, features, inside & (last == tokens), coming[s])


@triton.jit
def backward_kernel(
    grad_state, grad_x_in, grad_context, grad_gate, grad_value,  # of the results; None: zero
    base, row_stride, column_stride, hs, us,  # the state after the write
    h, y, z, inverse_norm, discrepancy, x_in, rho,
    read, norm, gate, value,
    new_grad_state, grad_h, grad_y, grad_z,  # results
    sums,  # (programs, TOTAL) fp32: of the parameters' gradients, as `parameter_sizes` lays them out
    tokens, chunk, chunks, zero,
    value_scale, value_constant,
    D: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    VALUE: tl.constexpr, VALUE_INPUT: tl.constexpr, ERASE: tl.constexpr, TOTAL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    features, columns = tl.arange(0, BLOCK), tl.arange(0, V)
    inside = features < D
    pid = tl.program_id(0)
    sequence, first = pid // chunks, pid % chunks * chunk
    last = tl.minimum(first + chunk, tokens)
    # The reads of the K - 1 tokens after the chunk saw its states.
    end = tl.minimum(last + K - 1, tokens)

    g = load_vector(norm, features, inside)
    sum_g = tl.zeros((BLOCK,), tl.float32)
    if K == 1:
        e = load_columns(read, D, features, inside, V)
    if gate is not None:
        w = load_vector(gate, features, inside)
        sum_w, sum_b = tl.zeros((BLOCK,), tl.float32), tl.zeros((1,), tl.float32)
    if value is not None:
        W = load_columns(value, D, features, inside, V)
        sum_W, sum_bz = tl.zeros((BLOCK, V), tl.float32), tl.zeros((V,), tl.float32)
    sum_e, later = (), ()
    for s in tl.static_range(K):
        sum_e = sum_e + (tl.zeros((BLOCK, V), tl.float32),)
        if s > 0:
            later = later + (tl.zeros((BLOCK,), tl.float32),)  # a of the tokens after this one

    # Time runs backwards: a token's state is in the reads of those after it.
    for turn in tl.range(0, end - first, num_stages=STAGES):
        t = end - 1 - turn
        row = (sequence * tokens + t).to(tl.int64)
        own = t < last
        mask, own_columns = inside & own, (columns < V) & own
        state = state_at(base, row_stride, column_stride, hs, us, row, features, mask, columns, D, V)
        if K == 1:
            x = tl.sum(state * e, 1)
        else:
            x = load_vector(x_in + row * D, features, inside)

        rho_t = tl.load(rho + row)
        chat = x * rho_t
        gamma = load_vector(grad_context + row * D, features, inside)
        if gate is not None:
            gy = tl.load(grad_gate + row)
            gamma += gy * w
        if value is not None:
            gz = tl.load(grad_value + row * V + columns)
            back = tl.sum(W * gz[None, :], 1)
            if VALUE_INPUT == "context":
                gamma += back
        q = gamma * g
        a = rho_t * (q - tl.sum(q * chat, 0) / D * chat)
        if value is not None and VALUE_INPUT == "residual":
            a += back
        if grad_x_in is not None:
            a += load_vector(grad_x_in + row * D, features, inside)
        mine = own.to(tl.float32)
        sum_g += mine * gamma * chat
        if gate is not None:
            sum_w += (mine * gy) * (chat * g)
            sum_b += mine * gy
        if value is not None:
            seen = x if VALUE_INPUT == "residual" else chat * g
            sum_W += seen[:, None] * (mine * gz)[None, :]
            sum_bz += mine * gz

        M, updated = tl.zeros((BLOCK, V), tl.float32), ()
        for s in tl.static_range(K):
            seen_by = a if s == 0 else later[s - 1]
            if K == 1:
                e_s = e
            else:
                # Too many to stay in registers; `zero`, which the compiler does not know, makes it load them each turn.
                e_s = load_columns(read + s * V * D + turn * zero, D, features, inside, V)
            M += seen_by[:, None] * e_s
            updated = updated + (sum_e[s] + seen_by[:, None] * state,)  # the next chunk's states are zero here
        sum_e = updated
        if K > 1:
            later = (a,) + later[: K - 2]
        if grad_state is not None:
            M += load_columns(grad_state + row * V * D, D, features, mask, V)

        if h is not None:
            source = load_vector(h + row * D, features, mask)
            n = tl.load(inverse_norm + row, own, other=0.0)
            logit = tl.load(y + row, own, other=0.0)
            beta = 2 * tl.sigmoid(logit)
            delta = tl.load(discrepancy + row * V + columns, own_columns, other=0.0)
            r = beta * delta
            psi = n * tl.sum(M * source[:, None], 0)
            grad_source = tl.sum(M * r[None, :], 1)
            kappa = tl.sum(psi * r, 0)
            value_t, slope = write_value(z, row, columns, value_scale, value_constant, VALUE, V)
            if ERASE:
                grad_source -= tl.sum(state * (beta * psi)[None, :], 1)
                kappa -= beta * tl.sum(psi * (value_t - delta), 0) + beta * tl.sum(psi * delta * beta, 0)
                M -= source[:, None] * (n * beta * psi)[None, :]
            store_vector(grad_h + row * D, features, mask, n * (grad_source - n * kappa * source))
            tl.store(grad_y + row, tl.sum(psi * delta, 0) * beta * tl.sigmoid(-logit), own)
            if VALUE != "constant":
                tl.store(grad_z + row * V + columns, beta * psi * slope, own_columns)
        store_columns(new_grad_state + row * V * D, D, features, mask, M, V)

    sums += pid * TOTAL
    for s in tl.static_range(K):
        store_columns(sums + s * V * D, D, features, inside, sum_e[s], V)
    sums += K * V * D
    store_vector(sums, features, inside, sum_g)
    sums += D
    if gate is not None:
        store_vector(sums, features, inside, sum_w)
        sums += D
    if value is not None:
        store_columns(sums, D, features, inside, sum_W, V)
        sums += V * D
        tl.store(sums + columns, sum_bz)
        sums += V
    if gate is not None:
        tl.store(sums + tl.arange(0, 1), sum_b)
