"""Format tables as Markdown, LaTeX and CSV.

A table is a header and rows of cells. A cell of None is shown as a dash, and left empty in CSV.
"""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Characters that LaTeX reads as something else, and those that its standard fonts lack.
LATEX_ESCAPES = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "±": "$\\pm$",
    "\u00d7": "$\\times$",
    "β": "$\\beta$",
}


def format_cells(header: Sequence, rows: Iterable[Sequence]) -> list[list[str]]:
    """Return the header and the rows as text."""
    return [["-" if cell is None else str(cell) for cell in row] for row in (header, *rows)]


def format_markdown(header: Sequence, rows: Iterable[Sequence]) -> str:
    """Format a Markdown table whose columns are padded to equal widths."""
    cells = format_cells(header, rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])


def format_latex(
    header: Sequence, rows: Iterable[Sequence], continuations: tuple[str, ...] = ()
) -> str:
    """Format a LaTeX tabular with the rules of the booktabs package.

    Args:
        continuations: if given, a rule separates the rows, except above those whose first cell is
            one of these
    """
    head, *body = [
        [cell.translate(str.maketrans(LATEX_ESCAPES)) for cell in row]
        for row in format_cells(header, rows)
    ]
    column_types = "l" + "r" * (len(head) - 1)
    lines = [
        f"\\begin{{tabular}}{{{column_types}}}",
        "\\toprule",
        f"{' & '.join(head)} \\\\",
        "\\midrule",
    ]
    for row_number, cells in enumerate(body):
        if continuations and row_number > 0 and cells[0] not in continuations:
            lines.append("\\midrule")
        lines.append(f"{' & '.join(cells)} \\\\")
    lines += ["\\bottomrule", "\\end{tabular}"]
    return "\n".join(lines)


def format_csv(header: Sequence, rows: Iterable[Sequence]) -> str:
    """Format a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    return text.getvalue()


@dataclass
class Table:
    """A table as cells of text and as numbers.

    rows: the text of each cell, None for an empty one. numbers: the numbers by name, a dict for each line
    of a CSV or JSON file. continuations: first cells of the rows that belong to the row above them.
    """

    name: str
    title: str
    header: list[str]
    rows: list[list[str | None]]
    notes: list[str] = field(default_factory=list)
    numbers: list[dict[str, Any]] = field(default_factory=list)
    continuations: tuple[str, ...] = ()

    def to_csv(self) -> str:
        """Return the numbers, with a column for each name."""
        header = []
        for row in self.numbers:
            header += [key for key in row if key not in header]
        rows = [[row.get(key) for key in header] for row in self.numbers]
        return format_csv(header, rows)

    def to_markdown(self) -> str:
        """Return the cells with the title as a heading, and the notes below."""
        grid = format_markdown(self.header, self.rows)
        return "\n\n".join([f"## {self.title}", grid, *self.notes, ""])

    def to_latex(self) -> str:
        """Return the cells as a tabular; title and notes are comments above it."""
        notes = [f"% {note.replace('±', '+-')}" for note in self.notes]
        grid = format_latex(self.header, self.rows, self.continuations)
        return "\n".join([f"% {self.title}", *notes, grid, ""])
