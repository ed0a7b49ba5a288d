"""This rank's part of a tensor that it sees whole: cut where the tensor lies, then moved.

``distribute_tensor`` would move the whole tensor to the device of the mesh before cutting it.
"""

import torch
from torch.distributed.tensor import DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(full: torch.Tensor, slot: torch.Tensor, *dims: int) -> torch.Tensor:
    """The part of ``full`` that this rank's shard of ``slot`` covers, as a view.

    Args:
        full: a whole tensor, on any device.
        slot: the parameter that is sharded; of a plain one every rank has the whole.
        dims: dims of ``full`` to cut; none given means all.
    """
    if not isinstance(slot, DTensor):
        return full
    (chunk,) = slot.__create_chunk_list__()  # by which torch's distributed checkpoints cut, too
    for dim in dims or range(full.ndim):
        full = full.narrow(dim, min(chunk.offsets[dim], full.shape[dim]), chunk.sizes[dim])
    return full


def own_shard(full: torch.Tensor, slot: torch.Tensor, device: torch.device) -> torch.Tensor:
    """This rank's shard of ``full``, on ``device``, in the dtype of ``slot``.

    Args:
        full: a whole tensor, which is copied, or a DTensor that is sharded like ``slot``.
        slot: the parameter that the tensor is for.
        device: the device of this rank.
    """
    if isinstance(full, DTensor):
        return full.to(device=device, dtype=slot.dtype)
    part = own_part(full, slot)
    return as_shard(part.to(device, slot.dtype, copy=True).contiguous(), slot)


def as_shard(part: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
    """``part``, which this rank holds, as a DTensor sharded like ``slot``, if that is one."""
    if not isinstance(slot, DTensor):
        return part
    mesh, placements, shape = slot.device_mesh, slot.placements, slot.shape
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=shape, stride=slot.stride()
    )
