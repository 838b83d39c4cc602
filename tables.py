"""Tables of text, one way for every script."""

from collections.abc import Iterable, Sequence


def markdown(header: Sequence, rows: Iterable[Sequence]) -> str:
    """A Markdown table, its columns padded to equal widths; None is shown as a dash."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])
