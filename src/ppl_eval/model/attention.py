"""Causal attention with what torch's kernel lacks: sliding windows, soft caps, split windows.

Where a mask is needed, queries are taken in blocks: a mask or score matrix of all queries x keys
never exists.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from ppl_eval.parallel.context import ContextSplit

QUERY_BLOCK = 512
"""Queries in a block, at most, where a mask is needed."""

SCORE_ELEMENTS = 2**25
"""Scores in a block, at most, where soft caps need the scores themselves."""

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What torch's attention kernels on CUDA take. For other dtypes torch builds all scores at once."""


class Seen(Protocol):
    """Which keys a query sees. Queries and keys are places in a window; none sees a later key.

    If :meth:`first_key` of the last query is 0, every query sees all keys up to its own place.
    """

    def first_key(self, query: int) -> int:
        """No query from this one on sees an earlier key."""
        ...

    def mask(self, queries_T1: torch.Tensor, keys_S: torch.Tensor) -> torch.Tensor:
        """Whether each query sees each key (bool [T, S])."""
        ...


@dataclass(frozen=True)
class Causal:
    """A query sees its own key and all before it."""

    def first_key(self, query: int) -> int:
        """See :class:`Seen`."""
        return 0

    def mask(self, queries_T1: torch.Tensor, keys_S: torch.Tensor) -> torch.Tensor:
        """See :class:`Seen`."""
        return keys_S <= queries_T1


@dataclass(frozen=True)
class SlidingWindow:
    """A query sees the last ``size`` keys, its own included (Mistral's sliding_window)."""

    size: int

    def first_key(self, query: int) -> int:
        """See :class:`Seen`."""
        return max(0, query - self.size + 1)

    def mask(self, queries_T1: torch.Tensor, keys_S: torch.Tensor) -> torch.Tensor:
        """See :class:`Seen`."""
        return (keys_S <= queries_T1) & (keys_S > queries_T1 - self.size)


@dataclass(frozen=True)
class Attention:
    """What a layer's attention computes of queries, keys and values.

    Attributes:
        seen: which keys a query sees.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` before the softmax (Gemma 2).
        scale: factor of the scores; None: 1 / sqrt(K).
    """

    seen: Seen = field(default_factory=Causal)
    soft_cap: float | None = None
    scale: float | None = None

    def __call__(
        self, q_BHTK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSK: torch.Tensor
    ) -> torch.Tensor:
        """Attended values [B, H, T, K] in the dtype of the queries.

        Args:
            q_BHTK: queries of B rows, H heads, T positions, K features: the last T of S positions.
            k_BHSK: keys of all S positions.
            v_BHSK: values, the same shape as the keys.
        """
        q, k, v, length, num_keys = q_BHTK, k_BHSK, v_BHSK, q_BHTK.shape[2], k_BHSK.shape[2]
        is_plain = self.soft_cap is None and self.seen.first_key(num_keys - 1) == 0
        if is_plain and (not q.is_cuda or q.dtype in _KERNEL_DTYPES):
            if length == num_keys:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
            if q.is_cuda:  # its kernels know this mask; elsewhere it would be built whole
                return self._attended(q, k, v, causal_lower_right(length, num_keys))
        first, step, blocks = num_keys - length, QUERY_BLOCK, []
        if self.soft_cap is not None:
            step = max(1, min(step, SCORE_ELEMENTS // (q.shape[0] * q.shape[1] * num_keys)))
        for queries in q.split(step, dim=2):
            begin, stop = self.seen.first_key(first), first + queries.shape[2]
            queries_T1 = torch.arange(first, stop, device=q.device).unsqueeze(1)
            mask = self.seen.mask(queries_T1, torch.arange(begin, stop, device=q.device))
            keys, values = k[:, :, begin:stop], v[:, :, begin:stop]
            blocks.append(self._attended(queries, keys, values, mask))
            first = stop
        return torch.cat(blocks, dim=2)

    def _attended(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attended values of one block of queries; a soft cap needs the scores themselves."""
        if self.soft_cap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = soft_capped(q @ k.transpose(2, 3), self.soft_cap / scale)
        if scores.requires_grad:
            scores = (scores * scale).masked_fill(~mask, -torch.inf)
        else:
            scores.mul_(scale).masked_fill_(~mask, -torch.inf)
        weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        return weights.to(v.dtype) @ v


@dataclass(frozen=True)
class SplitAttention:
    """:class:`Attention` where each rank of ``cp`` has the two chunks of a window that are its own.

    All-gathers the keys and values, each head once, before query heads that share it repeat it.

    Attributes:
        whole: the attention of whole windows.
        context: how windows are split over ranks.
        queries_per_key: query heads that share a key head.
    """

    whole: Attention
    context: ContextSplit
    queries_per_key: int

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attended values [B, H, 2c, K] of this rank's q, k, v, where c is a chunk's length."""
        repeats, size = self.queries_per_key, q.shape[2] // 2
        local = torch.stack([k[:, ::repeats], v[:, ::repeats]])
        keys, values = self.context.gather(local, dim=3).repeat_interleave(repeats, dim=2)
        attended = []
        for chunk, queries in zip(self.context.chunks, q.split(size, dim=2), strict=True):
            end = (chunk + 1) * size
            attended.append(self.whole(queries, keys[:, :, :end], values[:, :, :end]))
        return torch.cat(attended, dim=2)


def soft_capped(logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """``soft_cap * tanh(logits / soft_cap)``, in the memory of ``logits`` unless they have a
    gradient."""
    if logits.requires_grad:
        return soft_cap * torch.tanh(logits / soft_cap)
    return logits.div_(soft_cap).tanh_().mul_(soft_cap)
