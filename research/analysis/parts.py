"""What analyses look at in the parts of streams, by class: edits, details, directions, shares and shortcuts.

A key is a class by its module and name. A class without an entry, a newcomer's for example, has what every stream has:
its statistics, h as the direction of its writes, and h = 0 as its edit. A subclass has its parent's entries as long as
it keeps the parent's forward; else it computes something else.

    EDITS      of a read, write or `post_write`, edits(part) -> {name: {keyword: value}}: arguments of its forward
               beside the usual ones, with which it computes the same but for one piece
    DETAILS    details(write, state, h, x_in, c, written), of a read details(read, state) -> {name: (B, T, ...)}: more
               numbers, vectors or matrices of each token
    ALONG      along(write, state, h, x_in, c) -> (B, T, d): the direction that a write writes along
    SHARES     {statistic: {label: (low, high)}} of a write: intervals, ends left out, that tokens are counted in
    SHORTCUTS  shortcut(write, state, h, x_in, c) -> a map of products.py: what becomes of the state,
               gates and directions as they are
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

from model.layers import at_least_fp32
from model.residual import read_along, read_columns
from research.analysis.products import Diagonal, LowRank, Mix, identity


def entry(table: dict, part):
    """What the table says of a part of a site, None: nothing."""
    for parent in type(part).__mro__:
        if getattr(parent, "forward", None) is not getattr(type(part), "forward", None):
            break
        if (found := table.get(f"{parent.__module__}.{parent.__qualname__}")) is not None:
            return found
    return None


def details_of_columns(read, state) -> dict:
    """What a read of the state (B, T, v, d) makes of its columns; nothing of a single one.

    `column_share` (B, T, v): the norm of a column's part of x_in over the sum of those of all. Of the kernels that
    columns are read with, the same for every token: `kernel_norm` (B, T, v), `kernel_cosine` (B, T, v, v).
    """
    weights = read.weights()  # (K, v, d)
    if weights.shape[1] == 1:
        return {}
    columns = range(weights.shape[1])
    parts = torch.stack(
        [read_columns(state[:, :, j, None], weights[:, j, None]) for j in columns], dim=2
    )
    sizes = torch.linalg.vector_norm(parts, dim=-1)
    share = sizes / sizes.sum(-1, keepdim=True).clamp_min(torch.finfo(sizes.dtype).tiny)
    kernels = weights.transpose(0, 1).flatten(1)  # (v, K d)
    tokens = state.shape[:2]
    return {
        "column_share": share,
        "kernel_norm": torch.linalg.vector_norm(kernels, dim=-1).expand(*tokens, -1),
        "kernel_cosine": cosines(kernels).expand(*tokens, -1, -1),
    }


def cosines(x):
    """Between the rows of x (..., n, d), (..., n, n); 0 for rows of zeros."""
    unit = F.normalize(x, dim=-1)
    return unit @ unit.mT


def edits_of_laurel(part) -> dict:
    return {"a=b=1" if part.weighted else "no low rank": {"plain": True}}


def shortcut_of_laurel(write, state, h, x_in, c) -> Diagonal | LowRank:
    if write.weighted:
        return Diagonal((2 * write.logits.softmax(0)[1]).expand(1, 1, write.hidden_size))
    return LowRank(write.up.weight.mT[None, None], write.down.weight[None, None])


def edits_of_connection(part) -> dict:
    mixes = getattr(part, "kind", None) != "identity"
    return ({"mix=I": {"mixes": False}} if mixes else {}) | {"write=1": {"weighs": False}}


def edits_of_depth_attention(part) -> dict:
    """None of the first site, which has one source."""
    edits = {"uniform weights": {"force": "uniform"}, "last source alone": {"force": "last"}}
    return edits if part.sources > 1 else {}


def details_of_depth_attention(part, state) -> dict:
    """Of each token (B, T, sources): the weights a."""
    return {"source_weight": part(state)[1]}


def shortcut_of_add(write, state, h, x_in, c) -> Diagonal:
    return identity(state)


def details_of_connection(part, state) -> dict:
    """Of each token: read and write (B, T, n), and mix (B, T, n, n)."""
    streams = state.to(at_least_fp32(state.dtype))
    found = zip(("read", "write", "mix"), part.weights(streams))
    shapes = {"read": (-1,), "write": (-1,), "mix": (-1, -1)}
    return {name: weights.expand(*state.shape[:2], *shapes[name]) for name, weights in found}


def shortcut_of_mix_and_add(write, state, h, taken, c) -> Mix:
    """mix^T, which is one for all tokens where it is learned numbers."""
    mix = taken[2]
    return Mix(mix.mT[(None,) * (4 - mix.ndim)])


def edits_of_mgt(part) -> dict:
    edits = {"gate=1": {"gate": 1.0}} if part.config.has_gate else {}
    return edits | (
        {"beta=1": {"beta": 1.0}, "alpha=0": {"alpha": 0.0}} if part.config.has_beta else {}
    )


def details_of_mgt(part, state, h, x_in, c, written) -> dict:
    """Of each token (B, T, d): beta."""
    return {"beta_of_feature": part.gates(state)[1]} if part.config.has_beta else {}


def shortcut_of_mgt(write, state, h, x_in, c) -> Diagonal:
    """1 - beta alpha of every feature."""
    return (
        Diagonal(1 - write.gates(state)[1] * write.alpha)
        if write.config.has_beta
        else identity(state)
    )


def edits_of_delta_rewrite(part) -> dict:
    edits = {f"beta={beta}": {"force": float(beta)} for beta in range(3)}
    return edits | ({"no erase": {"erase": False}} if part.config.ddl_update == "delta" else {})


def details_of_delta_rewrite(part, state, h, x_in, c, written) -> dict:
    """Of each token: the norms of what is erased, beta k k^T X, and written, beta k t^T, over that of X (B, T); the
    discrepancy's ratio, after to before, and |1 - beta|, which it should be (B, T); the value t (B, T, v)."""
    khat, value = part.along(state, h, x_in, c), part.write_value(h, x_in, c)
    said, norm = (
        part.statistics(state, h, x_in, c, written),
        partial(torch.linalg.vector_norm, dim=-1),
    )
    beta = part.config.branch_mult * said["beta"]
    step = beta * norm(khat) / math.sqrt(khat.shape[-1]) / norm(state.flatten(2).to(khat.dtype))
    found = {"written": step * norm(value), "value": value}
    if part.config.ddl_update == "delta":
        found |= {"erased": step * norm(read_along(state, khat))}
        tiny = torch.finfo(khat.dtype).tiny
        found |= {
            "contraction": said["discrepancy_after"] / said["discrepancy_before"].clamp_min(tiny)
        }
        found |= {"contraction_expected": (1 - beta).abs()}
    return found


