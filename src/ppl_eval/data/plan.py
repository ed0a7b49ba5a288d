"""Plan: windows -> batches -> which data-parallel rank runs which batch in which step."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ppl_eval import fingerprint
from ppl_eval.data.windows import Windows

CPU_BUDGET, GPU_BUDGET = 1024, 8192
"""Default ``max_tokens_per_batch``. One window of 1,024 tokens keeps a CPU busy: more of them at a
time cost padding, and leave ranks without work."""


@dataclass(frozen=True)
class Plan:
    """Batches of a whole corpus, the longest windows first.

    The batches do not depend on the number of ranks, so neither do the results: a row gives the
    same bits in the same batch on the same kind of machine.

    Attributes:
        batches: window numbers (int64 [windows of the batch]) by batch.
        num_positions: input positions by batch, padding included (int64 [batches]).
        fingerprint: hash of the windows and the batches.
    """

    batches: list[np.ndarray]
    num_positions: np.ndarray
    fingerprint: str

    def num_steps(self, num_ranks: int) -> int:
        """Steps that each of ``num_ranks`` data-parallel ranks runs."""
        return -(-len(self.batches) // num_ranks)

    def batches_of(self, rank: int, num_ranks: int, every: int = 1) -> Iterator[int | None]:
        """The batches that a data-parallel rank runs, one a step.

        Neighbours in the order of lengths share a step, so the ranks have nearly the same work.

        Args:
            rank: the data-parallel rank.
            num_ranks: number of data-parallel ranks.
            every: take only one batch in so many.

        Yields:
            The batch's number, on every rank in equally many steps. It is None in the last step of
            a rank for which no batch is left: the rank takes part in the step's collectives and
            counts nothing.
        """
        chosen = range(0, len(self.batches), every)
        for begin in range(0, len(chosen), num_ranks):
            yield chosen[begin + rank] if begin + rank < len(chosen) else None


def batch_budget(given: int | None, device_type: str) -> int:
    """``max_tokens_per_batch`` as given, or the default for the type of device."""
    default = CPU_BUDGET if device_type == "cpu" else GPU_BUDGET
    return default if given is None else given


def largest_budget_for(num_ranks: int, windows: Windows, most: int) -> int | None:
    """The largest ``max_tokens_per_batch`` that gives each data-parallel rank a batch.

    ``most`` is the largest that is tried. None: there are fewer windows than ranks.
    """

    def negated(budget: int) -> int:
        return -len(make_plan(windows, max_tokens_per_batch=budget).batches)

    # a larger budget never makes more batches, so the budgets that make enough come first
    return bisect_right(range(1, most + 1), -num_ranks, key=negated) or None


def make_plan(windows: Windows, *, max_tokens_per_batch: int) -> Plan:
    """Sort the windows by length and cut them into batches.

    Args:
        windows: all windows of the corpus.
        max_tokens_per_batch: most input positions of a batch, padding included. A longer window is
            a batch by itself.
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
