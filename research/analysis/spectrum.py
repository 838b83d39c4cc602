"""`analyze.py spectrum`: what is left of a token's state on its way through the model, the writes' additions aside.

The shortcut of a token is the product over all sites, in order, of what each write does to the
state that it finds, with gates and directions as they are for that token of the validation split. A
delta rewrite does A = I - beta k k^T to every column; the streams of HC and mHC are mixed; MGT
scales features; an additive write does nothing. Computed in float64 from maps in the precision of
the model (analysis/products.py).
"""

import math

import numpy as np
import torch

from model.block import Stream
from research import plots
from research.analysis import common
from research.analysis.parts import SHORTCUTS, entry
from research.analysis.products import Mix, Spectra, spectra
from utils import tables

QUANTILES = {"5%": 0.05, "median": 0.5, "95%": 0.95}
BINS = 61  # of the eigenvalues' density, along each axis
NEAR = 0.1  # an eigenvalue smaller than this is called erased


def undeclared(model) -> str | None:
    """Which part of the model says no linear shortcut, as the end of a message; None: all do."""
    for site in (site for block in model.transformer.h for site in block.sites):
        for part in filter(None, (site.write, site.post_write)):
            if entry(SHORTCUTS, part) is None:
                name = type(part).__name__
                return f"{name} has no linear shortcut (research/analysis/parts.py)"
    return None


class Shortcuts(Stream):
    """Every step by itself; keeps the shortcut of every write at some positions of each sequence."""

    def __init__(self, positions: torch.Tensor):
        self.positions, self.maps = positions, []

    def pick(self, part):
        """(B, T, ...) -> (tokens, ...) in float64; (1, 1, ...) stays one for all tokens."""
        chosen = part if part.shape[:2] == (1, 1) else part[:, self.positions]
        return chosen.detach().flatten(0, 1).double().cpu()

    def write(self, site, state, h, c, x_in, cache):
        found = entry(SHORTCUTS, site.write)(site.write, state, h, x_in, c)
        self.maps.append(type(found)(*map(self.pick, vars(found).values())))
        return super().write(site, state, h, c, x_in, cache)


@torch.no_grad()
def maps_of(model, ids, positions) -> list:
    """The maps of all sites, each of all tokens at `positions` (n,) of ids (B, T)."""
    kept = Shortcuts(positions)
    with model.through(kept):
        model(ids)
    return kept.maps


def measure(model, batches, windows: list[int], rows: int, tokens: int, progress=None) -> dict:
    """What a stored row has of the shortcuts of `tokens` tokens, evenly spread, of every window.

    ValueError: the maps are not finite, or of several kinds.
    """
    positions = torch.linspace(0, batches.seq_len - 1, min(tokens, batches.seq_len)).round().long()
    parts, sums = [], []
    for ids, _ in common.in_batches(batches, windows, rows, common.device_of(model), progress):
        maps = maps_of(model, ids, positions)
        parts.append(spectra(maps))
        sums += [gains(maps)] if isinstance(maps[0], Mix) else []
        if parts[-1].log_det.shape[1] == 1:  # the same for every token
            break
    largest = {name: max(each[name] for each in sums) for name in (sums[0] if sums else ())}
    return summary_of(parts, type(maps[0])) | largest


def joined(parts: list[Spectra], name: str) -> np.ndarray:
    """A quantity of all batches' tokens, by site: (S, N)."""
    return torch.cat([getattr(part, name) for part in parts], dim=1).numpy()


def summary_of(parts: list[Spectra], kind: type) -> dict:
    by_site = {
        name: joined(parts, name)
        for name in ("largest", "smallest", "untouched", "energy", "reflections")
    }
    with np.errstate(divide="ignore"):
        by_site["condition"] = by_site["largest"] / by_site["smallest"]
    by_site["log10_det"] = joined(parts, "log_det") / math.log(10)
    by_site["reflections_so_far"] = by_site["reflections"].cumsum(0)
    eigenvalues = torch.cat([part.eigenvalues for part in parts]).numpy()
    return {
        "kind": kind.__name__,
        "size": parts[0].size,
        "tokens": len(eigenvalues),
        "det_negative": float((joined(parts, "sign")[-1] < 0).mean()),
        "by_site": {name: over_tokens(values) for name, values in by_site.items()},
        "reflecting": (by_site["reflections"] > 0).mean(1).tolist(),
        "eigenvalues": shares_of(eigenvalues),
        "density": density(eigenvalues),
    }


