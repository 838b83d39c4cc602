"""A second implementation of what `analyze.py gates` measures: loops over tokens, the dense A = I - beta k k^T.

It computes in float64. Backbone and reads are naive.py's, from a state dict and a configuration; no code is shared with
model/ or analysis/. In names and shapes, X (d, d_v) is the state of a token, k (d,) a direction and v (d_v,) a value.
"""

import math
from dataclasses import dataclass

import torch
from naive import attention, branch_mult, expand, mlp, read, rms_norm, select, sigmoid


@dataclass
class TokenWrite:
    """What a site does to the state of one token; the gate includes the factor on the update."""

    X: torch.Tensor
    written: torch.Tensor
    k: torch.Tensor
    beta: torch.Tensor
    v: torch.Tensor

    # the map of X: I - beta k k^T
    A: torch.Tensor


def compute_write(w, X, h, x_in, c, cfg) -> TokenWrite:
    """Write to the state of one token: k-Map, a gate of one layer on c, and a value from x_in."""
    k = h / (h @ h + cfg["ddl_k_eps"] ** 2).sqrt()
    beta = branch_mult(cfg) * 2 * sigmoid(w["beta.weight"][0] @ c + w["beta.bias"][0])
    v = w["v_proj.weight"] @ x_in
    if cfg["ddl_v_bias"]:
        v = v + w["v_proj.bias"]
    if cfg["ddl_v_sigmoid"]:
        v = cfg["ddl_v_sigmoid_scale"] * sigmoid(v)
    A = torch.eye(len(k), dtype=X.dtype) - beta * torch.outer(k, k)
    written = A @ X + beta * torch.outer(k, v)
    return TokenWrite(X, written, k, beta, v, A)


def list_writes(
    weights: dict, cfg: dict, ids: list[int], kind: str, embedding_conv: bool
) -> dict[tuple[int, str], list[TokenWrite]]:
    """Return the writes of the tokens of one sequence at each site.

    Args:
        kind: how the compressor reads, as naive.read takes it
        embedding_conv: whether the expander has a convolution
    """
    embeddings = [weights["transformer.wte.weight"][token] for token in ids]
    states = expand(weights, embeddings, cfg["ddl_value_channels"], embedding_conv)
    writes = {}
    for layer in range(cfg["num_hidden_layers"]):
        w = select(weights, f"transformer.h.{layer}.")
        for norm, sublayer, name in (
            ("ln_1.weight", attention, "attn"),
            ("ln_2.weight", mlp, "mlp"),
        ):
            x_ins = read(select(w, "compress."), states, kind)
            cs = [rms_norm(x, w[norm], 1e-5) for x in x_ins]
            hs = sublayer(select(w, f"{name}."), cs, cfg)
            write_weights = select(w, f"ddl_{name}.")
            writes[layer, name] = [
                compute_write(write_weights, X, h, x_in, c, cfg)
                for X, h, x_in, c in zip(states, hs, x_ins, cs)
            ]
            states = [write.written for write in writes[layer, name]]
    return writes


def cosine(a, b) -> float:
    dot = sum(x * y for x, y in zip(a, b))
    return float(dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b)))


def l2_norm(x: torch.Tensor) -> float:
    return math.sqrt((x**2).sum())


def discrepancy(X, k, v) -> float:
    """Return the root mean square of v - k^T X over value channels."""
    squares = [(v[j] - k @ X[:, j]).item() ** 2 for j in range(len(v))]
    return math.sqrt(sum(squares) / len(v))


def compute_statistics(
    writes: list[TokenWrite], previous_writes: list[TokenWrite] | None
) -> dict[str, list[float]]:
    """Return the statistics of one site and one sequence: a number for each token, or for the sequence.

    Args:
        previous_writes: those of the site before; None at the first one
    """
    statistics: dict[str, list[float]] = {}
    for position, write in enumerate(writes):
        X = write.X
        k = write.k
        norm = l2_norm(X)
        discrepancy_before = discrepancy(X, k, write.v)
        discrepancy_after = discrepancy(write.written, k, write.v)
        erase_term = write.beta * torch.outer(k, k) @ X
        write_term = write.beta * torch.outer(k, write.v)
        values = {
            "beta": write.beta.item(),
            "discrepancy_before": discrepancy_before,
            "discrepancy_after": discrepancy_after,
            "contraction": discrepancy_after / discrepancy_before,
            "contraction_expected": abs(1 - write.beta.item()),
            "erased": l2_norm(erase_term) / norm,
            "written": l2_norm(write_term) / norm,
            "write_size": l2_norm(write.written - X) / norm,
        }
        if position > 0:
            values["cosine_tokens"] = cosine(k, writes[position - 1].k)
        if previous_writes is not None:
            values["cosine_sites"] = cosine(k, previous_writes[position].k)
        for name, value in values.items():
            statistics.setdefault(name, []).append(value)
    return statistics
