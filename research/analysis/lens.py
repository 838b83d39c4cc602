"""`analyze.py lens`: what a model would predict if it ended after each of its sites (the logit lens).

At depth 0, the embedding, and after each site, the readout, final norm and output layer are applied
to the state as it is, that of several columns, streams or sources included. The last depth is the
model itself. They were trained for the last depth alone: a poor prediction early on does not mean
that the state knows no better.
"""

import itertools

import numpy as np
import torch
import torch.nn.functional as F

from data.tokenizer import encode_prompt
from model.block import Stream
from model.layers import at_least_fp32
from research import plots
from research.analysis import common
from sample import read_prompt
from serving.events import Pieces
from utils import tables


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
    return ["embedding", *common.list_site_names(model)]


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
    for ids, targets in common.iterate_batches(
        batches, windows, rows, common.get_device(model), progress
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


def ids_of(argument: str, model, encoding) -> torch.Tensor:
    """--text, FILE:path, or - for standard input, as ids (1, T) after end-of-text.

    ValueError: it is empty, longer than block_size, or the encoding lacks some of it.
    """
    text = read_prompt(argument)
    if not text:
        raise ValueError("--text is empty: give a text, FILE:path, or - for standard input")
    ids, longest = encode_prompt(encoding, text), model.config.block_size
    if len(ids) > longest:
        given = f"the text has {len(ids)} tokens"
        raise ValueError(f"{given}: give at most block_size={longest}, end-of-text included")
    return torch.tensor([ids], device=common.get_device(model))


def visible(label: str, most: int = 12) -> str:
    """A token in a table's cell: white space that is seen, at most `most` characters."""
    for space, sign in {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": "·", "|": "\\|"}.items():
        label = label.replace(space, sign)
    # Some that cannot be printed would end the line.
    label = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in label)
    return label if len(label) <= most else f"{label[: most - 1]}…"


def name(encoding, token: int) -> str:
    """A token's visible label; ids past the vocabulary are the padding of the output layer."""
    if token >= encoding.n_vocab:
        return f"id {token}"
    data = encoding.decode_single_token_bytes(token)
    try:
        return visible(data.decode("utf-8"))
    except UnicodeDecodeError:
        return f"bytes {data.hex(' ')}"


def table_of(model, encoding, ids) -> str:
    """A row for each token of a text (1, T), a column for each depth: the likeliest next token
    where it changes."""
    top = by_token(model, ids, ids.roll(-1, 1))["top"][:, 0]  # (D, T)
    pieces = Pieces(encoding, [])
    labels = [visible(pieces.make_piece(token, None)["label"]) for token in ids[0].tolist()]
    rows = []
    for t, (label, following) in enumerate(zip(labels, [*labels[1:], None])):
        course = top[:, t].tolist()
        new = [True, *(a != b for a, b in itertools.pairwise(course))]
        cells = [name(encoding, token) if each else "" for token, each in zip(course, new)]
        rows.append([t, label, following, *cells])
    return tables.format_markdown(("", "token", "next", *depths_of(model)), rows)


def say(row: dict) -> str:
    depths, loss, changed = row["depths"], row["loss"], row["overwritten"]
    half = int(np.searchsorted(np.cumsum(row["settles"]), 0.5))
    return (
        f"loss {loss[0]:.3f} after the embedding, {loss[-1]:.3f} at the end; half of the "
        f"predictions settled by depth {half} of {len(depths) - 1} ({depths[half]}), the last "
        f"site changes {changed[-1]:.1%}"
    )


COLUMNS = ("agrees", "right", "overwritten", "settles")


def table(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        for depth, label in enumerate(row["depths"]):
            nats = [f"{row[key][depth]:.3f}" for key in ("loss", "kl")]
            shares = [f"{row[key][depth]:.1%}" for key in COLUMNS]
            cells.append([row["label"], label, *nats, *shares])
    return tables.format_markdown(("run", "depth", "loss (nats)", "KL to the end", *COLUMNS), cells)


PANELS = {
    "loss": ("loss (nats)", "log"),
    "kl": ("KL of the final distribution (nats)", "symlog"),
    "agrees": ("share that agrees with the end", "linear"),
    "overwritten": ("share that a site changes", "linear"),
    "settled": ("share that is settled", "linear"),
}


def draw(rows: list[dict]):
    def course(row):
        settled = np.cumsum(row["settles"]).tolist()
        return row | {"overwritten": row["overwritten"][1:], "settled": settled}

    label = "depth (sites; 0: embedding)"
    figure, axes = plots.plot_over_depth([course(row) for row in rows], PANELS, label)
    for axis in axes[1 : len(PANELS)]:
        axis.set_ylim(bottom=0)
    return figure


def of_run(model, encoding, batches, windows: list[int], args, progress) -> dict:
    """The figures of `measure`, and the table of --text, which is printed."""
    found = {"depths": depths_of(model)}
    if args.text is not None:
        found["table"] = table_of(model, encoding, ids_of(args.text, model, encoding))
        print(found["table"])
    return found | measure(model, batches, windows, args.rows, progress)


def add_options(parser) -> None:
    parser.set_defaults(rows=1)
    text = "a table of one text as well: text, FILE:path, or - for standard input"
    parser.add_argument("--text", help=text)


def run(args) -> None:
    """Measure, store and draw every run. ValueError: a text is too long for a model."""
    common.analyze_runs(args, "lens", of_run, say, table, draw)
