"""`analyze.py rank`: how many directions the hidden states of a trained model use, over its depth.

For every sequence of S tokens the hidden states at a depth are a matrix (S, D), whose effective rank is that of the
paper on the Manifold-Geometric Transformer (eq. 8). Depth 0 is after the embedding, depth l after the l-th block. A
state that is (B, T, d) is taken as it is. Of any other, several columns or a tuple of tensors, what counts is what the
next site reads of it (`read`: the readout's, after the last block); the rank of the state's numbers side by side
(`state`) is stored as well. Computed in float32, the singular values in float64.
"""

from pathlib import Path

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

from data.loader import ValidationBatches
from evaluation import tables
from evaluation.subjects import open_corpus_of
from model.block import Stream, past
from research.analysis import common
from research.plots import look, look_numbers, pyplot
from training import distributed
from training.provenance import provenance, store


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


class Sums:
    """What is added up over batches, by depth; `of`: whether state or read counts as the hidden state."""

    def __init__(self):
        self.sequences, self.numbers, self.of = 0, None, "state"

    def add(self, recorder: Recorder) -> None:
        """Count a batch, after its backward pass."""
        states, reads = recorder.states, recorder.reads
        own = torch.is_tensor(states[0]) and states[0].ndim == 3
        self.of = "state" if own else "read"
        hidden = [state if own else read for state, read in zip(states, reads)]
        rows = {
            name: []
            for name in (
                "rank_state",
                "rank_read",
                "rank_difference",
                "squares",
                "count",
                "gradient",
            )
        }
        for depth, (state, read) in enumerate(zip(states, reads)):
            flat = side_by_side(state)
            rows["rank_state"].append(effective_rank(flat).sum().item())
            same = read is state
            rows["rank_read"].append(
                rows["rank_state"][-1] if same else effective_rank(read).sum().item()
            )
            change = hidden[depth] - hidden[depth - 1] if depth else torch.zeros_like(hidden[0])
            rows["rank_difference"].append(effective_rank(change).sum().item())
            rows["squares"].append(flat.double().square().sum().item())
            rows["count"].append(flat.numel())
            grads = [part.grad for part in tree_leaves(state) if part.grad is not None]
            rows["gradient"].append(sum(grad.double().square().sum().item() for grad in grads))
        numbers = np.array(list(rows.values()))
        self.numbers = numbers if self.numbers is None else self.numbers + numbers
        self.sequences += len(hidden[0])

    def result(self) -> dict:
        states, reads, differences, squares, count, gradient = self.numbers
        found = {
            "rank_of": self.of,
            "rank_state": states / self.sequences,
            "rank_read": reads / self.sequences,
        }
        found |= {
            "rank_difference": differences[1:] / self.sequences,
            "state_rms": np.sqrt(squares / count),
        }
        found["gradient_state"] = np.sqrt(gradient)
        return {
            key: value if isinstance(value, str) else value.tolist() for key, value in found.items()
        }


def measure(
    model, batches: ValidationBatches, windows: list[int], rows: int, device, progress=None
) -> dict:
    """By depth, over the windows, which are whole: rank_state, rank_read, rank_difference (of the change that each
    block makes), state_rms, and the norms of the gradient of the mean loss with respect to the state (gradient_state)
    and to the parameters of each block (gradient_parameters). progress(done) is told of every batch.

    ValueError: a state is not finite.
    """
    sums = Sums()
    model.zero_grad(set_to_none=True)
    for ids, targets in common.in_batches(batches, windows, rows, device, progress):
        recorder = Recorder()
        with model.through(recorder):
            _, loss = model(ids, targets)
        (loss * (len(ids) / len(windows))).backward()
        with torch.no_grad():
            sums.add(recorder)
    found = sums.result() | {
        "gradient_parameters": [norm_of_gradient(block) for block in model.transformer.h]
    }
    model.zero_grad(set_to_none=True)
    return found | summary_of(found)


def norm_of_gradient(module) -> float:
    squares = [
        p.grad.double().square().sum().item() for p in module.parameters() if p.grad is not None
    ]
    return float(np.sqrt(sum(squares)))


