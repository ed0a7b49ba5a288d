"""Reads text, CSV, TSV and JSON files, compressed or not, with errors that name file and line."""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from typing import Any

import pyarrow as pa

from ppl_eval.data.files import File
from ppl_eval.data.rows import (
    UNITS,
    Columns,
    Row,
    Spelled,
    described,
    no_column,
)
from ppl_eval.errors import UserError
from ppl_eval.files import refuse_lfs_pointer
from ppl_eval.plural import counted

_HEAD = 1024

# strict=False allows tabs and other control characters inside strings
_decode = json.JSONDecoder(
    parse_int=Spelled, parse_float=Spelled, parse_constant=Spelled, strict=False
).decode


def text_rows(file: File, columns: Columns) -> Iterator[Row]:
    """The documents of a text file, whose only column is ``text``."""
    columns.find(file.name, ["text"])
    for text in _documents(file, columns.wanted.unit or "line"):
        yield "", text, None, None


def need_no_unit(files: Sequence[File]) -> None:
    """Raise a UserError if blank lines separate paragraphs: ``dataset.unit`` must be set then."""
    if all(len([*islice(_documents(file, "paragraph"), 2)]) < 2 for file in files):
        return
    counts = {unit: sum(1 for file in files for _ in _documents(file, unit)) for unit in UNITS}
    blank = sum(not text.strip() for file in files for text in _documents(file, "line"))
    meanings = {
        "line": f"each line is a document ({blank:,} of them blank)",
        "paragraph": "blank lines separate documents",
        "file": "each file is a document",
    }
    choices = "; ".join(f"{u}: {counted(counts[u], 'document')}, {meanings[u]}" for u in UNITS)
    names = files[0].name if len(files) == 1 else f"{files[0].name} and others"
    raise UserError(
        f"{names} has blank lines between others, so what is a document has to be said: set"
        f" dataset.unit to {choices}"
    )


def _documents(file: File, unit: str) -> Iterator[str]:
    with named(file):
        if unit == "file":
            yield "".join(text for _, text in _decoded(file))
        elif unit == "line":
            yield from (line.rstrip("\r\n") for line in _lines_of(file))
        else:
            for is_text, paragraph in groupby(_lines_of(file), lambda line: bool(line.strip())):
                if is_text:
                    yield "".join(paragraph).rstrip("\r\n")


def csv_rows(file: File, columns: Columns) -> Iterator[Row]:
    """The rows of a CSV or TSV file, whose first row is the header.

    Raises:
        UserError: a row has more or fewer fields than the header, or a quote is not closed.
    """
    csv.field_size_limit(sys.maxsize)  # Python's default is 131,072 characters
    separator = "\t" if file.suffix == ".tsv" else ","
    rows = csv.reader(_lines_of(file), delimiter=separator, strict=True)
    header: list[str] = []
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
        if not header:
            header = row
            names = columns.find(file.name, header)
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


def json_rows(file: File, columns: Columns) -> Iterator[Row]:
    """The objects of a JSON file: one per line, or the items of one array.

    Raises:
        UserError: a line or item is not JSON, not an object, or has no text.
    """
    column, row_id, domain = columns.wanted.names()
    for where, row in _values(file):
        if not isinstance(row, dict):
            raise UserError(
                f"{file.name}, {where} is {described(row)}, but each {where.split()[0]} is an"
                ' object such as {"text": "A text."}'
            )
        if column not in row:
            no_column("column", column, f"{file.name}, {where}", row)
        columns.has_domain |= domain in row
        columns.header = columns.header or tuple(row)
        yield where, row[column], row.get(row_id), row.get(domain)


def _values(file: File) -> Iterator[tuple[str, Any]]:
    """(where the value is, value) for each line, or for each item of one array."""
    number, first = next(_nonblank(file), (1, ""))
    if not first.lstrip().startswith("["):
        for number, line in _nonblank(file):
            try:
                yield f"line {number}", _decode(line)
            except (ValueError, RecursionError) as error:
                hint = ": write an object a line, or one array" if line.strip() == "{" else ""
                raise UserError(f"{file.name}, line {number} is not JSON: {error}{hint}") from error
        return
    try:
        items = _decode("".join(line for _, line in _decoded(file)))
    except (ValueError, RecursionError) as error:
        try:
            value = _decode(first)
        except (ValueError, RecursionError):
            raise UserError(f"{file.name} is not JSON: {error}") from error
        yield f"line {number}", value  # every line is a list
        return
    yield from ((f"item {number}", item) for number, item in enumerate(items, start=1))


def _nonblank(file: File) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in _decoded(file) if line.strip())


@contextmanager
def named(file: File) -> Iterator[None]:
    """Turn errors of the file system, a decompressor or Arrow into a UserError."""
    try:
        yield
    except (EOFError, OSError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        if isinstance(error, EOFError) or "Truncated compressed stream" in reason:
            raise UserError(
                f"{file.name} is cut off: its compressed data end too early; fetch or write it"
                " again"
            ) from error
        raise UserError(f"{file.name} cannot be read: {reason}") from error


@contextmanager
def opened(file: File) -> Iterator[Any]:
    """The file's bytes, decompressed."""
    path = str(file.path)
    if file.compression == ".zst":
        stream: Any = io.BufferedReader(pa.input_stream(path, compression="zstd"))  # pyright: ignore
    else:
        openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        stream = openers.get(file.compression, open)(path, "rb")
    with stream:
        yield stream


def _decoded(file: File) -> Iterator[tuple[int, str]]:
    """(number from 1, line with its line end) of a UTF-8 file, without the byte order mark."""
    with opened(file) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield number, line.decode("utf-8" if number > 1 else "utf-8-sig")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{file.name}, line {number} is not UTF-8: {error.reason} at byte"
                    f" {error.start}: convert it, as by iconv -f LATIN1 -t UTF-8"
                ) from error


def _lines_of(file: File) -> Iterator[str]:
    """The lines with their ends; a carriage return alone ends a line, too."""
    for _, text in _decoded(file):
        yield from io.StringIO(text, newline="") if "\r" in text else (text,)


def check_content(file: File) -> None:
    """Raise a UserError for an empty file, a git-lfs pointer, UTF-16 or UTF-32."""
    with named(file), file.path.open("rb") as stream:
        raw = stream.read(_HEAD)
    if not raw:
        raise UserError(f"{file.name} is empty: there is nothing to measure")
    refuse_lfs_pointer(file.path, file.name)
    if file.loader in ("parquet", "arrow"):
        return
    with named(file), opened(file) as stream:
        head = stream.read(_HEAD)
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or head.count(0) * 3 > len(head):
        raise UserError(
            f"{file.name} looks like UTF-16, and is read as UTF-8: convert it, as by iconv -f"
            " UTF-16 -t UTF-8"
        )
