"""The output folder. It holds the files of one run, never a mixture of two."""

import atexit
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO

from ppl_eval.errors import UserError

RESULTS = "results.json"
DOCUMENTS = "documents.jsonl"
TOKENS = "tokens.parquet"
WINDOWS = "windows.parquet"
CONFIG = "torchtune_config.yaml"
"""Written by torchtune's metric loggers, which take the name from its recipes."""

logger = logging.getLogger("ppl_eval")


class OutputFolder:
    """``output_dir``, for this run alone until its results are published.

    Results are written into a hidden folder inside, and put in place when they are whole. What a
    killed run left there is removed. Files under other names are not touched.

    Args:
        name: path of the folder, which is made if need be.

    Raises:
        UserError: nothing can be written there, another run will write there, or a file under one
            of our names is not ours.
    """

    def __init__(self, name: str) -> None:
        self.path = Path(name)
        self._unfinished = self.path / ".writing"
        try:
            self._lock = _lock(self._unfinished)
            for left in self._unfinished.iterdir():
                if left.name != "lock":
                    left.unlink()
        except BlockingIOError as error:
            raise UserError(
                f"output_dir is {name}, but another run is going to write its results there:"
                " wait for its end or set another output_dir"
            ) from error
        except OSError as error:
            raise UserError(
                f"output_dir is {name}, but nothing can be written there: {_reason(error)}"
            ) from error
        atexit.register(self.close)
        for file in (RESULTS, DOCUMENTS, TOKENS, WINDOWS, CONFIG):
            if (self.path / file).exists() and not _is_ours(self.path / file):
                raise UserError(
                    f"output_dir is {name}, whose {file} is not from ppl_eval and would be"
                    " replaced: set another output_dir"
                )
        self._earlier = _num_scored_and_description(self.path / RESULTS)

    def warn_if_smaller(self, num_scored: int) -> None:
        """Say so if a run of ``num_scored`` tokens will replace a larger one's results."""
        if self._earlier is not None and num_scored < self._earlier[0]:
            logger.warning(
                "warning: %s has the results of a larger run (%s), which this one of %s scored"
                " tokens will replace: another output_dir keeps them",
                *(self.path, self._earlier[1], f"{num_scored:,}"),
            )

    def publish(self, writers: Mapping[str, Callable[[Path], None]]) -> str | None:
        """Write files whole, then put them in the place of an earlier run's, results.json last.

        A file that cannot be written (a full disk) is left out; the others are published without
        it. The earlier run's results.json goes first: wherever the process ends, the folder has
        none, rather than one that disagrees with the other files.

        Args:
            writers: name of a file -> what writes it to a path; the most important first.

        Returns:
            In one sentence, what is missing; None if nothing is.

        Raises:
            UserError: an earlier file cannot be replaced. The new ones are kept in another folder.
        """
        try:
            missing = self._write(writers)
            self._replace()
        finally:
            self.close()
        if self._earlier is not None and len(missing) < len(writers):
            logger.info("replaced the results of an earlier run (%s)", self._earlier[1])
        if not missing:
            return None
        others = [name for name in writers if name not in missing]
        rest = f"; {self.path} has {', '.join(others)} of this run" if others else ""
        lost = ", ".join(f"{name} ({reason})" for name, reason in missing.items())
        return f"output_dir is {self.path}, where this cannot be written: {lost}{rest}"

    def close(self) -> None:
        """Let other runs have the folder."""
        atexit.unregister(self.close)
        if not self._lock.closed:
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._lock.close()

    def _write(self, writers: Mapping[str, Callable[[Path], None]]) -> dict[str, str]:
        """Name -> reason of each file that cannot be written."""
        missing = {}
        for name, write in writers.items():
            path = self._unfinished / name
            try:
                write(path)
                with path.open("rb+") as file:
                    os.fsync(file.fileno())  # some file systems tell only now that they are full
            except OSError as error:
                path.unlink(missing_ok=True)
                missing[name] = _reason(error)
        return missing

    def _replace(self) -> None:
        complete = [
            n for n in (TOKENS, WINDOWS, DOCUMENTS, RESULTS) if (self._unfinished / n).exists()
        ]
        if not complete:
            return
        try:
            for name in (RESULTS, DOCUMENTS, TOKENS, WINDOWS, CONFIG):
                (self.path / name).unlink(missing_ok=True)
            for name in complete:
                (self._unfinished / name).rename(self.path / name)
        except OSError as error:
            kept = self.path / f"results_{datetime.now():%Y-%m-%d_%H-%M-%S}"
            self._unfinished.rename(kept)
            (kept / "lock").unlink()
            raise UserError(
                f"{error.filename} cannot be replaced ({_reason(error)});"
                f" the new files are in {kept}"
            ) from error


def replace_results(folder: Path, write: Callable[[Path], None]) -> None:
    """Put another results.json into a folder, in one step.

    Raises:
        UserError: it cannot be written; the one that is there is kept.
    """
    unfinished = folder / f".{RESULTS}"
    try:
        write(unfinished)
        unfinished.replace(folder / RESULTS)
    except OSError as error:
        raise UserError(f"{folder / RESULTS} cannot be replaced: {_reason(error)}") from error


def _lock(folder: Path) -> IO[bytes]:
    """An open file in ``folder`` that no other process has while this one has it.

    On a file system without locks everyone gets it; then two runs at once are not noticed.

    Raises:
        BlockingIOError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("ab")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.close()
        raise BlockingIOError from error
    except OSError:
        pass
    return file


def _is_ours(file: Path) -> bool:
    """Whether what has one of our names is a result, which the next run may replace."""
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet as pq

            return not {"nll_nats", "nll_nats_sum"}.isdisjoint(pq.read_schema(file).names)
        with file.open(encoding="utf-8") as text:
            if file.name == CONFIG:
                return "\nmax_tokens_per_batch:" in text.read()
            if file.name == DOCUMENTS:
                return "nll_nats_sum" in json.loads(text.readline())
            return {"schema_version", "counts", "metrics"} <= json.load(text).keys()
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def _num_scored_and_description(results: Path) -> tuple[int, str] | None:
    if not results.exists():
        return None
    content = json.loads(results.read_text(encoding="utf-8"))
    num_scored = content["counts"]["scored_tokens"]
    perplexity = content["metrics"]["token_perplexity"]
    when = datetime.fromtimestamp(results.stat().st_mtime)
    metric = "no finite perplexity" if perplexity is None else f"token ppl {perplexity:.4f}"
    return num_scored, f"{num_scored:,} scored tokens, {metric}, {when:%Y-%m-%d %H:%M}"


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
