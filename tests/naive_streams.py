"""Compute the streams besides DDL a second time, as naive.py does for DDL.

Those that test_production_streams.py compares with transformers are not here.

The loops over tokens, sites and streams follow the papers' equations, and share no code with
`model/`. Backbone and norms are those of naive.py; X, or H, is the state of one token.

A function of a stream takes the embeddings xs of all tokens, and returns what the final norm gets.
"""

import functools
import math
from types import SimpleNamespace

import torch
from naive import attention, branch_mult, expand, mlp, read, rms_norm, select, sigmoid


def layer_norm(x, w, name):
    """Return the LayerNorm of x with weight and bias."""
    deviation = x - x.mean()
    return (
        deviation / (deviation.pow(2).mean() + 1e-5).sqrt() * w[f"{name}.weight"]
        + w[f"{name}.bias"]
    )


def sites(weights, cfg):
    """Yield the sites in order.

    A site has the weights of its block, the names of its sublayer and norm, and process(cs) -> hs,
    the sublayer itself.
    """
    for _, block in blocks(weights, cfg):
        for name, norm, sublayer in (("attn", "ln_1", attention), ("mlp", "ln_2", mlp)):
            yield SimpleNamespace(
                block=block,
                name=name,
                norm=norm,
                process=functools.partial(run_sublayer, sublayer, select(block, f"{name}."), cfg),
            )


def run_sublayer(sublayer, w, cfg, cs):
    """Return h = F(c) of all tokens."""
    return sublayer(w, cs, cfg)


def sublayer(site, x_ins):
    """Return h = F(RMSNorm(x_in)) of all tokens."""
    return site.process([rms_norm(x, site.block[f"{site.norm}.weight"], 1e-5) for x in x_ins])


# Hyper-Connections, of one token: H (n, d), the streams; B (1, n), A_m (n, 1), A_r (n, n).


def hyper_weights(w, H, cfg):
    """Return B, A_m and A_r of one token."""
    B = w["write"][None, :]
    A_m = w["read"][:, None]
    A_r = w["mix"]
    if cfg["hc_dynamic"]:
        normed = torch.stack([layer_norm(stream, w, "norm") for stream in H])
        maps = w["maps.weight"].T
        W_b = maps[:, :1]
        W_m = maps[:, 1:2]
        W_r = maps[:, 2:]
        B = B + w["write_scale"] * (normed @ W_b).tanh().T
        A_m = A_m + w["scale"] * (normed @ W_m).tanh()
        A_r = A_r + w["scale"] * (normed @ W_r).tanh()
    return B, A_m, A_r


def hyper_connections(weights, cfg, xs):
    states = [torch.stack([x] * cfg["hc_streams"]) for x in xs]
    for site in sites(weights, cfg):
        own = select(site.block, f"hc_{site.name}.")
        maps = [hyper_weights(own, H, cfg) for H in states]
        hs = sublayer(site, [(A_m.T @ H)[0] for H, (_, A_m, _) in zip(states, maps)])
        states = [A_r.T @ H + B.T @ h[None, :] for H, h, (B, _, A_r) in zip(states, hs, maps)]
    return [H.sum(0) for H in states]


def sinkhorn_knopp(logits, iterations):
    """Return the softmax of every row, whose columns and rows are divided by their sums in turn.

    1e-6 is added to each sum.
    """
    matrix = torch.stack([row.exp() / row.exp().sum() for row in logits]) + 1e-6
    for iteration in range(iterations):
        if iteration > 0:
            matrix = torch.stack([row / (row.sum() + 1e-6) for row in matrix])
        matrix = torch.stack([column / (column.sum() + 1e-6) for column in matrix.T]).T
    return matrix


