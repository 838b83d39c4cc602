"""`analyze.py rank`: how many directions the hidden states of a trained model use, over its depth.

For every sequence of S tokens the hidden states at a depth are a matrix (S, D), whose effective rank is that of the
paper on the Manifold-Geometric Transformer (eq. 8). Depth 0 is after the embedding, depth l after the l-th block. A
state that is (B, T, d) is taken as it is. Of any other, several columns or a tuple of tensors, what counts is what the
next site reads of it (`read`: the readout's, after the last block); the rank of the state's numbers side by side
(`state`) is stored as well. Computed in float32, the singular values in float64.
"""

import itertools

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from model.block import Stream, past
from research import plots
from research.analysis import common
from utils import tables


def effective_rank(x: torch.Tensor) -> torch.Tensor:
    """exp(H(s / sum s)) / min(S, D), s the singular values of x (..., S, D) (eq. 8) -> (...) float64, 0 of zeros.

    ValueError: x is not finite.
    """
    if not x.isfinite().all():
        raise ValueError("the hidden states are not finite: the model has diverged")
    values = torch.linalg.svdvals(x.double())
    shares = values / values.sum(-1, keepdim=True)
    rank = torch.special.entr(shares).sum(-1).exp() / min(x.shape[-2:])
    return torch.where(values.sum(-1) > 0, rank, 0.0)


def side_by_side(state) -> torch.Tensor:
    """A state's numbers of each token in one row: a tensor or tuple of tensors (B, T, ...) -> (B, T, all of them)."""
    return torch.cat([part.flatten(2) for part in tree_leaves(state)], dim=-1)


class Recorder(Stream):
    """Every step by itself; keeps the states of depths 0 to L, and what is read there, with their gradients.

    The gradient of a state is that by way of what comes after: a tuple's earlier parts have been used before, too.
    """

    def __init__(self):
        self.states, self.reads = [], []

    def keep(self, state):
        """The state as it is to be handed on."""
        state = tree_map(lambda part: part.view_as(part), state)
        for part in tree_leaves(state):
            part.retain_grad()
        self.states.append(state)
        return state

    def read(self, site, state, cache, positions):
        first = site.name == "attn"
        state, c, taken = super().read(site, self.keep(state) if first else state, cache, positions)
        if first:
            self.reads.append(taken[0] if isinstance(taken, tuple) else taken)
        return state, c, taken

    def finish(self, model, state, cache):
        self.reads.append(model.readout(self.keep(state), past(cache, "readout")))
        return model.ln_f(self.reads[-1])


@torch.no_grad()
def by_depth(recorder: Recorder) -> tuple[str, dict[str, list[float]]]:
    """After the backward pass of a batch: which of state and read counts, and sums by depth."""
    states, reads = recorder.states, recorder.reads
    own = torch.is_tensor(states[0]) and states[0].ndim == 3
    hidden = [state if own else read for state, read in zip(states, reads)]
    flat = [side_by_side(state) for state in states]
    gradients = [[p.grad for p in tree_leaves(s) if p.grad is not None] for s in states]
    changes = [after - before for before, after in itertools.pairwise(hidden)]
    ranks = [effective_rank(x).sum().item() for x in flat]
    same = [read is state for state, read in zip(states, reads)]
    of_reads = [r if s else effective_rank(x).sum().item() for r, s, x in zip(ranks, same, reads)]
    return "state" if own else "read", {
        "rank_state": ranks,
        "rank_read": of_reads,
        "rank_difference": [effective_rank(x).sum().item() for x in changes],
        "state_rms": [x.double().square().sum().item() for x in flat],
        "gradient_state": [sum(squares_of(g) for g in each) for each in gradients],
        "numbers": [x.numel() for x in flat],
    }


def squares_of(x: torch.Tensor) -> float:
    return x.double().square().sum().item()


def measure(model, batches, windows: list[int], rows: int, progress=None) -> dict:
    """By depth, over the windows, which are whole: rank_state, rank_read, rank_difference (of the
    change that each block makes), state_rms, and the norms of the gradient of the mean loss with
    respect to the state (gradient_state) and to the parameters of each block
    (gradient_parameters). Of the rank that counts (`rank`) `preservation`, the last depth's over
    that at depth 0, and `slope`, least squares, of its logarithm over depth; None where it is 0.

    ValueError: a state is not finite.
    """
    total: dict[str, np.ndarray] = {}
    model.zero_grad(set_to_none=True)
    device = common.get_device(model)
    for ids, targets in common.iterate_batches(batches, windows, rows, device, progress):
        recorder = Recorder()
        with model.through(recorder):
            _, loss = model(ids, targets)
        (loss * (len(ids) / len(windows))).backward()
        counts, sums = by_depth(recorder)
        total = {name: total.get(name, 0) + np.array(each) for name, each in sums.items()}
    ranks = {name: total[name] / len(windows) for name in total if name.startswith("rank")}
    found = {name: values.tolist() for name, values in ranks.items()}
    found["state_rms"] = np.sqrt(total["state_rms"] / total["numbers"]).tolist()
    found["gradient_state"] = np.sqrt(total["gradient_state"]).tolist()
    squares = [
        sum(squares_of(p.grad) for p in block.parameters() if p.grad is not None)
        for block in model.transformer.h
    ]
    found["gradient_parameters"] = np.sqrt(squares).tolist()
    model.zero_grad(set_to_none=True)
    rank = found[f"rank_{counts}"]
    found |= {"rank_of": counts, "rank": rank, "preservation": None, "slope": None}
    if min(rank) > 0:
        slope = np.polyfit(np.arange(len(rank)), np.log(rank), 1)[0]
        found |= {"preservation": rank[-1] / rank[0], "slope": float(slope)}
    return found


def over_validation(model, corpus, count: int, rows: int, label: str) -> dict:
    """`measure` over `count` validation sequences of a corpus, and their number."""
    batches = common.open_validation_batches(model, corpus)
    windows = common.select_sequences(batches, count)
    progress = common.Progress(label, len(windows))
    return {"sequences": len(windows), **measure(model, batches, windows, rows, progress)}


def line_of(row: dict) -> str:
    ends = f"{row['rank'][0]:.3f} to {row['rank'][-1]:.3f}"
    return f"effective rank {ends} over {row['layers']} blocks"


def table(rows: list[dict]) -> str:
    header = ("run", "blocks", "taken", "rank at 0", "at the end", "preserved", "slope of log rank")
    cells = []
    for row in rows:
        figures = [row["rank"][0], row["rank"][-1], row["preservation"]]
        shown = [None if x is None else f"{x:.3f}" for x in figures]
        slope = row["slope"] and f"{row['slope']:+.4f}"
        cells.append([row["label"], row["layers"], row["rank_of"], *shown, slope])
    return tables.format_markdown(header, cells)


PANELS = {
    "rank": ("effective rank, hidden state", "linear"),
    "rank_difference": ("effective rank, block's change", "linear"),
    "state_rms": ("RMS of the state", "log"),
    "gradient_state": ("gradient norm, state", "log"),
    "gradient_parameters": ("gradient norm, parameters", "log"),
}


def draw(rows: list[dict]):
    figure, axes = plots.plot_over_depth(rows, PANELS, "depth (blocks)")
    axes[0].set_ylim(0, 1)
    return figure


def run(args) -> None:
    """Measure, store and draw every run."""

    def of_run(model, encoding, batches, windows, args, progress):
        return measure(model, batches, windows, args.rows, progress)

    common.analyze_runs(args, "rank", of_run, line_of, table, draw)
