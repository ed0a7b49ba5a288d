"""The collectives that evaluation needs, on any backend."""

import torch
import torch.distributed as dist


def reduce_(tensor: torch.Tensor, group: dist.ProcessGroup | None, op: str = "sum") -> torch.Tensor:
    """All-reduce ``tensor`` in place over ``group`` and return it.

    Args:
        tensor: on any device; the same shape on every rank.
        group: None leaves the tensor as it is.
        op: ``sum`` or ``max``.
    """
    if group is None:
        return tensor
    operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
    if tensor.device.type == "cpu" and "cpu:" not in dist.get_backend_config(group):
        moved = tensor.to(torch.device("cuda", torch.cuda.current_device()))
        dist.all_reduce(moved, op=operation, group=group)
        return tensor.copy_(moved)
    dist.all_reduce(tensor, op=operation, group=group)
    return tensor


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The tensors of all ranks of ``group``, stacked in the order of the ranks: [ranks, ...].

    ``tensor`` must have the same shape and dtype on every rank.
    """
    size = dist.get_world_size(group)
    joined = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
    # all_gather_single is its name since torch 2.13
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(joined, tensor.contiguous(), group=group)
    return joined.view(size, *tensor.shape)
