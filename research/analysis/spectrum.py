"""`analyze.py spectrum`: what is left of a token's state on its way through the model, apart from what writes add.

The shortcut of a token is the product over all sites, in order, of the linear maps that the writes
apply to the state, with gates and directions as they are for that token of the validation split. A
delta rewrite applies A = I - beta k k^T to every value channel; HC and mHC mix their streams; MGT
scales features; an additive write does nothing. The products are computed in float64 from maps in
the precision of the model (analysis/products.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch

from configurator import option
from data.loader import ValidationBatches
from data.tokenizer import Tokenizer
from model.block import Site, State, Stream
from model.gpt import GPT
from research import plots
from research.analysis import common
from research.analysis.parts import SHORTCUTS, find_entry
from research.analysis.products import LinearMap, Mix, Spectra, compute_spectra
from utils import tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTILES = {"5%": 0.05, "median": 0.5, "95%": 0.95}
NUM_BINS = 61  # of the density of eigenvalues, along each axis
ERASED_BELOW = 0.1  # an eigenvalue of a smaller size counts as erased


# ---- shortcuts ----


def explain_missing_shortcut(model: GPT) -> str | None:
    """Return which part of the model has no linear shortcut, as the end of a message, or None."""
    for block in model.transformer.h:
        for site in block.sites:
            for part in (site.write, site.post_write):
                if part is not None and find_entry(SHORTCUTS, part) is None:
                    return (
                        f"{type(part).__name__} has no linear shortcut (research/analysis/parts.py)"
                    )
    return None


class ShortcutRecorder(Stream):
    """Run the stream as it is, and record the shortcut of every write at some positions.

    Args:
        positions: int64 (n,)

    Attributes:
        maps: of each site, for B n tokens or one for all, in float64 on the CPU
    """

    def __init__(self, positions: torch.Tensor):
        self.positions = positions
        self.maps: list[LinearMap] = []

    def select_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return (B n, ...) of (B, T, ...); (1, ...) of (1, 1, ...), which is for all tokens."""
        if tensor.shape[:2] != (1, 1):
            tensor = tensor[:, self.positions]
        return tensor.detach().flatten(0, 1).double().cpu()

    def write(
        self,
        site: Site,
        state: State,
        h: torch.Tensor,
        c: torch.Tensor,
        x_in: torch.Tensor | tuple,
        cache: dict | None,
    ) -> tuple[State, torch.Tensor | None]:
        get_shortcut = find_entry(SHORTCUTS, site.write)
        shortcut = get_shortcut(site.write, state, h, x_in, c)
        tensors = {name: self.select_tokens(tensor) for name, tensor in vars(shortcut).items()}
        self.maps.append(type(shortcut)(**tensors))
        return super().write(site, state, h, c, x_in, cache)


@torch.no_grad()
def record_maps(model: GPT, ids: torch.Tensor, positions: torch.Tensor) -> list[LinearMap]:
    """Return the maps of all sites for the tokens at `positions` (n,) of ids (B, T)."""
    recorder = ShortcutRecorder(positions)
    with model.through(recorder):
        model(ids)
    return recorder.maps


# ---- a run ----


def measure(
    model: GPT,
    batches: ValidationBatches,
    sequences: list[int],
    batch_size: int,
    tokens_per_sequence: int,
    progress: Callable[[int], None] | None = None,
) -> dict:
    """Return the figures of the shortcuts of some tokens of every sequence, spread evenly.

    Raises:
        ValueError: the maps are not finite, or of several kinds
    """
    num_positions = min(tokens_per_sequence, batches.seq_len)
    positions = torch.linspace(0, batches.seq_len - 1, num_positions).round().long()
    spectra: list[Spectra] = []
    gains: list[dict[str, float]] = []
    device = common.get_device(model)
    for ids, _ in common.iterate_batches(batches, sequences, batch_size, device, progress):
        maps = record_maps(model, ids, positions)
        spectra.append(compute_spectra(maps))
        if isinstance(maps[0], Mix):
            gains.append(compute_gains(maps))
        # one map for several tokens is the same for every token
        if spectra[-1].log_det.shape[1] < len(ids) * num_positions:
            break
    figures = summarize_spectra(spectra, type(maps[0]))
    if gains:
        for name in gains[0]:
            figures[name] = max(batch_gains[name] for batch_gains in gains)
    return figures


def join_tokens(spectra: list[Spectra], name: str) -> np.ndarray:
    """Return a field of the spectra of all batches by site and token, (S, N)."""
    return torch.cat([getattr(batch, name) for batch in spectra], dim=1).numpy()


