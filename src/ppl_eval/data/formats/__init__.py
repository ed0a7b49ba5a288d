"""Local files of any format -> Arrow tables of text, id and domain, spelled as in the files.

Only these three columns are read, so the other columns may hold anything.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ppl_eval.data.files import File
from ppl_eval.data.formats.arrow_tables import arrow_tables
from ppl_eval.data.formats.lines import csv_rows, json_rows, need_no_unit, text_rows
from ppl_eval.data.formats.rows import UNITS, Seen, Wanted, find_columns, tables
from ppl_eval.data.formats.stream import check_content, named

__all__ = ["UNITS", "Seen", "Wanted", "find_columns", "read"]

_ROWS = {"text": text_rows, "json": json_rows, "csv": csv_rows}


def read(files: Sequence[File], wanted: Wanted) -> Iterator[Any]:
    """Read files that all have the same loader.

    Yields:
        ``pyarrow.Table`` with the columns text, id and domain (large_string).

    Raises:
        UserError: a row cannot be read; the error names its file, line (or row) and column.
    """
    seen = Seen()
    for file in files:
        check_content(file)
    if files[0].loader == "text" and wanted.unit is None:
        need_no_unit(files)
    for file in files:
        with named(file):
            if file.loader in _ROWS:
                yield from tables(file, _ROWS[file.loader](file, wanted, seen), wanted)
            else:
                yield from arrow_tables(file, wanted, seen)
    seen.need_domain(wanted, files[0].name)
