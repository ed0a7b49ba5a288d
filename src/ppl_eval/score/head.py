"""The model's head, run only where a token is scored, in chunks: full logits never exist."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ppl_eval.score.nll import token_nll

_CHUNK_ELEMENTS = 2**26
"""Logits that exist at a time, at most (256 MB in fp32)."""

_LARGE_VOCABULARY = 2**18
"""Taken for a head that does not show its weight."""

_CAST_ROWS = 16_384
"""Rows of a low-precision head that are cast to fp32 at a time."""


class CappedHead(nn.Module):
    """A head whose logits are soft-capped (Gemma 2).

    Args:
        head: gives the logits: a linear layer or torchtune's TiedLinear.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``.
    """

    def __init__(self, head: Any, soft_cap: float) -> None:
        super().__init__()
        self.head = head
        self.soft_cap = soft_cap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Capped logits."""
        return soft_capped(self.head(hidden), self.soft_cap)


def soft_capped(logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """``soft_cap * tanh(logits / soft_cap)``."""
    return soft_cap * torch.tanh(logits / soft_cap)


def score(
    model: nn.Module,
    inputs_BT: torch.Tensor,
    targets_BT: torch.Tensor,
    scored_BT: torch.Tensor,
    *,
    fp32_logits: bool = True,
) -> torch.Tensor:
    """NLL of every scored target, in one forward pass of ``model``.

    Of a torchtune ``TransformerDecoder`` only the hidden states are computed at every position; its
    final norm and head run inside its own forward (where FSDP2 has gathered their parameters) on
    the scored positions. Any other module must return logits [B, T, V], itself or as ``.logits``.

    Args:
        model: on the device of the inputs; sharded or not.
        inputs_BT: token ids (int64).
        targets_BT: the token after each input (int64).
        scored_BT: which targets to score (bool); N of them.
        fp32_logits: compute logits as ``hidden.float() @ weight.float().T``, also of a bf16 model.
            Its own bf16 product rounds each logit (0.015 nats rms for a token). False uses that.

    Returns:
        NLL in nats [B, T] (fp32, or fp64 from fp64 logits), 0 where nothing is scored.
    """
    targets_N = targets_BT[scored_BT]
    decoder = unwrapped(model)

    def from_hidden(hidden_BTD: torch.Tensor) -> torch.Tensor:
        hidden_ND = decoder.norm(hidden_BTD[scored_BT])
        weight_VD = _plain_weight(decoder.output)
        vocab_size = _LARGE_VOCABULARY if weight_VD is None else len(weight_VD)
        return _nll_in_chunks(
            hidden_ND, targets_N, vocab_size, lambda h: head_logits(decoder.output, h, fp32_logits)
        )

    if hasattr(decoder, "unembed"):
        with _unembed_replaced(decoder, from_hidden):
            nll_N = model(inputs_BT)
    else:
        out = model(inputs_BT)
        logits_NV = getattr(out, "logits", out)[scored_BT]
        nll_N = _nll_in_chunks(logits_NV, targets_N, logits_NV.shape[-1], lambda logits: logits)
    nll_BT = torch.zeros(inputs_BT.shape, dtype=nll_N.dtype, device=nll_N.device)
    nll_BT[scored_BT] = nll_N
    return nll_BT


def unwrapped(model: nn.Module) -> Any:
    """The module inside DistributedDataParallel and torch.compile's wrapper."""
    inner: Any = model
    for name in ("module", "_orig_mod"):
        inner = getattr(inner, name, inner)
    return inner


@contextmanager
def _unembed_replaced(decoder: nn.Module, unembed: Callable[..., torch.Tensor]) -> Iterator[None]:
    """torchtune's decoder ends its forward with ``self.unembed(h)``: norm, head, ``.float()``."""
    object.__setattr__(decoder, "unembed", unembed)
    try:
        yield
    finally:
        object.__delattr__(decoder, "unembed")


def _nll_in_chunks(
    rows_N: torch.Tensor,
    targets_N: torch.Tensor,
    vocab_size: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    size = max(1, _CHUNK_ELEMENTS // vocab_size)
    dtype = torch.float64 if rows_N.dtype == torch.float64 else torch.float32
    nll_N = torch.zeros(len(rows_N), dtype=dtype, device=rows_N.device)
    for begin in range(0, len(rows_N), size):
        chunk = slice(begin, begin + size)
        nll_N[chunk] = token_nll(logits_of(rows_N[chunk]), targets_N[chunk])
    return nll_N


def head_logits(output: Any, hidden_ND: torch.Tensor, fp32: bool) -> torch.Tensor:
    """Logits [N, V] of a decoder's ``output``: a linear layer, a tied one, or any callable."""
    if isinstance(output, CappedHead):
        return soft_capped(head_logits(output.head, hidden_ND, fp32), output.soft_cap)
    weight_VD = _plain_weight(output)
    if weight_VD is None or not fp32 or weight_VD.dtype == torch.float64:
        return output(hidden_ND)
    hidden_ND = hidden_ND.float()
    if weight_VD.dtype == torch.float32:
        return F.linear(hidden_ND, weight_VD)
    logits_NV = hidden_ND.new_empty(len(hidden_ND), len(weight_VD))
    for columns, rows in zip(
        logits_NV.split(_CAST_ROWS, dim=1), weight_VD.split(_CAST_ROWS), strict=True
    ):
        columns.copy_(F.linear(hidden_ND, rows.float()))
    return logits_NV


def _plain_weight(output: Any) -> torch.Tensor | None:
    """The weight, if ``output`` is nothing but a product with it, perhaps capped."""
    if isinstance(output, CappedHead):
        output = output.head
    if isinstance(output, nn.Linear) and type(output).forward is nn.Linear.forward:
        return output.weight if output.bias is None else None
    tied = getattr(output, "tied_module", None)  # torchtune's TiedLinear, which is no nn.Module
    return None if tied is None else tied.weight
