"""Local files, format by format -> Arrow tables of text, id and domain, as the files spell them.

Only these columns are read, so it does not matter what the others hold. Each reader names file,
line (or row) and column of what it cannot read.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ppl_eval.data.files import File
from ppl_eval.data.formats.arrow_tables import arrow_tables
from ppl_eval.data.formats.lines import csv_rows, json_rows, need_no_unit, text_rows
from ppl_eval.data.formats.rows import UNITS, Seen, Wanted, listed, tables
from ppl_eval.data.formats.stream import check_content, named
from ppl_eval.errors import UserError

__all__ = ["UNITS", "Wanted", "read"]

_ROWS = {"text": text_rows, "json": json_rows, "csv": csv_rows}


def read(files: Sequence[File], wanted: Wanted) -> Iterator[Any]:
    """The rows of several files.

    Args:
        files: what is read, all by one loader.
        wanted: which columns are read.

    Yields:
        ``pyarrow.Table`` with the columns text, id and domain (large_string).

    Raises:
        UserError: what cannot be read, naming file and line (or row).
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
    if wanted.domain and not seen.domain and seen.columns:
        raise UserError(
            f"dataset.domain_column is {wanted.domain!r}, but {files[0].name} has the columns"
            f" {listed(seen.columns)}"
        )