def over_tokens(values: np.ndarray) -> dict:
    """(S, N) -> by site the mean and quantiles over tokens; None where it is not finite."""
    found = {"mean": values.mean(1)} | {
        name: np.quantile(values, share, axis=1, method="lower")
        for name, share in QUANTILES.items()
    }
    return {
        name: [x if math.isfinite(x) else None for x in each.tolist()]
        for name, each in found.items()
    }


def shares_of(eigenvalues: np.ndarray) -> dict:
    """Which share of the eigenvalues (N, e) is erased, flipped (real and negative), turned (not real), and larger than
    1 in size; and how many there are of each token."""
    real = np.abs(eigenvalues.imag) <= 1e-9
    return {
        "each": eigenvalues.shape[1],
        "erased": float((np.abs(eigenvalues) < NEAR).mean()),
        "flipped": float((real & (eigenvalues.real < 0)).mean()),
        "turned": float((~real).mean()),
        "grown": float((np.abs(eigenvalues) > 1 + 1e-6).mean()),
    }


def density(eigenvalues: np.ndarray) -> dict:
    """Counts of eigenvalues in squares of the complex plane, [imaginary][real], from -limit to limit along each."""
    limit = max(1.25, 1.05 * float(np.abs(eigenvalues).max()))
    edges = np.linspace(-limit, limit, BINS + 1)
    counts, _, _ = np.histogram2d(
        eigenvalues.imag.ravel(), eigenvalues.real.ravel(), bins=(edges, edges)
    )
    return {"limit": limit, "counts": counts.astype(int).tolist()}


def gains(maps: list[Mix]) -> dict:
    """Of the products of mixes, over their tokens: the largest sum of a row and of a column by size (by how
    much a signal may grow forward and a gradient backward, as the paper on mHC has it), and how far one is from 1."""
    product = maps[0].matrix
    for each in maps[1:]:
        product = each.matrix @ product
    rows, columns = product.sum(-1), product.sum(-2)
    error = max((rows - 1).abs().max(), (columns - 1).abs().max())
    return {
        "row_gain": rows.abs().max().item(),
        "column_gain": columns.abs().max().item(),
        "sum_error": error.item(),
    }


def say(row: dict) -> str:
    last = {name: each["median"][-1] for name, each in row["by_site"].items()}
    eigenvalues, tokens = row["eigenvalues"], row["tokens"]
    if row["by_site"]["untouched"]["5%"][-1] == 1:
        return "the shortcut is the identity: what was written stays as it was"
    said = (
        f"shortcut through {len(row['sites'])} sites, medians of {tokens:,} tokens: "
        f"{last['reflections_so_far']:.0f} reflections, det negative for "
        f"{row['det_negative']:.0%}; of {eigenvalues['each']} eigenvalues that can differ from 1 "
        f"{eigenvalues['erased']:.0%} erased (below {NEAR}), {eigenvalues['flipped']:.0%} flipped, "
        f"{eigenvalues['turned']:.0%} not real, {eigenvalues['grown']:.0%} above 1"
    )
    if "row_gain" in row:
        said += (
            f"; sums of a row of the product at most {row['row_gain']:.4g}, of a column "
            f"{row['column_gain']:.4g}, none further than {row['sum_error']:.1g} from 1"
        )
    return said


def power(exponent: float | None) -> str:
    """10 to the exponent; None: 0."""
    if exponent is None:
        return "0"
    return f"{10**exponent:.3g}" if abs(exponent) < 3 else f"10^{exponent:.1f}"


COLUMNS = ("largest", "smallest", "condition", "untouched", "energy")


