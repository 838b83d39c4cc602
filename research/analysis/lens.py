"""`analyze.py lens`: what a model would predict if it ended after each of its sites (the logit lens).

At depth 0, the embedding, and after each site, the readout, final norm and output layer are applied to the state as it
is, that of several columns, streams or sources included. The last depth is the model itself. They were trained for the
last depth alone: a poor prediction early on does not mean that the state knows no better.
"""

import itertools
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from evaluation import tables
from evaluation.subjects import open_corpus_of
from model.block import Stream
from model.layers import at_least_fp32
from research.analysis import common, texts
from research.plots import look, look_numbers, pyplot
from training import distributed
from training.provenance import provenance, store


class Lens(Stream):
    """Every step by itself; `seen(depth, logits)` is told what would be said of the state at each depth."""

    def __init__(self, model, seen):
        self.model, self.seen = model, seen

    def tell(self, state):
        logits = self.model.logits(super().finish(self.model, state, None))
        self.seen(self.depth, logits.to(at_least_fp32(logits.dtype)))
        self.depth += 1
        return state

    def begin(self, model, x, cache):
        self.depth = 0
        return self.tell(super().begin(model, x, cache))

    def write(self, site, state, h, c, x_in, cache):
        written, loss = super().write(site, state, h, c, x_in, cache)
        return self.tell(written), loss


def depths_of(model) -> list[str]:
    """Names of the depths: the embedding, and each site."""
    return [
        "embedding",
        *(f"{site.layer} {site.name}" for block in model.transformer.h for site in block.sites),
    ]


@torch.no_grad()
def by_token(model, ids, targets) -> dict[str, torch.Tensor]:
    """Of ids and targets (B, T), each (D, B, T): `loss` in nats, `kl` of the final distribution from that of the depth,
    and `top`, the likeliest token."""
    logits, _ = model(ids)
    final = logits.to(at_least_fp32(logits.dtype)).log_softmax(-1)
    rows = {"loss": [], "kl": [], "top": []}

    def seen(_, logits):
        said = logits.log_softmax(-1)
        rows["loss"].append(-said.gather(-1, targets.unsqueeze(-1)).squeeze(-1).double())
        rows["kl"].append(F.kl_div(said, final, reduction="none", log_target=True).sum(-1).double())
        rows["top"].append(logits.argmax(-1))

    with model.through(Lens(model, seen)):
        model.hidden(ids)
    return {name: torch.stack(each) for name, each in rows.items()}


def settled(top: torch.Tensor) -> torch.Tensor:
    """The depth from which on the likeliest token stays; top (D, ...) -> (...), 0 to D - 1."""
    changes = top[1:] != top[:-1]
    depths = torch.arange(1, len(top), device=top.device).view(-1, *[1] * (top.ndim - 1))
    return (changes * depths).amax(0)


def measure(model, batches, windows: list[int], rows: int, progress=None) -> dict:
    """By depth, over all tokens of the windows, which are whole: `loss` in nats, `kl`, the shares of tokens whose
    likeliest token is that of the last depth (`agrees`), is the right one (`right`), is another than at the depth
    before (`overwritten`, 0 at depth 0) and stays from there on (`settles`; they sum to 1)."""
    names, count = ("loss", "kl", "agrees", "right", "overwritten", "settles"), 0
    depths = len(depths_of(model))
    sums = {name: torch.zeros(depths, dtype=torch.float64) for name in names}
    for ids, targets in common.in_batches(
        batches, windows, rows, common.device_of(model), progress
    ):
        found = by_token(model, ids, targets)
        top = found["top"]
        found |= {"agrees": top == top[-1], "right": top == targets}
        found["overwritten"] = torch.cat(
            [torch.zeros_like(top[:1], dtype=torch.bool), top[1:] != top[:-1]]
        )
        found["settles"] = F.one_hot(settled(top), depths).movedim(-1, 0)
        for name in names:
            sums[name] += found[name].double().sum((1, 2)).cpu()
        count += ids.numel()
    if not sums["loss"].isfinite().all():
        raise ValueError("the loss at some depth is not finite: the model has diverged")
    return {"tokens": count} | {name: (each / count).tolist() for name, each in sums.items()}


def sentences(row: dict) -> list[str]:
    """What a row says, in words."""
    depths, loss, changed = row["depths"], row["loss"], row["overwritten"]
    steps = np.diff(loss)
    best, sites = int(steps.argmin()) + 1, len(depths) - 1
    half = int(np.searchsorted(np.cumsum(row["settles"]), 0.5)) if sites else 0
    most = int(np.argmax(changed[1:])) + 1
    return [
        f"Read after the embedding the loss is {loss[0]:.3f} nats, at the end {loss[-1]:.3f}; it falls most at "
        f"{depths[best]}, by {-steps[best - 1]:.3f}.",
        f"Half of the predictions are settled by depth {half} of {sites} ({depths[half]}); the last site still changes "
        f"{changed[-1]:.1%} of them.",
        f"{depths[most]} overwrites most predictions, {changed[most]:.1%}; a token's likeliest one changes "
        f"{sum(changed):.1f} times on its way.",
    ]


