"""Arrow columns -> text: what a column of ids, domains or texts holds, as its file spells it."""

import json
from typing import Any

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


def as_text(column: Chunked) -> Chunked:
    """A column as strings: numbers and times as Arrow prints them, nested values as JSON.

    Args:
        column: of any type.

    Returns:
        A column of large_string; null stays null.
    """
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
