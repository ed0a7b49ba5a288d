"""Ledger: sums by window. A rank writes the rows of its windows; with cp, its part of each row."""

import copy
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ppl_eval.parallel.reduce import reduce_
from ppl_eval.score.batch import Tokens

NLL = ("nll_nats", "nll_nats_squared")
"""Columns of every ledger."""


class Ledger:
    """Number of scored tokens, and sums of their values, for every window of a corpus.

    Every rank has all rows, zero where it has not written. :meth:`assemble` adds them up over the
    ranks. Adding zeros changes no bits, so the result is bit-identical for any number of
    data-parallel ranks. With cp a row is the sum of its parts.

    Args:
        num_windows: rows.
        device: where they live; writing to a GPU does not wait for it.
        num_parts: ranks that share a window (cp); each writes its part of a row.
        columns: names of the sums, beginning with :data:`NLL`.

    Attributes:
        columns: names of the sums.
        num_scored: scored tokens by window (int64 [windows]).
        sums: by column and window (float64 [columns, windows]).
        num_writes: how often each row was written (int64 [windows]).
    """

    def __init__(
        self,
        num_windows: int,
        device: torch.device | str = "cpu",
        num_parts: int = 1,
        columns: Sequence[str] = NLL,
    ) -> None:
        self.num_parts = num_parts
        self.columns = tuple(columns)
        self.num_scored = torch.zeros(num_windows, dtype=torch.int64, device=device)
        self.sums = torch.zeros(len(columns), num_windows, dtype=torch.float64, device=device)
        self.num_writes = torch.zeros(num_windows, dtype=torch.int64, device=device)

    @property
    def nll_nats_sum(self) -> torch.Tensor:
        """Sum of the NLL by window (float64 [windows])."""
        return self.column("nll_nats")

    def column(self, name: str) -> torch.Tensor:
        """Sums of one column by window (float64 [windows])."""
        return self.sums[self.columns.index(name)]

    def with_nll_of(self, prefix: str) -> "Ledger":
        """The same windows, with the columns ``PREFIXnll_nats...`` as the NLL."""
        other = copy.copy(self)
        other.columns = NLL
        other.sums = torch.stack([self.column(prefix + name) for name in NLL])
        return other

    def update(self, tokens: Tokens, values: Mapping[str, torch.Tensor]) -> None:
        """Enter the windows of one batch.

        Args:
            tokens: scored on this rank.
            values: what was found of each, by name ([N] each). The column ``NAME_squared`` takes
                the square of ``NAME``.
        """
        values_NC = torch.stack([_column(values, name) for name in self.columns], dim=1)
        # one after the other within a window, so in the same order on every device; "unsafe" leaves
        # out a check of the lengths that would wait for the device
        sums_WC = torch.segment_reduce(
            values_NC, "sum", lengths=tokens.num_tokens_W, axis=0, unsafe=True, initial=0
        )
        self.num_scored.index_copy_(0, tokens.window_W, tokens.num_tokens_W)
        self.sums.index_copy_(1, tokens.window_W, sums_WC.T)
        self.num_writes.index_add_(0, tokens.window_W, torch.ones_like(tokens.window_W))

    def assemble(self, group: dist.ProcessGroup | None) -> None:
        """Complete the rows on every rank.

        Args:
            group: ranks that wrote different rows (the ``loss`` mesh), or None for this rank alone.

        Raises:
            RuntimeError: a row was not written once, or once in each part: a defect of the plan.
        """
        reduce_(self.num_scored, group)
        reduce_(self.num_writes, group)
        reduce_(self.sums, group)
        wrong = (self.num_writes != self.num_parts).nonzero().flatten().tolist()
        if wrong:
            raise RuntimeError(f"windows not scored exactly once: {wrong[:10]} of {len(wrong)}")

    def first_non_finite(self) -> tuple[int, str] | None:
        """Number of the first window with a NaN or infinite sum and the first such column, or
        None."""
        if self.sums.sum().isfinite():
            return None
        bad = (~self.sums.isfinite()).T.nonzero()
        return None if len(bad) == 0 else (int(bad[0, 0]), self.columns[int(bad[0, 1])])


def _column(values: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name in values:
        return values[name].double()
    return values[name.removesuffix("_squared")].double().square()
