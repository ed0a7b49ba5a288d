"""W + B A: the update of an adapter, merged into the shard of the weight that a rank keeps."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from ppl_eval.parallel.cut import as_shard, own_part

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
    part = full.to_local() if isinstance(full, DTensor) else own_part(full, slot)
    b, a = own_part(update.b, slot, 0), own_part(update.a, slot, 1).to(device).double()
    merged = torch.empty(part.shape, dtype=slot.dtype, device=device)
    scale = torch.ones(len(part), dtype=torch.float64, device=device)
    if update.magnitude is not None:
        scale = _dora_scale(full, update, slot, device)
    blocks = (merged.split(_BLOCK_ROWS), _sums(part, b, a), scale.split(_BLOCK_ROWS))
    for rows, sums, factors in zip(*blocks, strict=True):
        rows.copy_(sums * factors.unsqueeze(1))
    return as_shard(merged, slot)


def dora_scale_shard(
    full: torch.Tensor, update: LowRank, slot: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """This rank's shard of an unmerged layer's ``dora_scale``; see :func:`merged_shard`."""
    return as_shard(_dora_scale(full, update, slot, device).to(slot.dtype), slot)


def _dora_scale(
    full: torch.Tensor, update: LowRank, slot: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """magnitude / ||W + B A|| of this rank's rows in fp64; a row is read whole."""
    assert update.magnitude is not None
    assert not isinstance(full, DTensor)
    weight, b = own_part(full, slot, 0), own_part(update.b, slot, 0)
    sums = _sums(weight, b, update.a.to(device).double())
    norms = torch.cat([block.norm(dim=1) for block in sums])
    return own_part(update.magnitude, slot, 0).to(device).double() / norms


def _sums(weight: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> Iterator[torch.Tensor]:
    """W + B A in fp64 on the device of ``a``, block of rows after block of rows."""
    for rows, b_rows in zip(weight.split(_BLOCK_ROWS), b.split(_BLOCK_ROWS), strict=True):
        yield rows.to(a.device).double() + b_rows.to(a.device).double() @ a
