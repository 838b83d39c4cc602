"""Draw docs/rewrite.png: Compress - Process - Rewrite at one site of a block.

    python docs/draw_rewrite.py

Run from the repository root.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import pyplot

BOXES = {
    # name: (x, y, width, height, text, color)
    "state": (0.2, 0.1, 1.7, 3.5, "state\n$X$\n$d \\times v$", "#dbe7f5"),
    "read": (2.6, 2.55, 1.7, 0.9, "compress\n$x_{in} = \\mathrm{read}(X)$", "#e8f3e2"),
    "norm": (4.9, 2.55, 1.5, 0.9, "norm\n$c = \\mathrm{ln}(x_{in})$", "#f3f3f3"),
    "process": (7.0, 2.55, 1.9, 0.9, "process\n$h = F(c)$", "#fdeecd"),
    "direction": (9.5, 2.9, 1.9, 0.75, "$k = h / |h|$", "#f9dedc"),
    "gate": (9.5, 1.75, 1.9, 0.75, "$\\beta = 2\\sigma(w \\cdot c + b)$", "#f9dedc"),
    "value": (9.5, 0.6, 1.9, 0.75, "$t = 4\\sigma(W x_{in} + b)$", "#f9dedc"),
    "write": (12.0, 0.1, 2.7, 3.5, "rewrite\n\n$X' = X + \\beta k (t - X^\\top k)^\\top$", "#dbe7f5"),
}
ARROWS = [("state", "read"), ("read", "norm"), ("norm", "process"), ("process", "direction")]
ARROWS += [("norm", "gate"), ("read", "value"), ("direction", "write"), ("gate", "write"), ("value", "write")]


def main():
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(13, 3.8), layout="constrained")
    for x, y, width, height, text, color in BOXES.values():
        axes.add_patch(plt.Rectangle((x, y), width, height, facecolor=color, edgecolor="#555555"))
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=11)
    for start, end in ARROWS:
        x, y, width, height, *_ = BOXES[start]
        to_x, to_y, _, to_height, *_ = BOXES[end]
        level = to_y < y - 0.5 and start in ("norm", "read")
        tail = (x + width / 2, y) if level else (x + width, min(max(to_y + to_height / 2, y + 0.2), y + height - 0.2))
        head = (to_x, min(max(tail[1], to_y + 0.2), to_y + to_height - 0.2))
        axes.annotate("", head, tail, arrowprops={"arrowstyle": "->", "color": "#333333"})
    axes.annotate("", (12.0, 0.35), (1.9, 0.35), arrowprops={"arrowstyle": "->", "color": "#333333"})
    axes.text(3.2, 0.08, "the state passes by: only its component along $k$ is rewritten", fontsize=10, color="#333333")
    axes.set(xlim=(0, 15), ylim=(0, 4))
    axes.axis("off")
    out = Path(__file__).with_name("rewrite.png")
    figure.savefig(out, dpi=110)
    print(f"drew {out}")


if __name__ == "__main__":
    main()
