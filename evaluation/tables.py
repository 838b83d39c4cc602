"""Tables of text, one way for every script."""

import csv
import io
from collections.abc import Iterable, Sequence

# What LaTeX reads as something else, and the signs that its standard fonts lack.
LATEX = {character: f"\\{character}" for character in "&%$#_{}"}
LATEX |= {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
}
LATEX |= {"±": "$\\pm$", "\u00d7": "$\\times$", "β": "$\\beta$"}


def markdown(header: Sequence, rows: Iterable[Sequence]) -> str:
    """A Markdown table, its columns padded to equal widths; None is shown as a dash."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |"
        for row in cells
    ]
    return "\n".join(
        [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
    )


def latex(header: Sequence, rows: Iterable[Sequence], below: tuple[str, ...] = ()) -> str:
    """A tabular of booktabs; None is shown as a dash.

    A rule stands before each row but those that begin with a word of `below`, where there are such
    words.
    """
    head, *body = [
        [escaped("-" if cell is None else str(cell)) for cell in row] for row in (header, *rows)
    ]
    lines = [
        f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        "\\toprule",
        f"{' & '.join(head)} \\\\",
        "\\midrule",
    ]
    for number, cells in enumerate(body):
        if below and number and cells[0] not in below:
            lines.append("\\midrule")
        lines.append(f"{' & '.join(cells)} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"])


def escaped(text: str) -> str:
    """Text as LaTeX has to be told it."""
    return "".join(LATEX.get(character, character) for character in text)


def comma_separated(header: Sequence, rows: Iterable[Sequence]) -> str:
    """CSV; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()
