"""`report.py curves --out=curves.html`: the curves as one page to point at and zoom, which needs no network."""

from html import escape
from pathlib import Path

import configurator
from research.reporting import style
from research.reporting.curves import Line, label_of

DASHES = dict(zip(style.STYLES, ("solid", "dash", "dot", "dashdot")))


def draw(lines: list[Line], x: str, labels: tuple[str, str], out: Path, title: str = "") -> None:
    """As curves.draw, by plotly: a click on a name hides its curve, pointing at it shows its values and interval."""
    figure = configurator.optional("plotly.graph_objects", "an interactive page").Figure()
    for number, line in zip(style.numbers([line.stem for line in lines]), lines):
        look, name = style.line(number), escape(label_of(line))
        common = {"legendgroup": str(number), "line": {"color": look["color"], "dash": DASHES[look["linestyle"]]}}
        for kind, curve, mode in (("training", line.training, "lines"), ("validation", line.validation, "markers")):
            if curve:
                half = curve.half.tolist() if line.runs > 1 else None
                points = {"x": curve.x[x].tolist(), "y": curve.mean.tolist(), "mode": mode, "customdata": half}
                bars = {"type": "data", "array": half, "visible": bool(half) and kind == "validation"}
                shown = "%{x:,.6g}: %{y:.4f}" + (" ± %{customdata:.4f}" if half else "")
                first = kind == "training" or not line.training
                about = {"name": name, "showlegend": first, "hovertemplate": f"{shown}<extra>{kind}, {name}</extra>"}
                figure.add_scatter(**points, **common, **about, error_y=bars)
    axes = {"xaxis_title": labels[0], "yaxis_title": labels[1], "title": escape(title)}
    figure.update_layout(**axes, template="plotly_white", legend={"orientation": "h", "y": -0.2})
    configurator.replace_text(out, figure.to_html(include_plotlyjs=True, full_html=True))
