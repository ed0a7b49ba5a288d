"""ParallelDims: degrees of parallelism -> device meshes, handed out by purpose."""

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from ppl_eval.errors import UserError


@dataclass(frozen=True)
class ParallelDims:
    """How the processes are laid out: dp_replicate x dp_shard x cp x tp, tp innermost.

    The names are torchtune main's. dp_replicate and dp_shard split the data (dp_shard the
    parameters as well), cp splits a window, tp splits matrices.

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

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "cp", "tp"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"parallel.{name} is {getattr(self, name)}, but a degree is at least 1"
                    " (only dp_shard may be -1: the processes that are left)"
                )
        if self.dp_shard < 1 and self.dp_shard != -1:
            raise UserError(
                f"parallel.dp_shard is {self.dp_shard}, but it is at least 1,"
                " or -1 for the processes that are left"
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

    def build_mesh(self, device_type: str) -> "Meshes":
        """Build the meshes; every rank calls it, after ``init_process_group``.

        Args:
            device_type: ``cpu`` or ``cuda``.
        """
        ranks = torch.arange(self.world_size)

        def mesh(**axes: int) -> DeviceMesh:
            shaped = ranks.view(tuple(axes.values()))
            return DeviceMesh(device_type, shaped, mesh_dim_names=tuple(axes))

        # One root mesh per purpose: slices of a flattened axis are deprecated, and what follows
        # uses nothing but DeviceMesh's constructor. FSDP and TP must share a root.
        sharding = mesh(dp_replicate=self.dp_replicate, fsdp=self.fsdp_size, tp=self.tp)
        batch = mesh(batch=self.batch_size, model=self.cp * self.tp)
        loss = mesh(loss=self.batch_size * self.cp, tp=self.tp)
        context = mesh(batch=self.batch_size, cp=self.cp, tp=self.tp)
        return Meshes(
            batch=batch["batch"],
            fsdp=sharding["fsdp"],
            loss=loss["loss"],
            cp=context["cp"],
            tp=sharding["tp"],
        )

    def __str__(self) -> str:
        return (
            f"dp_replicate={self.dp_replicate} dp_shard={self.dp_shard} cp={self.cp} tp={self.tp}"
        )


@dataclass(frozen=True)
class Meshes:
    """One-dimensional meshes by purpose; each holds this rank's own group.

    Attributes:
        batch: ranks that read different windows (dp_replicate x dp_shard).
        fsdp: ranks that share one copy's parameters (dp_shard x cp, within one replica: a forward
            pass needs nothing from the other replicas).
        loss: ranks over which a sum of losses is reduced (batch x cp, never tp).
        cp: ranks that share a window.
        tp: ranks that share a matrix.
    """

    batch: DeviceMesh
    fsdp: DeviceMesh
    loss: DeviceMesh
    cp: DeviceMesh
    tp: DeviceMesh
