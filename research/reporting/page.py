"""The report as one HTML file that needs no network: tables to sort, curves to point at, the figures for print."""

import base64
import json
import math
from html import escape
from pathlib import Path
from string import Template

import configurator
from research.reporting.bands import Curve
from research.reporting.figures import AXES, MARKERS, Drawn
from research.reporting.style import BASELINE, PALETTE, STYLES

HERE = Path(__file__).parent
LIGHT = BASELINE, *PALETTE
SHADES = "#f2f2f2", "#56a9ea", "#f08a4b", "#2fc79a", "#e49fc8", "#f0b93a", "#93d4f7", "#a6a6a6"
DARK = dict(zip(LIGHT, SHADES, strict=True))  # the same on a dark page
DASHES = dict(zip(STYLES, ("solid", "dash", "dot", "dashdot")))
NAMES = "circle square diamond triangle-up triangle-down cross x pentagon hexagon"
SYMBOLS = dict(zip(MARKERS, NAMES.split()))
GAPS = "not evaluated", "did not finish", "not compared"


def page(title: str, summary: str, tables: list, groups: list[Drawn], figures: list[dict], notes: str, **said) -> str:
    """tables: `results.Table`s, the last one of the runs; figures: name, caption and svg of each; notes: HTML; said:
    what the script is told besides the curves."""
    offline = configurator.optional("plotly.offline", "a report")
    shown = [each for group in groups if (each := curves_of(group))["curves"]]
    data = {"groups": shown, "axes": AXES, **said}
    parts = {
        "title": escape(title),
        "summary": escape(summary),
        "tables": "\n".join(map(table, tables[:-1])),
        "runs": table(tables[-1]),
        "figures": "\n".join(map(figure, figures)),
        "notes": notes,
        "plotly": offline.get_plotlyjs().replace("</script", "<\\/script"),
        "data": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),  # no end of the script, no comment
        "css": (HERE / "page.css").read_text(encoding="utf-8"),
        "js": (HERE / "page.js").read_text(encoding="utf-8"),
    }
    return Template((HERE / "page.html").read_text(encoding="utf-8")).substitute(parts)


def table(own) -> str:
    head = "".join(f'<th scope="col"><button type="button">{escape(cell)}</button></th>' for cell in own.header)
    body = "\n".join(f"<tr>{''.join(cell(i, text) for i, text in enumerate(row))}</tr>" for row in own.rows)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in own.notes)
    files = f"""<p class="files">{link(f"{own.name}.csv", own.comma_separated(), "text/csv")} (all digits),
      {link(f"{own.name}.tex", own.latex(), "text/x-tex")}</p>"""
    return f"""<section aria-labelledby="table-{own.name}"><h2 id="table-{own.name}">{escape(own.title)}</h2>
      <div class="scroll" tabindex="0" role="region" aria-labelledby="table-{own.name}"><table>
      <thead><tr>{head}</tr></thead>
      <tbody>{body}</tbody></table></div>{notes}{files}</section>"""


def cell(column: int, text: str | None) -> str:
    if column == 0:
        return f'<th scope="row">{escape(text or "")}</th>'
    gap = ' class="gap"' if text is None or text.startswith(GAPS) else ""
    return f"<td{gap}>{escape('-' if text is None else text)}</td>"


def link(name: str, content: str | bytes, kind: str) -> str:
    """To a file that the page carries in itself."""
    data = base64.b64encode(content.encode() if isinstance(content, str) else content).decode()
    return f'<a download="{name}" href="data:{kind};base64,{data}">{name}</a>'


def figure(own: dict) -> str:
    data = base64.b64encode(own["svg"]).decode()
    caption = escape(own["caption"])
    return f"""<figure class="print"><img alt="{caption}" src="data:image/svg+xml;base64,{data}">
      <figcaption>{caption} (figures/{escape(own["name"])}.svg, .png)</figcaption></figure>"""


def curves_of(group: Drawn) -> dict:
    """What the script draws of a group; numbers of six digits."""
    return {
        "name": group.name,
        "label": escape(group.name),
        "light": group.look["color"],
        "dark": DARK[group.look["color"]],
        "dash": DASHES[group.look["linestyle"]],
        "symbol": SYMBOLS[MARKERS[group.number % len(MARKERS)]],
        "curves": {kind: points(curve, group.bits.get(kind)) for kind, curve in group.curves.items()},
    }


def points(curve: Curve, bits: float | None) -> dict:
    """bits: bits per byte for each nat per token, None where nobody knows."""
    alone = not all(map(math.isfinite, curve.half))
    half = None if alone else [short(value) for value in curve.half]
    x = {name: [short(value) for value in values] for name, values in curve.x.items()}
    return {"x": x, "mean": [short(value) for value in curve.mean], "half": half, "runs": curve.runs, "bits": bits}


def short(value: float) -> float | int:
    number = float(f"{value:.6g}")
    return int(number) if number.is_integer() else number
