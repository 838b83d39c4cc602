"""What all figures share: matplotlib without a display, and colours and line styles."""

import itertools

import configurator

# Okabe and Ito's: told apart with any colour vision.
COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442"
STYLES = "-", "--", ":", "-."
BASELINE = COLORS[6]  # black, for no other curve
PALETTE = *COLORS[:6], "#7F7F7F"  # yellow is no line on white paper: grey
DISTINCT = len(PALETTE) * len(STYLES)  # curves in one picture beside the baseline
BASELINE_STEM = "gpt-mha-rope"


def pyplot():
    """matplotlib.pyplot without a display. ValueError: the package is missing."""
    configurator.optional("matplotlib", "a figure").use("Agg")
    return configurator.optional("matplotlib.pyplot", "a figure")


def line(number: int) -> dict:
    """Colour and style of a curve: 0 is the baseline's; after DISTINCT others they come again."""
    color = PALETTE[(number - 1) % len(PALETTE)] if number else BASELINE
    return {"color": color, "linestyle": STYLES[number % len(STYLES)]}


def numbers(stems: list[str | None]) -> list[int]:
    """For each curve the number of its look: 0 of the baseline's, where just one is of its stem, else 1, 2, ..."""
    baseline = stems.index(BASELINE_STEM) if stems.count(BASELINE_STEM) == 1 else None
    others = itertools.count(1)
    return [0 if index == baseline else next(others) for index in range(len(stems))]
