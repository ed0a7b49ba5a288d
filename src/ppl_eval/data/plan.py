"""Plan: windows -> batches -> which data-parallel rank runs which batch in which step."""

from dataclasses import dataclass

import numpy as np

from ppl_eval import fingerprint
from ppl_eval.data.windows import Windows


@dataclass(frozen=True)
class Plan:
    """Batches of a whole corpus, the longest windows first.

    The batches do not depend on the number of ranks, so neither do the numbers that come out of
    them: a forward row gives the same bits in the same batch on the same kind of machine.

    Attributes:
        batches: window numbers (int64 [rows]) of each batch.
        num_positions: input positions of each batch, padding included (int64 [batches]).
        fingerprint: hash of the windows and the batches.
    """

    batches: list[np.ndarray]
    num_positions: np.ndarray
    fingerprint: str

    def num_steps(self, num_ranks: int) -> int:
        """Steps that every one of ``num_ranks`` data-parallel ranks runs."""
        return -(-len(self.batches) // num_ranks)

    def batch_of(self, step: int, rank: int, num_ranks: int) -> np.ndarray | None:
        """What data-parallel rank ``rank`` runs in ``step``.

        Neighbours in the order of lengths share a step, so the ranks have nearly the same work.

        Returns:
            Window numbers, or None in the last step of a rank for which no batch is left: it takes
            part in the collectives of the step and counts nothing.
        """
        index = step * num_ranks + rank
        return self.batches[index] if index < len(self.batches) else None


def make_plan(windows: Windows, *, max_tokens_per_batch: int) -> Plan:
    """Sort the windows by length and cut them into batches.

    Args:
        windows: of the whole corpus.
        max_tokens_per_batch: input positions of a batch at most, padding included. A window that
            is longer is a batch of its own.
    """
    num_inputs = windows.num_inputs
    order = np.argsort(-num_inputs, kind="stable")
    batches, positions = [], []
    begin = 0
    while begin < len(order):
        longest = int(num_inputs[order[begin]])
        rows = max(1, max_tokens_per_batch // longest)
        batch = order[begin : begin + rows]
        batches.append(batch)
        positions.append(len(batch) * longest)
        begin += len(batch)
    rows = np.asarray([len(batch) for batch in batches], dtype=np.int64)
    content = (windows.document, windows.start, windows.num_tokens, windows.num_skipped, rows)
    return Plan(batches, np.asarray(positions, dtype=np.int64), fingerprint.of_arrays(*content))
