"""`analyze.py lens`: what a model would predict if it ended after each of its sites (the logit lens).

At depth 0, the embedding, and after each site, the readout, the final norm and the output layer are
applied to the state as it is, including a state of several value channels, streams or sources. The
last depth is the model itself. These modules were trained for the last depth only: a wrong
prediction at an early depth does not show that the state lacks the information.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from configurator import option
from data.loader import IGNORED_TARGET
from data.tokenizer import Tokenizer, encode_prompt
from model.block import Site, State, Stream
from model.gpt import GPT
from model.precision import at_least_fp32
from research import plots
from research.analysis import common
from serving.completion import label_token
from utils import files, tables

MAX_LABEL_LENGTH = 12  # characters of a token in a table


# ---- the lens ----


class Lens(Stream):
    """Run the stream as it is, and compute logits from the state at each depth.

    Args:
        on_logits: called with (depth, logits (B, T, vocab_size) in at least fp32)
    """

    def __init__(self, model: GPT, on_logits: Callable[[int, torch.Tensor], None]):
        self.model = model
        self.on_logits = on_logits
        self.depth = 0

    def decode(self, state: State) -> None:
        logits = self.model.logits(super().finish(self.model, state, None))
        self.on_logits(self.depth, logits.to(at_least_fp32(logits.dtype)))
        self.depth += 1

    def begin(self, model: GPT, x: torch.Tensor, cache: dict | None) -> State:
        self.depth = 0
        state = super().begin(model, x, cache)
        self.decode(state)
        return state

    def write(self, site: Site, state: State, *args: object) -> State:
        written = super().write(site, state, *args)
        self.decode(written)
        return written


def list_depths(model: GPT) -> list[str]:
    """Return a name for each depth: "embedding", "0 attn", "0 mlp", and so on."""
    sites = [f"{site.layer} {site.name}" for block in model.transformer.h for site in block.sites]
    return ["embedding", *sites]


@torch.no_grad()
def measure_tokens(model: GPT, ids: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Measure the prediction of each token at each depth.

    Args:
        ids, targets: (B, T)

    Returns:
        Tensors (D, B, T): `loss` in nats; `kl` in nats, the divergence of the final distribution
        from that of the depth; `top`, the most probable token. The loss of a token without a
        target has no meaning.
    """
    final_logits, _ = model(ids)
    final_log_probs = final_logits.to(at_least_fp32(final_logits.dtype)).log_softmax(-1)
    by_name = {"loss": [], "kl": [], "top": []}

    def measure_depth(_: int, logits: torch.Tensor) -> None:
        log_probs = logits.log_softmax(-1)
        existing_targets = targets.clamp(min=0)
        target_log_probs = log_probs.gather(-1, existing_targets.unsqueeze(-1)).squeeze(-1)
        kl = F.kl_div(log_probs, final_log_probs, reduction="none", log_target=True).sum(-1)
        by_name["loss"].append(-target_log_probs.double())
        by_name["kl"].append(kl.double())
        by_name["top"].append(logits.argmax(-1))

    with model.through(Lens(model, measure_depth)):
        model.hidden(ids)
    return {name: torch.stack(depths) for name, depths in by_name.items()}


def find_settled_depth(top: torch.Tensor) -> torch.Tensor:
    """Return the depth from which on the most probable token stays, 0 to D - 1.

    top: (D, ...) -> (...)
    """
    changes = top[1:] != top[:-1]
    depths = torch.arange(1, len(top), device=top.device).view(-1, *[1] * (top.ndim - 1))
    return (changes * depths).amax(0)


# ---- a run ----


@torch.no_grad()
def measure(run: common.LoadedRun, batch_size: int) -> dict:
    """Measure the predictions at each depth, over all scored tokens of the sequences.

    Returns:
        "tokens", their number, and lists by depth: `loss` and `kl` in nats, and the fractions of
        tokens whose most probable token is that of the last depth (`agrees`), is the target
        (`right`), differs from that at the depth before (`overwritten`, 0 at depth 0), and stays
        from there on (`settles`, which sum to 1).

    Raises:
        ValueError: the loss is not finite
    """
    num_depths = len(list_depths(run.model))
    num_tokens = 0
    sums: dict[str, torch.Tensor] = {}
    for ids, targets in run.iterate_batches(batch_size):
        measured = measure_tokens(run.model, ids, targets)
        top = measured.pop("top")
        by_name = {
            **measured,
            "agrees": top == top[-1],
            "right": top == targets,
            "overwritten": top != torch.cat([top[:1], top[:-1]]),
            "settles": F.one_hot(find_settled_depth(top), num_depths).movedim(-1, 0),
        }
        # a task scores only the tokens of answers
        is_scored = targets != IGNORED_TARGET
        for name, values in by_name.items():
            total = values[:, is_scored].double().sum(1).cpu()
            sums[name] = sums.get(name, 0.0) + total
        num_tokens += int(is_scored.sum())
    if not sums["loss"].isfinite().all():
        raise ValueError("the loss at some depth is not finite: the model has diverged")
    means = {name: (total / num_tokens).tolist() for name, total in sums.items()}
    return {"tokens": num_tokens, **means}


