"""JSON: an object a line, or one array of objects."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from ppl_eval.data.files import File
from ppl_eval.data.formats.rows import Rows, Spelled, described
from ppl_eval.data.formats.stream import decoded
from ppl_eval.data.formats.wanted import Seen, Wanted, no_column
from ppl_eval.errors import UserError

_MISSING = object()


class _Repeated(dict[str, Any]):
    """A JSON object in which a name stands twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.names = [name for name, _ in pairs]


def _decoder() -> json.JSONDecoder:
    def with_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        return found if len(found) == len(pairs) else _Repeated(pairs)

    # strict=False: a tab or another control character in a string is text as it stands
    return json.JSONDecoder(
        object_pairs_hook=with_names,
        parse_int=Spelled,
        parse_float=Spelled,
        parse_constant=Spelled,
        strict=False,
    )


def json_rows(file: File, wanted: Wanted, seen: Seen) -> Rows:
    """The rows of a JSON file, numbers as they are spelled.

    Raises:
        UserError: what is no JSON, no object, or has no text, with its line (or item).
    """
    if _first_character(file) == "[":
        return Rows("item", _json_objects(file, "item", _items(file), wanted, seen))
    return Rows("line", _json_objects(file, "line", _json_lines(file), wanted, seen))


def _json_lines(file: File) -> Iterator[tuple[int, Any]]:
    decode = _decoder().decode
    for number, line in decoded(file):
        if not line or line.isspace():
            continue
        try:
            yield number, decode(line)
        except (ValueError, RecursionError) as error:
            hint = ": write an object a line, or one array" if line.strip() == "{" else ""
            raise UserError(f"{file.name}, line {number} is not JSON: {error}{hint}") from error


def _items(file: File) -> Iterator[tuple[int, Any]]:
    """The items of one array, or the only value of a first line that is one by itself."""
    texts = [text for _, text in decoded(file)]
    try:
        items = _decoder().decode("".join(texts))
    except (ValueError, RecursionError) as error:
        number, first = next((n, text) for n, text in enumerate(texts, 1) if text.strip())
        try:
            value = _decoder().decode(first)
        except (ValueError, RecursionError):
            raise UserError(f"{file.name} is not JSON: {error}") from error
        _no_object(f"{file.name}, line {number}", value, "line")
    yield from enumerate(items, start=1)


def _json_objects(
    file: File, word: str, values: Iterable[tuple[int, Any]], wanted: Wanted, seen: Seen
) -> Iterator[tuple[int, Any, Any, Any]]:
    column, row_id, domain = wanted.names()
    for number, row in values:
        if type(row) is not dict:
            place = f"{file.name}, {word} {number}"
            if not isinstance(row, _Repeated):
                _no_object(place, row, word)
            for name in (column, row_id, domain):
                if row.names.count(str(name)) > 1:
                    raise UserError(f"{place} has two values called {name!r}: remove one")
        text = row.get(column, _MISSING)
        if text is _MISSING:
            no_column(column, f"{file.name}, {word} {number}", row)
        if domain is not None and domain in row:
            seen.domain = True
        if not seen.columns:
            seen.columns = tuple(row)
        yield number, text, row.get(row_id), None if domain is None else row.get(domain)


def _no_object(place: str, value: Any, word: str) -> NoReturn:
    raise UserError(
        f'{place} is {described(value)}, but each {word} is an object such as {{"text": "A text."}}'
    )


def _first_character(file: File) -> str:
    return next((text.lstrip()[0] for _, text in decoded(file) if text.strip()), "")
