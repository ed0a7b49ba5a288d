"""Standard streams that are closed, break, or cannot encode some characters.

``tune run ppl_eval | head`` closes stdout's reader while a run goes on. The run matters more than
what it prints, so a stream that cannot be written any more is dropped. :func:`repair` does this for
the whole process.
"""

import errno
import io
import os
import sys
from typing import Any

_STREAMS = ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w"))


def repair() -> None:
    """Replace this process's standard streams by streams that do not raise.

    A closed stream becomes the null device, and so does one that breaks later. If it breaks for
    another reason than a closed pipe, one line on stderr tells the user. Characters that the
    stream's encoding lacks are written as escapes. Other streams (in a notebook, in a test) stay as
    they are.
    """
    for fd, name, mode in _STREAMS:
        stream = getattr(sys, name)
        if stream is None:  # the process began without it; the file opened here gets its number
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and _is_standard(stream, fd):
            setattr(sys, name, _unbreakable(stream, fd, name))


def restart_in_utf8() -> None:
    """Start this process again in Python's UTF-8 mode, if its locale has another encoding.

    Under ``LC_ALL=C`` Python may treat file names as ASCII, and cannot open ``café`` or pass it to
    libraries that expect UTF-8. The mode cannot be changed later. Nothing happens if sys.argv is
    not the command line of the process.
    """
    args = sys.argv[1:]
    is_command_line = bool(args) and sys.orig_argv[-len(args) :] == args
    is_utf8 = sys.getfilesystemencoding() == "utf-8" or "utf8" in sys._xoptions
    if is_command_line and not is_utf8:
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


class _Dropping(io.FileIO):
    """The file of a standard stream; the null device replaces it when a write fails."""

    def __init__(self, fd: int, stream_name: str) -> None:
        super().__init__(fd, "w", closefd=False)
        self._stream_name = stream_name

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _point_to_null(self.fileno())
            if error.errno != errno.EPIPE and self._stream_name != "stderr":
                sys.stderr.write(
                    f"ppl_eval: {self._stream_name} cannot be written ({error.strerror});"
                    " going on without it\n"
                )
            return memoryview(data).nbytes


def _unbreakable(stream: io.TextIOWrapper, fd: int, name: str) -> io.TextIOWrapper:
    if isinstance(getattr(stream.buffer, "raw", None), _Dropping):
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
