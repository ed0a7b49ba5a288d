"""Rows of files that are read line by line: text, CSV and TSV, JSON."""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import Any

from ppl_eval.data.files import File
from ppl_eval.data.formats.rows import (
    UNITS,
    Row,
    Seen,
    Spelled,
    Wanted,
    described,
    found_names,
    no_column,
)
from ppl_eval.data.formats.stream import decoded, lines_of, named
from ppl_eval.errors import UserError
from ppl_eval.plural import counted

# strict=False: a tab or another control character in a string is text as it stands
_decode = json.JSONDecoder(
    parse_int=Spelled, parse_float=Spelled, parse_constant=Spelled, strict=False
).decode


def text_rows(file: File, wanted: Wanted, seen: Seen) -> Iterator[Row]:
    """The documents of a text file, which has one column, ``text``.

    Raises:
        UserError: another column is wanted.
    """
    found_names(file.name, ["text"], wanted, seen)
    for text in _documents(file, wanted.unit or "line"):
        yield "", text, None, None


def need_no_unit(files: Sequence[File]) -> None:
    """Refuse files with blank lines between others, where no unit was chosen.

    Raises:
        UserError: with the choices, and the number of documents that each gives.
    """
    if all(len([*islice(_documents(file, "paragraph"), 2)]) < 2 for file in files):
        return
    counts = {unit: sum(1 for file in files for _ in _documents(file, unit)) for unit in UNITS}
    blank = sum(not text.strip() for file in files for text in _documents(file, "line"))
    what = {
        "line": f"each line is a document ({blank:,} of them blank)",
        "paragraph": "blank lines separate documents",
        "file": "each file is a document",
    }
    choices = "; ".join(f"{u}: {counted(counts[u], 'document')}, {what[u]}" for u in UNITS)
    names = files[0].name if len(files) == 1 else f"{files[0].name} and others"
    raise UserError(
        f"{names} has blank lines between others, so what is a document has to be said: set"
        f" dataset.unit to {choices}"
    )


def _documents(file: File, unit: str) -> Iterator[str]:
    with named(file):
        if unit == "file":
            yield "".join(text for _, text in decoded(file))
            return
        lines = (text for _, text in lines_of(file))
        if unit == "line":
            yield from (line.rstrip("\r\n") for line in lines)
            return
        for is_text, paragraph in groupby(lines, lambda line: bool(line.strip())):
            if is_text:
                yield "".join(paragraph).rstrip("\r\n")


def csv_rows(file: File, wanted: Wanted, seen: Seen) -> Iterator[Row]:
    """The rows of a CSV or TSV file under their header.

    Raises:
        UserError: a row that does not fit the header, or a quote that is not closed, with its line.
    """
    csv.field_size_limit(sys.maxsize)  # of the process; 131,072 characters as Python starts
    separator = "\t" if file.suffix == ".tsv" else ","
    rows = csv.reader((text for _, text in lines_of(file)), delimiter=separator, strict=True)
    header: list[str] | None = None
    numbers: list[int | None] = []
    while True:
        line = rows.line_num + 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            hint = "; a quote inside a quoted field is doubled" if '"' in f"{error}" else ""
            raise UserError(
                f"{file.name}, line {line} cannot be read as"
                f" {file.suffix[1:].upper() or 'CSV'}: {error}{hint}"
            ) from error
        if row is None:
            return
        if not row:  # a blank line
            continue
        if header is None:
            header = row
            names = found_names(file.name, header, wanted, seen)
            numbers = [None if name is None else header.index(name) for name in names]
            continue
        if len(row) != len(header):
            raise UserError(
                f"{file.name}, line {line} has {counted(len(row), 'field')}, but the header has"
                f" {counted(len(header), 'field')}: a field with a separator or a line's end in"
                " it needs quotes"
            )
        text, row_id, domain = (None if n is None else row[n] for n in numbers)
        yield f"line {line}", text, row_id, domain


def json_rows(file: File, wanted: Wanted, seen: Seen) -> Iterator[Row]:
    """The rows of a JSON file, numbers as they are spelled.

    Raises:
        UserError: what is no JSON, no object, or has no text, with its line (or item).
    """
    column, row_id, domain = wanted.names()
    for where, row in _values(file):
        if not isinstance(row, dict):
            raise UserError(
                f"{file.name}, {where} is {described(row)}, but each {where.split()[0]} is an"
                ' object such as {"text": "A text."}'
            )
        if column not in row:
            no_column(column, f"{file.name}, {where}", row)
        seen.domain |= domain in row
        seen.columns = seen.columns or tuple(row)
        yield where, row[column], row.get(row_id), row.get(domain)


def _values(file: File) -> Iterator[tuple[str, Any]]:
    """(where it is, value) of each item of one array, or of each line."""
    lines = ((number, line) for number, line in decoded(file) if line.strip())
    number, first = next(lines, (1, ""))
    if not first.lstrip().startswith("["):
        for number, line in decoded(file):
            if line.strip():
                yield f"line {number}", _line(file, number, line)
        return
    try:
        items = _decode("".join(line for _, line in decoded(file)))
    except (ValueError, RecursionError) as error:
        try:
            value = _decode(first)
        except (ValueError, RecursionError):
            raise UserError(f"{file.name} is not JSON: {error}") from error
        yield f"line {number}", value  # a list a line
        return
    yield from ((f"item {number}", item) for number, item in enumerate(items, start=1))


def _line(file: File, number: int, line: str) -> Any:
    try:
        return _decode(line)
    except (ValueError, RecursionError) as error:
        hint = ": write an object a line, or one array" if line.strip() == "{" else ""
        raise UserError(f"{file.name}, line {number} is not JSON: {error}{hint}") from error
