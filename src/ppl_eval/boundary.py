"""The boundary between a run and the terminal: one error, shown once, on any number of ranks.

A rank that fails makes the others fail too (a closed connection, a collective that times out).
Through the rendezvous store the ranks find out which rank failed first, and only that rank writes
to stderr. Every rank also leaves a message in the file from which torchrun makes its report.

Only programs import this module, before torchtune: the import silences a notice of torchao.
"""

import contextlib
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

from ppl_eval import compat, streams
from ppl_eval.errors import UserError
from ppl_eval.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

logger = logging.getLogger("ppl_eval")
compat.quiet()

_WAIT_FOR_FIRST = timedelta(seconds=10)


def set_log_level(level: str) -> None:
    """Show rank 0's log on stderr, from ``level`` up; other ranks' only at DEBUG."""
    logger.handlers = [logging.StreamHandler()]
    logger.propagate = False
    logger.setLevel(level if Ranks.from_env().rank == 0 or level == "DEBUG" else logging.ERROR)


def guarded(main: Callable[[], object], *, alone: bool = False) -> None:
    """Run ``main`` and turn any exception into one message and a non-zero exit of this process.

    Every rank calls it. The rank that failed first shows a :class:`UserError` as a sentence,
    anything else as a traceback; with ``log_level: DEBUG`` every rank shows its traceback. A
    standard stream that is closed or breaks does not end the run; see :mod:`ppl_eval.streams`.

    Args:
        main: the program.
        alone: this process has no peers, whatever the environment says.

    Raises:
        SystemExit: with code 1 after an error, 3 above a limit of ``fail_if``, and 130 after
            Ctrl-C. If there are several processes, each ends without running destructors, which
            could wait for peers that are gone.
    """
    streams.restart_in_utf8()
    streams.repair()
    alone = alone or Ranks.from_env().world_size == 1
    store = None
    try:
        store = None if alone else _connect()
        main()
    except KeyboardInterrupt:
        _report(store, "ppl_eval: interrupted")
        _leave(130, alone)
    except UserError as error:
        debug = logger.isEnabledFor(logging.DEBUG)
        _report(store, traceback.format_exc() if debug else f"ppl_eval: error: {error}")
        _leave(error.exit_code, alone)
    except Exception:  # noqa: BLE001  (the boundary: any error is shown once)
        rank = "" if alone else f" on rank {Ranks.from_env().rank}"
        _report(store, f"ppl_eval: unexpected error{rank}\n{traceback.format_exc()}")
        _leave(1, alone)


def _connect() -> "Store":
    """The launcher's store, which exists before any process group."""
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(rendezvous("env://"))
    except ValueError as error:
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {error}: start the processes by"
            " `tune run --nproc_per_node N` or torchrun"
        ) from error
    return store


def _report(store: "Store | None", message: str) -> None:
    """Write ``message`` to stderr if this rank failed first, or at log level DEBUG."""
    if store is None:
        _show(message)
        return _tell_launcher(message, first=True)
    import torch.distributed as dist

    # torchrun keeps the store when it starts the ranks again
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    failures, shown = f"ppl_eval/failures/{attempt}", f"ppl_eval/shown/{attempt}"
    try:
        first = store.add(failures, 1) == 1
    except dist.DistError:  # the store ended with its host, a rank that has shown its error
        first = False
    if first or logger.isEnabledFor(logging.DEBUG):
        _show(message)
    if first:
        _tell_launcher(message, first=True)
        with contextlib.suppress(dist.DistError):
            store.set(shown, str(Ranks.from_env().rank))
        return
    try:  # the launcher kills all ranks when one ends: wait until the first has shown its error
        store.wait([shown], _WAIT_FOR_FIRST)
        cause = f"rank {store.get(shown).decode()}"
    except dist.DistError:
        cause = "another rank"
    _tell_launcher(f"ended by the error of {cause}", first=False)


def _tell_launcher(message: str, *, first: bool) -> None:
    """Leave ``message`` for torchrun's report.

    torchrun reports the entry with the smallest time as the cause. A rank without an entry gets the
    second in which torchrun saw it end, so the first failure is dated one second back.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    timestamp = str(int(time.time()) - first)
    content = {"message": {"message": message.rstrip(), "extraInfo": {"timestamp": timestamp}}}
    with contextlib.suppress(OSError), open(file, "w", encoding="ascii") as out:
        json.dump(content, out)


def _show(message: str) -> None:
    print(message.rstrip(), file=sys.stderr, flush=True)  # noqa: T201


def _leave(code: int, alone: bool) -> None:
    if alone:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
