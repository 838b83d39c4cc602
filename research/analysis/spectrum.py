"""`analyze.py spectrum`: what is left of a token's state on its way through the model, the writes' additions aside.

The shortcut of a token is the product over all sites, in order, of what each write does to the state that it finds,
with gates and directions as they are for that token of the validation split. A delta rewrite does A = I - beta k k^T
to every column; the streams of HC and mHC are mixed; MGT scales features; an additive write does nothing. Computed in
float64 from maps in the precision of the model (analysis/products.py).
"""

import math
from pathlib import Path

import numpy as np
import torch

from evaluation import tables
from evaluation.subjects import open_corpus_of
from model.block import Stream
from research.analysis import common
from research.analysis.parts import SHORTCUTS, entry
from research.analysis.products import Spectra, spectra
from research.analysis.shortcut import Diagonal, LowRank, Mix
from research.plots import COLORS, pyplot
from training import distributed
from training.provenance import provenance, store

QUANTILES = {"5%": 0.05, "median": 0.5, "95%": 0.95}
BINS = 61  # of the eigenvalues' density, along each axis
NEAR = 0.1  # an eigenvalue smaller than this is called erased


def sites_of(model) -> list:
    return [site for block in model.transformer.h for site in block.sites]


def undeclared(model) -> str | None:
    """Which part of the model says no linear shortcut, as the end of a message; None: all do."""
    for site in sites_of(model):
        if entry(SHORTCUTS, site.write) is None:
            return (
                f"{type(site.write).__name__} has no linear shortcut (research/analysis/parts.py)"
            )
        if site.after is not None:
            return f"{type(site.after).__name__} after its writes has no linear shortcut"
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


def sentences(row: dict) -> list[str]:
    """What the figures of a row say, in words."""
    sites, last = (
        len(row["sites"]),
        {name: each["median"][-1] for name, each in row["by_site"].items()},
    )
    low, high = (row["by_site"]["reflections_so_far"][name][-1] for name in ("5%", "95%"))
    what = {LowRank: f"{row['size']} features", Diagonal: f"{row['size']} features, each by itself"}
    what[Mix] = f"{row['size']} streams"
    of = next(text for kind, text in what.items() if kind.__name__ == row["kind"])
    tokens = "the same for every token" if row["tokens"] == 1 else f"of {row['tokens']:,} tokens"
    said = [
        f"The shortcut through {sites} sites is a linear map of {of}, {tokens}; below: medians over tokens."
    ]
    if row["by_site"]["untouched"]["5%"][-1] == 1:
        return [*said, "It is the identity: what was written stays as it was."]
    said.append(
        f"It leaves {last['untouched']:.0%} of the dimensions untouched and {last['energy']:.0%} of the squared "
        f"length of a random state; its singular values go from {figure(last['smallest'])} to "
        f"{figure(last['largest'])} (condition number {figure(last['condition'])}) and |det| is "
        f"{power(last['log10_det'])}."
    )
    count = f"{last['reflections_so_far']:.0f}"
    said.append(
        f"The {sites} maps have {count} negative eigenvalues, which reflect (5% to 95% of tokens: {low:.0f} to "
        f"{high:.0f}); det is negative for "
        f"{row['det_negative']:.0%} of tokens."
    )
    shares = row["eigenvalues"]
    said.append(
        f"Of the {shares['each']} eigenvalues that can differ from 1, {shares['erased']:.0%} are below {NEAR} in size "
        f"(erased), {shares['flipped']:.0%} real and negative (flipped), {shares['turned']:.0%} not real (turned) and "
        f"{shares['grown']:.0%} above 1."
    )
    if "row_gain" in row:
        said.append(
            f"Sums of a row of the product are at most {row['row_gain']:.4g} in size, those of a column "
            f"{row['column_gain']:.4g}; none is further than {row['sum_error']:.1g} from 1. Were all mixes doubly "
            f"stochastic, every sum and the spectral norm would be 1; for 95% of tokens this norm is at most "
            f"{row['by_site']['largest']['95%'][-1]:.6g}."
        )
    return said


def figure(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.3g}"


def power(exponent: float | None) -> str:
    return (
        "0"
        if exponent is None
        else f"{10**exponent:.3g}"
        if abs(exponent) < 3
        else f"10^{exponent:.1f}"
    )


def markdown(rows: list[dict]) -> str:
    header = (
        "run",
        "sites",
        "reflections",
        "|det|",
        "largest",
        "smallest",
        "condition",
        "untouched",
        "energy",
    )
    cells = []
    for row in rows:
        last = {name: each["median"][-1] for name, each in row["by_site"].items()}
        figures = [figure(last[name]) for name in header[4:]]
        cells.append(
            [
                row["label"],
                len(row["sites"]),
                f"{last['reflections_so_far']:.0f}",
                power(last["log10_det"]),
                *figures,
            ]
        )
    return tables.markdown(header, cells)


