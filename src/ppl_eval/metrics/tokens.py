"""Records of single tokens, kept on request and brought together on one rank."""

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist


class TokenRecords:
    """(document, position, values) of every token that this rank scored."""

    def __init__(self) -> None:
        self._parts: list[dict[str, np.ndarray]] = []

    def update(
        self,
        document_BT: torch.Tensor,
        token_BT: torch.Tensor,
        values: Mapping[str, torch.Tensor],
        scored_BT: torch.Tensor,
    ) -> None:
        """Add a batch; waits for the device.

        Args:
            document_BT: document of each target (int64).
            token_BT: its place among the document's tokens (int64).
            values: what is recorded of it, by name ([B, T] each); the same names in each batch.
            scored_BT: whether it counts (bool).
        """
        columns = {"document": document_BT, "position": token_BT, **values}
        self._parts.append({k: part[scored_BT].cpu().numpy() for k, part in columns.items()})

    def gather(self, group: dist.ProcessGroup | None) -> dict[str, np.ndarray] | None:
        """All records in the order of documents and tokens, on the first rank of ``group``.

        Args:
            group: ranks that scored different tokens (the ``loss`` mesh), or None for this rank.

        Returns:
            ``document`` and ``position`` (int64 [scored]) and the values, by name; None on the
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
