"""Loss by the number of tokens that came before: what context is worth."""

from typing import Any

import torch
import torch.distributed as dist

from ppl_eval.parallel.reduce import reduce_

NUM_BINS = 24


class PositionLoss:
    """Sums of NLL in bins of context length: 1, 2 to 3, 4 to 7, ... tokens before the scored one.

    Args:
        device: where the sums live; updates on a GPU do not wait for it.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        # scored tokens and NLL; float64 counts are exact up to 2^53
        self.sums_2N = torch.zeros(2, NUM_BINS, dtype=torch.float64, device=device)

    def update(
        self, nll_BT: torch.Tensor, scored_BT: torch.Tensor, positions: torch.Tensor | None
    ) -> None:
        """Add a batch.

        Args:
            nll_BT: NLL of each target, 0 where not scored.
            scored_BT: which targets were scored (bool).
            positions: places of the inputs in their windows ([T]); None: 0, 1, 2, ...
        """
        bins = context_bins(nll_BT.shape[1], positions, nll_BT.device)
        for number in range(NUM_BINS):
            inside = (bins == number) & scored_BT
            self.sums_2N[0, number] += inside.sum()
            self.sums_2N[1, number] += (nll_BT * inside).sum(dtype=torch.float64)

    def assemble(self, group: dist.ProcessGroup | None) -> None:
        """Complete the sums on every rank of ``group``."""
        reduce_(self.sums_2N, group)

    def rows(self) -> list[dict[str, Any]]:
        """Bins that have tokens: their bounds, tokens, and mean NLL."""
        counts, sums = self.sums_2N.tolist()
        return [
            {
                "context_tokens": [2**number, 2 ** (number + 1) - 1],
                "scored_tokens": int(count),
                "nll_nats_per_token": total / count,
            }
            for number, (count, total) in enumerate(zip(counts, sums, strict=True))
            if count
        ]


def context_bins(length: int, positions: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Bin of the target after each of ``length`` inputs ([T]): 0 for 1 token before it,
    1 for 2 to 3, 2 for 4 to 7, ...

    Args:
        length: T.
        positions: places of the inputs in their windows; None: 0, 1, 2, ...
        device: of the result, where there are no positions.
    """
    if positions is None:
        positions = torch.arange(length, device=device)
    bounds = 2 ** torch.arange(1, NUM_BINS, device=positions.device)
    return torch.bucketize(positions + 1, bounds, right=True)  # the input at p ends p + 1 tokens
