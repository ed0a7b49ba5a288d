"""Reads Parquet, Arrow and Feather files."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ppl_eval.data.columns import as_text, is_text
from ppl_eval.data.files import File
from ppl_eval.data.formats.rows import Seen, Wanted, find_columns
from ppl_eval.data.formats.stream import opened
from ppl_eval.errors import UserError

_BATCH_ROWS = 2048


def arrow_tables(file: File, wanted: Wanted, seen: Seen) -> Iterator[Any]:
    """The rows of a file as ``pyarrow.Table`` with the columns text, id and domain.

    Raises:
        UserError: the text's column does not hold strings, or a row has no text.
    """
    import pyarrow as pa

    schema, batches = _parquet(file) if file.loader == "parquet" else _arrow(file)
    names = find_columns(file.name, schema.names, wanted, seen)
    kind = schema.field(wanted.column).type
    if not is_text(kind) and not pa.types.is_null(kind):
        raise UserError(
            f"{file.name}: column {wanted.column!r} holds {kind}, but every row needs a text: set"
            " dataset.column to a column of strings"
        )
    start = 0
    for batch in batches([name for name in dict.fromkeys(names) if name is not None]):
        table, rows = pa.Table.from_batches([batch]), range(start, start + len(batch))
        columns = [
            pa.nulls(len(batch), pa.large_string())
            if name is None
            else as_text(table[name], name, file.name, rows, is_needed=name == wanted.column)
            for name in names
        ]
        yield pa.table(columns, names=["text", "id", "domain"])
        start += len(batch)


_Batches = Callable[[list[str]], Iterable[Any]]
"""Names of columns -> batches of rows with these columns."""


def _parquet(file: File) -> tuple[Any, _Batches]:
    import pyarrow.parquet as pq

    content = pq.ParquetFile(_seekable(file))
    return content.schema_arrow, lambda names: content.iter_batches(_BATCH_ROWS, columns=names)


def _arrow(file: File) -> tuple[Any, _Batches]:
    """Arrow's two formats: the file format, which .feather files have, or the stream format."""
    import pyarrow as pa

    content = _seekable(file)
    is_file = bytes(content.read(6)) == b"ARROW1"
    content.seek(0)
    table = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(content).read_all()
    return table.schema, lambda names: table.select(names).to_batches(_BATCH_ROWS)


def _seekable(file: File) -> Any:
    import pyarrow as pa

    if not file.compression:
        return pa.memory_map(str(file.path))
    with opened(file) as stream:
        return pa.BufferReader(stream.read())
