"""Format tables as Markdown."""

from collections.abc import Iterable, Sequence


def format_markdown(header: Sequence, rows: Iterable[Sequence]) -> str:
    """Format a Markdown table whose columns are padded to equal widths; None is shown as a dash."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])
