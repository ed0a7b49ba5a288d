"""JSON: an object a line, or one array of objects."""

import json
from collections.abc import Iterator
from typing import Any

from ppl_eval.data.files import File
from ppl_eval.data.formats.rows import Row, Seen, Spelled, Wanted, described, no_column
from ppl_eval.data.formats.stream import decoded
from ppl_eval.errors import UserError

# strict=False: a tab or another control character in a string is text as it stands
_decode = json.JSONDecoder(
    parse_int=Spelled, parse_float=Spelled, parse_constant=Spelled, strict=False
).decode


def json_rows(file: File, wanted: Wanted, seen: Seen) -> Iterator[Row]:
    """The rows of a JSON file, numbers as they are spelled.

    Raises:
        UserError: what is no JSON, no object, or has no text, with its line (or item).
    """
    column, row_id, domain = wanted.names()
    for place, row in _values(file):
        if not isinstance(row, dict):
            raise UserError(
                f"{file.name}, {place} is {described(row)}, but each {place.split()[0]} is an"
                ' object such as {"text": "A text."}'
            )
        if column not in row:
            no_column(column, f"{file.name}, {place}", row)
        seen.domain |= domain in row
        seen.columns = seen.columns or tuple(row)
        yield place, row[column], row.get(row_id), row.get(domain)


def _values(file: File) -> Iterator[tuple[str, Any]]:
    """(place, value) of each item of one array, or of each line."""
    lines = ((number, line) for number, line in decoded(file) if line.strip())
    number, first = next(lines, (1, ""))
    if not first.lstrip().startswith("["):
        for number, line in decoded(file):
            if line.strip():
                yield f"line {number}", _line(file, number, line)
        return
    try:
        items = _decode("".join(line for _, line in decoded(file)))
    except (ValueError, RecursionError) as error:
        try:
            value = _decode(first)
        except (ValueError, RecursionError):
            raise UserError(f"{file.name} is not JSON: {error}") from error
        yield f"line {number}", value  # a list a line
        return
    yield from ((f"item {number}", item) for number, item in enumerate(items, start=1))


def _line(file: File, number: int, line: str) -> Any:
    try:
        return _decode(line)
    except (ValueError, RecursionError) as error:
        hint = ": write an object a line, or one array" if line.strip() == "{" else ""
        raise UserError(f"{file.name}, line {number} is not JSON: {error}{hint}") from error
