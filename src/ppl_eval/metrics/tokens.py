"""The loss of every scored token (``save_tokens``), gathered on one rank."""

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist

from ppl_eval.score.batch import Tokens

RECORDED = {
    "nll_nats": "nll_nats",
    "teacher_nll_nats": "teacher_nll_nats",
    "kl_teacher_student": "kl_teacher_student_nats",
}
"""Value -> column of tokens.parquet."""


class TokenRecords:
    """(document, position, values) of every token that this rank scored, in CPU memory.

    12 bytes a token, and 32 with a teacher. Tensor-parallel ranks score the same tokens, so
    only one of them should hold records.
    """

    def __init__(self) -> None:
        self._parts: list[dict[str, np.ndarray]] = []

    def update(self, tokens: Tokens, values: Mapping[str, torch.Tensor]) -> None:
        """Add a batch; waits for the device.

        Args:
            tokens: scored on this rank.
            values: by name ([N] each); those of :data:`RECORDED` are kept, as they were computed.
        """
        columns = {
            "document": tokens.document_N.int(),
            "position": tokens.position_N.int(),
            **{to: values[name] for name, to in RECORDED.items() if name in values},
        }
        self._parts.append({name: column.cpu().numpy() for name, column in columns.items()})

    def gather(self, group: dist.ProcessGroup | None) -> dict[str, np.ndarray] | None:
        """All records in the order of documents and tokens, on the first rank of ``group``.

        Args:
            group: ranks that scored different tokens (the ``loss`` mesh), or None for this rank.

        Returns:
            ``document`` and ``position`` (int32 [scored]) and the values, by name; None on the
            other ranks.
        """
        names = self._parts[0].keys()
        mine = {name: np.concatenate([part[name] for part in self._parts]) for name in names}
        gathered: list = [mine]
        if group is not None:
            first = dist.get_rank(group) == 0
            gathered = [None] * dist.get_world_size(group)
            dist.gather_object(mine, gathered if first else None, group=group, group_dst=0)
            if not first:
                return None
        joined = {name: np.concatenate([part[name] for part in gathered]) for name in names}
        order = np.lexsort((joined["position"], joined["document"]))
        return {name: values[order] for name, values in joined.items()}
