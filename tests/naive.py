"""A second implementation of the models, from the equations of docs and papers alone: plain loops
over tokens.

It takes a state dict and a configuration and shares no code with `model/`. Everything is float64.
Slow on purpose.
"""

import dataclasses
import math

import torch

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def rms_norm(x, weight, eps):
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def rotate(x, position, base, ratio):
    """Half-split rotary embedding of one head vector."""
    dim = int(x.shape[0] * ratio)
    dim -= dim % 2
    out = list(x)
    for i in range(dim // 2):
        angle = position * base ** (-2 * i / dim)
        a, b = x[i], x[i + dim // 2]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + dim // 2] = a * math.sin(angle) + b * math.cos(angle)
    return torch.stack(out)


def canon(w, xs):
    """x + conv4(x) where there is one: of every feature, over the token and the three before."""
    if "canon.weight" not in w:
        return xs
    taps = w["canon.weight"]
    return [
        x + sum(taps[:, 3 - s] * xs[t - s] for s in range(4) if t >= s) for t, x in enumerate(xs)
    ]


def attention(w, cs, cfg, k_from=None, v_from=None, change=None):
    """cs: list of T vectors (d,) -> list of T vectors (d,). Keys and values may be made from other
    vectors; change(v, head, t): the value that counts in v's place.
    """
    k_from, v_from = k_from or cs, v_from or cs
    heads, dim = cfg["num_attention_heads"], cfg["head_dim"]
    out = [[] for _ in cs]
    given = ("c_q", cs), ("c_k", k_from), ("c_v", v_from)
    parts = [torch.cat([w[f"{n}.weight"] @ xs[t] for n, xs in given]) for t in range(len(cs))]
    parts = [part.chunk(3) for part in canon(w, parts)]
    for head in range(heads):
        rows = slice(head * dim, (head + 1) * dim)
        keys, values = [], []
        for t, part in enumerate(parts):
            q, k, value = (each[rows] for each in part)
            q = rotate(q, t, cfg["rope_base"], cfg["rope_ratio"])
            k = rotate(k, t, cfg["rope_base"], cfg["rope_ratio"])
            if cfg["use_qk_rmsnorm"]:
                q, k = rms_norm(q, w["q_rms.weight"], 1e-5), rms_norm(k, w["k_rms.weight"], 1e-5)
            keys.append(k)
            values.append(change(value, head, t) if change else value)
            scores = torch.stack([q @ key / math.sqrt(dim) for key in keys]).exp()
            out[t].append(sum(s * value for s, value in zip(scores, values)) / scores.sum())
    return [w["c_proj.weight"] @ torch.cat(parts) for parts in out]


def mlp(w, cs, cfg):
    hidden, both = [], [torch.cat([w[f"c_fc{n}.weight"] @ c for n in (1, 2)]) for c in cs]
    for a, b in (each.chunk(2) for each in canon(w, both)):
        hidden.append(a / (1 + (-a).exp()) * b)
    return [w["c_proj.weight"] @ h for h in hidden]


def sigmoid(x):
    return 1 / (1 + (-x).exp())


def branch_mult(cfg):
    """Factor on what a sublayer adds to its state."""
    if cfg.get("residual_branch_mult") is not None:
        return cfg["residual_branch_mult"]
    base = cfg.get("num_hidden_layers_base")
    return 1.0 if base is None else base / cfg["num_hidden_layers"]


def pool(X, form):
    """The state as one vector: the mean of its columns, or all of them one after the other."""
    columns = [X[:, j] for j in range(X.shape[1])]
    return sum(columns) / len(columns) if form == "mean" else torch.cat(columns)


def gate(w, name, gate_input):
    """2 sigmoid of one linear layer, or of two with a tanh between them, as the weights are."""
    if f"{name}.weight" in w:
        return 2 * sigmoid(w[f"{name}.weight"][0] @ gate_input + w[f"{name}.bias"][0])
    hidden = (w[f"{name}_in.weight"] @ gate_input).tanh()
    return 2 * sigmoid(w[f"{name}_out.weight"][0] @ hidden + w[f"{name}_out.bias"][0])


def rewrite(w, X, h, x_in, c, cfg):
    """One token: X (d, d_v) -> A X + beta k v^T with the dense matrix A = I - beta k k^T."""
    d, v = X.shape
    if cfg.get("ddl_map", "k") == "k":
        source, value_input = h, x_in if cfg["ddl_v_input"] == "residual" else c
    else:
        value_input = h
        branch = c if v == 1 else x_in
        if cfg["ddl_k_input"] != "read":
            branch = pool(X, cfg["ddl_k_input"])
        if cfg["ddl_k_branch"] == "mlp":
            hidden = w["k_in.weight"] @ branch
            source = w["k_out.weight"] @ (hidden * sigmoid(hidden))
        else:
            scores = torch.stack(
                [w["k_query"] @ (w["k_key.weight"] @ X[:, j]) / math.sqrt(d) for j in range(v)]
            ).exp()
            source = w["k_out.weight"] @ (X @ (scores / scores.sum()))
    if cfg["ddl_k_norm"] == "guarded":
        k = source / (source @ source + cfg["ddl_k_eps"] ** 2).sqrt()
    else:
        k = source / ((source @ source).sqrt() + cfg["ddl_k_eps"])
    seen = {"context": c, "residual": x_in}
    seen = (
        seen[cfg["ddl_beta_input"]]
        if cfg["ddl_beta_input"] in seen
        else pool(X, cfg["ddl_beta_input"])
    )
    beta = gate(w, "beta", seen) * branch_mult(cfg)
    beta_erase = beta
    if cfg["ddl_erase_gate"] == "own":
        beta_erase = gate(w, "beta_erase", seen) * branch_mult(cfg)
    A = torch.eye(d, dtype=X.dtype)
    if cfg["ddl_update"] in ("delta", "erase_only"):
        A = A - beta_erase * torch.outer(k, k)
    if cfg["ddl_update"] == "erase_only":
        return A @ X
    value = w["v_proj.weight"] @ value_input + (w["v_proj.bias"] if cfg["ddl_v_bias"] else 0)
    if cfg["ddl_v_sigmoid"]:
        value = cfg["ddl_v_sigmoid_scale"] * sigmoid(value)
    if cfg["ddl_v_constant"]:
        value = torch.full((v,), cfg["ddl_v_constant_value"], dtype=X.dtype)
    return A @ X + beta * torch.outer(k, value)


# What the papers' texts say of one token, key by key in config/ddl_january_*.py and ddl_july_*.py:
# X (d, v), the sublayer's output h, the compressed x_in and c = RMSNorm(x_in). The output bias of
# the gate starts at beta = 1, at 0.


def delta_rule(X, k, beta, value):
    """X + beta k (v^T - k^T X): January's eq. 6, July's eq. 2.2."""
    return X + beta * torch.outer(k, value - X.T @ k)


def january_v1(w, X, h, x_in, c, cfg):
    """First text: direction and gate over Pool(X), k~ / (|k~| + eps); the sublayer gives the value.

    No biases.
    """
    mean = X.mean(dim=1)
    hidden = w["k_in.weight"] @ mean
    source = w["k_out.weight"] @ (hidden * sigmoid(hidden))
    beta = 2 * sigmoid(w["beta_out.weight"][0] @ (w["beta_in.weight"] @ mean).tanh())
    return delta_rule(X, source / (source.norm() + cfg["ddl_k_eps"]), beta, w["v_proj.weight"] @ h)


def january_v2(w, X, h, x_in, c, cfg):
    """Revised text, sections 4.1 and 4.2 (k-Map) and B.2: v = W_v x_in, with one column v =
    sigmoid(w_v^T x).
    """
    value = w["v_proj.weight"] @ x_in
    beta = 2 * sigmoid(w["beta.weight"][0] @ c + w["beta.bias"][0])
    return delta_rule(
        X,
        h / (h @ h + cfg["ddl_k_eps"] ** 2).sqrt(),
        beta,
        sigmoid(value) if len(value) == 1 else value,
    )


def july(w, X, h, x_in, c, cfg):
    """July's text, appendix A.1: v = W_v c for any number of columns."""
    beta = 2 * sigmoid(w["beta.weight"][0] @ c + w["beta.bias"][0])
    return delta_rule(X, h / (h @ h + cfg["ddl_k_eps"] ** 2).sqrt(), beta, w["v_proj.weight"] @ c)


def read(w, Xs, kind, causal=False):
    """Xs: list of T states -> list of T vectors (d,).

    causal: how a pair's convolution over columns looks at them.
    """
    d, v = Xs[0].shape if Xs[0].ndim == 2 else (Xs[0].shape[0], 1)
    result = []
    for t in range(len(Xs)):
        if kind == "direct":
            result.append(Xs[t])
        elif kind == "column":
            result.append(Xs[t][:, 0])
        # each column's window of taps, then a sum over columns
        elif kind == "channel" and "read" in w:
            size = w["weight"].shape[1]
            before, total = size - 1 if causal else (size - 1) // 2, 0
            for j in range(v):
                near = [(tap, j + tap - before) for tap in range(size) if 0 <= j + tap - before < v]
                total = total + w["read"][j] * sum(
                    w["weight"][:, tap] * Xs[t][:, u] for tap, u in near
                )
            result.append(total)
        elif kind == "channel":
            result.append(sum(w["weight"][:, j] * Xs[t][:, j] for j in range(v)))
        else:
            taps = w["shortconv.weight"].reshape(d, v, -1)
            size = taps.shape[-1]
            convolved = torch.zeros(d, v, dtype=Xs[0].dtype)
            for tap in range(size):
                if t - (size - 1 - tap) >= 0:
                    convolved = convolved + taps[:, :, tap] * Xs[t - (size - 1 - tap)]
            result.append(convolved @ w["read"])
    return result


def expand(w, xs, v, embedding_conv):
    """Repetition, or a causal depthwise convolution whose channel i*v + j reads feature i."""
    if not embedding_conv:
        return [x[:, None].expand(-1, v) for x in xs]
    taps = w["input_embed.conv.weight"].reshape(xs[0].shape[0], v, -1)
    size = taps.shape[-1]
    states = []
    for t in range(len(xs)):
        lags = [(tap, t - (size - 1 - tap)) for tap in range(size) if t - (size - 1 - tap) >= 0]
        states.append(sum(taps[:, :, tap] * xs[source][:, None] for tap, source in lags))
    return states


def select(weights, prefix):
    return {
        name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)
    }


KINDS = {"gpt-mha-rope": "direct", "DDL-vdim1-gpt-mha-rope": "column"}


def logits(stem, weights, cfg, ids, rewrite=rewrite):
    """ids: list of T ints -> (T, vocab_size).

    rewrite: as the keys of cfg say, or as one of the texts does.
    """
    additive = stem == "gpt-mha-rope"
    kind = KINDS.get(stem, "channel" if "-CC" in stem else "token")
    xs = [weights["transformer.wte.weight"][i] for i in ids]
    states = (
        xs if additive else expand(weights, xs, cfg["ddl_value_channels"], stem.endswith("-EC"))
    )
    for layer in range(cfg["num_hidden_layers"]):
        w = select(weights, f"transformer.h.{layer}.")
        for norm, sublayer, name in (
            ("ln_1.weight", attention, "attn"),
            ("ln_2.weight", mlp, "mlp"),
        ):
            x_ins = read(
                select(w, "compress."),
                states,
                kind,
                cfg.get("ddl_state_dv_shortconv_causal", False),
            )
            cs = [rms_norm(x, w[norm], 1e-5) for x in x_ins]
            hs = sublayer(select(w, f"{name}."), cs, cfg)
            if additive:
                states = [X + branch_mult(cfg) * h for X, h in zip(states, hs)]
            else:
                site = select(w, f"ddl_{name}.")
                states = [
                    rewrite(site, X, h, x, c, cfg) for X, h, x, c in zip(states, hs, x_ins, cs)
                ]
    last = read(
        select(weights, "readout."), states, kind, cfg.get("ddl_state_dv_shortconv_causal", False)
    )
    finals = [rms_norm(x, weights["ln_f.weight"], 1e-5) for x in last]
    scale = cfg["hidden_size_base"] / cfg["hidden_size"] if cfg["mup"] else 1.0
    return torch.stack([weights["lm_head.weight"] @ x * scale for x in finals])


def loss(stem, weights, cfg, ids, targets, logits=logits):
    """Mean cross-entropy over a batch of token lists; targets of -1 do not count."""
    terms = []
    for row, goal in zip(ids, targets):
        for scores, target in zip(logits(stem, weights, cfg, row), goal):
            if target != -1:
                terms.append(scores.exp().sum().log() - scores[target])
    return sum(terms) / len(terms)


def check(stem, model, ids, targets, logits=logits):
    """A model of float64: its loss, logits and every gradient against these loops.

    Returns what has no gradient.
    """
    found, found_loss = model(ids, targets, return_logits=True)
    found_loss.backward()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    named, cfg = (
        {**weights, "lm_head.weight": weights["transformer.wte.weight"]},
        dataclasses.asdict(model.config),
    )
    wanted = loss(stem, named, cfg, ids.tolist(), targets.tolist(), logits)
    wanted.backward()
    torch.testing.assert_close(found_loss, wanted, **EXACT)
    torch.testing.assert_close(found[-1], logits(stem, named, cfg, ids[-1].tolist()), **EXACT)
    unused = {name for name, weight in weights.items() if weight.grad is None}
    assert unused == {name for name, p in model.named_parameters() if p.grad is None}
    for name, p in model.named_parameters():
        if name not in unused:
            torch.testing.assert_close(
                p.grad, weights[name].grad, **EXACT, msg=lambda text, name=name: f"{name}: {text}"
            )
    return unused