def manifold_weights(w, H, cfg):
    """Return pre (n,), post (n,) and res (n, n) of one token."""
    n = len(H)
    z = rms_norm(torch.cat(list(H)), 1.0, 1e-6)
    phi = w["maps.weight"].T
    b = w["bias"]
    a_pre, a_post, *a_res = w["scales"]
    pre = sigmoid(a_pre * (z @ phi[:, :n]) + b[:n])
    post = 2 * sigmoid(a_post * (z @ phi[:, n : 2 * n]) + b[n : 2 * n])
    if cfg["mhc_mix"] == "identity":
        return pre, post, torch.eye(n, dtype=H.dtype)
    logits = (a_res[0] * (z @ phi[:, 2 * n :]) + b[2 * n :]).reshape(n, n)
    mix = sinkhorn_knopp(logits, cfg["mhc_iterations"])
    # the weights into a stream, which sum to 1, are a row of res
    return pre, post, mix.T if cfg["mhc_rows_last"] else mix


def manifold_connections(weights, cfg, xs):
    states = [torch.stack([x] * cfg["hc_streams"]) for x in xs]
    for site in sites(weights, cfg):
        own = select(site.block, f"hc_{site.name}.")
        maps = [manifold_weights(own, H, cfg) for H in states]
        hs = sublayer(site, [pre @ H for H, (pre, _, _) in zip(states, maps)])
        states = [res @ H + torch.outer(post, h) for H, h, (_, post, res) in zip(states, hs, maps)]
    return [H.sum(0) for H in states]


# Norms in other places, of one token: X (d,).


def norm_placement(weights, cfg, xs):
    placement = cfg["norm_placement"]
    L = cfg["num_hidden_layers"]
    m = branch_mult(cfg)
    for number, site in enumerate(sites(weights, cfg)):
        layer = number // 2
        n = functools.partial(rms_norm, weight=site.block[f"{site.norm}.weight"], eps=1e-5)
        if placement == "lns":
            hs = site.process([n(X) / math.sqrt(layer + 1) for X in xs])
            xs = [X + m * h for X, h in zip(xs, hs)]
        elif placement == "keel":
            alpha = 1 if layer == 0 else 2 * L
            xs = [alpha * X + m * h for X, h in zip(xs, sublayer(site, xs))]
            if number > 0:
                xs = [rms_norm(X, site.block[f"post_{site.name}.weight"], 1e-5) for X in xs]
        elif placement == "post":
            xs = [n(X + m * h) for X, h in zip(xs, site.process(xs))]
        else:
            hs = site.process(xs)
            xs = [(2 * L) ** (1 / 4) * X + m * h for X, h in zip(xs, hs)]
            xs = [layer_norm(X, site.block, site.norm) for X in xs]
    return xs


# Attention Residuals, of one token: V, the list of its sources.


def depth_weights(query, V):
    scores = torch.stack([query @ rms_norm(source, 1.0, 1e-5) for source in V]).exp()
    return scores / scores.sum()


def depth_attention(query, V):
    """Return x_in, from a list of sources V."""
    return sum(a * source for a, source in zip(depth_weights(query, V), V))


def sources(x, hs, cfg):
    """Return the embedding and the outputs h so far, each or summed over blocks of sublayers."""
    length = 1
    if cfg["attn_res_blocks"] is not None:
        length = math.ceil(2 * cfg["num_hidden_layers"] / cfg["attn_res_blocks"])
    return [x, *(sum(hs[i : i + length]) for i in range(0, len(hs), length))]


def attention_residuals(weights, cfg, xs):
    outputs = [[] for _ in xs]

    def read(query):
        return [depth_attention(query, sources(x, hs, cfg)) for x, hs in zip(xs, outputs)]

    for site in sites(weights, cfg):
        new_outputs = sublayer(site, read(site.block[f"depth_{site.name}.query"]))
        for hs, h in zip(outputs, new_outputs):
            hs.append(h)
    return read(weights["readout.query"])


# MGT, of one token: X (d,).


def mgt_gate(w, X):
    return sigmoid(layer_norm(w["gate.weight"] @ X, w, "gate_norm"))


