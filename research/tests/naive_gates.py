"""A second implementation of what `analyze.py gates` measures: loops over tokens, the dense A = I - beta k k^T.

It computes in float64 from the parameters of sites and from what they get; no code is shared with the writes of model/
or with analysis/. X (d, d_v) is the state of a token, k (d,) a direction and v (d_v,) a value.
"""

import math
from dataclasses import dataclass

import torch
from naive import branch_mult, sigmoid

from model.block import Stream


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


class Recorder(Stream):
    """Run the stream as it is, and record {(layer, site name): [sequence][token] -> TokenWrite}."""

    def __init__(self):
        self.writes: dict[tuple[int, str], list[list[TokenWrite]]] = {}

    def write(self, site, state, h, x_in, c, cache):
        w = dict(site.write.named_parameters())
        cfg = vars(site.write.config)
        self.writes[site.layer, site.name] = [
            [compute_write(w, X.T, *inputs, cfg) for X, *inputs in zip(*sequence)]
            for sequence in zip(state, h, x_in, c)
        ]
        return super().write(site, state, h, x_in, c, cache)


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