def table(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        last = {name: each["median"][-1] for name, each in row["by_site"].items()}
        figures = ["infinite" if last[n] is None else f"{last[n]:.3g}" for n in COLUMNS]
        reflections = f"{last['reflections_so_far']:.0f}"
        det = power(last["log10_det"])
        cells.append([row["label"], len(row["sites"]), reflections, det, *figures])
    return tables.format_markdown(("run", "sites", "reflections", "size of det", *COLUMNS), cells)


PANELS = {
    "log10_det": ("log10 |det|", "linear"),
    "condition": ("condition number", "log"),
    "reflections_so_far": ("reflections so far", "linear"),
}


def draw(rows: list[dict]):
    """A row of panels for each run: eigenvalues, then the products up to each site: the median over
    tokens and between which values 90% of them lie; gaps where they are infinite."""
    figure, axes = plots.make_panels(
        len(rows), 4, 1.6, ["median over tokens, 5% to 95%"], sharey="col"
    )
    densities = [np.ma.masked_equal(row["density"]["counts"], 0) / row["tokens"] for row in rows]
    highest = max(each.max() for each in densities)
    lowest = min(*(each.min() for each in densities), highest / 10)
    limit, color = max(row["density"]["limit"] for row in rows), plots.COLORS[0]
    angle, entries = np.linspace(0, 2 * np.pi, 200), {}
    for row, counts, panels in zip(rows, densities, axes):
        panels[0].plot(np.cos(angle), np.sin(angle), color="0.5", linewidth=0.8)
        extent = (-row["density"]["limit"], row["density"]["limit"]) * 2
        scale = {"norm": "log", "cmap": "viridis_r", "clim": (lowest, highest)}
        image = panels[0].imshow(counts, extent=extent, origin="lower", **scale)
        panels[0].set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
        panels[0].set_ylabel(plots.wrap_name(row["label"]))
        sites = np.arange(1, len(row["sites"]) + 1)
        for panel, (name, (_, scale)) in zip(panels[1:], PANELS.items()):
            values = {key: np.array(row["by_site"][name][key], dtype=float) for key in QUANTILES}
            between = {"color": color, "alpha": 0.25, "linewidth": 0}
            band = panel.fill_between(sites, values["5%"], values["95%"], **between)
            (line,) = panel.plot(sites, values["median"], color=color, marker="o")
            entries |= {"median over tokens": line, "5% to 95%": band}
            panel.set_yscale(scale)
    titles = ["eigenvalues", *(title for title, _ in PANELS.values())]
    for panel, title in zip(axes[0], titles):
        panel.set_title(title)
    plots.use_plain_numbers(axes[0, 2].yaxis)
    axes[0, 3].set_ylim(0, max(axes[0, 3].get_ylim()[1], 1.0))
    for axis in (axes[0, 3].yaxis, *(panel.xaxis for panel in axes[:, 1:].flat)):
        axis.get_major_locator().set_params(integer=True)
    for panel in axes[-1, 1:]:
        panel.set_xlabel("sites so far")
    bar = figure.colorbar(image, ax=axes[:, 0], location="left", shrink=0.8)
    bar.set_label("eigenvalues of a token")
    plots.use_plain_numbers(bar.ax.yaxis)
    plots.add_legend(figure, entries)
    return figure


def add_options(parser) -> None:
    tokens = "tokens of each sequence (default: %(default)s)"
    parser.add_argument("--tokens", type=int, default=32, help=tokens)


def run(args) -> None:
    """Measure, store and draw every run. ValueError: one has no linear shortcut."""
    for subject in common.chosen(args):  # before any of them is measured
        if why := undeclared(subject.load("cpu")[0]):
            raise ValueError(f"{subject.label}: {why}")

    def of_run(model, encoding, batches, windows, args, progress):
        sites = {"sites": common.site_names(model)}
        return sites | measure(model, batches, windows, args.rows, args.tokens, progress)

    common.over_runs(args, "spectrum", of_run, say, table, draw)
