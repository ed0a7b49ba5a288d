"""Parquet, Arrow and Feather: only the wanted columns are read, whatever their types."""

from collections.abc import Callable, Iterator
from typing import Any

from ppl_eval.data.columns import as_text, is_text
from ppl_eval.data.files import File
from ppl_eval.data.formats.stream import opened
from ppl_eval.data.formats.wanted import Seen, Wanted, places
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
        _check_rows(file, rows, column, start)
        start += len(rows)
        yield rows


def _check_rows(file: File, table: Any, column: str, start: int) -> None:
    """Every text is there, and is UTF-8, which Arrow does not check when it reads."""
    import pyarrow as pa

    try:
        table.validate(full=True)
        bad = [] if not table.column("text").null_count else table.column("text").to_pylist()
        found = "null"
    except pa.ArrowInvalid:
        bad, found = _not_utf8(table.column("text")), "bytes that are not UTF-8"
    for row, text in enumerate(bad):
        if text is None:
            raise UserError(
                f"{file.name}, row {start + row} (the first is 0): column {column!r} holds {found},"
                " but every row needs a text: mend or drop the row"
            )
    if bad:
        raise UserError(
            f"{file.name}, rows {start} to {start + len(table) - 1}: the id or the domain holds"
            " bytes that are not UTF-8: mend the rows"
        )


def _not_utf8(column: Any) -> list[str | None]:
    texts: list[str | None] = []
    for value in column:
        try:
            texts.append(value.as_py())
        except UnicodeDecodeError:
            texts.append(None)
    return texts


_Batches = Callable[[list[str]], Iterator[Any]]


def _parquet(file: File) -> tuple[Any, _Batches]:
    import pyarrow.parquet as pq

    content = pq.ParquetFile(_seekable(file))
    return content.schema_arrow, lambda names: content.iter_batches(_BATCH_ROWS, columns=names)


def _arrow(file: File) -> tuple[Any, _Batches]:
    """Arrow's formats: a file, which .feather is, a stream, and the first .feather."""
    import pyarrow as pa

    content = _seekable(file)
    magic = bytes(content.read(4))
    content.seek(0)
    if magic == b"FEA1":
        import pyarrow.feather

        table = pyarrow.feather.read_table(content)
        return table.schema, lambda names: iter(table.select(names).to_batches(_BATCH_ROWS))
    if magic == b"ARRO":
        reader = pa.ipc.open_file(content)
        batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        reader = pa.ipc.open_stream(content)
        batches = iter(reader)

    def selected(names: list[str]) -> Iterator[Any]:
        for batch in batches:
            for begin in range(0, len(batch), _BATCH_ROWS):
                yield batch.select(names).slice(begin, _BATCH_ROWS)

    return reader.schema, selected


def _seekable(file: File) -> Any:
    import pyarrow as pa

    if not file.compression:
        return pa.memory_map(str(file.path))
    with opened(file) as stream:
        return pa.BufferReader(stream.read())
