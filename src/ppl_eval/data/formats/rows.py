"""Rows of text, id and domain -> Arrow tables, each text checked."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ppl_eval.data.files import File
from ppl_eval.data.formats.wanted import Wanted, printable
from ppl_eval.errors import UserError

_BATCH_ROWS = 2048
_BATCH_CHARACTERS = 2**23


@dataclass(frozen=True)
class Rows:
    """The rows of a file.

    Attributes:
        word: what the numbers count: ``line`` or ``item``.
        rows: (number, text, id, domain); None where there is no id or domain.
    """

    word: str
    rows: Iterable[tuple[int, Any, Any, Any]]


class Spelled(str):
    """A number of a JSON file, as it is spelled there."""

    __slots__ = ()


def tables(file: File, found: Rows, wanted: Wanted) -> Iterator[Any]:
    """Rows as ``pyarrow.Table`` with the columns text, id and domain.

    Raises:
        UserError: a text that is no string, with its place.
    """
    batch: list[tuple[int, Any, Any, Any]] = []
    size = 0
    for row in found.rows:
        if type(row[1]) is not str:
            raise UserError(
                f"{file.name}, {found.word} {row[0]}: column {wanted.column!r} holds"
                f" {described(row[1])}, but every row needs a text: mend or drop the row"
            )
        batch.append(row)
        size += len(row[1])
        if len(batch) == _BATCH_ROWS or size > _BATCH_CHARACTERS:
            yield _table(file, found.word, batch, wanted)
            batch, size = [], 0
    if batch:
        yield _table(file, found.word, batch, wanted)


def _table(
    file: File, word: str, batch: Sequence[tuple[int, Any, Any, Any]], wanted: Wanted
) -> Any:
    import pyarrow as pa

    numbers, texts, ids, domains = zip(*batch, strict=True)
    columns = (texts, [_label(value) for value in ids], [_label(value) for value in domains])
    try:
        arrays = [pa.array(values, pa.large_string()) for values in columns]
    except UnicodeEncodeError as error:
        for name, values in zip(wanted.names(), columns, strict=True):
            for number, value in zip(numbers, values, strict=True):
                if value is not None and not _is_unicode(value):
                    raise UserError(
                        f"{file.name}, {word} {number}: column {name!r} holds half a surrogate pair"
                        " (\\ud800 to \\udfff), which is no text: mend the row"
                    ) from error
        raise
    return pa.table(arrays, names=["text", "id", "domain"])


def _label(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else _json(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def described(value: Any) -> str:
    """A JSON value as an error calls it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {_json(value)}"
    kinds = {Spelled: "the number", str: "the string", list: "the list"}
    return f"{kinds.get(type(value), 'the object')} {printable(_json(value)):.60}"


def _json(value: Any) -> str:
    """A value as JSON, its numbers as they are spelled."""
    if isinstance(value, Spelled):
        return str(value)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_json(str(k))}: {_json(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_json, value))}]"
    return json.dumps(value, ensure_ascii=False)
