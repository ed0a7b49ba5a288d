"""Arrow columns of any type -> columns of strings, spelled as in the file."""

import json
from collections.abc import Sequence
from typing import Any

from ppl_eval.errors import UserError

Chunked = Any
"""``pyarrow.ChunkedArray``; pyarrow is imported where it is used."""


def is_text(kind: Any) -> bool:
    """Whether a column of this Arrow type holds strings, dictionary-encoded or not."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    views = getattr(pa.types, "is_string_view", None)  # since pyarrow 16
    plain = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return plain or (views is not None and views(kind))


def as_text(
    column: Chunked, name: str, origin: str, rows: Sequence[int], *, is_needed: bool = False
) -> Chunked:
    """A column as large_string: numbers and times as Arrow prints them, nested values as JSON.

    Args:
        column: values of any type; nulls stay null.
        name: the column's name, for errors.
        origin: where the rows come from, for errors.
        rows: the number of each row in its file or data set, for errors.
        is_needed: every row must hold a string.

    Raises:
        UserError: bytes that are not UTF-8; a row without the string that it needs.
    """
    import pyarrow as pa

    found = _cast(column)
    try:
        found.validate(full=True)  # Arrow does not check for UTF-8 when it reads a file
        if not is_needed or (is_text(column.type) and not found.null_count):
            return found
    except pa.ArrowInvalid:
        pass
    for row, value in zip(rows, found, strict=True):
        try:
            text = value.as_py()
        except UnicodeDecodeError:
            wrong = "bytes that are not UTF-8"
        else:
            if not is_needed or (text is not None and is_text(column.type)):
                continue
            wrong = "null" if text is None else f"{column.type} {text:.60}"
            wrong += ", but every row needs a text"
        raise UserError(
            f"{origin}, row {row} (the first is 0): column {name!r} holds {wrong}: mend or drop"
            " the row"
        )
    return found


def _cast(column: Chunked) -> Chunked:
    import pyarrow as pa

    text, kind = pa.large_string(), column.type
    if not pa.types.is_floating(kind):  # Arrow casts 1.0 to "1"
        try:
            return column.cast(text)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            pass
    spell = json.JSONEncoder(ensure_ascii=False, default=str).encode
    spelled = [value if value is None else spell(value) for value in column.to_pylist()]
    return pa.chunked_array([pa.array(spelled, text)])
