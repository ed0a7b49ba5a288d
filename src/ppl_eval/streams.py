"""Standard streams that may be closed, full, or without our letters.

``tune run ppl_eval | head`` closes the reader's end of stdout while a run goes on. A run is worth
more than what it prints, so a stream that cannot be written any more is dropped and the run goes
on. :func:`repair` does this for the whole process; nothing else has to think of it.
"""

import errno
import io
import os
import sys
from typing import Any

_STREAMS = ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w"))


def repair() -> None:
    """Replace this process's standard streams by ones that do not raise.

    A closed stream becomes the null device; one that breaks later does so then. If it breaks for
    another reason than a reader that has gone, one line on stderr says so. Letters that the
    stream's encoding lacks are written as escapes. Streams that are no standard ones (a notebook's,
    a test's) stay as they are.
    """
    for fd, name, mode in _STREAMS:
        stream = getattr(sys, name)
        if stream is None:  # the process was started without it; what is opened gets its number
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and _is_standard(stream, fd):
            setattr(sys, name, _unbreakable(stream, fd, name))


def restart_in_utf8() -> None:
    """Start this process again in Python's UTF-8 mode, if its locale has another encoding.

    Under ``LC_ALL=C`` Python may take file names for ASCII, and then cannot open ``café`` if a
    config names it, nor hand it to libraries that expect UTF-8. The mode cannot be changed later.
    Does nothing where the process's command line is not the one that is being run.
    """
    args = sys.argv[1:]
    ours = bool(args) and sys.orig_argv[-len(args) :] == args
    if sys.getfilesystemencoding() != "utf-8" and ours and "utf8" not in sys._xoptions:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


class _Dropping(io.FileIO):
    """The file behind a standard stream; the null device takes its place when a write fails."""

    def __init__(self, fd: int, name: str) -> None:
        super().__init__(fd, "w", closefd=False)
        self._what = name

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _point_to_null(self.fileno())
            if error.errno != errno.EPIPE and self._what != "stderr":
                sys.stderr.write(
                    f"ppl_eval: {self._what} cannot be written ({error.strerror});"
                    " going on without it\n"
                )
            return memoryview(data).nbytes


def _unbreakable(stream: io.TextIOWrapper, fd: int, name: str) -> io.TextIOWrapper:
    raw = getattr(stream.buffer, "raw", None)
    if isinstance(raw, _Dropping):
        return stream
    try:
        stream.flush()
    except OSError:
        _point_to_null(fd)
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Dropping(fd, name)),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering or stream.write_through,
    )


def _is_standard(stream: Any, fd: int) -> bool:
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == fd
    except (OSError, ValueError):  # in memory, or closed
        return False


def _point_to_null(fd: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != fd:
        os.dup2(null, fd)
        os.close(null)