def shortcut_of_delta_rewrite(write, state, h, x_in, c) -> LowRank | Diagonal:
    """A = I - beta k k^T of every column; the identity without erase."""
    if write.config.ddl_update == "write_only":
        return identity(state)
    k = write.along(state, h, x_in, c) / math.sqrt(state.shape[-1])
    beta = write.config.branch_mult * write.gate(write.gate_source(state, x_in, c))
    return LowRank((-beta * k).unsqueeze(2), k.unsqueeze(2))


EDITS = {
    "model.residual.DeltaRewrite": edits_of_delta_rewrite,
    "model.hyper_connections.Connection": edits_of_connection,
    "model.attention_residuals.DepthAttention": edits_of_depth_attention,
    "model.mgt.MGTWrite": edits_of_mgt,
    "model.ReZero-gpt-mha-rope.ScaledAdd": lambda part: {
        "a=0": {"scale": 0.0},
        "a=1": {"scale": 1.0},
    },
    "model.DenseFormer-gpt-mha-rope.DepthAverage": lambda part: {"A=I": {"averages": False}},
    "model.LAuReL-gpt-mha-rope.LAuReLWrite": edits_of_laurel,
    "model.wide-gpt-mha-rope.WideAdd": lambda part: {"w=1": {"alike": True}},
}
DETAILS = {
    "model.residual.DeltaRewrite": details_of_delta_rewrite,
    "model.residual.TokenConvRead": details_of_columns,
    "model.residual.ColumnConvRead": details_of_columns,
    "model.hyper_connections.Connection": details_of_connection,
    "model.attention_residuals.DepthAttention": details_of_depth_attention,
    "model.mgt.MGTWrite": details_of_mgt,
}
ALONG = {"model.residual.DeltaRewrite": lambda write, *given: write.along(*given)}
# Where k^T X is kept, overwritten by t or reflected about it; 1 - beta is the eigenvalue of A = I - beta k k^T.
SHARES = {
    "model.residual.DeltaRewrite": {
        "beta": {
            "skip": (0, 0.5),
            "match": (0.5, 1.5),
            "over-relaxed": (1.5, 2),
            "negative eigenvalue": (1, 2),
            "skipped write": (0, 0.05),
        }
    }
}
ADDS = "model.block.Add", "model.wide-gpt-mha-rope.WideAdd", "model.ReZero-gpt-mha-rope.ScaledAdd"
SHORTCUTS = {
    **dict.fromkeys(ADDS, shortcut_of_add),
    "model.residual.DeltaRewrite": shortcut_of_delta_rewrite,
    "model.hyper_connections.MixAndAdd": shortcut_of_mix_and_add,
    "model.mgt.MGTWrite": shortcut_of_mgt,
    "model.LAuReL-gpt-mha-rope.LAuReLWrite": shortcut_of_laurel,
}
