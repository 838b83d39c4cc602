"""`analyze.py gates`: what a trained model does at every site of its residual stream, and what the loss makes of it.

Over validation sequences, in float32: what each write says of itself (`statistics`, `details`: of a delta rewrite the
gate, its shares, the discrepancy before and after, what is erased and written), the size of what it changes, how its
direction turns from site to site and token to token, effective ranks, and how columns differ; then the loss where a
piece of one site, or of all, is forced or taken away. Any stream has a row; what it names shows (docs/gates.md).
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from evaluation.subjects import open_corpus_of
from model.block import Stream
from research import plots
from research.analysis import common, edits, gates_page
from research.analysis.parts import ALONG, DETAILS, cosines, entry, shares_of
from research.analysis.rank import effective_rank, side_by_side
from research.benchmarks.figures import Figures
from training import distributed
from training.provenance import compute_digest
from utils import files

CODE = (
    "model/*.py",
    *(f"research/analysis/{name}.py" for name in ("common", "rank", "parts", "edits", "gates")),
)
BINS = 40
QUANTILES = 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99
LARGEST = 2**14  # numbers of a detail that is stored


class Collected:
    """What comes in of one site: numbers of tokens or sequences as they are, of vectors and matrices the moments."""

    def __init__(self, shares: dict):
        self.numbers, self.moments, self.shares = {}, {}, shares

    def add(self, name: str, values: torch.Tensor) -> None:
        """values (B,) or (B, T), or (B, T, ...)."""
        if values.ndim <= 2:
            self.numbers.setdefault(name, []).append(values.flatten().cpu())
            return
        values = values.double().flatten(0, 1)
        found = torch.stack([values.sum(0), values.square().sum(0)])
        count, total = self.moments.get(name, (0, 0.0))
        self.moments[name] = count + len(values), total + found

    def all(self, name: str) -> np.ndarray:
        """Every number of it, float64. ValueError: one is not finite."""
        values = torch.cat(self.numbers[name]).double().numpy()
        if not np.isfinite(values).all():
            raise ValueError(f"{name} is not finite for {(~np.isfinite(values)).sum()} tokens")
        return values

    def summary(self, edges: dict[str, np.ndarray]) -> dict:
        """Of numbers mean, standard deviation, quantiles, histogram and shares; of vectors and matrices mean and
        standard deviation over tokens."""
        found = {name: described(self.all(name), edges[name]) for name in self.numbers}
        for name, intervals in self.shares.items():
            values = self.all(name)
            inside = {each: (values > a) & (values < b) for each, (a, b) in intervals.items()}
            shares = {each: float(where.mean()) for each, where in inside.items()}
            found[name] |= {"shares": shares, "intervals": intervals}
        details = {}
        for name, (count, (total, squares)) in self.moments.items():
            if total.numel() <= LARGEST:
                mean = total / count
                deviation = (squares / count - mean.square()).clamp_min(0).sqrt()
                details[name] = {"mean": mean.tolist(), "std": deviation.tolist()}
        return {"statistics": found, "details": details}


def described(values: np.ndarray, edges: np.ndarray) -> dict:
    found = {"mean": values.mean(), "std": values.std(), "mean_abs": np.abs(values).mean()}
    found |= {"min": values.min(), "max": values.max()}
    quantiles = dict(zip(map(str, QUANTILES), np.quantile(values, QUANTILES).tolist()))
    histogram = np.histogram(values, edges)[0].tolist()
    return {
        "count": len(values),
        **{key: float(value) for key, value in found.items()},
        "quantiles": quantiles,
        "histogram": histogram,
    }


def cosine(x, y):
    """(B, T) of directions (B, T, d); 0 where one of them is zero."""
    return (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(-1)


class Audit(Stream):
    """Every step by itself; what happens at each site goes to `found` {(layer, name): Collected}.

    `embedded` (B, T, d) are the tokens' embeddings; `before` the direction of the site before, None at the first one.
    """

    def __init__(self, found: dict, embedded: torch.Tensor):
        self.found, self.embedded, self.before = found, embedded, None

    def write(self, site, state, h, c, x_in, cache):
        written, loss = super().write(site, state, h, c, x_in, cache)
        found = self.found.setdefault((site.layer, site.name), Collected(shares_of(site.write)))
        direction = direction_of(site, state, h, x_in, c)
        numbers = said(site, state, h, x_in, c, written) | changed(state, written)
        for name, values in (numbers | turned(direction, self.before, self.embedded)).items():
            found.add(name, values)
        self.before = direction
        return written, loss


def said(site, state, h, x_in, c, written) -> dict:
    """What the site's parts say of themselves."""
    result = {}
    if hasattr(site.write, "statistics"):
        result |= site.write.statistics(state, h, x_in, c, written)
    if details := entry(DETAILS, site.write):
        result |= details(site.write, state, h, x_in, c, written)
    if details := entry(DETAILS, site.read):
        result |= details(site.read, state)
    return result


def direction_of(site, state, h, x_in, c):
    """(B, T, d), of any length: what the write names, or the sublayer's output."""
    along = entry(ALONG, site.write)
    return h if along is None else along(site.write, state, h, x_in, c)


