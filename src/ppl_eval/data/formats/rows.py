"""Rows of text, id and domain -> Arrow tables; what is said where a column or a text is missing."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ppl_eval.data.files import File
from ppl_eval.errors import UserError
from ppl_eval.plural import some

UNITS = ("line", "paragraph", "file")
"""What may be a document of a .txt file."""

Row = tuple[str, Any, Any, Any]
"""Where it is in its file, such as ``line 3``; text, id, domain. None where there is none."""

_BATCH_ROWS = 2048
_BATCH_CHARACTERS = 2**23


@dataclass(frozen=True)
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


class Spelled(str):
    """A number of a JSON file, as it is spelled there."""

    __slots__ = ()


def tables(file: File, rows: Iterable[Row], wanted: Wanted) -> Iterator[Any]:
    """Rows as ``pyarrow.Table`` with the columns text, id and domain.

    Raises:
        UserError: a text that is no string, naming its line.
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
        if len(batch) == _BATCH_ROWS or size > _BATCH_CHARACTERS:
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
                if value is not None and printable(value) != value:
                    raise UserError(
                        f"{file.name}, {where}: column {name!r} holds half a surrogate pair"
                        " (\\ud800 to \\udfff), which is no text: mend the row"
                    ) from error
        raise
    return pa.table(arrays, names=["text", "id", "domain"])


def found_names(
    file: str, header: Sequence[str], wanted: Wanted, seen: Seen
) -> tuple[str | None, ...]:
    """The file's columns of text, id and domain; None where there is no such column.

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
    return tuple(name if name in header else None for name in names)


def no_column(wanted: str, where: str, columns: Iterable[str]) -> NoReturn:
    """Say which columns there are instead of the one with the text."""
    raise UserError(f"dataset.column is {wanted!r}, but {where} has the columns {listed(columns)}")


def listed(columns: Iterable[str]) -> str:
    """Names of columns, of the first twenty if there are more."""
    return some([printable(name) for name in columns], 20) or "none"


def printable(text: str) -> str:
    """A text with its half surrogate pairs spelled out: no terminal takes them."""
    return text.encode("utf-8", "backslashreplace").decode()


def described(value: Any) -> str:
    """A JSON value as an error calls it."""
    if value is None:
        return "null"
    kinds = {Spelled: "number", str: "string", list: "list", bool: "boolean"}
    return f"the {kinds.get(type(value), 'object')} {printable(_json(value)):.60}"


def _json(value: Any, *, quoted: bool = True) -> str:
    """A value as JSON, its numbers as they are spelled; a string with or without quotes."""
    if isinstance(value, Spelled) or (isinstance(value, str) and not quoted):
        return str(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_json(k)}: {_json(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_json, value))}]"
    return json.dumps(value, ensure_ascii=False)
