"""Text layout for a terminal of 80 columns: tables, entries, wrapped lines, numbers."""

import math
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence

WIDTH = 80
"""Columns of a terminal that everything fits into, paths excepted."""


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as a table: the first column to the left, the others to the right.

    The first row is the heading; its cells may have several lines. Where the table is wider than a
    terminal, columns stand closer, and then names of the first column lose their middle.
    """
    headings = [cell.split("\n") for cell in rows[0]]
    height = max(map(len, headings))
    top = list(zip(*([""] * (height - len(cell)) + cell for cell in headings), strict=True))
    body = [[_printable(row[0]), *row[1:]] for row in rows[1:]]
    widths = [max(map(columns, column)) for column in zip(*top, *body, strict=True)]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else 1
    room = WIDTH - sum(widths[1:]) - gap * (len(widths) - 1)
    widths[0] = min(widths[0], max(room, _SHORTEST_NAME))

    def line(row: Sequence[str]) -> str:
        name = shortened(row[0], widths[0])
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        name += " " * (widths[0] - columns(name))
        return (" " * gap).join([name, *cells]).rstrip()

    rule = "-" * (sum(widths) + gap * (len(widths) - 1))
    return "\n".join([*map(line, top), rule, *map(line, body)])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """The rows of :func:`align` as a table in Markdown."""
    heading, *body = [
        [" ".join(cell.split()).replace("/ ", "/").replace("|", r"\|") for cell in row]
        for row in rows
    ]
    rule = ["---", *("---:" for _ in heading[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heading, rule, *body))


_SHORTEST_NAME = 6


def columns(text: str) -> int:
    """Columns of a terminal that a text takes: two for each Chinese character."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def shortened(text: str, most: int) -> str:
    """A text without its middle, if it takes more than ``most`` columns."""
    if columns(text) <= most:
        return text
    head, tail = text, text
    while columns(head) > (most - 2) // 2:
        head = head[:-1]
    while columns(tail) > most - 3 - columns(head):
        tail = tail[1:]
    return f"{head}...{tail}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def number(value: float | int) -> str:
    """A number as people read it, in at most 9 characters: 1,234 or 24.7184 or 1.23e+09.

    Whole numbers from ten million on are rounded: 12.35M.
    """
    if isinstance(value, int):
        return _whole(value)
    if value == 0 or not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e-3:
        for decimals in (4, 2, 1, 0):
            text = f"{value:,.{decimals}f}"
            if len(text) <= _DIGITS:
                return text
    text = f"{value:.2e}"
    return text if len(text) <= _DIGITS else f"{value:.1e}"


_DIGITS = 8


def _whole(value: int) -> str:
    if abs(value) < 10_000_000:
        return f"{value:,}"
    for unit, size in (("M", 10**6), ("B", 10**9), ("T", 10**12)):
        if abs(value) < 999.95 * size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.2e}"


def entries(pairs: Iterable[tuple[str, str]], indent: int) -> str:
    """Names to the left and texts to the right, in lines that fit a terminal.

    A text may have several lines; each is broken at spaces alone, so a path stays whole.
    """
    lines = []
    for name, text in pairs:
        for line in text.split("\n"):
            for part in wrapped(line, WIDTH - indent):
                lines.append(f"{name:<{indent}}{part}".rstrip())
                name = ""
    return "\n".join(lines)


def wrapped(text: str, width: int = WIDTH, indent: str = "") -> list[str]:
    """Lines of at most ``width`` characters; what :func:`kept` made is not broken."""
    lines = textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_NO_BREAK, " ") for line in lines] or [""]


def kept(text: str) -> str:
    """A text that :func:`wrapped` does not break."""
    return text.replace(" ", _NO_BREAK)


_NO_BREAK = "\N{NO-BREAK SPACE}"
