"""The residual stream's step between two sublayers in one pass over the state, forward and backward
(Triton).

A step is the delta rewrite of one site, then the next site's read, RMSNorm, gate head and value
head. Per token, with the state X (v columns of width d), k~ = h the sublayer's output, and e the
read's weights over s = 0..K-1 tokens back:

    n = 1 / sqrt(|h|^2 + eps^2)    k = n h    delta = t - k^T X    r = beta delta    X' = X + k r^T
    x_in = sum_s sum_j e[s, j] X'[t - s, j]   chat = rho x_in   c = g chat   y = w.c + b   z = W x_in + b

`model/residual.py` defines the same in plain operations and is its oracle. Everything is computed
in fp32; the state is rounded to its dtype where it would be stored, and that rounded state enters
the read.

State that is not stored. A step may leave X' in memory or not. If not, what makes it again is kept
instead: h and u = n r of each write since the last stored state, `base`. A later step replays these
writes, X = round(X + h u^T), which needs no reduction and gives the same bits. The gradient still
flows from step to step: `state` carries it, a tensor of the state's shape that has no memory where
the state is not stored.

Backward, given G' = dL/dX', gc, gy, gz, with a = dL/dx_in:

    gamma = gc + gy w   q = gamma g   a = rho (q - mean(q chat) chat) + W^T gz   M[t] = G' + sum_s e_s a[t + s]
    psi = k^T M    gX = M - beta k psi^T    gt = beta psi    gbeta = psi.delta
    gh = n (M r - beta X' psi - k kappa),  kappa = psi.(r - beta p) - beta r.psi,  p = t - delta

It needs X' only, never X, and x_in, which is made again from X' where the read looks at one token,
and kept where it looks at several. Parameter gradients are summed by each program over its own run
of tokens in fp32 and then over programs in a fixed order: the same bits every time.
"""

import triton
import triton.language as tl

from model.kernels.tiles import (
    combined,
    fma,
    load,
    load_again,
    load_columns,
    load_numbers,
    numbers,
    outer,
    plus,
    prefetch,
    products,
    rounded,
    scaled,
    shifted,
    sigmoid,
    store,
    store_numbers,
    times,
    totals,
    weighted,
    zeros,
)  # fmt: skip


