"""A failure of one rank that all ranks raise, so that none waits for it in a collective."""

import traceback
from types import TracebackType

import torch
import torch.distributed as dist

from ppl_eval.errors import UserError
from ppl_eval.parallel.reduce import reduce_


class SharedFailure:
    """Keeps the exception of a ``with`` block on this rank until all ranks can raise one.

    Put work that may fail on one rank into ``with failure:``. After it every rank must call one of
    the methods.

    Attributes:
        error: this rank's exception, or None.
    """

    error: Exception | None = None

    def __enter__(self) -> "SharedFailure":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
            return True
        return False

    def raise_if_any(self, group: dist.ProcessGroup | None) -> None:
        """:meth:`raise_on_all` if a rank of ``group`` has failed; an all-reduce of one number."""
        if reduce_(torch.tensor([int(self.error is not None)]), group):
            self.raise_on_all(group)

    def raise_on_all(self, group: dist.ProcessGroup | None) -> None:
        """Raise the error of the lowest rank that failed; call it only if one has.

        Args:
            group: all ranks that call this; None for this rank alone.

        Raises:
            UserError: the same sentence on every rank.
            RuntimeError: another exception, named with its rank; the cause has its traceback.
        """
        error = self.error
        if group is None:
            assert error is not None
            raise error
        report = None
        if error is not None:
            lines = "".join(traceback.format_exception(error))
            report = isinstance(error, UserError), type(error).__name__, str(error), lines
        reports: list[tuple[bool, str, str, str] | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(reports, report, group=group)
        rank, (is_user_error, kind, sentence, lines) = next(
            (rank, each) for rank, each in enumerate(reports) if each is not None
        )
        if is_user_error:
            raise UserError(sentence) from error
        cause = error or RuntimeError(f"on rank {rank}:\n{lines}")
        raise RuntimeError(f"rank {rank} failed with {kind}: {sentence}") from cause
