"""Tables of text: Markdown, LaTeX and CSV. A cell of None is shown as a dash, in CSV as nothing."""

import csv
import io
from collections.abc import Iterable, Sequence

# What LaTeX reads as something else, and the signs that its standard fonts lack.
LATEX = {character: f"\\{character}" for character in "&%$#_{}"}
LATEX |= {"\\": "\\textbackslash{}", "~": "\\textasciitilde{}", "^": "\\textasciicircum{}"}
LATEX |= {"<": "$<$", ">": "$>$", "±": "$\\pm$", "\u00d7": "$\\times$", "β": "$\\beta$"}
ESCAPES = str.maketrans(LATEX)


def cells_of(header: Sequence, rows: Iterable[Sequence]) -> list[list[str]]:
    return [["-" if cell is None else str(cell) for cell in row] for row in (header, *rows)]


def markdown(header: Sequence, rows: Iterable[Sequence]) -> str:
    """A Markdown table, its columns padded to equal widths."""
    cells = cells_of(header, rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(map(str.ljust, row, widths)) for row in cells]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def latex(header: Sequence, rows: Iterable[Sequence], below: tuple[str, ...] = ()) -> str:
    """A tabular of booktabs.

    Where `below` has words, a rule stands before each row but those that begin with one of them.
    """
    head, *body = [[cell.translate(ESCAPES) for cell in row] for row in cells_of(header, rows)]
    lines = [f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", "\\toprule"]
    lines += [f"{' & '.join(head)} \\\\", "\\midrule"]
    for number, cells in enumerate(body):
        lines += ["\\midrule"] * bool(below and number and cells[0] not in below)
        lines.append(f"{' & '.join(cells)} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"])


def comma_separated(header: Sequence, rows: Iterable[Sequence]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()
