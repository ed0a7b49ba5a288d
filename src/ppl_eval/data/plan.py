"""Plan: windows -> batches -> which data-parallel rank runs which batch in which step."""

from dataclasses import dataclass

import numpy as np

from ppl_eval import fingerprint
from ppl_eval.data.windows import Windows

CPU_BUDGET, GPU_BUDGET = 1024, 8192
"""Input positions of a batch at most, where none are given. A CPU is busy with one window of 1,024
tokens: more of them at a time cost padding, and leave ranks without work."""


@dataclass(frozen=True)
class Plan:
    """Batches of a whole corpus, the longest windows first.

    The batches do not depend on the number of ranks, so neither do the numbers that come out of
    them: a forward row gives the same bits in the same batch on the same kind of machine.

    Attributes:
        batches: window numbers (int64 [windows]) of each batch.
        rows: for each batch the row of each of its windows (int64 [windows]). Without packing every
            window has a row of its own.
        num_positions: input positions of each batch, padding included (int64 [batches]).
        fingerprint: hash of the windows and the batches.
    """

    batches: list[np.ndarray]
    rows: list[np.ndarray]
    num_positions: np.ndarray
    fingerprint: str

    @property
    def num_rows(self) -> int:
        """Rows of all batches."""
        return sum(int(rows[-1]) + 1 for rows in self.rows)

    def num_steps(self, num_ranks: int) -> int:
        """Steps that every one of ``num_ranks`` data-parallel ranks runs."""
        return -(-len(self.batches) // num_ranks)

    def batch_of(self, step: int, rank: int, num_ranks: int) -> int | None:
        """Which batch data-parallel rank ``rank`` runs in ``step``.

        Neighbours in the order of lengths share a step, so the ranks have nearly the same work.

        Returns:
            Its number, or None in the last step of a rank for which no batch is left: it takes part
            in the collectives of the step and counts nothing.
        """
        number = step * num_ranks + rank
        return number if number < len(self.batches) else None


def batch_budget(given: int | None, device_type: str) -> int:
    """``max_tokens_per_batch`` as given, or what suits the type of device."""
    if given is not None:
        return given
    return CPU_BUDGET if device_type == "cpu" else GPU_BUDGET


def largest_budget_for(
    num_ranks: int, windows: Windows, most: int, row_positions: int | None = None
) -> int | None:
    """The largest ``max_tokens_per_batch`` that gives each data-parallel rank a batch.

    Args:
        num_ranks: of these.
        windows: of the whole corpus.
        most: the largest budget that may be.
        row_positions: see :func:`make_plan`.

    Returns:
        The budget, or None if there are fewer rows than ranks.
    """
    # a larger budget never makes more batches, and a budget of 1 makes one of each row
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        made = make_plan(windows, max_tokens_per_batch=middle, row_positions=row_positions)
        low, high = (middle, high) if len(made.batches) >= num_ranks else (low, middle - 1)
    return low or None


def make_plan(
    windows: Windows, *, max_tokens_per_batch: int, row_positions: int | None = None
) -> Plan:
    """Sort the windows by length, put them into rows, and cut these into batches.

    Args:
        windows: of the whole corpus.
        max_tokens_per_batch: input positions of a batch at most, padding included. A row that is
            longer is a batch of its own.
        row_positions: several windows share a row of so many positions; None: each has its own.
    """
    order = np.argsort(-windows.num_inputs, kind="stable")
    lengths = windows.num_inputs[order]
    row_of, row_lengths = _rows(lengths, row_positions)
    batches, rows, positions = [], [], []
    begin = first = 0
    while begin < len(order):
        longest = int(row_lengths[first:].max()) if row_positions else int(lengths[begin])
        last = first + max(1, max_tokens_per_batch // longest)
        end = int(np.searchsorted(row_of, last))
        batches.append(order[begin:end])
        rows.append(row_of[begin:end] - first)
        positions.append((int(row_of[end - 1]) - first + 1) * int(row_lengths[first:last].max()))
        begin, first = end, last
    counts = np.asarray([len(batch) for batch in batches], dtype=np.int64)
    content = (windows.document, windows.start, windows.num_tokens, windows.num_skipped, counts)
    packing = () if row_positions is None else rows
    return Plan(
        batches,
        rows,
        np.asarray(positions, dtype=np.int64),
        fingerprint.of_arrays(*content, *packing),
    )


def _rows(lengths: np.ndarray, row_positions: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Row of each window, in order, and positions of each row."""
    if row_positions is None:
        return np.arange(len(lengths)), lengths
    row_of = np.zeros(len(lengths), dtype=np.int64)
    row_lengths: list[int] = []
    for number, length in enumerate(lengths.tolist()):
        if not row_lengths or row_lengths[-1] + length > row_positions:
            row_lengths.append(0)
        row_lengths[-1] += length
        row_of[number] = len(row_lengths) - 1
    return row_of, np.asarray(row_lengths, dtype=np.int64)