def mgt_beta(w, X, cfg):
    return cfg["mgt_lambda"] * (w["beta.weight"] @ X + w["beta.bias"]).tanh() + cfg["mgt_epsilon"]


def mgt_write(w, X, h, cfg):
    """Return the new state of one token, before the LayerNorm of the post-norm arms."""
    update = h
    if cfg["mgt_arm"] in ("full", "full_post", "mhc", "mhc_pre"):
        update = mgt_gate(w, X) * h
    if cfg["mgt_arm"] in ("full", "full_post", "ddl", "ddl_post"):
        update = mgt_beta(w, X, cfg) * (update - w["alpha"] * X)
    return X + branch_mult(cfg) * update


def mgt(weights, cfg, xs):
    """Return the final states, normalized."""
    is_post_norm = cfg["mgt_arm"] in ("standard", "mhc", "ddl_post", "full_post")
    for site in sites(weights, cfg):
        own = select(site.block, f"write_{site.name}.")
        norm = functools.partial(layer_norm, w=site.block, name=site.norm)
        hs = site.process(xs if is_post_norm else [norm(X) for X in xs])
        xs = [mgt_write(own, X, h, cfg) for X, h in zip(xs, hs)]
        if is_post_norm:
            xs = [norm(X) for X in xs]
    return xs if is_post_norm else [layer_norm(X, weights, "ln_f") for X in xs]


# The others, of one token: X (d,), in `wide` X (d, v).


def rezero(weights, cfg, xs):
    for site in sites(weights, cfg):
        a = site.block[f"write_{site.name}.scale"]
        xs = [X + a * h for X, h in zip(xs, sublayer(site, xs))]
    return xs


def laurel(weights, cfg, xs):
    for site in sites(weights, cfg):
        w = select(site.block, f"write_{site.name}.")
        hs = sublayer(site, xs)
        if cfg["laurel_form"] == "rw":
            a, b = 2 * w["logits"].exp() / w["logits"].exp().sum()
            xs = [a * h + b * X for X, h in zip(xs, hs)]
        else:
            A = w["down.weight"].T
            B = w["up.weight"].T
            xs = [h + X + (X @ A) @ B for X, h in zip(xs, hs)]
    return xs


def dense_former(weights, cfg, xs):
    outputs = [[x] for x in xs]  # Y_0, Y_1, ... of each token
    for site in sites(weights, cfg):
        xs = [X + branch_mult(cfg) * h for X, h in zip(xs, sublayer(site, xs))]
        if site.name == "mlp":
            for ys, X in zip(outputs, xs):
                ys.append(X)
            A = site.block["average.weights"]
            xs = [sum(A[i] * ys[i] for i in range(len(ys))) for ys in outputs]
    return xs


def conv(weights, cfg, xs):
    for site in sites(weights, cfg):
        x_ins = read(select(site.block, "compress."), [X[:, None] for X in xs], "token")
        xs = [X + branch_mult(cfg) * h for X, h in zip(xs, sublayer(site, x_ins))]
    return read(select(weights, "readout."), [X[:, None] for X in xs], "token")


def wide(weights, cfg, xs):
    kind = {"tc": "token", "cc": "channel"}[cfg["wide_read"]]
    states = expand(weights, xs, cfg["ddl_value_channels"], False)
    for site in sites(weights, cfg):
        hs = sublayer(site, read(select(site.block, "compress."), states, kind))
        states = [
            X + torch.outer(h, site.block[f"write_{site.name}.weights"]) for X, h in zip(states, hs)
        ]
    return read(select(weights, "readout."), states, kind)


# Streams block by block, whose attention may have several inputs


def blocks(weights, cfg):
    for layer in range(cfg["num_hidden_layers"]):
        yield layer, select(weights, f"transformer.h.{layer}.")


def normed(xs, block, norm):
    return [rms_norm(x, block[f"{norm}.weight"], 1e-5) for x in xs]


def plus_mlp(xs, block, cfg):
    hs = mlp(select(block, "mlp."), normed(xs, block, "ln_2"), cfg)
    return [x + branch_mult(cfg) * h for x, h in zip(xs, hs)]


