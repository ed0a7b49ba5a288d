"""Arrow columns -> text: what a column of ids, domains or texts holds, as its file spells it."""

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
    """A column as strings: numbers and times as Arrow prints them, nested values as JSON.

    Args:
        column: values of any type.
        name: the column's name, for errors.
        origin: where the rows come from, for errors.
        rows: numbers of the rows there, for errors.
        is_needed: whether every row needs a text, which a value of another type is not.

    Returns:
        A column of large_string; null stays null.

    Raises:
        UserError: bytes that are not UTF-8; a row without a text that is needed.
    """
    import pyarrow as pa

    found = _cast(column)
    try:
        found.validate(full=True)  # Arrow does not check what its strings hold when it reads them
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
    if not pa.types.is_floating(kind):  # whose cast writes 1 for 1.0
        try:
            return column.cast(text)
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            pass
    spelled = [value if value is None else _spelled(value) for value in column.to_pylist()]
    return pa.chunked_array([pa.array(spelled, text)])


def _spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
