"""Causal attention with what torch's kernel lacks: windows, soft caps, and queries of a later part.

Where a mask is needed queries are taken in blocks, so that no mask or score matrix of queries x
keys ever exists.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right

from ppl_eval.errors import UserError
from ppl_eval.parallel.context import ContextSplit

QUERY_BLOCK = 512
"""Queries that are attended at a time where a mask is needed."""

SCORE_ELEMENTS = 2**25
"""Scores that exist at a time, at most, where they must be seen (soft caps)."""


class _Attention:
    """Takes the place of what torchtune's MultiHeadAttention calls after rope."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
    ) -> torch.Tensor:
        """Attended values of q, k, v [B, H, T, K]; no layer may ask for a mask of its own."""
        if mask is not None:
            raise UserError(
                "a layer gives its attention a mask, which only plain attention can take"
            )
        return self.attend(q, k, v)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attended values of q [B, H, T, K], as the kind of attention has it."""
        raise NotImplementedError


@dataclass(frozen=True)
class CausalAttention(_Attention):
    """Whole windows; see :func:`causal_attention` for the options."""

    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """:func:`causal_attention` with these options."""
        return causal_attention(
            q, k, v, window=self.window, soft_cap=self.soft_cap, scale=self.scale
        )


@dataclass(frozen=True)
class SplitAttention(_Attention):
    """:class:`CausalAttention` where each rank has the queries, keys and values of its chunks.

    Keys and values are gathered with as few heads as the model has of them, and each chunk of
    queries attends to its prefix.
    """

    whole: CausalAttention
    context: ContextSplit
    queries_per_key: int

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attended values of this rank's q, k, v [B, H, 2c, K]."""
        repeats, size = self.queries_per_key, q.shape[2] // 2
        own = torch.stack([k[:, ::repeats], v[:, ::repeats]])
        keys, values = self.context.gather(own, dim=3).repeat_interleave(repeats, dim=2)
        attended = []
        for chunk, queries in zip(self.context.chunks, q.split(size, dim=2), strict=True):
            prefix = slice((chunk + 1) * size)
            attended.append(self.whole.attend(queries, keys[:, :, prefix], values[:, :, prefix]))
        return torch.cat(attended, dim=2)


@contextmanager
def attention_split(model: nn.Module, context: ContextSplit | None) -> Iterator[None]:
    """Within it, the attention of a decoder's layers expects this rank's part of a window.

    Args:
        model: a torchtune decoder; other modules cannot be split.
        context: how; None changes nothing.

    Raises:
        UserError: a layer whose attention is not known.
    """
    if context is None:
        yield
        return
    calls = check_attention(model, f"parallel.cp is {context.size}", "parallel.cp=1")
    before = [attention._attention_call for attention, _ in calls]
    for attention, whole in calls:
        repeats = attention.num_heads // attention.num_kv_heads
        attention._attention_call = SplitAttention(whole, context, repeats)
    try:
        yield
    finally:
        for (attention, _), call in zip(calls, before, strict=True):
            attention._attention_call = call


def check_attention(model: nn.Module, why: str, instead: str) -> list[tuple[Any, CausalAttention]]:
    """Each layer's attention, and what it computes with a window of its own.

    Args:
        model: a decoder.
        why: it must be known, for the message.
        instead: what to set, for the message.

    Raises:
        UserError: the model has no such layers, or masks in a way that is not known.
    """
    if not hasattr(model, "layers"):
        raise UserError(
            f"{why}, but a {type(model).__name__} has no decoder layers whose attention could be"
            f" told: set {instead}"
        )
    layers: Any = model.layers
    found = []
    for layer in layers:
        call = _known_call(layer.attn)
        if call is None:
            raise UserError(
                f"{why}, but how a {type(layer.attn).__name__} masks is not known: set {instead}"
            )
        found.append((layer.attn, call))
    return found


def _known_call(attention: Any) -> CausalAttention | None:
    call = getattr(attention, "_attention_call", None)
    kind = f"{type(attention).__module__}.{type(attention).__qualname__}"
    if kind == "torchtune.modules.attention.MultiHeadAttention" and attention.is_causal:
        if isinstance(call, CausalAttention):
            return call
        if getattr(call, "__module__", None) == "torchtune.modules.attention_utils":
            return CausalAttention()  # torchtune's own, which is plain
    return None


def causal_attention(
    q_BHTK: torch.Tensor,
    k_BHSK: torch.Tensor,
    v_BHSK: torch.Tensor,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Each query attends to itself and to keys before it; the last query belongs to the last key.

    Args:
        q_BHTK: queries of B rows, H heads, T positions, K features: the last T of S positions.
        k_BHSK: keys of all S positions.
        v_BHSK: values, the same shape as the keys.
        window: keys that a query sees at most, itself included (Mistral's sliding_window); None:
            all before it.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` before the softmax (Gemma 2).
        scale: factor of the scores; None: 1 / sqrt(K).

    Returns:
        Attended values [B, H, T, K] in the dtype of the queries.
    """
    length, num_keys = q_BHTK.shape[2], k_BHSK.shape[2]
    offset = num_keys - length
    if soft_cap is None and (window is None or window >= num_keys):
        if offset == 0:
            return F.scaled_dot_product_attention(
                q_BHTK, k_BHSK, v_BHSK, is_causal=True, scale=scale
            )
        if q_BHTK.is_cuda:  # flash kernels know this mask; elsewhere it would be built whole
            mask = causal_lower_right(length, num_keys)
            return F.scaled_dot_product_attention(
                q_BHTK, k_BHSK, v_BHSK, attn_mask=mask, scale=scale
            )
    blocks, step = [], QUERY_BLOCK
    if soft_cap is not None:
        step = max(1, min(step, SCORE_ELEMENTS // (q_BHTK.shape[0] * q_BHTK.shape[1] * num_keys)))
    for first in range(0, length, step):
        stop = min(first + step, length)
        begin = 0 if window is None else max(0, offset + first - window + 1)
        seen_keys = slice(begin, offset + stop)
        q, k, v = q_BHTK[:, :, first:stop], k_BHSK[:, :, seen_keys], v_BHSK[:, :, seen_keys]
        queries = torch.arange(offset + first, offset + stop, device=q.device).unsqueeze(1)
        keys = torch.arange(begin, offset + stop, device=q.device)
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        if soft_cap is None:
            blocks.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale))
        else:
            blocks.append(_soft_capped(q, k, v, seen, soft_cap, scale))
    return torch.cat(blocks, dim=2)


def _soft_capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    soft_cap: float,
    scale: float | None,
) -> torch.Tensor:
    factor = (q.shape[-1] ** -0.5 if scale is None else scale) / soft_cap
    scores = q @ k.transpose(2, 3)
    if scores.requires_grad:
        scores = soft_cap * torch.tanh(scores * factor)
        scores = scores.masked_fill(~seen, -torch.inf)
    else:
        scores.mul_(factor).tanh_().mul_(soft_cap).masked_fill_(~seen, -torch.inf)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return weights.to(v.dtype) @ v
