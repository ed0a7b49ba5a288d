"""Rows of text, id and domain -> Arrow tables, with errors for a missing column or text."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ppl_eval.data.files import File
from ppl_eval.errors import UserError
from ppl_eval.plural import some

UNITS = ("line", "paragraph", "file")
"""How a .txt file can be split into documents."""

Row = tuple[str, Any, Any, Any]
"""(where the row is in its file, such as ``line 3``; text; id or None; domain or None)."""

BATCH_ROWS = 2048
_BATCH_CHARACTERS = 2**23


@dataclass(frozen=True)
class Wanted:
    """What to read of each row.

    Attributes:
        column: the column with the text.
        domain: the column with the domain. None: ``domain``, if there is such a column; an empty
            string: no column.
        unit: one of ``UNITS`` for .txt files. None: lines, and an error for blank lines between
            others.
    """

    column: str = "text"
    domain: str | None = None
    unit: str | None = None

    def names(self) -> tuple[str, str, str | None]:
        """The columns with the text, the id and the domain."""
        domain = "domain" if self.domain is None else self.domain
        return self.column, "id", domain or None


@dataclass
class Columns:
    """Finds the wanted columns in one file after the other.

    Attributes:
        wanted: what to read.
        header: columns of a file that was read, for errors; empty if none has rows.
        has_domain: whether a file that was read has the column with the domain.
    """

    wanted: Wanted
    header: tuple[str, ...] = ()
    has_domain: bool = False

    def find(self, where: str, header: Sequence[str]) -> list[str | None]:
        """The names of the columns with text, id and domain; None for one that is not there.

        Raises:
            UserError: no column with the text, or two wanted columns of the same name.
        """
        names = self.wanted.names()
        if self.wanted.column not in header:
            no_column("column", self.wanted.column, where, header)
        for name in names:
            if name is not None and header.count(name) > 1:
                raise UserError(f"{where} has two columns called {name!r}: rename one")
        self.header = tuple(header)
        self.has_domain |= names[2] in header
        return [name if name in header else None for name in names]

    def need_domain(self, where: str) -> None:
        """Raise a UserError if there are rows, and none has the domain's column that is set."""
        if self.wanted.domain and not self.has_domain and self.header:
            no_column("domain_column", self.wanted.domain, where, self.header)


class Spelled(str):
    """A number as a JSON file spells it."""

    __slots__ = ()


def tables(file: File, rows: Iterable[Row], wanted: Wanted) -> Iterator[Any]:
    """Collect rows into ``pyarrow.Table`` with the columns text, id and domain.

    Raises:
        UserError: a text is not a string.
    """
    batch: list[Row] = []
    size = 0
    for row in rows:
        where, text, _, _ = row
        if type(text) is not str:
            raise UserError(
                f"{file.name}, {where}: column {wanted.column!r} holds {described(text)}, but every"
                " row needs a text: mend or drop the row"
            )
        batch.append(row)
        size += len(text)
        if len(batch) == BATCH_ROWS or size > _BATCH_CHARACTERS:
            yield _table(file, batch, wanted)
            batch, size = [], 0
    if batch:
        yield _table(file, batch, wanted)


def _table(file: File, batch: Sequence[Row], wanted: Wanted) -> Any:
    import pyarrow as pa

    wheres, *columns = zip(*batch, strict=True)
    columns = [[None if v is None else _json(v, quoted=False) for v in c] for c in columns]
    try:
        arrays = [pa.array(values, pa.large_string()) for values in columns]
    except UnicodeEncodeError as error:
        for name, values in zip(wanted.names(), columns, strict=True):
            for where, value in zip(wheres, values, strict=True):
                if value is not None and _printable(value) != value:
                    raise UserError(
                        f"{file.name}, {where}: column {name!r} holds half a surrogate pair"
                        " (\\ud800 to \\udfff), which is no text: mend the row"
                    ) from error
        raise
    return pa.table(arrays, names=["text", "id", "domain"])


def no_column(key: str, wanted: str, where: str, columns: Iterable[str]) -> NoReturn:
    """Raise the error for a missing column, with the columns that there are."""
    names = some([_printable(name) for name in columns], 20) or "none"
    raise UserError(f"dataset.{key} is {wanted!r}, but {where} has the columns {names}")


def _printable(text: str) -> str:
    """The text with half surrogate pairs spelled out, because a terminal cannot print them."""
    return text.encode("utf-8", "backslashreplace").decode()


def described(value: Any) -> str:
    """A JSON value as error messages show it."""
    if value is None:
        return "null"
    kinds = {Spelled: "number", str: "string", list: "list", bool: "boolean"}
    return f"the {kinds.get(type(value), 'object')} {_printable(_json(value)):.60}"


def _json(value: Any, *, quoted: bool = True) -> str:
    """A value as JSON, with numbers as the file spells them; a string with or without quotes."""
    if isinstance(value, Spelled) or (isinstance(value, str) and not quoted):
        return str(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_json(k)}: {_json(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_json, value))}]"
    return json.dumps(value, ensure_ascii=False)
