"""What `analyze.py gates` measures, once more: loops over tokens in float64, the dense matrix A = I - beta k k^T.

Backbone and reads are naive.py's, from a state dict and a configuration; no code is shared with model/ or analysis/.
"""

import math

import numpy as np
import torch
from naive import attention, expand, mlp, read, rms_norm, select, sigmoid


def pieces(w, h, x_in, c, cfg):
    """k (d,), beta of write and erase, t (v,) of one token.

    The k-Map with gates of one layer on c and a squashed value from x_in.
    """
    k = h / (h @ h + cfg["ddl_k_eps"] ** 2).sqrt()
    beta = 2 * sigmoid(w["beta.weight"][0] @ c + w["beta.bias"][0])
    beta_erase = beta
    if cfg["ddl_erase_gate"] == "own":
        beta_erase = 2 * sigmoid(w["beta_erase.weight"][0] @ c + w["beta_erase.bias"][0])
    value = cfg["ddl_v_sigmoid_scale"] * sigmoid(w["v_proj.weight"] @ x_in + w["v_proj.bias"])
    return k, beta, beta_erase, value


def forward(weights, cfg, ids, kind, embedding_conv=False, edits=None):
    """(logits (T, V), {(layer, site): its tokens' X, X', k, beta, beta_erase, t}).

    edits {(layer, site): {"beta", "erase", "write", "shared"}}: a number for both gates; False: without that term;
    the write's gate for the erase as well.
    """
    xs = [weights["transformer.wte.weight"][i] for i in ids]
    states, record = expand(weights, xs, cfg["ddl_value_channels"], embedding_conv), {}
    for layer in range(cfg["num_hidden_layers"]):
        w = select(weights, f"transformer.h.{layer}.")
        for norm, sublayer, name in (
            ("ln_1.weight", attention, "attn"),
            ("ln_2.weight", mlp, "mlp"),
        ):
            edit = (edits or {}).get((layer, name), {})
            x_ins = read(select(w, "compress."), states, kind)
            cs = [rms_norm(x, w[norm], 1e-5) for x in x_ins]
            hs = sublayer(select(w, f"{name}."), cs, cfg)
            tokens = []
            for X, h, x_in, c in zip(states, hs, x_ins, cs):
                k, beta, beta_erase, value = pieces(select(w, f"ddl_{name}."), h, x_in, c, cfg)
                if "beta" in edit:
                    beta = beta_erase = beta * 0 + edit["beta"]
                if "shared" in edit:
                    beta_erase = beta
                A = torch.eye(len(k), dtype=X.dtype)
                if edit.get("erase", True):
                    A = A - beta_erase * torch.outer(k, k)
                after = A @ X
                if edit.get("write", True):
                    after = after + beta * torch.outer(k, value)
                tokens.append(
                    {
                        "X": X,
                        "after": after,
                        "k": k,
                        "beta": beta,
                        "beta_erase": beta_erase,
                        "t": value,
                    }
                )
            record[layer, name] = tokens
            states = [token["after"] for token in tokens]
    finals = [
        rms_norm(x, weights["ln_f.weight"], 1e-5)
        for x in read(select(weights, "readout."), states, kind)
    ]
    return torch.stack([weights["lm_head.weight"] @ x for x in finals]), record


def loss(weights, cfg, ids, targets, kind, **options) -> float:
    """Mean nats per token of one sequence."""
    scores, _ = forward(weights, cfg, ids, kind, **options)
    return sum((row.exp().sum().log() - row[t]).item() for row, t in zip(scores, targets)) / len(
        targets
    )


def cosine(a, b) -> float:
    return float(
        sum(x * y for x, y in zip(a, b)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))
    )


def gap(X, k, t) -> float:
    """Root mean square of v - k^T X over value channels."""
    return math.sqrt(sum((t[j] - k @ X[:, j]).item() ** 2 for j in range(len(t))) / len(t))


def numbers(tokens, before, embedded, own_gate=False) -> dict[str, list[float]]:
    """The statistics of one site and one sequence; before: the tokens of the site before, None; embedded: of each.

    own_gate: whether the erase has a gate of its own
    """
    found: dict[str, list[float]] = {}
    for n, token in enumerate(tokens):
        X, after, k, t, beta = (token[name] for name in ("X", "after", "k", "t", "beta"))
        beta_erase = token["beta_erase"]
        size = math.sqrt((X**2).sum())
        values = {
            "beta": beta.item(),
            "discrepancy_before": gap(X, k, t),
            "discrepancy_after": gap(after, k, t),
            "contraction": gap(after, k, t) / gap(X, k, t),
            "contraction_expected": abs(1 - beta.item()),
            "erased": math.sqrt(((beta_erase * torch.outer(k, k) @ X) ** 2).sum()) / size,
            "written": math.sqrt(((beta * torch.outer(k, t)) ** 2).sum()) / size,
            "write_size": math.sqrt(((after - X) ** 2).sum()) / size,
            "cosine_embedding": cosine(k, embedded[n]),
        }
        if own_gate:
            values["beta_erase"] = beta_erase.item()
            del values["contraction_expected"]
        if n > 0:
            values["cosine_tokens"] = cosine(k, tokens[n - 1]["k"])
        if before is not None:
            values["cosine_sites"] = cosine(k, before[n]["k"])
        for name, value in values.items():
            found.setdefault(name, []).append(value)
    found["rank_state"] = [rank(np.stack([token["after"].flatten().numpy() for token in tokens]))]
    found["rank_direction"] = [rank(np.stack([token["k"].numpy() for token in tokens]))]
    return found


def rank(matrix) -> float:
    share = np.linalg.svd(matrix, compute_uv=False)
    share = share / share.sum()
    return math.exp(-sum(s * math.log(s) for s in share if s > 0)) / min(matrix.shape)


def column_cosines(tokens) -> list[np.ndarray]:
    """Of each token the matrix of cosines between the columns of the new state."""
    columns = range(tokens[0]["X"].shape[1])
    return [
        np.array([[cosine(t["after"][:, i], t["after"][:, j]) for j in columns] for i in columns])
        for t in tokens
    ]


def column_shares(w, tokens, kind) -> list[np.ndarray]:
    """Of each token the norm of what the read makes of one column alone, over the sum of those norms."""
    parts = []
    for j in range(tokens[0]["X"].shape[1]):
        alone = [
            token["X"] * torch.nn.functional.one_hot(torch.tensor(j), token["X"].shape[1])
            for token in tokens
        ]
        parts.append([math.sqrt((x**2).sum()) for x in read(w, alone, kind)])
    return [np.array(each) / sum(each) for each in zip(*parts)]


def kernels(w, kind, columns: int) -> list[np.ndarray]:
    """Of each column every weight that it is read with."""
    if kind == "channel":
        ones = (
            torch.eye(columns, dtype=w["weight"].dtype)
            .unsqueeze(1)
            .expand(-1, w["weight"].shape[0], -1)
        )
        return [read(w, [column], kind)[0].numpy() for column in ones]
    d = w["shortconv.weight"].shape[0] // columns
    rows = [
        [w["shortconv.weight"][i * columns + j].flatten() * w["read"][j] for i in range(d)]
        for j in range(columns)
    ]
    return [torch.cat(each).numpy() for each in rows]