def mudd(weights, cfg, xs):
    inputs = [[x] * 4 for x in xs]  # of each token: queries, keys, values and the residual's
    outputs = [[x] for x in xs]  # h_0, h_1, ... of each token
    for _, block in blocks(weights, cfg):
        qs, ks, vs = (
            normed([token_inputs[i] for token_inputs in inputs], block, norm)
            for i, norm in enumerate(("ln_1", "ln_k", "ln_v"))
        )
        hs = attention(select(block, "attn."), qs, cfg, ks, vs)
        xs = [x[-1] + branch_mult(cfg) * h for x, h in zip(inputs, hs)]
        xs = plus_mlp(xs, block, cfg)
        w = select(block, "dense.")
        for t, x in enumerate(xs):
            outputs[t].append(x)
            hidden = w["first.weight"] @ rms_norm(x, 1.0, 1e-6)
            hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
            dynamic = (w["second.weight"] @ hidden).reshape(w["static"].shape)
            rows = dynamic + w["static"]
            inputs[t] = [sum(a * h for a, h in zip(row, outputs[t])) for row in rows]
    return [token_inputs[-1] for token_inputs in inputs]


def lambdas(weights, cfg, xs):
    embeddings = xs
    first = None  # values of the first block
    skipped = []  # states of the first half of the blocks
    last = cfg["num_hidden_layers"] - 1
    heads = cfg["num_attention_heads"]
    dim = cfg["head_dim"]
    for layer, block in blocks(weights, cfg):
        begin = select(block, "begin.")
        if "skip" in begin:
            xs = [x + begin["skip"] * y for x, y in zip(xs, skipped.pop())]
        if cfg["lambda_input"]:
            xs = [begin["a"] * x + begin["b"] * x_0 for x, x_0 in zip(xs, embeddings)]
        if cfg["lambda_gain"]:
            xs = [begin["a"] * x for x in xs]
        cs = normed(xs, block, "ln_1")
        own = [block["attn.c_v.weight"] @ c for c in cs]
        first = own if layer == 0 else first

        def change(v, head, t, layer=layer, block=block, first=first):
            if "g" in block:
                g = block["g"][head if len(block["g"]) > 1 else 0]
                v = (1 - g) * v + g * first[t].reshape(heads, dim)[head]
            if cfg["lambda_value_embeddings"] and (last - layer) % 2 == 0:
                v = v + block["embedding.weight"][cfg["ids"][t]].reshape(heads, dim)[head]
            return v

        hs = attention(select(block, "attn."), cs, cfg, change=change)
        xs = [x + branch_mult(cfg) * h for x, h in zip(xs, hs)]
        xs = plus_mlp(xs, block, cfg)
        if cfg["lambda_skips"] and layer < (last + 1) // 2:
            skipped.append(xs)
    return xs


STREAMS = {
    "MUDD": mudd,
    "Lambdas": lambdas,
    "HC": hyper_connections,
    "mHC": manifold_connections,
    "NormPlacement": norm_placement,
    "AttnRes": attention_residuals,
    "MGT": mgt,
    "ReZero": rezero,
    "LAuReL": laurel,
    "DenseFormer": dense_former,
    "conv": conv,
    "wide": wide,
}


def logits(model_name, weights, cfg, ids):
    """Return the logits (T, vocab_size) of a list of T ids, as naive.logits does."""
    name = model_name.partition("-")[0]
    cfg = {**cfg, "ids": ids}
    finals = STREAMS[name](weights, cfg, [weights["transformer.wte.weight"][i] for i in ids])
    if name != "MGT":  # it has a norm of its own
        finals = [rms_norm(x, weights["ln_f.weight"], 1e-5) for x in finals]
    scale = cfg["hidden_size_base"] / cfg["hidden_size"] if cfg["mup"] else 1.0
    return torch.stack([weights["lm_head.weight"] @ x * scale for x in finals])
