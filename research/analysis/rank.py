"""`analyze.py rank`: the effective rank of the hidden states over depth (Su and You 2026, equation 8).

The hidden states of a sequence at a depth are a matrix (S, D). Depth 0 is the embedding, and depth l the
output of block l. If a state is not a vector of width d for each token, the rank is that of what the next
site reads, and at the last depth that of the readout.
"""

from pathlib import Path
from types import SimpleNamespace

import torch

from model.block import Site, State, Stream, get_past
from model.gpt import GPT
from research import plots
from research.analysis import common
from utils import tables

Options = common.RunOptions


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


class HiddenStates(Stream):
    """Run the stream as it is, and record the hidden states (B, S, D) of depths 0 to L."""

    def __init__(self):
        self.states: list[torch.Tensor] = []

    def record(self, state: State, read: torch.Tensor) -> None:
        is_hidden_state = torch.is_tensor(state) and state.ndim == 3
        self.states.append(state if is_hidden_state else read)

    def read(
        self, site: Site, state: State, cache: dict | None
    ) -> tuple[State, torch.Tensor | tuple, torch.Tensor]:
        state, read_output, c = super().read(site, state, cache)
        if site.name == "attn":  # the first site of a block
            x_in = read_output[0] if isinstance(read_output, tuple) else read_output
            self.record(state, x_in)
        return state, read_output, c

    def finish(self, model: GPT, state: State, cache: dict | None) -> torch.Tensor:
        x_in = model.readout(state, get_past(cache, "readout"))
        self.record(state, x_in)
        return model.ln_f(x_in)


@torch.no_grad()
def measure_run(run: common.LoadedRun, args: SimpleNamespace) -> dict:
    """Return "rank", the mean effective rank over sequences by depth."""
    total = 0.0
    for ids, _ in run.iterate_batches(args.rows):
        stream = HiddenStates()
        with run.model.through(stream):
            run.model.hidden(ids)
        ranks = torch.stack([effective_rank(state).sum() for state in stream.states])
        total = total + ranks.cpu()
    return {"rank": (total / len(run.sequences)).tolist()}


def summarize(row: dict) -> str:
    """Return the line that is printed of a row."""
    return (
        f"effective rank {row['rank'][0]:.3f} to {row['rank'][-1]:.3f} over {row['layers']} blocks"
    )


def finish(rows: list[dict], out: Path) -> None:
    """Print the table of all rows, and draw a line for each beside the JSON file `out`."""
    cells = []
    for row in rows:
        ranks = [f"{row['rank'][0]:.3f}", f"{row['rank'][-1]:.3f}"]
        cells.append([row["label"], row["layers"], *ranks])
    print(tables.format_markdown(["run", "blocks", "rank at 0", "at the end"], cells))
    quantities = {"rank": "effective rank of the hidden states"}
    figure, axes = plots.plot_over_depth(rows, quantities, "depth (blocks)")
    axes[0].set_ylim(0, 1)
    plots.save(figure, out.with_suffix(".png"))
