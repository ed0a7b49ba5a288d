"""A file -> decompressed bytes or decoded lines, with errors that name the file."""

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ppl_eval.data.files import File
from ppl_eval.errors import UserError
from ppl_eval.files import refuse_lfs_pointer

_HEAD = 1024


@contextmanager
def named(file: File) -> Iterator[None]:
    """Turn errors of the file system, a decompressor or Arrow into a UserError."""
    import pyarrow as pa

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
    import pyarrow as pa

    path = str(file.path)
    if file.compression == ".zst":
        stream: Any = io.BufferedReader(pa.input_stream(path, compression="zstd"))  # pyright: ignore
    else:
        openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        stream = openers.get(file.compression, open)(path, "rb")
    with stream:
        yield stream


def decoded(file: File) -> Iterator[tuple[int, str]]:
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


def lines_of(file: File) -> Iterator[str]:
    """The lines with their ends; a carriage return alone ends a line, too."""
    for _, text in decoded(file):
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