def summary_of(found: dict) -> dict:
    """What a course of ranks comes to: `rank` (that which counts), `preservation`, rank at the last depth over that at
    depth 0, and `slope`, least squares, of the logarithm of the rank over depth; None where a rank is 0."""
    rank = found[f"rank_{found['rank_of']}"]
    result = {"rank": rank, "preservation": None, "slope": None}
    if min(rank) > 0:
        slope = np.polyfit(np.arange(len(rank)), np.log(rank), 1)[0]
        result |= {"preservation": rank[-1] / rank[0], "slope": float(slope)}
    return result


def over_validation(model, corpus, count: int, rows: int, label: str) -> dict:
    """`measure` over `count` validation sequences of the corpus, their number, and a line now and then."""
    batches = common.validation_batches(model, corpus)
    windows = common.whole_windows(batches, count)
    progress = common.Progress(label, len(windows))
    return {
        "sequences": len(windows),
        **measure(model, batches, windows, rows, common.device_of(model), progress),
    }


def measure_run(subject, dataset: str, count: int, rows: int, device) -> dict:
    """`over_validation` of a subject's model on its own corpus, or `dataset`, and what it is of. ValueError: the corpus
    is not there, or has other tokens."""
    corpus = open_corpus_of(subject, dataset)
    model, _, stem = subject.load(device)
    return common.about(subject, model, stem) | over_validation(
        model, corpus, count, rows, subject.label
    )


def markdown(rows: list[dict]) -> str:
    header = ("run", "blocks", "taken", "rank at 0", "at the end", "preserved", "slope of log rank")
    cells = []
    for row in rows:
        figures = [row["rank"][0], row["rank"][-1], row["preservation"], row["slope"]]
        shown = [None if x is None else f"{x:.3f}" for x in figures[:3]]
        cells.append(
            [
                row["label"],
                row["layers"],
                row["rank_of"],
                *shown,
                figures[3] and f"{figures[3]:+.4f}",
            ]
        )
    return tables.markdown(header, cells)


PANELS = (
    ("rank", "effective rank of the hidden state", "linear"),
    ("rank_difference", "effective rank of a block's change", "linear"),
    ("state_rms", "root mean square of the state", "log"),
    ("gradient_state", "gradient norm, with respect to the state", "log"),
    ("gradient_parameters", "gradient norm, of the block's parameters", "log"),
)


def draw(rows: list[dict], out: Path) -> None:
    """A panel for each quantity, a line for each run, over depth."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 3, figsize=(14, 8), layout="constrained")
    for panel, (key, label, scale) in zip(axes.flat, PANELS):
        for number, row in zip(look_numbers([row["model"] for row in rows]), rows):
            values = row[key]
            depths = range(row["layers"] + 1 - len(values), row["layers"] + 1)
            panel.plot(depths, values, label=row["label"], **look(number))
        panel.set(xlabel="depth (blocks)", ylabel=label, yscale=scale)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
    axes[0, 0].set_ylim(0, 1)
    last = axes.flat[len(PANELS)]
    last.axis("off")
    last.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper left", fontsize="small")
    figure.savefig(out, dpi=100)
    plt.close(figure)


def run(args) -> None:
    """Measure every run, store the rows and draw them. ValueError: a run or its corpus is not there."""
    pyplot()  # a missing package should be known before the work
    origin, device = provenance(), distributed.pick_device(args.device)
    chosen, rows = common.chosen(args), []
    out = common.output(args, "rank")
    for subject in chosen:
        rows.append(measure_run(subject, args.dataset or "", args.windows, args.rows, device))
        print(line_of(rows[-1]), flush=True)
        store(out, {"rows": rows}, origin)
    print(markdown(rows))
    draw(rows, out.with_suffix(".png"))
    print(f"wrote {out}, drew {out.with_suffix('.png')}")


def line_of(row: dict) -> str:
    return f"{row['label']}: effective rank {row['rank'][0]:.3f} to {row['rank'][-1]:.3f} over {row['layers']} blocks"
