"""This rank's part of a tensor that it sees whole: cut where the tensor lies, then moved.

``distribute_tensor`` moves a whole tensor to the device of the mesh before it cuts it.
"""

import torch
from torch.distributed.tensor import DTensor


def own_part(full: torch.Tensor, slot: torch.Tensor, *dims: int) -> torch.Tensor:
    """The part of ``full`` that this rank's shard of ``slot`` covers, as a view.

    Args:
        full: a whole tensor, on any device.
        slot: the parameter that is sharded; plain parameters are whole.
        dims: dims of ``full`` to cut; the others stay whole. None given means all.
    """
    if not isinstance(slot, DTensor):
        return full
    (chunk,) = slot.__create_chunk_list__()  # by which torch's distributed checkpoints cut, too
    for dim in dims or range(full.ndim):
        full = full.narrow(dim, min(chunk.offsets[dim], full.shape[dim]), chunk.sizes[dim])
    return full


def own_shard(full: torch.Tensor, slot: torch.Tensor, device: torch.device) -> torch.Tensor:
    """This rank's shard of a whole tensor as a new tensor, on ``device``, in the dtype of ``slot``.

    Args:
        full: a whole tensor, or a DTensor that has this rank's shard already.
        slot: the parameter that the tensor is for.
        device: the device of this rank.
    """
    if isinstance(full, DTensor):
        return full.to(device=device, dtype=slot.dtype)
    part = own_part(full, slot)
    return as_shard(part.to(device, slot.dtype, copy=True).contiguous(), slot)


def as_shard(part: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """``part``, this rank's own, as a DTensor with the placements of ``slot`` if it is one."""
    if not isinstance(slot, DTensor):
        return part
    return DTensor.from_local(
        part,
        slot.device_mesh,
        slot.placements,
        run_check=False,
        shape=slot.shape,
        stride=slot.stride(),
    )