PANELS = (
    ("log10_det", "log10 |det|", "linear"),
    ("condition", "condition number", "log"),
    ("reflections_so_far", "reflections so far", "linear"),
)


def draw(rows: list[dict], out: Path) -> None:
    """A row of panels for each run: eigenvalues, then quantities of the products up to each site; alike for all."""
    plt = pyplot()
    size = (16, 3.6 * len(rows))
    figure, axes = plt.subplots(
        len(rows), 4, figsize=size, layout="constrained", squeeze=False, sharey="col"
    )
    densities = [np.ma.masked_equal(row["density"]["counts"], 0) / row["tokens"] for row in rows]
    lowest, highest = min(each.min() for each in densities), max(each.max() for each in densities)
    for row, each, panels in zip(rows, densities, axes):
        image = draw_eigenvalues(panels[0], row, each, min(lowest, highest / 10), highest)
        for panel, (name, label, scale) in zip(panels[1:], PANELS):
            draw_course(panel, row, name, label, scale)
        figure.colorbar(image, ax=panels[0], label="eigenvalues of a token", shrink=0.85)
    axes[0, 1].legend(fontsize="small", loc="lower left")  # |det| begins at 1 and falls
    axes[0, 3].set_ylim(0, max(axes[0, 3].get_ylim()[1], 1.0))
    axes[0, 0].set_ylim(*(max(row["density"]["limit"] for row in rows) * np.array([-1, 1])))
    figure.savefig(out, dpi=100)
    plt.close(figure)


def draw_eigenvalues(panel, row: dict, counts, lowest: float, highest: float):
    """Their density in the complex plane, with the unit circle."""
    limit, angle = row["density"]["limit"], np.linspace(0, 2 * np.pi, 200)
    panel.plot(np.cos(angle), np.sin(angle), color="0.5", linewidth=0.8)
    panel.set(xlabel="real part", ylabel="imaginary part")
    panel.set_title(row["label"], fontsize="medium", loc="left")
    colours = {"norm": "log", "cmap": "viridis_r", "clim": (lowest, highest)}
    return panel.imshow(counts, extent=(-limit, limit) * 2, origin="lower", **colours)


def draw_course(panel, row: dict, name: str, label: str, scale: str) -> None:
    """Over sites: the median over tokens, and between which values nine tenths of them are; gaps where infinite."""
    sites = np.arange(1, len(row["sites"]) + 1)
    values = {key: np.array(row["by_site"][name][key], dtype=float) for key in QUANTILES}
    panel.fill_between(
        sites,
        values["5%"],
        values["95%"],
        color=COLORS[0],
        alpha=0.25,
        linewidth=0,
        label="5% to 95%",
    )
    panel.plot(
        sites,
        values["median"],
        color=COLORS[0],
        marker="o",
        markersize=3,
        label="median over tokens",
    )
    panel.set(xlabel="sites so far", ylabel=label, yscale=scale)
    for axis in (panel.xaxis, *([panel.yaxis] if name == "reflections_so_far" else [])):
        axis.get_major_locator().set_params(integer=True)
    panel.grid(alpha=0.3)


def measure_run(subject, args, device) -> dict:
    """The row of a run."""
    model, _, stem = subject.load(device)
    batches = common.validation_batches(model, open_corpus_of(subject, args.dataset or ""))
    windows = common.whole_windows(batches, args.windows)
    progress = common.Progress(subject.label, len(windows))
    row = common.about(subject, model, stem) | {
        "sites": [f"{site.layer} {site.name}" for site in sites_of(model)]
    }
    return (
        row
        | {"sequences": len(windows)}
        | measure(model, batches, windows, args.rows, args.tokens, progress)
    )


def run(args) -> None:
    """Measure every run, store the rows and draw them. ValueError: a run or its corpus is not there, or has none."""
    pyplot()  # a missing package should be known before the work
    origin, device = provenance(), distributed.pick_device(args.device)
    chosen, rows = common.chosen(args), []
    for subject in chosen:  # before any of them is measured
        if why := undeclared(subject.load("cpu")[0]):
            raise ValueError(f"{subject.label}: {why}")
    out = common.output(args, "spectrum")
    for subject in chosen:
        rows.append(measure_run(subject, args, device))
        print(f"{subject.label}: {' '.join(sentences(rows[-1]))}", flush=True)
        store(out, {"rows": rows}, origin)
    print(markdown(rows))
    draw(rows, out.with_suffix(".png"))
    print(f"wrote {out}, drew {out.with_suffix('.png')}")
