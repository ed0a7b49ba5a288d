"""Groups: the process groups that an evaluation communicates over, as one rank sees them."""

from dataclasses import dataclass

import torch.distributed as dist

from ppl_eval.parallel.dims import Meshes


@dataclass(frozen=True)
class Groups:
    """None stands for this rank alone; so ``Groups()`` is a run of one process.

    Attributes:
        batch: ranks that read different windows.
        loss: ranks that score different tokens: different windows, or parts of them (batch x cp).
            Sums over tokens are reduced over it.
        cp: ranks that share a window.
    """

    batch: dist.ProcessGroup | None = None
    loss: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, meshes: Meshes | None) -> "Groups":
        """The groups of ``meshes``; of this rank alone without any."""
        if meshes is None:
            return cls()
        return cls(meshes.batch.get_group(), meshes.loss.get_group(), meshes.cp.get_group())

    @property
    def batch_rank(self) -> int:
        """This rank's place among those that read different windows."""
        return 0 if self.batch is None else dist.get_rank(self.batch)

    @property
    def num_batch_ranks(self) -> int:
        """How many ranks read different windows."""
        return 1 if self.batch is None else dist.get_world_size(self.batch)
