"""The model's head, run only where a token is scored, in chunks: full logits never exist."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from ppl_eval.parallel.tensor import VocabularyPart, vocabulary_part
from ppl_eval.score.nll import sharded_token_nll_, token_nll_

CHUNK_ELEMENTS = 2**25
"""Logits that exist at a time, at most (128 MiB in fp32)."""

_LARGE_VOCABULARY = 2**18
"""Taken for a head that does not show its weight."""

CAST_ROWS = 8192
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
    """``soft_cap * tanh(logits / soft_cap)``, in the memory of ``logits`` unless they have a
    gradient."""
    if logits.requires_grad:
        return soft_cap * torch.tanh(logits / soft_cap)
    return logits.div_(soft_cap).tanh_().mul_(soft_cap)


def score(
    model: nn.Module,
    inputs_BT: torch.Tensor,
    targets_BT: torch.Tensor,
    scored_BT: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    fp32_logits: bool = True,
) -> torch.Tensor:
    """NLL of every scored target, in one forward pass of ``model``.

    Of a torchtune ``TransformerDecoder`` only the hidden states are computed at every position; its
    final norm and head run inside its own forward (where FSDP2 has gathered their parameters) on
    the scored positions. A head that is split by vocabulary stays split: see
    :func:`ppl_eval.score.nll.sharded_token_nll_`. Any other module must return logits [B, T, V],
    itself or as ``.logits``.

    Args:
        model: on the device of the inputs; sharded or not.
        inputs_BT: token ids (int64).
        targets_BT: the token after each input (int64).
        scored_BT: which targets to score (bool); N of them, 0 on a rank that has only padding.
        positions: places of the inputs in their windows (int64 [T] or [B, T]); None: 0, 1, 2, ...
        fp32_logits: compute logits as ``hidden.float() @ weight.float().T``, also of a bf16 model.
            Its own bf16 product rounds each logit (0.015 nats rms for a token). False uses that.

    Returns:
        NLL in nats [B, T] (fp32, or fp64 from fp64 logits), 0 where nothing is scored.
    """
    targets_N = targets_BT[scored_BT]
    decoder = unwrapped(model)

    def from_hidden(hidden_BTD: torch.Tensor) -> torch.Tensor:
        hidden_ND = decoder.norm(hidden_BTD[scored_BT])
        head = Head.of(decoder.output, fp32_logits)
        return _in_chunks(head.nll, hidden_ND, targets_N, head.largest_vocabulary)

    if hasattr(decoder, "unembed"):
        options = {} if positions is None else {"input_pos": positions.view(-1, inputs_BT.shape[1])}
        with _unembed_replaced(decoder, from_hidden):
            nll_N = model(inputs_BT, **options)
    else:
        out = model(inputs_BT)
        logits_NV = getattr(out, "logits", out)[scored_BT]
        nll_N = _in_chunks(token_nll_, logits_NV, targets_N, logits_NV.shape[-1])
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


def _in_chunks(
    nll: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows_N: torch.Tensor,
    targets_N: torch.Tensor,
    vocabulary: int,
) -> torch.Tensor:
    """``nll`` of as many rows at a time as may have their logits at once."""
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    dtype = torch.float64 if rows_N.dtype == torch.float64 else torch.float32
    nll_N = torch.zeros(len(rows_N), dtype=dtype, device=rows_N.device)
    for begin in range(0, len(rows_N), size):
        chunk = slice(begin, begin + size)
        nll_N[chunk] = nll(rows_N[chunk], targets_N[chunk])
    return nll_N


@dataclass(frozen=True)
class Head:
    """A decoder's ``output`` as what gives a loss: a linear layer, a tied one, or any callable.

    Attributes:
        logits: hidden states [N, D] -> logits [N, V], or this rank's part of them.
        largest_vocabulary: most logits of a token on any rank.
        part: how the vocabulary is split, if it is.
    """

    logits: Callable[[torch.Tensor], torch.Tensor]
    largest_vocabulary: int
    part: VocabularyPart | None = None

    @classmethod
    def of(cls, output: Any, fp32: bool) -> "Head":
        """Under FSDP2 call it inside the root's forward, where parameters are gathered."""
        if isinstance(output, CappedHead):
            inner = cls.of(output.head, fp32)
            return replace(inner, logits=lambda h: soft_capped(inner.logits(h), output.soft_cap))
        owner = getattr(output, "tied_module", output)  # torchtune's TiedLinear is no nn.Module
        part = vocabulary_part(owner)
        if part is not None:
            weight_VD = part.weight_VD
            return cls(lambda h: _product(h, weight_VD, fp32), part.largest, part)
        weight_VD = _plain_weight(output)
        if weight_VD is None:
            return cls(output, _LARGE_VOCABULARY)
        return cls(lambda h: _product(h, weight_VD, fp32), len(weight_VD))

    def nll(self, hidden_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """NLL of N tokens; every rank that has a part of the vocabulary calls it."""
        logits_NV = self.logits(hidden_ND)
        if self.part is None:
            return token_nll_(logits_NV, targets_N)
        return sharded_token_nll_(logits_NV, targets_N, self.part.first, self.part.group)


def _product(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, fp32: bool) -> torch.Tensor:
    """``hidden @ weight.T``, in fp32 if so wanted."""
    if not fp32 or weight_VD.dtype == torch.float64:
        return F.linear(hidden_ND, weight_VD)
    hidden_ND = hidden_ND.float()
    if weight_VD.dtype == torch.float32:
        return F.linear(hidden_ND, weight_VD)
    logits_NV = hidden_ND.new_empty(len(hidden_ND), len(weight_VD))
    for columns, rows in zip(
        logits_NV.split(CAST_ROWS, dim=1), weight_VD.split(CAST_ROWS), strict=True
    ):
        columns.copy_(F.linear(hidden_ND, rows.float()))
    return logits_NV


def _plain_weight(output: Any) -> torch.Tensor | None:
    """The weight, if ``output`` is nothing but a product with it."""
    if isinstance(output, nn.Linear) and type(output).forward is nn.Linear.forward:
        weight: Any = output.weight if output.bias is None else None
    else:
        weight = getattr(getattr(output, "tied_module", None), "weight", None)
    return None if isinstance(weight, DTensor) else weight
