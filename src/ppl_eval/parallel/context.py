"""Context parallelism for a forward pass: the ranks of a ``cp`` group share one window.

The window is padded to 2 x cp chunks of c positions. Rank r holds chunks r and 2 x cp - 1 - r: a
later chunk attends to more keys, and each such pair is the same work under causal attention.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ppl_eval.parallel.reduce import all_gather


@dataclass(frozen=True)
class ContextSplit:
    """Which part of each window this rank holds.

    Attributes:
        group: the ranks that share a window.
        rank: this rank's number in the group.
        size: number of ranks in the group.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "ContextSplit | None":
        """The split over ``group``; None where each rank has whole windows."""
        if group is None or dist.get_world_size(group) == 1:
            return None
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def chunks(self) -> tuple[int, int]:
        """Numbers of this rank's two chunks, in the order of the window."""
        return self.rank, 2 * self.size - 1 - self.rank

    def positions(self, length: int) -> torch.Tensor:
        """This rank's positions in a window of ``length`` tokens (int64 [2c]); those from
        ``length`` on are padding."""
        size = -(-length // (2 * self.size))
        return torch.cat([torch.arange(n * size, (n + 1) * size) for n in self.chunks])

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part [B, 2c, ...] of a tensor of whole windows [B, T, ...]; padding is 0."""
        length = whole.shape[1]
        positions = self.positions(length).to(whole.device)
        part = whole[:, positions.clamp(max=length - 1)]
        is_padding = (positions >= length).view(-1, *(1 for _ in whole.shape[2:]))
        return part.masked_fill_(is_padding, 0)

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """Join the parts of all ranks; a collective of the group.

        Args:
            part: this rank's two chunks, 2c entries along ``dim``.
            dim: the dim that is split.

        Returns:
            A new tensor with all 2 x cp chunks along ``dim``, in the order of the window, padding
            included.
        """
        parts = all_gather(part, self.group)
        halves = [half for rank in parts for half in rank.chunk(2, dim=dim)]
        firsts, lasts = halves[0::2], halves[1::2]
        return torch.cat([*firsts, *reversed(lasts)], dim=dim)