def summarize_spectra(spectra: list[Spectra], kind: type) -> dict:
    """Return the figures of a row; kind: the class of the maps."""
    largest = join_tokens(spectra, "largest")
    smallest = join_tokens(spectra, "smallest")
    reflections = join_tokens(spectra, "reflections")
    with np.errstate(divide="ignore"):
        condition = largest / smallest
    by_site = {
        "largest": largest,
        "smallest": smallest,
        "untouched": join_tokens(spectra, "untouched"),
        "energy": join_tokens(spectra, "energy"),
        "reflections": reflections,
        "condition": condition,
        "log10_det": join_tokens(spectra, "log_det") / math.log(10),
        "reflections_so_far": reflections.cumsum(0),
    }
    eigenvalues = torch.cat([batch.eigenvalues for batch in spectra]).numpy()
    return {
        "kind": kind.__name__,
        "size": spectra[0].size,
        "tokens": len(eigenvalues),
        "det_negative": float((join_tokens(spectra, "sign")[-1] < 0).mean()),
        "by_site": {name: summarize_over_tokens(values) for name, values in by_site.items()},
        "reflecting": (reflections > 0).mean(1).tolist(),
        "eigenvalues": classify_eigenvalues(eigenvalues),
        "density": compute_density(eigenvalues),
    }


def summarize_over_tokens(values: np.ndarray) -> dict[str, list[float | None]]:
    """Return the mean and quantiles over tokens of values (S, N), by site; None if not finite."""
    by_name = {"mean": values.mean(1)}
    for name, quantile in QUANTILES.items():
        by_name[name] = np.quantile(values, quantile, axis=1, method="lower")
    return {
        name: [value if math.isfinite(value) else None for value in site_values.tolist()]
        for name, site_values in by_name.items()
    }


def classify_eigenvalues(eigenvalues: np.ndarray) -> dict:
    """Return which fractions of the eigenvalues (N, e) have some property.

    Returns:
        "each", their number e per token; "erased", those that are close to 0; "flipped", those that
        are real and negative; "turned", those that are not real; "grown", those whose size is
        larger than 1.
    """
    sizes = np.abs(eigenvalues)
    is_real = np.abs(eigenvalues.imag) <= 1e-9
    return {
        "each": eigenvalues.shape[1],
        "erased": float((sizes < ERASED_BELOW).mean()),
        "flipped": float((is_real & (eigenvalues.real < 0)).mean()),
        "turned": float((~is_real).mean()),
        "grown": float((sizes > 1 + 1e-6).mean()),
    }


def compute_density(eigenvalues: np.ndarray) -> dict:
    """Count eigenvalues in squares of the complex plane.

    Returns:
        "counts"[imaginary][real] of squares from -"limit" to "limit" along both axes.
    """
    limit = max(1.25, 1.05 * float(np.abs(eigenvalues).max()))
    edges = np.linspace(-limit, limit, NUM_BINS + 1)
    counts, _, _ = np.histogram2d(
        eigenvalues.imag.ravel(), eigenvalues.real.ravel(), bins=(edges, edges)
    )
    return {"limit": limit, "counts": counts.astype(int).tolist()}


def compute_gains(maps: list[Mix]) -> dict[str, float]:
    """Return the largest sums of rows and columns of the products of mixes, over their tokens.

    Returns:
        "row_gain" and "column_gain", the largest absolute sum of a row and of a column: by how much
        a signal may grow forward, and a gradient backward (the paper on mHC); "sum_error", the
        largest difference of a sum from 1.
    """
    product = maps[0].matrix
    for mix in maps[1:]:
        product = mix.matrix @ product
    row_sums = product.sum(-1)
    column_sums = product.sum(-2)
    error = max((row_sums - 1).abs().max(), (column_sums - 1).abs().max())
    return {
        "row_gain": row_sums.abs().max().item(),
        "column_gain": column_sums.abs().max().item(),
        "sum_error": error.item(),
    }


# ---- the line and the table ----


def get_last_medians(row: dict) -> dict[str, float | None]:
    """Return the medians over tokens of the product of all sites."""
    return {name: values["median"][-1] for name, values in row["by_site"].items()}


def summarize(row: dict) -> str:
    """Return the line that is printed of a row."""
    if row["by_site"]["untouched"]["5%"][-1] == 1:
        return "the shortcut is the identity: what was written stays as it was"
    medians = get_last_medians(row)
    eigenvalues = row["eigenvalues"]
    line = (
        f"shortcut through {len(row['sites'])} sites, medians of {row['tokens']:,} tokens: "
        f"{medians['reflections_so_far']:.0f} reflections, det negative for "
        f"{row['det_negative']:.0%}; of {eigenvalues['each']} eigenvalues that can differ from 1 "
        f"{eigenvalues['erased']:.0%} erased (below {ERASED_BELOW}), "
        f"{eigenvalues['flipped']:.0%} flipped, {eigenvalues['turned']:.0%} not real, "
        f"{eigenvalues['grown']:.0%} above 1"
    )
    if "row_gain" in row:
        line += (
            f"; sums of a row of the product at most {row['row_gain']:.4g}, of a column "
            f"{row['column_gain']:.4g}, none further than {row['sum_error']:.1g} from 1"
        )
    return line


