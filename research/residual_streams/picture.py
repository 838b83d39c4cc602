"""The picture of the study: every arm on every problem, with what its seeds leave open."""

from pathlib import Path

import configurator
from research.plots import BASELINE_COLOR as BLACK
from research.plots import COLORS, printing
from research.residual_streams.arms import BASELINE

BLUE, VERMILION, GREEN, GREY = COLORS[0], COLORS[1], COLORS[2], "#7F7F7F"
KINDS = {
    "additive": BLACK,
    "a control: its convolution, or its width, alone": GREY,
    "Deep Delta Learning": BLUE,
    "the same without erase": VERMILION,
    "other streams": GREEN,
}
SIZE = 9.6, 4.4  # inches


def kind_of(arm: str) -> str:
    if arm == BASELINE:
        return "additive"
    if arm.startswith(("conv", "wide")):
        return "a control: its convolution, or its width, alone"
    if arm.endswith("no erase"):
        return "the same without erase"
    return "Deep Delta Learning" if arm.startswith("DDL") else "other streams"


def color_of(arm: str) -> str:
    return KINDS[kind_of(arm)]


def draw(found: dict, out: Path) -> None:
    """found: `report.numbers`. A panel for the language, differences to the baseline at equal tokens and seconds, and
    one for each task, right answers of every seed."""
    figures = configurator.optional("matplotlib.figure", "a figure")
    with printing():
        figure = figures.Figure(figsize=SIZE, layout="constrained")
        widths = [2.2] + [1.0] * (len(found) - 1)
        axes = figure.subplots(1, len(found), sharey=True, width_ratios=widths, squeeze=False)[0]
        arms = list(found["language"]["arms"])
        places = {arm: -number for number, arm in enumerate(arms)}
        draw_differences(axes[0], found["language"], places)
        for axis, (name, problem) in zip(axes[1:], list(found.items())[1:]):
            draw_answers(axis, name, problem, places)
        axes[0].set_yticks(list(places.values()), arms)
        axes[0].set_ylim(-len(arms) + 0.4, 0.6)
        for label, arm in zip(axes[0].get_yticklabels(), arms):
            label.set_color(color_of(arm))
        for axis in axes:
            axis.grid(axis="x")
        legend(figure)
        figure.savefig(out, dpi=130, metadata={"Software": None})


def draw_differences(axis, problem: dict, places: dict) -> None:
    """Means and 95% intervals, filled at equal tokens with a dot for each seed, open at equal seconds."""
    axis.axvline(0, color=BLACK, linewidth=0.8)
    base = problem["arms"][BASELINE]["equal"]["tokens"]
    for arm, place in places.items():
        for equal, shift, face in (("tokens", 0.15, color_of(arm)), ("seconds", -0.2, "white")):
            at = problem["arms"][arm]["equal"][equal]
            if at and arm != BASELINE:
                less = at["difference"]
                look = {
                    "fmt": "o",
                    "color": color_of(arm),
                    "markerfacecolor": face,
                    "capsize": 2,
                    "elinewidth": 1,
                }
                axis.errorbar(less["mean"], place + shift, xerr=less["ci95"], **look)
            if at and arm != BASELINE and equal == "tokens":
                seeds = [own - other for own, other in zip(at["values"], base["values"])]
                axis.plot(
                    seeds,
                    [place + shift] * len(seeds),
                    "o",
                    color=color_of(arm),
                    alpha=0.4,
                    markersize=2.5,
                )
    axis.set_title("language: loss less that of additive")
    axis.set_xlabel("nats per token (left: better)")


def draw_answers(axis, name: str, problem: dict, places: dict) -> None:
    """A dot for each seed, a stroke for their mean; a line at the baseline's mean, a dotted one at a guess."""
    axis.axvline(100 * problem["guess"], color=BLACK, linewidth=0.8, linestyle=":")
    for arm, one in problem["arms"].items():
        if at := one["equal"]["tokens"]:
            shares = [100 * value for value in at["values"]]
            axis.plot(
                shares,
                [places[arm]] * len(shares),
                "o",
                color=color_of(arm),
                alpha=0.5,
                markersize=3,
            )
            axis.plot(
                100 * at["mean"],
                places[arm],
                "|",
                color=color_of(arm),
                markersize=11,
                markeredgewidth=1.8,
            )
            if arm == BASELINE:
                axis.axvline(100 * at["mean"], color=BLACK, linewidth=0.8)
    if len(axis.lines) == 1:  # nothing has been run
        axis.set_xlim(0, 100)
    axis.set_title(name.replace("_", "-"))
    axis.set_xlabel("right answers (%)")


def legend(figure) -> None:
    line = configurator.optional("matplotlib.lines", "a figure").Line2D
    entries = [
        line([], [], marker="o", linestyle="none", color=color, label=kind)
        for kind, color in KINDS.items()
    ]
    look = {"marker": "o", "linestyle": "none", "color": GREY, "markerfacecolor": "white"}
    entries.append(line([], [], label="open: equal seconds", **look))
    figure.legend(handles=entries, loc="outside lower center", ncols=3, frameon=False)
