"""Negative log-likelihood of tokens, from logits of all ids or of one rank's part of them."""

from collections.abc import Iterator
from functools import reduce

import torch
import torch.distributed as dist


def token_nll(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """-ln softmax(logits)[target] in nats, computed in fp32 (fp64 for fp64 logits).

    It is logsumexp minus the target's logit. ``F.cross_entropy`` in fp32 on CPU is biased on real
    logits (-2.7e-6 relative at a vocabulary of 49,152); this form is right to 5e-9.

    Args:
        logits_NV: logits of N tokens over V ids, any floating dtype.
        targets_N: the ids that followed (int64).

    Returns:
        NLL in nats [N], fp32 or fp64.
    """
    return token_nll_(logits_NV.to(wide_dtype(logits_NV), copy=True), targets_N)


def token_nll_(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """:func:`token_nll` that overwrites fp32 and fp64 logits, so that no second copy exists."""
    logits_NV = logits_NV.to(wide_dtype(logits_NV))
    target_N = logits_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    return _logsumexp_(logits_NV) - target_N


def sharded_token_nll_(
    logits_NV: torch.Tensor, targets_N: torch.Tensor, first: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """:func:`token_nll_` of logits whose ids are spread over ranks; the same result on each.

    Two all-reduces of three numbers a token: the largest logsumexp of a rank; then the sum of
    exponentials relative to it, and the target's logit, which one rank has.

    Args:
        logits_NV: this rank's logits of N tokens; V may be 0. Overwritten.
        targets_N: the ids that followed, in the whole vocabulary.
        first: id of this rank's first logit.
        group: ranks that have the other ids, and the same tokens.

    Returns:
        NLL in nats [N], fp32 or fp64.
    """
    logits_NV = logits_NV.to(wide_dtype(logits_NV))
    target_N = target_logits(logits_NV, targets_N - first)
    has_ids = logits_NV.shape[1] > 0
    lse_N = _logsumexp_(logits_NV) if has_ids else torch.full_like(target_N, -torch.inf)
    largest_N = lse_N.clone()
    dist.all_reduce(largest_N, op=dist.ReduceOp.MAX, group=group)
    sums_2N = torch.stack([(lse_N - largest_N).exp(), target_N])
    dist.all_reduce(sums_2N, group=group)
    return largest_N + sums_2N[0].log() - sums_2N[1]


def target_logits(logits_NV: torch.Tensor, columns_N: torch.Tensor) -> torch.Tensor:
    """The logits [N] in these columns; 0 where the column is another rank's. V may be 0."""
    if not logits_NV.shape[1]:
        return logits_NV.new_zeros(len(columns_N))
    absent_N = (columns_N < 0) | (columns_N >= logits_NV.shape[1])
    columns_N1 = columns_N.masked_fill(absent_N, 0).unsqueeze(1)
    return logits_NV.gather(1, columns_N1).squeeze(1).masked_fill(absent_N, 0)


def wide_dtype(*tensors: torch.Tensor) -> torch.dtype:
    """The dtype of losses computed from these tensors: fp64 if one is fp64, else fp32."""
    return reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)


def row_blocks(
    num_elements: int, width: int, *tensors: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same rows of each tensor, so many at a time that ``num_elements`` make rows of ``width``
    (at least one row); nothing for tensors without rows."""
    size = max(1, num_elements // max(1, width))
    for begin in range(0, len(tensors[0]), size):
        yield tuple(tensor[begin : begin + size] for tensor in tensors)


def _logsumexp_(x_NV: torch.Tensor) -> torch.Tensor:
    """``x.logsumexp(dim=1)`` in the memory of ``x``; V is at least 1."""
    if x_NV.requires_grad:
        return x_NV.logsumexp(dim=1)
    largest_N1 = x_NV.amax(dim=1, keepdim=True)
    largest_N1.masked_fill_(largest_N1.isinf(), 0)  # inf - inf would be NaN
    sums_N = x_NV.sub_(largest_N1).exp_().sum(dim=1)
    return sums_N.log_().add_(largest_N1.squeeze(1))
