"""`analyze.py gates`: what a trained model does at every site of its residual stream, and how the loss depends on it.

Over validation sequences, in float32, it measures the statistics and details of each write (for a delta rewrite: the
gate, the fractions of tokens in its intervals, the discrepancy before and after, what is erased and written), the size
of the change of the state, how the direction of a write turns from site to site and from token to token, effective
ranks, and how value channels differ. Then it measures the loss with a piece of one site, or of all sites, forced to a
value or removed. This works for any stream, and shows every statistic that its parts define (research/docs/gates.md).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from configurator import option
from data.loader import ValidationBatches
from model.block import Site, State, Stream
from model.gpt import GPT
from model_folder import ModelFolder
from research import plots
from research.analysis import common, edits, gates_page
from research.analysis.parts import (
    DETAILS,
    DIRECTIONS,
    compute_cosines,
    find_entry,
    get_intervals,
)
from research.analysis.rank import concatenate_state, effective_rank
from research.benchmarks.figures import Figures
from utils import files, processes
from utils.provenance import compute_digest

# the code that the figures depend on
CODE = (
    "model/*.py",
    "model/streams/*.py",
    "research/analysis/common.py",
    "research/analysis/rank.py",
    "research/analysis/parts.py",
    "research/analysis/edits.py",
    "research/analysis/gates.py",
)
NUM_BINS = 40
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
MAX_DETAIL_SIZE = 2**14  # larger details are not stored


# ---- what is collected at each site ----


class Moments:
    """The sums over tokens of a vector or matrix and of its squares, in float64."""

    def __init__(self):
        self.count = 0
        self.total = 0.0
        self.total_of_squares = 0.0

    def add(self, values: torch.Tensor) -> None:
        """values: (tokens, ...)"""
        values = values.double()
        self.count += len(values)
        self.total = self.total + values.sum(0)
        self.total_of_squares = self.total_of_squares + values.square().sum(0)

    def summarize(self) -> dict[str, list]:
        """Return the mean and the standard deviation over tokens."""
        mean = self.total / self.count
        variance = (self.total_of_squares / self.count - mean.square()).clamp_min(0)
        return {"mean": mean.tolist(), "std": variance.sqrt().tolist()}


class SiteRecord:
    """What is collected at one site.

    Numbers of tokens or sequences are kept as they are, so that quantiles can be computed; of
    vectors and matrices only the moments are kept.

    Args:
        intervals: statistic -> label -> (low, high); the fraction of tokens strictly between the
            ends is reported
    """

    def __init__(self, intervals: dict[str, dict[str, tuple[float, float]]]):
        self.numbers: dict[str, list[torch.Tensor]] = {}
        self.moments: dict[str, Moments] = {}
        self.intervals = intervals

    def add(self, name: str, values: torch.Tensor) -> None:
        """Add numbers (B,) or (B, T), or vectors or matrices (B, T, ...)."""
        if values.ndim <= 2:
            self.numbers.setdefault(name, []).append(values.flatten().cpu())
        else:
            self.moments.setdefault(name, Moments()).add(values.flatten(0, 1))

    def join_numbers(self, name: str) -> np.ndarray:
        """Return all numbers of a statistic in float64.

        Raises:
            ValueError: one of them is not finite
        """
        values = torch.cat(self.numbers[name]).double().numpy()
        if not np.isfinite(values).all():
            raise ValueError(
                f"{name} is not finite for {(~np.isfinite(values)).sum()} tokens: the model has "
                "diverged"
            )
        return values

    def summarize(self, edges: dict[str, np.ndarray]) -> dict[str, dict]:
        """Return the summaries of all "statistics", which are numbers, and of all "details".

        edges: statistic -> edges of the bins of its histogram
        """
        statistics = {}
        for name in self.numbers:
            values = self.join_numbers(name)
            statistics[name] = summarize_numbers(values, edges[name])
        for name, intervals in self.intervals.items():
            values = self.join_numbers(name)
            fractions = {}
            for label, (low, high) in intervals.items():
                inside = (values > low) & (values < high)
                fractions[label] = float(inside.mean())
            statistics[name]["shares"] = fractions
            statistics[name]["intervals"] = intervals
        details = {
            name: moments.summarize()
            for name, moments in self.moments.items()
            if moments.total.numel() <= MAX_DETAIL_SIZE
        }
        return {"statistics": statistics, "details": details}


def summarize_numbers(values: np.ndarray, edges: np.ndarray) -> dict:
    """Return the count, mean, standard deviation, extremes, quantiles and histogram of numbers."""
    quantiles = np.quantile(values, QUANTILES).tolist()
    return {
        "count": len(values),
        "mean": float(values.mean()),
        "std": float(values.std()),
        "mean_abs": float(np.abs(values).mean()),
        "min": float(values.min()),
        "max": float(values.max()),
        "quantiles": dict(zip(map(str, QUANTILES), quantiles)),
        "histogram": np.histogram(values, edges)[0].tolist(),
    }


def choose_bin_edges(records: Iterable[SiteRecord]) -> dict[str, np.ndarray]:
    """Return, for each statistic, the edges of NUM_BINS equal bins, the same at all sites.

    They cover the intervals of the statistic, or, without any, the range of its values.
    """
    ranges: dict[str, tuple[float, float]] = {}
    for record in records:
        for name in record.numbers:
            if record.intervals.get(name):
                values = [end for interval in record.intervals[name].values() for end in interval]
            else:
                values = record.join_numbers(name)
            low, high = ranges.get(name, (np.inf, -np.inf))
            ranges[name] = (min(low, np.min(values)), max(high, np.max(values)))
    edges = {}
    for name, (low, high) in ranges.items():
        if high <= low:  # all values are equal
            high = low + 1
        edges[name] = np.linspace(low, high, NUM_BINS + 1)
    return edges


# ---- a forward pass ----


class Audit(Stream):
    """Run the stream as it is, and add what happens at each site to its record.

    Args:
        records: (layer, site name) -> record, which is created if it is missing
        embeddings: of the tokens (B, T, d)
    """

    def __init__(self, records: dict[tuple[int, str], SiteRecord], embeddings: torch.Tensor):
        self.records = records
        self.embeddings = embeddings
        self.previous_direction: torch.Tensor | None = None

    def write(
        self,
        site: Site,
        state: State,
        h: torch.Tensor,
        x_in: torch.Tensor | tuple,
        c: torch.Tensor,
        cache: dict | None,
    ) -> State:
        written = super().write(site, state, h, x_in, c, cache)
        direction = get_direction(site, state, h, x_in, c)
        values_by_name = {
            **collect_from_parts(site, state, h, x_in, c, written),
            **measure_change(state, written),
            **measure_turns(direction, self.previous_direction, self.embeddings),
        }
        key = (site.layer, site.name)
        if key not in self.records:
            self.records[key] = SiteRecord(get_intervals(site.write))
        for name, values in values_by_name.items():
            self.records[key].add(name, values)
        self.previous_direction = direction
        return written


def collect_from_parts(
    site: Site,
    state: State,
    h: torch.Tensor,
    x_in: torch.Tensor | tuple,
    c: torch.Tensor,
    written: State,
) -> dict[str, torch.Tensor]:
    """Return the statistics of the write, and the details of the write and the read (parts.py)."""
    values_by_name = {}
    if hasattr(site.write, "statistics"):
        values_by_name.update(site.write.statistics(state, h, x_in, c, written))
    write_details = find_entry(DETAILS, site.write)
    if write_details is not None:
        values_by_name.update(write_details(site.write, state, h, x_in, c, written))
    read_details = find_entry(DETAILS, site.read)
    if read_details is not None:
        values_by_name.update(read_details(site.read, state))
    return values_by_name


def get_direction(
    site: Site,
    state: State,
    h: torch.Tensor,
    x_in: torch.Tensor | tuple,
    c: torch.Tensor,
) -> torch.Tensor:
    """Return the direction of a write (B, T, d), of any length: h, unless parts.py has another."""
    direction = find_entry(DIRECTIONS, site.write)
    if direction is None:
        return h
    return direction(site.write, state, h, x_in, c)


def cosine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the cosines (B, T) between vectors (B, T, d); 0 where one of them is zero."""
    return (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(-1)


def measure_turns(
    direction: torch.Tensor, previous_direction: torch.Tensor | None, embeddings: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the cosines of a site's directions with other vectors, and their effective rank (B,).

    The cosines are those with the direction of the previous token (B, T - 1), with that of the
    previous site, if there is one, and with the embedding of the token (B, T).
    """
    values_by_name = {"cosine_tokens": cosine(direction[:, 1:], direction[:, :-1])}
    if previous_direction is not None:
        values_by_name["cosine_sites"] = cosine(direction, previous_direction)
    values_by_name["cosine_embedding"] = cosine(direction, embeddings)
    values_by_name["rank_direction"] = effective_rank(direction)
    return values_by_name


def measure_change(state: State, written: State) -> dict[str, torch.Tensor]:
    """Return how a write changes the state.

    Returns:
        `write_size` (B, T), ||X' - X|| / ||X||, unless the state grows; `rank_state` (B,), the
        effective rank of the new state; `column_cosine` (B, T, d_v, d_v), the cosines between its
        value channels or streams, if there are several.
    """
    values_by_name = {}
    shapes = [part.shape for part in tree_leaves(state)]
    if shapes == [part.shape for part in tree_leaves(written)]:
        old = concatenate_state(state)
        new = concatenate_state(written)
        norm = old.norm(dim=-1).clamp_min(torch.finfo(old.dtype).tiny)
        values_by_name["write_size"] = (new - old).norm(dim=-1) / norm
    values_by_name["rank_state"] = effective_rank(concatenate_state(written))
    if torch.is_tensor(written) and written.ndim == 4 and written.shape[2] > 1:
        values_by_name["column_cosine"] = compute_cosines(written)
    return values_by_name


# ---- a run ----


@torch.no_grad()
def measure(
    model: GPT,
    batches: ValidationBatches,
    sequences: list[int],
    batch_size: int,
    device: torch.device,
    progress: Callable[[int], None] | None = None,
) -> dict:
    """Measure every site over sequences of full length.

    The numbers of all tokens stay in memory until the end, 4 bytes each; states do not.

    Returns:
        "sequences" and "tokens", their numbers; "sites", with the "statistics" and "details" of
        each; "edges", those of the histogram of each statistic, which are the same at all sites.

    Raises:
        ValueError: a number is not finite
    """
    records: dict[tuple[int, str], SiteRecord] = {}
    for ids, _ in common.iterate_batches(batches, sequences, batch_size, device, progress):
        with model.through(Audit(records, model.transformer.wte(ids))):
            model.hidden(ids)
    edges = choose_bin_edges(records.values())
    return {
        "sequences": len(sequences),
        "tokens": len(sequences) * batches.seq_len,
        "sites": [
            {"layer": layer, "site": name, **record.summarize(edges)}
            for (layer, name), record in records.items()
        ],
        "edges": {name: bins.tolist() for name, bins in edges.items()},
    }


def measure_run(
    folder: ModelFolder, args: SimpleNamespace, device: torch.device, figures: Figures
) -> dict:
    """Return the row of a run's statistics with the effects of its edits.

    What `figures` has is not measured again.

    Raises:
        ValueError: args.edits names an edit that the model does not have
    """
    corpus = folder.open_corpus(args.dataset or "", option="--dataset")
    model, _ = folder.load(device)
    batches = common.open_validation_batches(model, corpus)
    sequences = common.select_sequences(batches, args.windows)
    row = figures.find(kind="statistics", weights=folder.identity, corpus=corpus.identity)
    if row is None:
        progress = common.Progress(folder.label, len(sequences))
        measured = measure(model, batches, sequences, args.rows, device, progress)
        row = {
            "kind": "statistics",
            "weights": folder.identity,
            "corpus": corpus.identity,
            **common.describe_run(folder, model),
            **measured,
        }
        figures.add(row)
        print(
            f"{folder.label}: {len(measured['sites'])} sites over {measured['tokens']:,} tokens",
            flush=True,
        )
    if args.edits == "none":
        return {**row, "effects": []}
    plan = edits.EditPlan(model, None if args.edits == "all" else args.edits.split(","))
    key = {
        "kind": "losses",
        "weights": folder.identity,
        "corpus": corpus.identity,
        "names": plan.names,
    }
    edits.measure_losses(
        model,
        batches,
        sequences,
        args.rows,
        plan,
        figures,
        key,
        label=f"{folder.label}, edits",
    )
    losses = [stored for stored in figures.rows if key.items() <= stored.items()]
    return {**row, "effects": edits.compute_effects(losses)}


# ---- the command ----


@dataclass(frozen=True)
class Options(common.RunOptions):
    """Edits of the model."""

    windows: int = option(32, "number of validation sequences", low=1)
    edits: str = option("all", "edits to measure: all, none, or names separated by commas")


def run(args: SimpleNamespace) -> None:
    """Measure every run and store its figures; then draw them and write the page."""
    plots.use_print_style()  # a missing package should be noticed before anything is measured
    device = processes.pick_device(args.device)
    out = common.prepare_output_file(args, "gates")
    folders = common.find_folders(args)
    if args.edits not in ("all", "none"):
        # a wrong name should be noticed before anything is measured
        for folder in folders:
            model, _ = folder.load("cpu")
            edits.EditPlan(model, args.edits.split(","))
    figures = Figures(
        out,
        device,
        {"windows": args.windows, "at_once": args.rows},
        resume=True,
        code=compute_digest(*CODE)[:12],
        notes={"summary": {}},
    )
    rows = [measure_run(folder, args, device, figures) for folder in folders]
    groups = gates_page.group_runs(rows, folders)
    figures.notes["summary"] = {group.label: group.summarize() for group in groups}
    figures.store()
    pictures = []
    for group in groups:
        pictures += gates_page.draw(group, out, in_several_groups=len(groups) > 1)
    page = gates_page.format_page(groups, pictures)
    page_file = out.with_suffix(".md")
    files.write_text(page_file, page)
    print(page)
    print(f"wrote {out} and {page_file}, drew {len(pictures)} figures beside them")
