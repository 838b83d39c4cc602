"""Compute the models a second time, from the equations of the papers, by plain loops over tokens.

The functions take weights by name (`w`, `weights`) and a configuration (`cfg`), and share no code
with `model/`. Everything is float64, and slow on purpose.

Notation: X (d, v) is the state of one token, with v value channels; x_in, c and h are (d,). A plural
(`Xs`, `cs`, `hs`) is the list of all tokens.
"""

import dataclasses
import math

import torch

EXACT = {"rtol": 1e-9, "atol": 1e-9}


def rms_norm(x, weight, eps):
    """Return x / sqrt(mean(x^2) + eps) * weight."""
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def rotate(x, position, base, ratio):
    """Return the half-split rotary embedding of one head vector."""
    dim = int(x.shape[0] * ratio)
    dim -= dim % 2
    out = list(x)
    for i in range(dim // 2):
        angle = position * base ** (-2 * i / dim)
        a = x[i]
        b = x[i + dim // 2]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + dim // 2] = a * math.sin(angle) + b * math.cos(angle)
    return torch.stack(out)


def attention(w, cs, cfg, k_from=None, v_from=None, change=None):
    """Return h of all tokens.

    Args:
        cs: list of T vectors (d,)
        k_from, v_from: the vectors that keys and values are computed from, if not cs
        change: change(value, head, t) returns the value to use instead
    """
    k_from = k_from or cs
    v_from = v_from or cs
    dim = cfg["head_dim"]
    qkvs = [
        (w["c_q.weight"] @ cs[t], w["c_k.weight"] @ k_from[t], w["c_v.weight"] @ v_from[t])
        for t in range(len(cs))
    ]
    out = [[] for _ in cs]
    for head in range(cfg["num_attention_heads"]):
        rows = slice(head * dim, (head + 1) * dim)
        keys = []
        values = []
        for t, (q, k, value) in enumerate(qkvs):
            q = rotate(q[rows], t, cfg["rope_base"], cfg["rope_ratio"])
            k = rotate(k[rows], t, cfg["rope_base"], cfg["rope_ratio"])
            value = value[rows]
            if cfg["use_qk_rmsnorm"]:
                q = rms_norm(q, w["q_rms.weight"], 1e-5)
                k = rms_norm(k, w["k_rms.weight"], 1e-5)
            keys.append(k)
            values.append(change(value, head, t) if change else value)
            scores = torch.stack([q @ key / math.sqrt(dim) for key in keys]).exp()
            out[t].append(sum(s * value for s, value in zip(scores, values)) / scores.sum())
    return [w["c_proj.weight"] @ torch.cat(head_outputs) for head_outputs in out]


def mlp(w, cs, cfg):
    """Return h = W_o (SiLU(W_1 c) * W_2 c) of all tokens."""
    hs = []
    for c in cs:
        a = w["c_fc1.weight"] @ c
        b = w["c_fc2.weight"] @ c
        hs.append(w["c_proj.weight"] @ (a / (1 + (-a).exp()) * b))
    return hs


def sigmoid(x):
    return 1 / (1 + (-x).exp())


def branch_mult(cfg):
    """Return the factor on what a sublayer adds to its state."""
    factor = cfg.get("residual_branch_mult")
    return 1.0 if factor is None else factor


def pool(X, form):
    """Return the state as one vector: the mean of its value channels, or their concatenation."""
    channels = [X[:, j] for j in range(X.shape[1])]
    return sum(channels) / len(channels) if form == "mean" else torch.cat(channels)


def gate(w, name, gate_input):
    """Return 2 sigmoid of a linear layer, or of two with a tanh between them."""
    if f"{name}.weight" in w:
        return 2 * sigmoid(w[f"{name}.weight"][0] @ gate_input + w[f"{name}.bias"][0])
    hidden = (w[f"{name}_in.weight"] @ gate_input).tanh()
    return 2 * sigmoid(w[f"{name}_out.weight"][0] @ hidden + w[f"{name}_out.bias"][0])


def rewrite(w, X, h, x_in, c, cfg):
    """Return A X + beta k v^T of one token, with the dense matrix A = I - beta k k^T."""
    d, v = X.shape
    if cfg.get("ddl_map", "k") == "k":
        source = h
        value_input = x_in if cfg["ddl_v_input"] == "residual" else c
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
    if cfg["ddl_beta_input"] == "context":
        gate_input = c
    elif cfg["ddl_beta_input"] == "residual":
        gate_input = x_in
    else:
        gate_input = pool(X, cfg["ddl_beta_input"])
    beta = gate(w, "beta", gate_input) * branch_mult(cfg)
    A = torch.eye(d, dtype=X.dtype)
    if cfg["ddl_update"] in ("delta", "erase_only"):
        A = A - beta * torch.outer(k, k)
    if cfg["ddl_update"] == "erase_only":
        return A @ X
    value = w["v_proj.weight"] @ value_input + (w["v_proj.bias"] if cfg["ddl_v_bias"] else 0)
    if cfg["ddl_v_sigmoid"]:
        value = cfg["ddl_v_sigmoid_scale"] * sigmoid(value)
    if cfg["ddl_v_constant"]:
        value = torch.full((v,), cfg["ddl_v_constant_value"], dtype=X.dtype)
    return A @ X + beta * torch.outer(k, value)


# The rewrite as the texts of the paper have it (config/ddl_january_*.py and ddl_july_*.py): from
# X (d, v), the sublayer's output h, the compressed x_in and c = RMSNorm(x_in). The gate starts at
# beta = 1, because its output bias starts at 0.


def delta_rule(X, k, beta, value):
    """Return X + beta k (v^T - k^T X): January's eq. 6, July's eq. 2.2."""
    return X + beta * torch.outer(k, value - X.T @ k)


def january_v1(w, X, h, x_in, c, cfg):
    """Rewrite as the first text does.

    Direction and gate are computed from Pool(X), with k = k~ / (|k~| + eps), and the value from h.
    There are no biases.
    """
    mean = X.mean(dim=1)
    hidden = w["k_in.weight"] @ mean
    source = w["k_out.weight"] @ (hidden * sigmoid(hidden))
    beta = 2 * sigmoid(w["beta_out.weight"][0] @ (w["beta_in.weight"] @ mean).tanh())
    return delta_rule(X, source / (source.norm() + cfg["ddl_k_eps"]), beta, w["v_proj.weight"] @ h)


def january_v2(w, X, h, x_in, c, cfg):
    """Rewrite as the revised text does, sections 4.1, 4.2 (k-Map) and B.2.

    v = W_v x_in; with one value channel v = sigmoid(w_v^T x).
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
    """Rewrite as July's text does, appendix A.1: v = W_v c for any number of value channels."""
    beta = 2 * sigmoid(w["beta.weight"][0] @ c + w["beta.bias"][0])
    return delta_rule(X, h / (h @ h + cfg["ddl_k_eps"] ** 2).sqrt(), beta, w["v_proj.weight"] @ c)


def read(w, Xs, kind, causal=False):
    """Read x_in (d,) from the state of every token.

    Args:
        Xs: list of T states
        kind: "direct", "column", "channel" or "token"
        causal: whether a channel convolution looks at a value channel and those before it, instead
            of those around it
    """
    d, v = Xs[0].shape if Xs[0].ndim == 2 else (Xs[0].shape[0], 1)
    result = []
    for t in range(len(Xs)):
        if kind == "direct":
            result.append(Xs[t])
        elif kind == "column":
            result.append(Xs[t][:, 0])
        # convolve over value channels, then sum over them
        elif kind == "channel" and "read" in w:
            size = w["weight"].shape[1]
            offset = size - 1 if causal else (size - 1) // 2
            total = 0
            for j in range(v):
                neighbors = [
                    (tap, j + tap - offset) for tap in range(size) if 0 <= j + tap - offset < v
                ]
                total = total + w["read"][j] * sum(
                    w["weight"][:, tap] * Xs[t][:, u] for tap, u in neighbors
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
    """Repeat x, or convolve it causally by a depthwise convolution: channel i*v + j reads feature i."""
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
    """Return the weights whose names begin with the prefix, without it."""
    return {
        name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)
    }


READ_KINDS = {"gpt-mha-rope": "direct", "DDL-vdim1-gpt-mha-rope": "column"}


def logits(model_name, weights, cfg, ids, rewrite=rewrite):
    """Return the logits (T, vocab_size) of a list of T ids.

    rewrite: the rewrite of the current models, or of one of the texts
    """
    is_additive = model_name == "gpt-mha-rope"
    kind = READ_KINDS.get(model_name, "channel" if "-CC" in model_name else "token")
    states = [weights["transformer.wte.weight"][i] for i in ids]
    if not is_additive:
        value_channels = cfg["ddl_value_channels"]
        states = expand(weights, states, value_channels, model_name.endswith("-EC"))
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
            if is_additive:
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


def loss(model_name, weights, cfg, ids, targets, logits=logits):
    """Return the mean cross-entropy over a batch of token lists; targets of -1 do not count."""
    terms = []
    for row, row_targets in zip(ids, targets):
        for scores, target in zip(logits(model_name, weights, cfg, row), row_targets):
            if target != -1:
                terms.append(scores.exp().sum().log() - scores[target])
    return sum(terms) / len(terms)


def check(model_name, model, ids, targets, logits=logits):
    """Compare the loss, logits and every gradient of a float64 model with these loops.

    Returns:
        The names of the parameters without a gradient.
    """
    model_logits, model_loss = model(ids, targets, return_logits=True)
    model_loss.backward()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    tied_weights = {**weights, "lm_head.weight": weights["transformer.wte.weight"]}
    cfg = dataclasses.asdict(model.config)
    expected_loss = loss(model_name, tied_weights, cfg, ids.tolist(), targets.tolist(), logits)
    expected_loss.backward()
    expected_logits = logits(model_name, tied_weights, cfg, ids[-1].tolist())
    torch.testing.assert_close(model_loss, expected_loss, **EXACT)
    torch.testing.assert_close(model_logits[-1], expected_logits, **EXACT)
    unused = {name for name, weight in weights.items() if weight.grad is None}
    assert unused == {name for name, p in model.named_parameters() if p.grad is None}
    for name, p in model.named_parameters():
        if name not in unused:
            torch.testing.assert_close(
                p.grad, weights[name].grad, **EXACT, msg=lambda text, name=name: f"{name}: {text}"
            )
    return unused
