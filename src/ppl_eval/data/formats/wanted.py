"""Which columns are read of files, and what is said where they are not there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ppl_eval.errors import UserError

UNITS = ("line", "paragraph", "file")
"""What may be a document of a .txt file."""


@dataclass
class Wanted:
    """What is to be read.

    Attributes:
        column: holds the text.
        domain: the column with the domain; None takes ``domain`` if there is one, an empty string
            none.
        unit: what is a document of a .txt file; None reads lines, and refuses blank lines between
            others.
    """

    column: str = "text"
    domain: str | None = None
    unit: str | None = None

    def names(self) -> tuple[str, str, str | None]:
        """Columns of text, id and domain."""
        domain = "domain" if self.domain is None else self.domain
        return self.column, "id", domain or None


@dataclass
class Seen:
    """What the files hold that were read so far."""

    domain: bool = False
    columns: tuple[str, ...] = ()


def places(file: str, header: Sequence[str], wanted: Wanted, seen: Seen) -> list[int | None]:
    """Where text, id and domain stand among a file's columns; None where there is no such column.

    Raises:
        UserError: there is no text, or two columns have the same name.
    """
    names = wanted.names()
    if wanted.column not in header:
        no_column(wanted.column, file, header)
    for name in names:
        if name is not None and header.count(name) > 1:
            raise UserError(f"{file} has two columns called {name!r}: rename one")
    seen.columns = tuple(header)
    seen.domain |= names[2] in header
    return [header.index(name) if name is not None and name in header else None for name in names]


def no_column(wanted: str, place: str, columns: Iterable[str]) -> NoReturn:
    """The column with the text is not there: name those that are."""
    raise UserError(f"dataset.column is {wanted!r}, but {place} has the columns {listed(columns)}")


def listed(columns: Iterable[str]) -> str:
    """Names of columns, of the first twenty if there are more."""
    names = [printable(str(name)) for name in columns]
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") or "none"


def printable(text: str) -> str:
    """A text with its half surrogate pairs spelled out: no terminal takes them."""
    return text.encode("utf-8", "backslashreplace").decode()