def table_of(model, encoding, ids) -> str:
    """A row for each token of a text (1, T), a column for each depth: the likeliest next token where it changes."""
    targets = ids.roll(-1, 1)
    top = by_token(model, ids, targets)["top"][:, 0]  # (D, T)
    pieces = texts.pieces_of(ids, encoding)
    rows = []
    for t, piece in enumerate(pieces):
        course = top[:, t].tolist()
        new = [True, *(a != b for a, b in itertools.pairwise(course))]
        cells = [name(encoding, token) if each else "" for token, each in zip(course, new)]
        following = texts.visible(pieces[t + 1]["label"]) if t + 1 < len(pieces) else None
        rows.append([t, texts.visible(piece["label"]), following, *cells])
    return tables.markdown(("", "token", "next", *depths_of(model)), rows)


def name(encoding, token: int) -> str:
    """A token's visible label; ids past the vocabulary are the padding of the output layer."""
    if token >= encoding.n_vocab:
        return f"id {token}"
    data = encoding.decode_single_token_bytes(token)
    try:
        return texts.visible(data.decode("utf-8"))
    except UnicodeDecodeError:
        return f"bytes {data.hex(' ')}"


def markdown(rows: list[dict]) -> str:
    header = (
        "run",
        "depth",
        "loss (nats)",
        "KL to the end",
        "agrees",
        "right",
        "overwritten",
        "settles",
    )
    cells = []
    for row in rows:
        for depth, label in enumerate(row["depths"]):
            shares = [
                f"{row[key][depth]:.1%}" for key in ("agrees", "right", "overwritten", "settles")
            ]
            cells.append(
                [
                    row["label"],
                    label,
                    f"{row['loss'][depth]:.3f}",
                    f"{row['kl'][depth]:.3f}",
                    *shares,
                ]
            )
    return tables.markdown(header, cells)


PANELS = (
    ("loss", "loss (nats)", "log"),
    ("kl", "KL of the final distribution (nats)", "symlog"),
    ("agrees", "share whose likeliest token is the final one", "linear"),
    ("overwritten", "share whose likeliest token changes", "linear"),
    ("settled", "share that is settled", "linear"),
)


def draw(rows: list[dict], out: Path) -> None:
    """A panel for each quantity, a line for each run, over depth."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 3, figsize=(14, 8), layout="constrained")
    for panel, (key, label, scale) in zip(axes.flat, PANELS):
        for number, row in zip(look_numbers([row["model"] for row in rows]), rows):
            values = np.cumsum(row["settles"]) if key == "settled" else row[key]
            first = 1 if key == "overwritten" else 0
            style = {"marker": "o", "markersize": 3, "label": row["label"], **look(number)}
            panel.plot(range(first, len(values)), values[first:], **style)
        panel.set(xlabel="depth (sites; 0: embedding)", ylabel=label, yscale=scale)
        panel.xaxis.get_major_locator().set_params(integer=True)
        if scale != "log":
            panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    last = axes.flat[len(PANELS)]
    last.axis("off")
    last.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper left", fontsize="small")
    figure.savefig(out, dpi=100)
    plt.close(figure)


def measure_run(subject, args, device) -> dict:
    """The row of a run, with the table of --text."""
    model, encoding, stem = subject.load(device)
    table = (
        table_of(model, encoding, texts.ids_of(args.text, model, encoding))
        if args.text is not None
        else None
    )
    batches = common.validation_batches(model, open_corpus_of(subject, args.dataset or ""))
    windows = common.whole_windows(batches, args.windows)
    row = common.about(subject, model, stem) | {
        "depths": depths_of(model),
        "sequences": len(windows),
    }
    row |= measure(model, batches, windows, args.rows, common.Progress(subject.label, len(windows)))
    return row | ({"table": table} if table else {})


def run(args) -> None:
    """Measure every run, store the rows and draw them. ValueError: a run or its corpus is not there, or a text is too
    long for a model."""
    pyplot()  # a missing package should be known before the work
    origin, device = provenance(), distributed.pick_device(args.device)
    chosen, rows = common.chosen(args), []
    out = common.output(args, "lens")
    for subject in chosen:
        rows.append(measure_run(subject, args, device))
        if "table" in rows[-1]:
            print(rows[-1]["table"])
        print(f"{subject.label}: {' '.join(sentences(rows[-1]))}", flush=True)
        store(out, {"rows": rows}, origin)
    print(markdown(rows))
    draw(rows, out.with_suffix(".png"))
    print(f"wrote {out}, drew {out.with_suffix('.png')}")
