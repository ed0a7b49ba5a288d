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
        num_positions: input positions of each batch, padding included (int64 [batches]).
        fingerprint: hash of the windows and the batches.
    """

    batches: list[np.ndarray]
    num_positions: np.ndarray
    fingerprint: str

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


def largest_budget_for(num_ranks: int, windows: Windows, most: int) -> int | None:
    """The largest ``max_tokens_per_batch`` that gives each data-parallel rank a batch.

    Args:
        num_ranks: number of data-parallel ranks.
        windows: all windows of the corpus.
        most: the largest budget that is tried.

    Returns:
        The budget, or None if there are fewer windows than ranks.
    """
    # a larger budget never makes more batches, and a budget of 1 makes one of each window
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        num_batches = len(make_plan(windows, max_tokens_per_batch=middle).batches)
        low, high = (middle, high) if num_batches >= num_ranks else (low, middle - 1)
    return low or None


def make_plan(windows: Windows, *, max_tokens_per_batch: int) -> Plan:
    """Sort the windows by length and cut them into batches.

    Args:
        windows: all windows of the corpus.
        max_tokens_per_batch: input positions of a batch at most, padding included. A window that is
            longer is a batch of its own.
    """
    order = np.argsort(-windows.num_inputs, kind="stable")
    lengths = windows.num_inputs[order]
    batches, positions = [], []
    begin = 0
    while begin < len(order):
        longest = int(lengths[begin])
        batches.append(order[begin : begin + max(1, max_tokens_per_batch // longest)])
        positions.append(len(batches[-1]) * longest)
        begin += len(batches[-1])
    counts = np.asarray([len(batch) for batch in batches], dtype=np.int64)
    content = (windows.document, windows.start, windows.num_tokens, windows.num_skipped, counts)
    return Plan(batches, np.asarray(positions, dtype=np.int64), fingerprint.of_arrays(*content))