def format_power_of_ten(exponent: float | None) -> str:
    """Return 10 to the exponent as text; None stands for -infinity."""
    if exponent is None:
        return "0"
    if abs(exponent) < 3:
        return f"{10**exponent:.3g}"
    return f"10^{exponent:.1f}"


TABLE_COLUMNS = ("largest", "smallest", "condition", "untouched", "energy")


def format_table(rows: list[dict]) -> str:
    cells = []
    for row in rows:
        medians = get_last_medians(row)
        row_cells = [
            row["label"],
            len(row["sites"]),
            f"{medians['reflections_so_far']:.0f}",
            format_power_of_ten(medians["log10_det"]),
        ]
        for name in TABLE_COLUMNS:
            row_cells.append("infinite" if medians[name] is None else f"{medians[name]:.3g}")
        cells.append(row_cells)
    header = ("run", "sites", "reflections", "size of det", *TABLE_COLUMNS)
    return tables.format_markdown(header, cells)


# ---- the figure ----

# quantity -> title and scale of its panel
PANELS = {
    "log10_det": ("log10 |det|", "linear"),
    "condition": ("condition number", "log"),
    "reflections_so_far": ("reflections so far", "linear"),
}


def draw(rows: list[dict]) -> "Figure":
    """Draw a row of panels for each run: eigenvalues, then the products up to each site.

    A product is drawn as the median over tokens, with a band that holds 90% of them; there are gaps
    where values are infinite.
    """
    figure, axes = plots.make_panels(
        len(rows), 4, 1.6, ["median over tokens, 5% to 95%"], sharey="col"
    )
    # per token, without the squares that are empty
    densities = [np.ma.masked_equal(row["density"]["counts"], 0) / row["tokens"] for row in rows]
    highest = max(density.max() for density in densities)
    lowest = min(*(density.min() for density in densities), highest / 10)
    limit = max(row["density"]["limit"] for row in rows)
    entries = {}
    for row, density, panels in zip(rows, densities, axes):
        panel = panels[0]
        draw_unit_circle(panel)
        own_limit = row["density"]["limit"]
        image = panel.imshow(
            density,
            extent=(-own_limit, own_limit, -own_limit, own_limit),
            origin="lower",
            norm="log",
            cmap="viridis_r",
            clim=(lowest, highest),
        )
        panel.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
        panel.set_ylabel(plots.wrap_name(row["label"]))
        for panel, (name, (_, scale)) in zip(panels[1:], PANELS.items()):
            plot_over_sites(panel, row, name, entries)
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
    color_bar = figure.colorbar(image, ax=axes[:, 0], location="left", shrink=0.8)
    color_bar.set_label("eigenvalues of a token")
    plots.use_plain_numbers(color_bar.ax.yaxis)
    plots.add_legend(figure, entries)
    return figure


def draw_unit_circle(panel: "Axes") -> None:
    angles = np.linspace(0, 2 * np.pi, 200)
    panel.plot(np.cos(angles), np.sin(angles), color="0.5", linewidth=0.8)


def plot_over_sites(panel: "Axes", row: dict, name: str, entries: dict) -> None:
    """Draw the median and the band of a quantity, and add them to the entries of the legend."""
    sites = np.arange(1, len(row["sites"]) + 1)
    values = {
        quantile: np.array(row["by_site"][name][quantile], dtype=float) for quantile in QUANTILES
    }
    color = plots.COLORS[0]
    band = panel.fill_between(
        sites, values["5%"], values["95%"], color=color, alpha=0.25, linewidth=0
    )
    [line] = panel.plot(sites, values["median"], color=color, marker="o")
    entries["median over tokens"] = line
    entries["5% to 95%"] = band


# ---- the command ----


@dataclass(frozen=True)
class Options(common.RunOptions):
    """The shortcut."""

    tokens: int = option(32, "number of tokens of each sequence", low=1)


def measure_run(
    model: GPT,
    encoding: Tokenizer,
    batches: ValidationBatches,
    sequences: list[int],
    args: SimpleNamespace,
    progress: common.Progress,
) -> dict:
    """Return the names of the sites and the figures of `measure`."""
    return {
        "sites": common.list_site_names(model),
        **measure(model, batches, sequences, args.rows, args.tokens, progress),
    }


def run(args: SimpleNamespace) -> None:
    """Measure, store and draw every run.

    Raises:
        ValueError: a run has no linear shortcut
    """
    # before any of them is measured
    for subject in common.find_subjects(args):
        model, _, _ = subject.load("cpu")
        reason = explain_missing_shortcut(model)
        if reason is not None:
            raise ValueError(f"{subject.label}: {reason}")
    common.analyze_runs(args, "spectrum", measure_run, summarize, format_table, draw)
