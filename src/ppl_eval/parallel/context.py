"""Context parallelism for a forward pass: the ranks of a ``cp`` group share one window.

The window is padded to 2 x cp chunks of c positions. Rank r has chunks r and 2 x cp - 1 - r, a
cheap and a dear one, so that all ranks have the same work under causal attention.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ppl_eval.parallel.reduce import all_gather


@dataclass(frozen=True)
class ContextSplit:
    """Which part of a window this rank has.

    Attributes:
        group: the ranks that share a window.
        rank: this rank's place among them.
        size: how many they are.
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "ContextSplit | None":
        """The split over ``group``; None where a window is not shared."""
        if group is None or dist.get_world_size(group) == 1:
            return None
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def chunks(self) -> tuple[int, int]:
        """Numbers of this rank's two chunks, in order."""
        return self.rank, 2 * self.size - 1 - self.rank

    def positions(self, length: int) -> torch.Tensor:
        """Places in a window of ``length`` tokens that this rank has (int64 [2c]).

        They go on beyond the window's end: what is there is padding.
        """
        size = -(-length // (2 * self.size))
        return torch.cat([torch.arange(n * size, (n + 1) * size) for n in self.chunks])

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part [B, 2c, ...] of a tensor of whole windows [B, T, ...]; zero in the
        padding."""
        length = whole.shape[1]
        positions = self.positions(length).to(whole.device)
        part = whole[:, positions.clamp(max=length - 1)]
        is_padding = (positions >= length).view(-1, *(1 for _ in whole.shape[2:]))
        return part.masked_fill_(is_padding, 0)

    def gather(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole of a tensor of which every rank has its two chunks along ``dim``.

        Returns:
            A new tensor with 2 x cp x c entries along ``dim``, in the order of the window.
        """
        parts = all_gather(part, self.group)
        halves = [half for rank in parts for half in rank.chunk(2, dim=dim)]
        firsts, lasts = halves[0::2], halves[1::2]
        return torch.cat([*firsts, *reversed(lasts)], dim=dim)
