"""Local files of any format -> a memory-mapped table in the cache of the datasets library.

Its columns are text, id and domain, spelled as in the files. Other columns are not read, so they
may hold anything. Other modules import this one late, because it imports the datasets library.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.exceptions import DatasetsError

from ppl_eval import fingerprint
from ppl_eval.data.columns import as_text, is_text
from ppl_eval.data.files import File
from ppl_eval.data.hub import unwritable
from ppl_eval.data.rows import BATCH_ROWS, Columns, Wanted, tables
from ppl_eval.data.text_files import (
    check_content,
    csv_rows,
    json_rows,
    named,
    need_no_unit,
    opened,
    text_rows,
)
from ppl_eval.errors import UserError

_VERSION = 1
"""Increase it with every change that reads other rows from the same files: tables that are in the
cache already are not used then."""

_FEATURES = datasets.Features(
    {name: datasets.Value("large_string") for name in ("text", "id", "domain")}
)

_ROWS = {"text": text_rows, "json": json_rows, "csv": csv_rows}


class _TextBuilder(datasets.ArrowBasedBuilder):
    """Writes the rows into the cache. The library locks it: one process writes, others wait."""

    def __init__(self, key: str, splits: Mapping[str, tuple[File, ...]], wanted: Wanted) -> None:
        self._files, self._wanted = splits, wanted
        super().__init__(dataset_name="ppl_eval_text", config_name=f"content-{key}")

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=_FEATURES)

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        return [
            datasets.SplitGenerator(name=split, gen_kwargs={"split": split})
            for split in self._files
        ]

    def _generate_tables(self, **kwargs: Any) -> Iterator[tuple[Any, Any]]:
        yield from enumerate(_read(self._files[kwargs["split"]], self._wanted))


def of_files(splits: Mapping[str, tuple[File, ...]], wanted: Wanted) -> Mapping[str, Any]:
    """The rows of files as data sets with the columns text, id and domain, by split.

    Processes that read the same files share one table.

    Args:
        splits: name of a split -> its files; all files have the same loader.
        wanted: which columns to read.

    Raises:
        UserError: a row cannot be read, or the cache cannot be written.
    """
    files = [file for found in splits.values() for file in found]
    try:
        facts = [(str(file.path.absolute()), file.path.stat().st_mtime_ns) for file in files]
        # the time alone is not enough: a file may change within a tick of the clock, or keep it
        content = fingerprint.of_files(file.path for file in files)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
    shape = [(split, [(f.name, f.loader) for f in found]) for split, found in splits.items()]
    key = fingerprint.of(_VERSION, content, facts, shape, vars(wanted))
    try:
        builder = _TextBuilder(key, splits, wanted)
        builder.download_and_prepare()
        rows = builder.info.splits or {}
        return {
            # as_dataset raises an error for a split without rows
            name: builder.as_dataset(name)
            if rows[name].num_examples
            else datasets.Dataset.from_dict({column: [] for column in _FEATURES}, _FEATURES)
            for name in splits
        }
    except (DatasetsError, OSError) as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from error
        for reason in (error, cause):
            if isinstance(reason, OSError):
                raise UserError(unwritable(reason)) from error
        raise


def _read(files: Sequence[File], wanted: Wanted) -> Iterator[Any]:
    """Read files that all have the same loader.

    Yields:
        ``pyarrow.Table`` with the columns text, id and domain (large_string).

    Raises:
        UserError: a row cannot be read; the error names its file, line (or row) and column.
    """
    columns = Columns(wanted)
    for file in files:
        check_content(file)
    if files[0].loader == "text" and wanted.unit is None:
        need_no_unit(files)
    for file in files:
        with named(file):
            if file.loader in _ROWS:
                yield from tables(file, _ROWS[file.loader](file, columns), wanted)
            else:
                yield from _arrow_tables(file, columns)
    columns.need_domain(files[0].name)


def _arrow_tables(file: File, columns: Columns) -> Iterator[Any]:
    """The rows of a file as ``pyarrow.Table`` with the columns text, id and domain.

    Raises:
        UserError: the text's column does not hold strings, or a row has no text.
    """
    schema, batches = _parquet(file) if file.loader == "parquet" else _arrow(file)
    wanted = columns.wanted
    names = columns.find(file.name, schema.names)
    kind = schema.field(wanted.column).type
    if not is_text(kind) and not pa.types.is_null(kind):
        raise UserError(
            f"{file.name}: column {wanted.column!r} holds {kind}, but every row needs a text: set"
            " dataset.column to a column of strings"
        )
    start = 0
    for batch in batches([name for name in dict.fromkeys(names) if name is not None]):
        table, rows = pa.Table.from_batches([batch]), range(start, start + len(batch))
        arrays = [
            pa.nulls(len(batch), pa.large_string())
            if name is None
            else as_text(table[name], name, file.name, rows, is_needed=name == wanted.column)
            for name in names
        ]
        yield pa.table(arrays, names=["text", "id", "domain"])
        start += len(batch)


_Batches = Callable[[list[str]], Iterable[Any]]
"""Names of columns -> batches of rows with these columns."""


def _parquet(file: File) -> tuple[Any, _Batches]:
    content = pq.ParquetFile(_seekable(file))
    return content.schema_arrow, lambda names: content.iter_batches(BATCH_ROWS, columns=names)


def _arrow(file: File) -> tuple[Any, _Batches]:
    """Arrow's two formats: the file format, which .feather files have, or the stream format."""
    content = _seekable(file)
    is_file = bytes(content.read(6)) == b"ARROW1"
    content.seek(0)
    table = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(content).read_all()
    return table.schema, lambda names: table.select(names).to_batches(BATCH_ROWS)


def _seekable(file: File) -> Any:
    if not file.compression:
        return pa.memory_map(str(file.path))
    with opened(file) as stream:
        return pa.BufferReader(stream.read())
