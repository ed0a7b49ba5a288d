"""Causal attention with what torch's kernel lacks: sliding windows and soft caps.

Queries are taken in blocks, so that no mask or score matrix of queries x keys ever exists.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_QUERY_BLOCK = 512


@dataclass(frozen=True)
class CausalAttention:
    """Takes the place of what torchtune's MultiHeadAttention calls after rope; see
    :func:`causal_attention` for the options."""

    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
    ) -> torch.Tensor:
        """Attended values of q, k, v [B, H, T, K]; what torchtune says of masks is not needed."""
        return causal_attention(
            q, k, v, window=self.window, soft_cap=self.soft_cap, scale=self.scale
        )


def causal_attention(
    q_BHTK: torch.Tensor,
    k_BHTK: torch.Tensor,
    v_BHTK: torch.Tensor,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Each query attends to itself and to keys before it.

    Args:
        q_BHTK: queries of B rows, H heads, T positions, K features.
        k_BHTK: keys, the same shape.
        v_BHTK: values, the same shape.
        window: keys that a query sees at most, itself included (Mistral's sliding_window); None:
            all before it.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` before the softmax (Gemma 2).
        scale: factor of the scores; None: 1 / sqrt(K).

    Returns:
        Attended values [B, H, T, K] in the dtype of the queries.
    """
    length = q_BHTK.shape[2]
    if soft_cap is None and (window is None or window >= length):
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True, scale=scale)
    blocks = []
    for first in range(0, length, _QUERY_BLOCK):
        stop = min(first + _QUERY_BLOCK, length)
        begin = 0 if window is None else max(0, first - window + 1)
        q, k, v = q_BHTK[:, :, first:stop], k_BHTK[:, :, begin:stop], v_BHTK[:, :, begin:stop]
        queries = torch.arange(first, stop, device=q.device).unsqueeze(1)
        keys = torch.arange(begin, stop, device=q.device)
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
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = scores.masked_fill(~seen, -torch.inf).float().softmax(dim=-1)
    return weights.to(v.dtype) @ v
