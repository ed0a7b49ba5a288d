"""W + B A: the update of an adapter, merged into the shard of the weight that a rank keeps."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

_BLOCK_ROWS = 1024


@dataclass(frozen=True)
class LowRank:
    """The update of one matrix.

    Attributes:
        a: [r, in], fp32.
        b: [out, r], fp32, rows in torchtune's order, times alpha / r.
        magnitude: [out], fp32, rows in torchtune's order; None for LoRA.
    """

    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None


def merged_shard(
    full: torch.Tensor, update: LowRank, slot: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """This rank's shard of the merged weight: W + B A, for DoRA times magnitude / ||W + B A||.

    A rank multiplies only the rows of B and the columns of A that its shard has. Sums are fp64 and
    rounded once, so that a number hardly ever depends on how the matrix is cut.

    Args:
        full: the base weight, or (LoRA only) this rank's shard of it.
        update: of it.
        slot: plain or a DTensor with any placements; gives the dtype.
        device: of this rank.
    """
    part = full.to_local() if isinstance(full, DTensor) else _along(full, slot, 0, 1)
    scale = None
    if update.magnitude is not None:
        scale = _dora_scale(full, update, slot, device)
    b = _along(update.b, slot, 0)
    a = _along(update.a, slot, 1).to(device, torch.float64)
    merged = torch.empty(part.shape, dtype=slot.dtype, device=device)
    for rows in _blocks(len(part)):
        sums = part[rows].to(device, torch.float64) + b[rows].to(device, torch.float64) @ a
        merged[rows] = sums if scale is None else sums.mul_(scale[rows].unsqueeze(1))
    return _like(slot, merged)


def dora_scale_shard(
    full: torch.Tensor, update: LowRank, slot: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """This rank's shard of an unmerged layer's ``dora_scale``; see :func:`merged_shard`."""
    return _like(slot, _dora_scale(full, update, slot, device).to(slot.dtype))


def _dora_scale(
    full: torch.Tensor, update: LowRank, slot: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """magnitude / ||W + B A|| of this rank's rows in fp64; a row is read whole."""
    assert update.magnitude is not None
    assert not isinstance(full, DTensor)
    weight, b = _along(full, slot, 0), _along(update.b, slot, 0)
    a = update.a.to(device, torch.float64)
    scale = _along(update.magnitude, slot, 0).to(device, torch.float64, copy=True)
    for rows in _blocks(len(weight)):
        sums = weight[rows].to(device, torch.float64) + b[rows].to(device, torch.float64) @ a
        scale[rows] /= sums.norm(dim=1)
    return scale


def _along(tensor: torch.Tensor, slot: torch.Tensor, *dims: int) -> torch.Tensor:
    """The part of ``tensor`` that this rank's shard of ``slot`` has along ``dims``, whole along
    the others."""
    if not isinstance(slot, DTensor):
        return tensor
    # FSDP2's strided shard is no subclass of Shard, but has its dim
    placements = [p if getattr(p, "dim", None) in dims else Replicate() for p in slot.placements]
    return distribute_tensor(tensor, slot.device_mesh, placements, src_data_rank=None).to_local()


def _like(slot: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A rank's own part as what ``slot`` is."""
    if not isinstance(slot, DTensor):
        return local
    return DTensor.from_local(
        local,
        slot.device_mesh,
        slot.placements,
        run_check=False,
        shape=slot.shape,
        stride=slot.stride(),
    )


def _blocks(num_rows: int) -> Iterator[slice]:
    return (slice(i, i + _BLOCK_ROWS) for i in range(0, num_rows, _BLOCK_ROWS))
