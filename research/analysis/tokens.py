"""`analyze.py tokens`: a text coloured by what the model's writes say of each token, as one HTML file.

Every statistic that a write names (of a delta rewrite: the gate beta, and the discrepancy before and after the write)
at every site, and the loss of each token given those before it, in nats. The page is analysis/tokens.html with the
heat map and the style of the serving page (serving/); it holds all that it needs and asks no network for anything.
"""

import html
import json
from pathlib import Path

import torch
import torch.nn.functional as F

from configurator import replace_text
from evaluation import subjects
from model.residual import DeltaRewrite
from research.analysis import texts
from training import distributed
from training.residual_statistics import Watched

HERE, SERVING = Path(__file__).parent, Path(__file__).parents[2] / "serving"
DIGITS = 5  # significant ones of a number in the page


@torch.no_grad()
def statistics_of(model, ids: torch.Tensor) -> list[dict]:
    """Of a text's ids (1, T): {"name", "gate", "range", "rows": [[site, [a number a token]]]} of each statistic.

    The first is that of most sites; the last is `loss`, of which the first token, which nothing precedes, has none.
    `gate`: whether it is that of a delta rewrite, whose colours are its regimes from 0 to 2. `range` is None: colours
    go from the least number to the largest.
    """
    rows, gates = {}, set()

    def seen(site, quantities):
        for name, values in quantities["statistics"].items():
            rows.setdefault(name, []).append([f"{site.layer} {site.name}", values[0].tolist()])
            if name == "beta" and isinstance(site.write, DeltaRewrite):
                gates.add(name)

    with model.through(Watched(seen)):
        logits, _ = model(ids)
    losses = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")
    rows["loss"] = [["model", [None, *losses.tolist()]]]
    return [{"name": name, "gate": name in gates, "range": None, "rows": each} for name, each in rows.items()]


def rounded(value):
    """The same data with numbers of DIGITS digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


def page_of(title: str, about: dict, pieces: list[dict], statistics: list[dict]) -> str:
    """The whole page. The text is data in it: nothing of it can be read as HTML."""
    data = {"about": about, "tokens": pieces, "statistics": rounded(statistics)}
    # "<" by its code, so that no text can end the element.
    written = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    parts = {
        "title": html.escape(title),
        "style": (SERVING / "page.css").read_text(encoding="utf-8") + (HERE / "tokens.css").read_text(encoding="utf-8"),
        "script": (SERVING / "heatmap.js").read_text(encoding="utf-8")
        + (HERE / "tokens.js").read_text(encoding="utf-8"),
        "data": written,
    }
    first, *rest = (HERE / "tokens.html").read_text(encoding="utf-8").split("{{")
    filled = [first]
    for each in rest:  # not one replacement after another: a text may have the name of a part
        name, _, after = each.partition("}}")
        filled += [parts[name], after]
    return "".join(filled)


def run(args) -> None:
    """Write the page of a text. ValueError: there is no run, no text, or it is too long; the model has diverged."""
    subject = subjects.find(args.run)
    model, encoding, stem = subject.load(distributed.pick_device(args.device))
    ids = texts.ids_of(args.text, model, encoding)
    statistics = statistics_of(model, ids)
    numbers = [value for each in statistics for _, row in each["rows"] for value in row if value is not None]
    if not torch.tensor(numbers, dtype=torch.float64).isfinite().all():
        raise ValueError(f"{subject.label}: its statistics are not finite: the model has diverged")
    about = {"run": subject.label, "model": stem, "tokenizer": encoding.name, "tokens": ids.shape[1]}
    page = page_of(f"{subject.label}: tokens", about, texts.pieces_of(ids, encoding), statistics)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(args.out, page)
    names = ", ".join(each["name"] for each in statistics)
    print(f"wrote {args.out}: {ids.shape[1]} tokens, coloured by {names}")
