"""`analyze.py rank`: how many directions the hidden states of a trained model use, over its depth.

For every sequence of S tokens, the hidden states at a depth are a matrix (S, D), whose effective rank is that of the
paper on the Manifold-Geometric Transformer (eq. 8). Depth 0 is after the embedding, depth l after the l-th block. If
the state is (B, T, d), the reported rank is that of the state itself. If it has several value channels, or is a tuple
of tensors, the reported rank is that of what the next site reads from it (`read`; after the last block, what the
readout reads). The rank of all numbers of the state side by side (`state`) is stored as well. The model computes in
float32, the singular values in float64.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from data.loader import IGNORED_TARGET, ValidationBatches
from data.tokenizer import Tokenizer
from model.block import Site, State, Stream, get_past
from model.gpt import GPT
from research import plots
from research.analysis import common
from utils import tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def effective_rank(x: torch.Tensor) -> torch.Tensor:
    """Return exp(H(s / sum s)) / min(S, D), s the singular values of x (..., S, D) (eq. 8).

    Returns:
        (...), float64; 0 if x is 0.

    Raises:
        ValueError: x is not finite
    """
    if not x.isfinite().all():
        raise ValueError("the hidden states are not finite: the model has diverged")
    singular_values = torch.linalg.svdvals(x.double())
    total = singular_values.sum(-1)
    entropy = torch.special.entr(singular_values / total.unsqueeze(-1)).sum(-1)
    return torch.where(total > 0, entropy.exp() / min(x.shape[-2:]), 0.0)


def concatenate_state(state: State) -> torch.Tensor:
    """Return all numbers of each token side by side: (B, T, ...), or a tuple of such, -> (B, T, n)."""
    return torch.cat([part.flatten(2) for part in tree_leaves(state)], dim=-1)


def sum_of_squares(x: torch.Tensor) -> float:
    return x.double().square().sum().item()


# ---- a batch ----


class GradientRecorder(Stream):
    """Run the stream as it is, and record the states of depths 0 to L, and what is read of them.

    After a backward pass the states have gradients. The gradient of a state is that by way of what
    comes after it; the earlier parts of a tuple have been used before as well.
    """

    def __init__(self):
        self.states: list[State] = []
        self.reads: list[torch.Tensor] = []

    def record(self, state: State) -> State:
        """Record a state, and return the one with which the model continues."""
        # a view, because a tensor that is part of several states has another gradient in each
        state = tree_map(lambda part: part.view_as(part), state)
        for part in tree_leaves(state):
            if part.requires_grad:  # a first state may hold constants
                part.retain_grad()
        self.states.append(state)
        return state

    def read(
        self, site: Site, state: State, cache: dict | None
    ) -> tuple[State, torch.Tensor | tuple, torch.Tensor]:
        is_first_site = site.name == "attn"
        if is_first_site:
            state = self.record(state)
        state, read_output, c = super().read(site, state, cache)
        if is_first_site:
            x_in = read_output[0] if isinstance(read_output, tuple) else read_output
            self.reads.append(x_in)
        return state, read_output, c

    def finish(self, model: GPT, state: State, cache: dict | None) -> torch.Tensor:
        x_in = model.readout(self.record(state), get_past(cache, "readout"))
        self.reads.append(x_in)
        return model.ln_f(x_in)


@dataclass
class DepthSums:
    """Sums over the sequences of some batches, by depth 0 to L."""

    # effective ranks of the states, of what is read of them, and of what each block (1 to L) adds
    # to the hidden states
    rank_state: np.ndarray
    rank_read: np.ndarray
    rank_difference: np.ndarray

    # squares of the numbers of the states, and how many they are
    state_squares: np.ndarray
    state_numel: np.ndarray

    # squares of the gradients of the states
    gradient_squares: np.ndarray

    def __add__(self, other: "DepthSums") -> "DepthSums":
        return DepthSums(
            rank_state=self.rank_state + other.rank_state,
            rank_read=self.rank_read + other.rank_read,
            rank_difference=self.rank_difference + other.rank_difference,
            state_squares=self.state_squares + other.state_squares,
            state_numel=self.state_numel + other.state_numel,
            gradient_squares=self.gradient_squares + other.gradient_squares,
        )


def is_hidden_state(state: State) -> bool:
    """Return whether a state is (B, T, d), so that its own rank counts."""
    return torch.is_tensor(state) and state.ndim == 3


@torch.no_grad()
def sum_batch(recorder: GradientRecorder) -> DepthSums:
    """Return the sums of a batch, after its backward pass."""
    hidden_states = recorder.reads
    if is_hidden_state(recorder.states[0]):
        hidden_states = recorder.states
    rank_state = []
    rank_read = []
    state_squares = []
    state_numel = []
    gradient_squares = []
    for state, read in zip(recorder.states, recorder.reads):
        numbers = concatenate_state(state)
        rank_state.append(effective_rank(numbers).sum().item())
        # singular values take long, so they are not computed twice
        if read is state:
            rank_read.append(rank_state[-1])
        else:
            rank_read.append(effective_rank(read).sum().item())
        state_squares.append(sum_of_squares(numbers))
        state_numel.append(numbers.numel())
        gradients = [part.grad for part in tree_leaves(state) if part.grad is not None]
        gradient_squares.append(sum(sum_of_squares(gradient) for gradient in gradients))
    rank_difference = [
        effective_rank(new_hidden - old_hidden).sum().item()
        for old_hidden, new_hidden in itertools.pairwise(hidden_states)
    ]
    return DepthSums(
        rank_state=np.array(rank_state),
        rank_read=np.array(rank_read),
        rank_difference=np.array(rank_difference),
        state_squares=np.array(state_squares),
        state_numel=np.array(state_numel),
        gradient_squares=np.array(gradient_squares),
    )


# ---- a run ----


def measure(
    model: GPT,
    batches: ValidationBatches,
    sequences: list[int],
    batch_size: int,
    progress: Callable[[int], None] | None = None,
) -> dict:
    """Measure ranks and gradients over sequences of full length.

    Returns:
        Lists by depth: rank_state and rank_read; rank_difference, of the change that each block
        makes; state_rms; gradient_state and gradient_parameters, the norms of the gradient of the
        mean loss per target with respect to the state and to the parameters of each block. `rank` is the one
        that counts, and rank_of says which. Of that rank, `preservation` is the value at the last
        depth over that at depth 0, and `slope` the least-squares slope of its logarithm over depth;
        both are None if it is 0 anywhere.

    Raises:
        ValueError: a state is not finite
    """
    sums: DepthSums | None = None
    rank_of = ""
    model.zero_grad(set_to_none=True)
    device = common.get_device(model)
    num_targets = int(common.count_targets(batches, sequences).sum())
    for ids, targets in common.iterate_batches(batches, sequences, batch_size, device, progress):
        recorder = GradientRecorder()
        with model.through(recorder):
            _, loss = model(ids, targets)
        # weighted so that the gradients add up to that of the mean over all targets
        num_batch_targets = int((targets != IGNORED_TARGET).sum())
        (loss * (num_batch_targets / num_targets)).backward()
        batch_sums = sum_batch(recorder)
        sums = batch_sums if sums is None else sums + batch_sums
        rank_of = "state" if is_hidden_state(recorder.states[0]) else "read"
    block_squares = [
        sum(sum_of_squares(p.grad) for p in block.parameters() if p.grad is not None)
        for block in model.transformer.h
    ]
    model.zero_grad(set_to_none=True)
    row = {
        "rank_state": (sums.rank_state / len(sequences)).tolist(),
        "rank_read": (sums.rank_read / len(sequences)).tolist(),
        "rank_difference": (sums.rank_difference / len(sequences)).tolist(),
        "state_rms": np.sqrt(sums.state_squares / sums.state_numel).tolist(),
        "gradient_state": np.sqrt(sums.gradient_squares).tolist(),
        "gradient_parameters": np.sqrt(block_squares).tolist(),
    }
    rank = row[f"rank_{rank_of}"]
    preservation = None
    slope = None
    if min(rank) > 0:
        preservation = rank[-1] / rank[0]
        slope = float(np.polyfit(np.arange(len(rank)), np.log(rank), 1)[0])
    return {
        **row,
        "rank_of": rank_of,
        "rank": rank,
        "preservation": preservation,
        "slope": slope,
    }


# ---- the line, the table and the figure ----


def summarize(row: dict) -> str:
    """Return the line that is printed of a row."""
    return (
        f"effective rank {row['rank'][0]:.3f} to {row['rank'][-1]:.3f} over {row['layers']} blocks"
    )


def format_table(rows: list[dict]) -> str:
    header = (
        "run",
        "blocks",
        "rank of",
        "rank at 0",
        "at the end",
        "rank at the end / at 0",
        "slope of log rank",
    )
    cells = []
    for row in rows:
        preservation = row["preservation"]
        slope = row["slope"]
        cells.append(
            [
                row["label"],
                row["layers"],
                row["rank_of"],
                f"{row['rank'][0]:.3f}",
                f"{row['rank'][-1]:.3f}",
                None if preservation is None else f"{preservation:.3f}",
                None if slope is None else f"{slope:+.4f}",
            ]
        )
    return tables.format_markdown(header, cells)


# quantity -> label and scale of its panel
PANELS = {
    "rank": ("effective rank, hidden state", "linear"),
    "rank_difference": ("effective rank, block's change", "linear"),
    "state_rms": ("RMS of the state", "log"),
    "gradient_state": ("gradient norm, state", "log"),
    "gradient_parameters": ("gradient norm, parameters", "log"),
}


def draw(rows: list[dict]) -> "Figure":
    """Draw each quantity over depth, with a line for each run."""
    figure, axes = plots.plot_over_depth(rows, PANELS, "depth (blocks)")
    axes[0].set_ylim(0, 1)
    return figure


# ---- the command ----

Options = common.RunOptions


def measure_run(
    model: GPT,
    encoding: Tokenizer,
    batches: ValidationBatches,
    sequences: list[int],
    args: SimpleNamespace,
    progress: common.Progress,
) -> dict:
    return measure(model, batches, sequences, args.rows, progress)


def run(args: SimpleNamespace) -> None:
    """Measure, store and draw every run."""
    common.analyze_runs(args, "rank", measure_run, summarize, format_table, draw)
