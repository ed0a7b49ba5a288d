"""Ledger: one row a window, written by one data-parallel rank, or in parts by the ranks that share
the window."""

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ppl_eval.parallel.reduce import reduce_

NLL = ("nll_nats", "nll_nats_squared")
"""Columns of every ledger."""


class Ledger:
    """Scored tokens and sums of what they were found to be, for every window of a corpus.

    Every rank has all rows, zero where it has not written; :meth:`assemble` adds them up. A row
    plus zeros is the row, so the assembled ledger is bitwise the same for any number of
    data-parallel ranks. Where windows are shared (cp) a row is the sum of its parts.

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

    @property
    def nll_nats_squared_sum(self) -> torch.Tensor:
        """Sum of its squares by window (float64 [windows])."""
        return self.column("nll_nats_squared")

    def column(self, name: str) -> torch.Tensor:
        """Sums of one column by window (float64 [windows])."""
        return self.sums[self.columns.index(name)]

    def with_nll_of(self, prefix: str) -> "Ledger":
        """The same windows, with the columns ``PREFIXnll_nats...`` as the NLL."""
        other = copy.copy(self)
        other.columns = NLL
        other.sums = torch.stack([self.column(prefix + name) for name in NLL])
        return other

    def write(
        self, rows_B: torch.Tensor, values_CBT: torch.Tensor, scored_BT: torch.Tensor
    ) -> None:
        """Enter the results of one batch.

        Args:
            rows_B: window numbers (int64); empty for a batch that counts nothing.
            values_CBT: what each target adds to each column, 0 where not scored.
            scored_BT: which targets were scored (bool).
        """
        if rows_B.numel() == 0:
            return
        self.num_scored[rows_B] = scored_BT.sum(dim=1)
        self.sums[:, rows_B] = values_CBT.sum(dim=2, dtype=torch.float64)
        self.num_writes[rows_B] += 1

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
        bad = (~self.sums.isfinite()).T.nonzero()
        return None if len(bad) == 0 else (int(bad[0, 0]), self.columns[int(bad[0, 1])])