# ---- the table of a text ----


def encode_text(text_argument: str, run: common.LoadedRun) -> torch.Tensor:
    """Return the ids (1, T) of --text, after end-of-text.

    text_argument: a text, FILE:path, or - for standard input

    Raises:
        ValueError: it is longer than block_size, or the encoding lacks some of it
    """
    ids = encode_prompt(run.encoding, files.read_text_argument(text_argument))
    block_size = run.model.config.block_size
    if len(ids) > block_size:
        raise ValueError(
            f"the text has {len(ids)} tokens: give at most block_size={block_size}, including "
            "end-of-text"
        )
    return torch.tensor([ids], device=run.device)


def format_token(encoding: Tokenizer, token: int) -> str:
    """Return a token for a cell of a table: with a sign for blanks, and not too long."""
    if token >= encoding.n_vocab:  # padding of the output layer
        return f"id {token}"
    label = repr(label_token(encoding, token))[1:-1].replace(" ", "·").replace("|", "\\|")
    return label if len(label) <= MAX_LABEL_LENGTH else f"{label[: MAX_LABEL_LENGTH - 1]}…"


def format_text_table(model: GPT, encoding: Tokenizer, ids: torch.Tensor) -> str:
    """Return a table with a row for each token of a text (1, T) and a column for each depth.

    A cell holds the most probable next token, if it is another than at the depth before.
    """
    # the targets do not matter, because the table has no losses
    top = measure_tokens(model, ids, ids.roll(-1, 1))["top"][:, 0]  # (D, T)
    labels = [format_token(encoding, token) for token in ids[0].tolist()]
    rows = []
    for position, (label, next_label) in enumerate(zip(labels, [*labels[1:], None])):
        cells = []
        previous_token = None
        for token in top[:, position].tolist():
            cells.append("" if token == previous_token else format_token(encoding, token))
            previous_token = token
        rows.append([position, label, next_label, *cells])
    return tables.format_markdown(("", "token", "next", *list_depths(model)), rows)


# ---- the line, the table and the figure of runs ----


def summarize(row: dict) -> str:
    """Return the line that is printed of a row."""
    depths = row["depths"]
    loss = row["loss"]
    half = int(np.searchsorted(np.cumsum(row["settles"]), 0.5))
    return (
        f"loss {loss[0]:.3f} after the embedding, {loss[-1]:.3f} at the end; half of the "
        f"predictions settled by depth {half} of {len(depths) - 1} ({depths[half]}), the last "
        f"site changes {row['overwritten'][-1]:.1%}"
    )


FRACTIONS = ("agrees", "right", "overwritten", "settles")


def format_table(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        for depth, label in enumerate(row["depths"]):
            cells.append(
                [
                    row["label"],
                    label,
                    f"{row['loss'][depth]:.3f}",
                    f"{row['kl'][depth]:.3f}",
                    *(f"{row[name][depth]:.1%}" for name in FRACTIONS),
                ]
            )
    header = ("run", "depth", "loss (nats)", "KL(final, this depth)", *FRACTIONS)
    return tables.format_markdown(header, cells)


# quantity -> label of its panel
PANELS = {
    "loss": "loss (nats)",
    "kl": "KL(final ‖ this depth) (nats)",
    "agrees": "fraction that agrees with the final prediction",
    "overwritten": "fraction that the site changes",
    "settled": "fraction that no longer changes",
}


def draw(rows: list[dict], picture: Path) -> None:
    """Draw each quantity over depth, with a line for each run."""
    drawn_rows = [
        {
            **row,
            "overwritten": row["overwritten"][1:],  # without depth 0
            "settled": np.cumsum(row["settles"]).tolist(),
        }
        for row in rows
    ]
    figure, axes = plots.plot_over_depth(drawn_rows, PANELS, "depth (sites; 0: embedding)")
    for axis in axes[1 : len(PANELS)]:
        axis.set_ylim(bottom=0)
    plots.save(figure, picture)


# ---- the command ----


@dataclass(frozen=True)
class Options(common.RunOptions):
    """A text of your own."""

    rows: int = option(1, "number of sequences per forward pass", low=1)
    text: str | None = option(
        None,
        "also print a table of the predictions for one text: the text itself, FILE:path, or - for "
        "standard input",
    )


def measure_run(run: common.LoadedRun, args: SimpleNamespace) -> dict:
    """Return the figures of `measure`, and the table of --text, which is printed."""
    row = {"depths": list_depths(run.model)}
    if args.text is not None:
        ids = encode_text(args.text, run)
        row["table"] = format_text_table(run.model, run.encoding, ids)
        print(row["table"])
    return {**row, **measure(run, args.rows)}


def finish(rows: list[dict], out: Path) -> None:
    """Print the table of all rows, and draw them beside the JSON file `out`."""
    print(format_table(rows))
    draw(rows, out.with_suffix(".png"))
