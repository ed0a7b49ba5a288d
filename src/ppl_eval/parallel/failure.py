"""A failure of one rank that all ranks raise, so that none waits for it in a collective."""

import traceback
from types import TracebackType

import torch
import torch.distributed as dist

from ppl_eval.errors import UserError
from ppl_eval.parallel.reduce import reduce_


class SharedFailure:
    """Holds back what this rank alone would raise, until all ranks can raise it.

    Work that may fail on one rank stands in ``with failure:``. An exception ends the block and is
    kept: every rank must then call one of the methods.

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
        """Raise on every rank if one of them has failed. Reduces one number; ``group`` is all
        ranks that call this, None for this rank alone."""
        num_failed = reduce_(torch.tensor([int(self.error is not None)]), group)
        if num_failed:
            self.raise_on_all(group)

    def raise_on_all(self, group: dist.ProcessGroup | None) -> None:
        """Raise the error of the first rank that failed; all ranks know that one has.

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
        mine = None
        if error is not None:
            lines = "".join(traceback.format_exception(error))
            mine = isinstance(error, UserError), type(error).__name__, str(error), lines
        found: list[tuple[bool, str, str, str] | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, mine, group=group)
        rank, (is_user_error, kind, sentence, lines) = next(
            (rank, each) for rank, each in enumerate(found) if each is not None
        )
        if is_user_error:
            raise UserError(sentence) from error
        cause = error or RuntimeError(f"as rank {rank} has it:\n{lines}")
        raise RuntimeError(f"rank {rank} failed with {kind}: {sentence}") from cause
