"""ParallelDims: degrees of parallelism -> device meshes and process groups, by purpose."""

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ppl_eval.errors import UserError

_AXES = ("dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class ParallelDims:
    """How the processes are laid out: dp_replicate x dp_shard x cp x tp, tp innermost.

    dp_replicate and dp_shard split the data (dp_shard the parameters as well), cp splits a window,
    tp splits matrices.

    Args:
        dp_replicate: copies of the model, at least 1.
        dp_shard: ranks that share the parameters of one copy; -1 takes the processes that are left.
        cp: ranks that share one window, at least 1.
        tp: ranks that share one matrix, at least 1.
        world_size: number of processes.

    Raises:
        UserError: a degree is out of range, or the product is not ``world_size``.

    Example:
        >>> ParallelDims(dp_replicate=2, dp_shard=-1, world_size=8).dp_shard
        4
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    world_size: int = 1

    @classmethod
    def of(cls, parallel: Any, world_size: int) -> "ParallelDims":
        """The degrees of the config section ``parallel``; raises as the constructor does."""
        return cls(*(getattr(parallel, axis) for axis in _AXES), world_size=world_size)

    def __post_init__(self) -> None:
        for axis in _AXES:
            degree = getattr(self, axis)
            if degree < 1 and (axis, degree) != ("dp_shard", -1):
                raise UserError(
                    f"parallel.{axis} is {degree}, but a degree is at least 1"
                    " (only dp_shard may be -1: the processes that are left)"
                )
        others = self.dp_replicate * self.cp * self.tp
        if self.dp_shard == -1:
            if self.world_size % others:
                raise UserError(
                    f"dp_replicate({self.dp_replicate}) * cp({self.cp}) * tp({self.tp}) = {others}"
                    f" does not divide the number of processes, {self.world_size}, so no"
                    " dp_shard fits: change parallel.* or --nproc_per_node"
                )
            object.__setattr__(self, "dp_shard", self.world_size // others)
        if others * self.dp_shard != self.world_size:
            started = f"{self.world_size} process{' was' if self.world_size == 1 else 'es were'}"
            raise UserError(
                f"dp_replicate({self.dp_replicate}) * dp_shard({self.dp_shard}) * cp({self.cp})"
                f" * tp({self.tp}) = {others * self.dp_shard}, but {started} started:"
                " change parallel.* or --nproc_per_node"
            )

    @property
    def batch_size(self) -> int:
        """Number of data-parallel ranks: those that read different windows."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp_size(self) -> int:
        """Number of ranks that share the parameters of one copy of the model."""
        return self.dp_shard * self.cp

    def build_mesh(self, device_type: str, timeout_s: float | None = None) -> "Meshes":
        """Build the meshes; every rank calls it, after ``init_process_group``.

        Meshes over the same ranks share one process group, because torch connects the ranks of each
        group that it makes. A rank belongs to five groups at most.

        Args:
            device_type: ``cpu`` or ``cuda``.
            timeout_s: seconds that a collective of these groups waits for the other ranks; None
                for torch's default (torch does not take it from the default group).
        """
        shape = (self.dp_replicate, self.dp_shard, self.cp, self.tp)
        ranks = torch.arange(self.world_size).view(shape)
        groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

        def group_over(*axes: int) -> dist.ProcessGroup:
            """This rank's group of the ranks that differ on ``axes`` alone."""
            others = [axis for axis in range(4) if axis not in axes]
            size = math.prod(shape[axis] for axis in axes)
            rows = tuple(map(tuple, ranks.permute(*others, *axes).reshape(-1, size).tolist()))
            if rows not in groups:
                groups[rows] = _new_group(rows, timeout_s)
            return groups[rows]

        def mesh(name: str, *axes: int) -> DeviceMesh:
            return DeviceMesh.from_group(group_over(*axes), device_type, mesh_dim_names=(name,))

        # FSDP2 on top of tp needs both as slices of one mesh, over the ranks of this replica
        replica = ranks[dist.get_rank() // ranks[0].numel()].reshape(self.fsdp_size, self.tp)
        sharding = DeviceMesh.from_group(
            [group_over(1, 2), group_over(3)], device_type, replica, mesh_dim_names=("fsdp", "tp")
        )
        return Meshes(
            batch=mesh("batch", 0, 1),
            fsdp=sharding["fsdp"],
            loss=mesh("loss", 0, 1, 2),
            cp=mesh("cp", 2),
            tp=sharding["tp"],
        )

    def __str__(self) -> str:
        return " ".join(f"{axis}={getattr(self, axis)}" for axis in _AXES)


def _new_group(rows: tuple[tuple[int, ...], ...], timeout_s: float | None) -> dist.ProcessGroup:
    """Make a group of the ranks in each row, and return this rank's; a collective of all ranks.

    ``rows`` has each rank once, and is the same on all ranks.
    """
    world = dist.group.WORLD
    assert world is not None, "init_process_group comes first"
    if len(rows) == 1:
        return world
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    # every rank makes the call for every group: torch numbers them by its calls
    made = [dist.new_group(list(row), timeout=timeout) for row in rows]
    return next(group for group in made if isinstance(group, dist.ProcessGroup))


@dataclass(frozen=True)
class Meshes:
    """One-dimensional meshes by purpose; each holds this rank's group.

    Attributes:
        batch: ranks that read different windows (dp_replicate x dp_shard).
        fsdp: ranks that share the parameters of one copy (dp_shard x cp). A forward pass needs
            nothing from other replicas.
        loss: ranks that score different tokens: sums over tokens are reduced over it (batch x cp).
        cp: ranks that share a window.
        tp: ranks that share a matrix.
    """

    batch: DeviceMesh
    fsdp: DeviceMesh
    loss: DeviceMesh
    cp: DeviceMesh
    tp: DeviceMesh


@dataclass(frozen=True)
class Groups:
    """The process groups that an evaluation communicates over; see :class:`Meshes`.

    None stands for this rank alone, so ``Groups()`` is a run of one process.
    """

    batch: dist.ProcessGroup | None = None
    loss: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, meshes: Meshes | None) -> "Groups":
        """The groups of ``meshes``; None for one process."""
        if meshes is None:
            return cls()
        return cls(meshes.batch.get_group(), meshes.loss.get_group(), meshes.cp.get_group())

    @property
    def batch_rank(self) -> int:
        """This rank's number in ``batch``."""
        return 0 if self.batch is None else dist.get_rank(self.batch)

    @property
    def num_batch_ranks(self) -> int:
        """Number of ranks in ``batch``."""
        return 1 if self.batch is None else dist.get_world_size(self.batch)
