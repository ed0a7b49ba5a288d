"""CSV and TSV: fields are text as they stand."""

import csv
import sys
from collections.abc import Iterator

from ppl_eval.data.files import File
from ppl_eval.data.formats.rows import Row, Seen, Wanted, places
from ppl_eval.data.formats.stream import lines_of
from ppl_eval.errors import UserError
from ppl_eval.plural import counted


def csv_rows(file: File, wanted: Wanted, seen: Seen) -> Iterator[Row]:
    """The rows of a CSV or TSV file under their header.

    Raises:
        UserError: a row that does not fit the header, or a quote that is not closed, with its line.
    """
    csv.field_size_limit(sys.maxsize)  # of the process; 131,072 characters as Python starts
    separator = "\t" if file.suffix == ".tsv" else ","
    rows = csv.reader((text for _, text in lines_of(file)), delimiter=separator, strict=True)
    header: list[str] | None = None
    found: list[int | None] = []
    while True:
        number = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            hint = "; a quote inside a quoted field is doubled" if '"' in f"{error}" else ""
            raise UserError(
                f"{file.name}, line {number} cannot be read as"
                f" {file.suffix[1:].upper() or 'CSV'}: {error}{hint}"
            ) from error
        if row is None:
            return
        if not row:  # a blank line
            continue
        if header is None:
            header = row
            found = places(file.name, header, wanted, seen)
            continue
        if len(row) != len(header):
            raise UserError(
                f"{file.name}, line {number} has {counted(len(row), 'field')}, but the header has"
                f" {counted(len(header), 'field')}: a field with a separator or a line's end in"
                " it needs quotes"
            )
        text, row_id, domain = (None if place is None else row[place] for place in found)
        yield f"line {number}", text, row_id, domain
