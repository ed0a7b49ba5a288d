"""Records of single tokens, kept on request and brought together on one rank."""

import numpy as np
import torch
import torch.distributed as dist


class TokenRecords:
    """(document, position, NLL) of every token that this rank scored."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def update(
        self,
        document_BT: torch.Tensor,
        token_BT: torch.Tensor,
        nll_BT: torch.Tensor,
        scored_BT: torch.Tensor,
    ) -> None:
        """Add a batch; waits for the device.

        Args:
            document_BT: document of each target (int64).
            token_BT: its place among the document's tokens (int64).
            nll_BT: its NLL in nats.
            scored_BT: whether it counts (bool).
        """
        chosen = (part[scored_BT].cpu().numpy() for part in (document_BT, token_BT, nll_BT))
        document, token, nll = chosen
        self._parts.append((document, token, nll))

    def gather(
        self, group: dist.ProcessGroup | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """All records in the order of documents and tokens, on the first rank of ``group``.

        Args:
            group: ranks that scored different tokens (the ``loss`` mesh), or None for this rank.
        """
        mine = tuple(map(np.concatenate, zip(*self._parts, strict=True)))
        gathered: list = [mine]
        if group is not None:
            first = dist.get_rank(group) == 0
            gathered = [None] * dist.get_world_size(group)
            dist.gather_object(mine, gathered if first else None, group=group, group_dst=0)
            if not first:
                return None
        document, token, nll = map(np.concatenate, zip(*gathered, strict=True))
        order = np.lexsort((token, document))
        return document[order], token[order], nll[order]
