"""Parquet, Arrow and Feather: only the wanted columns are read, whatever their types."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ppl_eval.data.columns import as_text, is_text
from ppl_eval.data.files import File
from ppl_eval.data.formats.rows import Seen, Wanted, places
from ppl_eval.data.formats.stream import opened
from ppl_eval.errors import UserError

_BATCH_ROWS = 2048


def arrow_tables(file: File, wanted: Wanted, seen: Seen) -> Iterator[Any]:
    """The rows of a file as ``pyarrow.Table`` with the columns text, id and domain.

    Raises:
        UserError: a column of texts that holds something else, or a row without one.
    """
    import pyarrow as pa

    column = wanted.column
    schema, batches = _parquet(file) if file.loader == "parquet" else _arrow(file)
    found = places(file.name, schema.names, wanted, seen)
    if not is_text(schema.field(column).type) and not pa.types.is_null(schema.field(column).type):
        raise UserError(
            f"{file.name}: column {column!r} holds {schema.field(column).type}, but every row needs"
            " a text: set dataset.column to a column of strings"
        )
    start = 0
    for batch in batches(
        [schema.names[place] for place in dict.fromkeys(found) if place is not None]
    ):
        none = pa.nulls(len(batch), pa.large_string())
        table = pa.Table.from_batches([batch])
        columns = [none if p is None else as_text(table.column(schema.names[p])) for p in found]
        rows = pa.table(columns, names=["text", "id", "domain"])
        _check_rows(file, rows, wanted.names(), start)
        start += len(rows)
        yield rows


def _check_rows(file: File, table: Any, names: Sequence[str | None], start: int) -> None:
    """Every text is there, and all is UTF-8, which Arrow does not check when it reads."""
    import pyarrow as pa

    try:
        table.validate(full=True)
        if not table.column("text").null_count:
            return
    except pa.ArrowInvalid:
        pass
    for row in range(len(table)):
        for name, key in zip(names, table.column_names, strict=True):
            try:
                if table[key][row].as_py() is not None or key != "text":
                    continue
                found = "null, but every row needs a text"
            except UnicodeDecodeError:
                found = "bytes that are not UTF-8"
            raise UserError(
                f"{file.name}, row {start + row} (the first is 0): column {name!r} holds {found}:"
                " mend or drop the row"
            )


_Batches = Callable[[list[str]], Iterable[Any]]


def _parquet(file: File) -> tuple[Any, _Batches]:
    import pyarrow.parquet as pq

    content = pq.ParquetFile(_seekable(file))
    return content.schema_arrow, lambda names: content.iter_batches(_BATCH_ROWS, columns=names)


def _arrow(file: File) -> tuple[Any, _Batches]:
    """Arrow's two formats: a file, which .feather is, or a stream."""
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