def turned(direction, before, embedded) -> dict:
    """Cosines of a site's directions (B, T, d) with those of the token before, of the site before and with the tokens'
    embeddings, and their effective rank, of each sequence."""
    found = {"cosine_tokens": cosine(direction[:, 1:], direction[:, :-1])}
    if before is not None:
        found["cosine_sites"] = cosine(direction, before)
    found["cosine_embedding"] = cosine(direction, embedded)
    return found | {"rank_direction": effective_rank(direction)}


def changed(state, written) -> dict:
    """|X' - X| / |X| of each token, unless the write makes the state grow; effective rank of the new state; cosines
    between its columns, where it has several."""
    found, shapes = {}, [[part.shape for part in tree_leaves(each)] for each in (state, written)]
    if shapes[0] == shapes[1]:
        old, new = side_by_side(state), side_by_side(written)
        norm = old.norm(dim=-1).clamp_min(torch.finfo(old.dtype).tiny)
        found["write_size"] = (new - old).norm(dim=-1) / norm
    found["rank_state"] = effective_rank(side_by_side(written))
    if torch.is_tensor(written) and written.ndim == 4 and written.shape[2] > 1:
        found["column_cosine"] = cosines(written)
    return found


@torch.no_grad()
def measure(model, batches, windows: list[int], rows: int, device, progress=None) -> dict:
    """Over the windows, which are whole: "sites", a row for each site with its `statistics` and `details`; "edges" of
    each statistic's histogram, the same at all sites; "tokens".

    Numbers of tokens are kept to the end, 4 bytes each; states are not. ValueError: one is not finite.
    """
    found: dict[tuple[int, str], Collected] = {}
    for ids, _ in common.in_batches(batches, windows, rows, device, progress):
        with model.through(Audit(found, model.transformer.wte(ids))):
            model.hidden(ids)
    edges, tokens = edges_of(found.values()), len(windows) * batches.seq_len
    sites = [{"layer": n, "site": name, **e.summary(edges)} for (n, name), e in found.items()]
    listed = {name: bins.tolist() for name, bins in edges.items()}
    return {"sequences": len(windows), "tokens": tokens, "sites": sites, "edges": listed}


def edges_of(sites) -> dict[str, np.ndarray]:
    """Of each statistic 40 equal bins over all sites: the range that its shares cover, or that of its values."""
    ranges: dict[str, tuple[float, float]] = {}
    for site in sites:
        for name in site.numbers:
            values = [end for interval in site.shares.get(name, {}).values() for end in interval]
            values = values or site.all(name)
            low, high = ranges.get(name, (np.inf, -np.inf))
            ranges[name] = min(low, np.min(values)), max(high, np.max(values))
    return {
        name: np.linspace(low, high if high > low else low + 1, BINS + 1)
        for name, (low, high) in ranges.items()
    }


def measure_run(subject, args, device, figures: Figures) -> dict:
    """The row of a subject's statistics with what its edits change (`effects`); each is taken from
    `figures` where it is there. ValueError: an edit that the model does not have."""
    corpus = open_corpus_of(subject, args.dataset or "")
    model, _, stem = subject.load(device)
    batches = common.validation_batches(model, corpus)
    windows = common.whole_windows(batches, args.windows)
    key = {"weights": subject.identity, "corpus": corpus.identity}
    if figures.find(kind="statistics", **key) is None:
        progress = common.Progress(subject.label, len(windows))
        found = measure(model, batches, windows, args.rows, device, progress)
        figures.add({"kind": "statistics", **key, **common.about(subject, model, stem), **found})
        counts = f"{len(found['sites'])} sites over {found['tokens']:,} tokens"
        print(f"{subject.label}: {counts}", flush=True)
    row = figures.find(kind="statistics", **key) | {"effects": []}
    if args.edits != "none":
        plan = edits.Plan(model, None if args.edits == "all" else args.edits.split(","))
        key = {"kind": "losses", **key, "names": plan.names}
        label = f"{subject.label}, edits"
        edits.measure(model, batches, windows, args.rows, plan, figures, key, label)
        row["effects"] = edits.effects([r for r in figures.rows if key.items() <= r.items()])
    return row


def add_options(parser) -> None:
    parser.set_defaults(windows=32)
    names = "all, none, or names with commas between (default: %(default)s)"
    parser.add_argument("--edits", default="all", help=names)


def run(args) -> None:
    """Measure every run, store what is found, draw it and write its page."""
    plots.use_print_style()  # a missing package is known before the work
    device, out = distributed.pick_device(args.device), common.output(args, "gates")
    chosen, settings = common.chosen(args), {"windows": args.windows, "at_once": args.rows}
    for subject in chosen if args.edits not in ("all", "none") else ():
        edits.Plan(subject.load("cpu")[0], args.edits.split(","))
    code, notes = compute_digest(*CODE)[:12], {"summary": {}}
    figures = Figures(out, device, settings, resume=True, code=code, notes=notes)
    rows = [measure_run(subject, args, device, figures) for subject in chosen]
    groups = gates_page.groups(rows, chosen)
    figures.notes["summary"] = {group.label: group.stored() for group in groups}
    figures.store()
    drawn = [path for group in groups for path in gates_page.draw(group, out, len(groups) > 1)]
    text = gates_page.markdown(groups, drawn)
    files.write_text(out.with_suffix(".md"), text)
    print(text)
    print(f"wrote {out} and {out.with_suffix('.md')}, drew {len(drawn)} figures beside them")
