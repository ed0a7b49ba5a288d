"""Local files, format by format -> Arrow tables of text, id and domain, as the files spell them.

Only these columns are read, so it does not matter what the others hold. Each reader names file,
line (or row) and column of what it cannot read.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ppl_eval.data.files import File
from ppl_eval.data.formats.arrow_tables import arrow_tables
from ppl_eval.data.formats.csv_rows import csv_rows
from ppl_eval.data.formats.json_rows import json_rows
from ppl_eval.data.formats.rows import tables
from ppl_eval.data.formats.stream import check_content, named
from ppl_eval.data.formats.text_rows import Lines, text_rows
from ppl_eval.data.formats.wanted import UNITS, Seen, Wanted, listed
from ppl_eval.errors import UserError

__all__ = ["UNITS", "Wanted", "read"]


def read(files: Sequence[File], wanted: Wanted) -> Iterator[Any]:
    """The rows of several files.

    Args:
        files: of one loader.
        wanted: which columns.

    Yields:
        ``pyarrow.Table`` with the columns text, id and domain (large_string).

    Raises:
        UserError: what cannot be read, with its place.
    """
    seen, lines = Seen(), Lines()
    for file in files:
        check_content(file)
        with named(file):
            if file.loader == "text":
                yield from tables(file, text_rows(file, wanted, seen, lines), wanted)
            elif file.loader == "json":
                yield from tables(file, json_rows(file, wanted, seen), wanted)
            elif file.loader == "csv":
                yield from tables(file, csv_rows(file, wanted, seen), wanted)
            else:
                yield from arrow_tables(file, wanted, seen)
    if wanted.domain and not seen.domain and seen.columns:
        raise UserError(
            f"dataset.domain_column is {wanted.domain!r}, but {files[0].name} has the columns"
            f" {listed(seen.columns)}"
        )
    lines.check(files)