@triton.jit
def state_at(
    base,
    row_stride,
    column_stride,
    hs,
    us,
    row,
    V: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The state of one token: `base` and the writes since, each rounded as if it had been
    stored.
    """
    state = load_columns(base + row * row_stride, column_stride, None, V, D, BLOCK)
    for i in tl.static_range(len(hs)):
        u = tl.load(us[i] + row * V + tl.arange(0, V))
        state = written(state, load(hs[i] + row * D, None, D, BLOCK), numbers(u, V), base)
    return state


@triton.jit
def prefetch_state(
    base, row_stride, column_stride, hs, row, there, V: tl.constexpr, D: tl.constexpr
):
    """Of what `state_at` will load.

    A repeated embedding, columns at stride 0, is left to the cache.
    """
    prefetch(base + row * row_stride, there & (column_stride == D), V * D)
    for i in tl.static_range(len(hs)):
        prefetch(hs[i] + row * D, there, D)


@triton.jit
def written(state, h, u, base):
    """state + h u^T, rounded to base's dtype."""
    P: tl.constexpr = len(h)
    after = ()
    for i in tl.static_range(len(state)):
        after = after + (rounded(tl.fma(h[i % P], u[i // P], state[i]), base.dtype.element_ty),)
    return after


@triton.jit
def write_value(z, row, scale, constant, VALUE: tl.constexpr, V: tl.constexpr):
    """(t, dt/dz), V numbers each."""
    value, slope = (), ()
    if VALUE == "constant":
        for i in tl.static_range(V):  # noqa: B007
            value, slope = value + (constant,), slope + (0.0,)
    else:
        # As a block: loads of blocks are pipelined, loads of numbers are not.
        logits = tl.load(z + row * V + tl.arange(0, V))
        if VALUE == "sigmoid":
            share = sigmoid(logits)
            value = numbers(scale * share, V)
            # From both ends, so that neither vanishes before it is tiny.
            slope = numbers(scale * share * sigmoid(-logits), V)
        else:
            value, slope = numbers(logits, V), numbers(tl.full((V,), 1.0, tl.float32), V)
    return value, slope


@triton.jit
def write(
    state, source, y, z, row, base, k_eps_squared, scale, constant, VALUE, ERASE, V: tl.constexpr
):
    """(the state after the write of `source`, n, delta, u): the last two of V numbers."""
    value, _ = write_value(z, row, scale, constant, VALUE, V)
    beta = 2 * sigmoid(tl.load(y + row + tl.arange(0, 1)))
    sums = totals(products(source + state if ERASE else source, source))
    n = tl.rsqrt(sums[0] + k_eps_squared)
    step, delta, u = n * tl.sum(beta, 0), (), ()
    for j in tl.static_range(V):
        delta = delta + (value[j] - n * sums[1 + j] if ERASE else value[j],)
        u = u + (step * delta[j],)
    return written(state, source, u, base), n, delta, u


@triton.jit
def reads(state, coming, e, V: tl.constexpr, K: tl.constexpr):
    """(x_in of the state's token, which `coming` is a part of; what comes to the next K - 1 tokens
    by then).
    """
    P: tl.constexpr = len(state) // V
    x, later = combined(state, e[: V * P], P), ()
    for s in tl.static_range(1, K):
        tap = combined(state, e[s * V * P : (s + 1) * V * P], P)
        later = later + (plus(coming[s * P : (s + 1) * P], 1, tap) if s < K - 1 else tap)
    if K > 1:
        x = plus(x, 1, coming[:P])
    return x, later


@triton.jit
def weights(
    source, turn, N: tl.constexpr, RELOAD: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Pieces of N parameter vectors: `source` itself, or, where registers do not hold them, loaded
    again each turn.
    """
    if RELOAD:
        return load_again(source, turn, N, D, BLOCK)
    else:
        return source


@triton.jit(do_not_specialize=["tokens", "chunk", "chunks"])
def forward_kernel(
    base, row_stride, column_stride, hs, us,  # the state before the write
    # the write: k~ (rows, D), logits of gate (rows,) and value (rows, V); h None: no write
    h, y, z,
    # e (K, V, D), g (D); heads of the next write, None: made elsewhere
    read, norm, gate, gate_bias, value, value_bias,
    # (sequences, K - 1, D) fp32: what earlier tokens add to the coming reads; None: zeros
    carry, new_carry,
    new_state, x_in, context, gate_logit, value_logit,  # results; None: not wanted
    # n (rows,), delta (rows, V), u = n r (rows, V), rho (rows,)
    inverse_norm, discrepancy, update, rho,
    tokens, chunk, chunks,  # of a sequence; of a program; programs of a sequence
    k_eps_squared, norm_eps, value_scale, value_constant,
    D: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    VALUE: tl.constexpr, VALUE_INPUT: tl.constexpr, ERASE: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = (D + BLOCK - 1) // BLOCK
    sequence, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * chunk
    last = tl.minimum(first + chunk, tokens)

    e, g = read, load(norm, None, D, BLOCK)
    if not RELOAD:
        e = load_columns(read, D, None, K * V, D, BLOCK)
    heads = ()  # what x_in is multiplied with besides itself
    if gate is not None:
        heads = heads + times(g, load(gate, None, D, BLOCK))
        b = tl.load(gate_bias).to(tl.float32)
    if value is not None:
        W = load_columns(value, D, None, V, D, BLOCK)
        for j in tl.static_range(V):
            heads = heads + (
                times(g, W[j * P : (j + 1) * P])
                if VALUE_INPUT == "context"
                else W[j * P : (j + 1) * P]
            )
        b_z = numbers(tl.load(value_bias + tl.arange(0, V)).to(tl.float32), V)

    coming = ()  # what the tokens so far add to the next K - 1 reads
    if K > 1:
        start = tl.maximum(first - (K - 1), 0)
        if carry is None:
            coming = zeros(K - 1, D, BLOCK)
        else:
            coming = load_columns(carry + sequence * (K - 1) * D, D, start == 0, K - 1, D, BLOCK)
        # The K - 1 tokens before the chunk are computed again: their states are part of its first
        # reads.
        for t in tl.range(start, first):
            row = (sequence * tokens + t).to(tl.int64)
            state = state_at(base, row_stride, column_stride, hs, us, row, V, D, BLOCK)
            if h is not None:
                source = load(h + row * D, None, D, BLOCK)
                state, _, _, _ = write(
                    state,
                    source,
                    y,
                    z,
                    row,
                    base,
                    k_eps_squared,
                    value_scale,
                    value_constant,
                    VALUE,
                    ERASE,
                    V,
                )
            _, coming = reads(state, coming, weights(e, t, K * V, RELOAD, D, BLOCK), V, K)

    for t in tl.range(first, last, num_stages=STAGES):
        row = (sequence * tokens + t).to(tl.int64)
        if PREFETCH > 0:
            prefetch_state(
                base, row_stride, column_stride, hs, row + PREFETCH, t + PREFETCH < last, V, D
            )
            if h is not None:
                prefetch(h + (row + PREFETCH) * D, t + PREFETCH < last, D)
        state = state_at(base, row_stride, column_stride, hs, us, row, V, D, BLOCK)
        if h is not None:
            source = load(h + row * D, None, D, BLOCK)
            state, n, delta, u = write(
                state,
                source,
                y,
                z,
                row,
                base,
                k_eps_squared,
                value_scale,
                value_constant,
                VALUE,
                ERASE,
                V,
            )
            tl.store(inverse_norm + row, n)
            store_numbers(discrepancy + row * V, delta)
            store_numbers(update + row * V, u)
        if new_state is not None:
            store(new_state + row * V * D, state, None, D, BLOCK)

        x, coming = reads(state, coming, weights(e, t, K * V, RELOAD, D, BLOCK), V, K)
        sums = totals(products(x + heads, x))
        rho_t = tl.rsqrt(sums[0] * (1 / D) + norm_eps)
        tl.store(rho + row, rho_t)
        c = ()
        for p in tl.static_range(P):
            c = c + (x[p] * rho_t * g[p],)
        store(context + row * D, c, None, D, BLOCK)
        if x_in is not None:
            store(x_in + row * D, x, None, D, BLOCK)
        if gate is not None:
            tl.store(gate_logit + row, rho_t * sums[1] + b)
        if value is not None:
            scale, logits = (rho_t if VALUE_INPUT == "context" else 1.0), ()
            for j in tl.static_range(V):
                logits = logits + (scale * sums[len(sums) - V + j] + b_z[j],)
            store_numbers(value_logit + row * V, logits)

    if carry is not None:
        store(new_carry + sequence * (K - 1) * D, coming, last == tokens, D, BLOCK)


@triton.jit
def through_norm(
    grad_context, grad_x_in, grad_gate, grad_value, x, rho, row, g, w, W, turn,
    GATE: tl.constexpr, HEADS: tl.constexpr, VALUE_INPUT: tl.constexpr, RELOAD: tl.constexpr,
    V: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(a = dL/dx_in, chat, gamma = dL/dc, gy, gz) of one token with the read x."""
    P: tl.constexpr = len(x)
    rho_t = load_numbers(rho + row, 1)[0]
    gamma, gy, gz, back = load(grad_context + row * D, None, D, BLOCK), 0.0, (), ()
    g = weights(g, turn, 1, RELOAD, D, BLOCK)
    if GATE:
        gy = load_numbers(grad_gate + row, 1)[0]
        gamma = plus(gamma, gy, weights(w, turn, 1, RELOAD, D, BLOCK))
    if HEADS:
        gz = load_numbers(grad_value + row * V, V)
        back = weighted(weights(W, turn, V, RELOAD, D, BLOCK), gz, P)
        if VALUE_INPUT == "context":
            gamma = plus(gamma, 1.0, back)
    chat, q = scaled(x, rho_t), times(gamma, g)
    mean, a = totals(products(q, chat))[0] * (1 / D), ()
    for p in tl.static_range(P):
        a = a + (rho_t * (q[p] - mean * chat[p]),)
    if HEADS and VALUE_INPUT == "residual":
        a = plus(a, 1.0, back)
    if grad_x_in is not None:
        a = plus(a, 1.0, load(grad_x_in + row * D, None, D, BLOCK))
    return a, chat, gamma, gy, gz


@triton.jit(do_not_specialize=["tokens", "chunk", "chunks"])
def backward_kernel(
    grad_state, grad_x_in, grad_context, grad_gate, grad_value,  # of the results; None: zero
    base, row_stride, column_stride, hs, us,  # the state after the write
    h, y, z, inverse_norm, discrepancy, x_in, rho,
    read, norm, gate, value,
    new_grad_state, grad_h, grad_y, grad_z,  # results
    # (programs, TOTAL) fp32: of the parameters' gradients, as `parameter_sizes` lays them out
    sums,
    tokens, chunk, chunks,
    value_scale, value_constant,
    D: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    VALUE: tl.constexpr, VALUE_INPUT: tl.constexpr, ERASE: tl.constexpr, TOTAL: tl.constexpr, STAGES: tl.constexpr,
    RELOAD: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    P: tl.constexpr = (D + BLOCK - 1) // BLOCK
    GATE: tl.constexpr = gate is not None
    HEADS: tl.constexpr = value is not None
    sequence, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * chunk
    last = tl.minimum(first + chunk, tokens)

    e, g, w, W = read, norm, gate, value
    if not RELOAD:
        e, g = load_columns(read, D, None, K * V, D, BLOCK), load(norm, None, D, BLOCK)
        if GATE:
            w = load(gate, None, D, BLOCK)
        if HEADS:
            W = load_columns(value, D, None, V, D, BLOCK)
    sum_e, sum_g, sum_w, sum_W = zeros(K * V, D, BLOCK), zeros(1, D, BLOCK), (), ()
    sum_b, sum_bz = 0.0, ()
    if GATE:
        sum_w = zeros(1, D, BLOCK)
    if HEADS:
        sum_W = zeros(V, D, BLOCK)
        for i in tl.static_range(V):  # noqa: B007, the compiler knows no `_`
            sum_bz = sum_bz + (0.0,)

    # Time runs backwards: a token's state is in the reads of those after it.
    later = zeros(K - 1, D, BLOCK)  # a of the tokens after this one
    if K > 1:
        # the reads of the K - 1 tokens after the chunk saw its states
        end = tl.minimum(last + K - 1, tokens)
        for turn in tl.range(0, end - last):
            row = (sequence * tokens + end - 1 - turn).to(tl.int64)
            a, _, _, _, _ = through_norm(
                grad_context, grad_x_in, grad_gate, grad_value, load(x_in + row * D, None, D, BLOCK), rho, row,
                g, w, W, turn, GATE, HEADS, VALUE_INPUT, RELOAD, V, D, BLOCK,
            )  # fmt: skip
            later = a + later[: (K - 2) * P]

    for turn in tl.range(0, last - first, num_stages=STAGES):
        row = (sequence * tokens + last - 1 - turn).to(tl.int64)
        if PREFETCH > 0:
            before, there = row - PREFETCH, turn + PREFETCH < last - first
            prefetch_state(base, row_stride, column_stride, hs, before, there, V, D)
            prefetch(grad_context + before * D, there, D)
            if K > 1:
                prefetch(x_in + before * D, there, D)
            if grad_state is not None:
                prefetch(grad_state + before * V * D, there, V * D)
            if h is not None:
                prefetch(h + before * D, there, D)
        state = state_at(base, row_stride, column_stride, hs, us, row, V, D, BLOCK)
        if K == 1:
            x = combined(state, weights(e, turn, V, RELOAD, D, BLOCK), P)
        else:
            x = load(x_in + row * D, None, D, BLOCK)
        a, chat, gamma, gy, gz = through_norm(
            grad_context, grad_x_in, grad_gate, grad_value, x, rho, row,
            g, w, W, turn, GATE, HEADS, VALUE_INPUT, RELOAD, V, D, BLOCK,
        )  # fmt: skip
        sum_g = fma(sum_g, gamma, chat)
        if GATE:
            sum_w, sum_b = plus(sum_w, gy, chat), sum_b + gy
        if HEADS:
            seen, added, biases = (x if VALUE_INPUT == "residual" else chat), (), ()
            for j in tl.static_range(V):
                added = added + plus(sum_W[j * P : (j + 1) * P], gz[j], seen)
                biases = biases + (sum_bz[j] + gz[j],)
            sum_W, sum_bz = added, biases

        seen_by, added = a + later, ()
        M = zeros(V, D, BLOCK)
        if grad_state is not None:
            M = load_columns(grad_state + row * V * D, D, None, V, D, BLOCK)
        for s in tl.static_range(K):
            e_s = (
                e[s * V * P : (s + 1) * V * P]
                if not RELOAD
                else load_again(read + s * V * D, turn, V, D, BLOCK)
            )
            M = outer(M, e_s, seen_by[s * P : (s + 1) * P])
            added = added + outer(
                sum_e[s * V * P : (s + 1) * V * P], state, seen_by[s * P : (s + 1) * P]
            )
        sum_e = added
        # Sums, though of nothing: Triton does not pipeline a loop that only hands values on from
        # turn to turn.
        later = shifted(seen_by[: (K - 1) * P])

        if h is not None:
            source = load(h + row * D, None, D, BLOCK)
            n, logit = load_numbers(inverse_norm + row, 1)[0], tl.load(y + row + tl.arange(0, 1))
            beta, slope_beta = tl.sum(2 * sigmoid(logit), 0), tl.sum(sigmoid(-logit), 0)
            delta = load_numbers(discrepancy + row * V, V)
            value_t, slope = write_value(z, row, value_scale, value_constant, VALUE, V)
            found, kappa, slant = totals(products(M, source)), 0.0, 0.0
            r, drop = (), ()  # drop: beta psi
            for j in tl.static_range(V):
                psi_j, r_j = n * found[j], beta * delta[j]
                r, drop = r + (r_j,), drop + (beta * psi_j,)
                slant += psi_j * delta[j]
                kappa += psi_j * r_j
                if ERASE:
                    kappa -= beta * (psi_j * (value_t[j] - delta[j])) + beta * (psi_j * r_j)
            grad_source = weighted(M, r, P)
            if ERASE:
                for j in tl.static_range(V):
                    grad_source = plus(grad_source, -drop[j], state[j * P : (j + 1) * P])
            result = ()
            for p in tl.static_range(P):
                result = result + (n * (grad_source[p] - n * kappa * source[p]),)
            store(grad_h + row * D, result, None, D, BLOCK)
            tl.store(grad_y + row, slant * beta * slope_beta)
            if VALUE != "constant":
                for j in tl.static_range(V):
                    tl.store(grad_z + row * V + j, drop[j] * slope[j])
            if ERASE:
                rewritten = ()
                for j in tl.static_range(V):
                    rewritten = rewritten + plus(M[j * P : (j + 1) * P], -n * drop[j], source)
                M = rewritten
        store(new_grad_state + row * V * D, M, None, D, BLOCK)

    sums += tl.program_id(0) * TOTAL
    store(sums, sum_e + sum_g, None, D, BLOCK)
    sums += (K * V + 1) * D
    g = load(norm, None, D, BLOCK)
    if GATE:
        store(sums, times(sum_w, g), None, D, BLOCK)
        sums += D
    if HEADS:
        if VALUE_INPUT == "context":
            for j in tl.static_range(V):
                store(sums + j * D, times(sum_W[j * P : (j + 1) * P], g), None, D, BLOCK)
        else:
            store(sums, sum_W, None, D, BLOCK)
        sums += V * D
        store_numbers(sums, sum_bz)
        sums += V
    if GATE:
        tl.store(sums, sum_b)
