"""The model's head, run only where a token is scored, in chunks: full logits never exist."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from ppl_eval.errors import UserError
from ppl_eval.parallel.reduce import all_gather
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

    def in_chunks(rows_ND: torch.Tensor, head: Head) -> torch.Tensor:
        nll_N = torch.zeros(len(rows_ND), dtype=wide_dtype(rows_ND), device=rows_ND.device)
        for chunk in chunks_of(len(rows_ND), CHUNK_ELEMENTS // head.largest_vocabulary):
            nll_N[chunk] = head.nll(rows_ND[chunk], targets_N[chunk])
        return nll_N

    nll_N = run_to_head(
        model,
        inputs_BT,
        lambda hidden_BTD: hidden_BTD[scored_BT],
        in_chunks,
        positions=positions,
        fp32_logits=fp32_logits,
    )
    nll_BT = torch.zeros(inputs_BT.shape, dtype=nll_N.dtype, device=nll_N.device)
    nll_BT[scored_BT] = nll_N
    return nll_BT


def run_to_head(
    model: nn.Module,
    inputs_BT: torch.Tensor,
    rows_of: Callable[[torch.Tensor], torch.Tensor],
    then: Callable[[torch.Tensor, "Head"], Any],
    *,
    positions: torch.Tensor | None = None,
    fp32_logits: bool = True,
) -> Any:
    """One forward pass of ``model`` that ends in ``then``, where its head can be run.

    Args:
        model: on the device of the inputs; sharded or not.
        inputs_BT: token ids (int64).
        rows_of: hidden states [B, T, D] -> those whose logits are wanted [N, D].
        then: given these, normed, and the head; under FSDP2 it runs inside the root's forward,
            where parameters are gathered. Of a module that gives logits: these, and no head's work.
        positions: places of the inputs in their windows (int64 [T] or [B, T]); None: 0, 1, 2, ...
        fp32_logits: see :func:`score`.

    Returns:
        What ``then`` returns.
    """
    decoder = unwrapped(model)
    if not hasattr(decoder, "unembed"):
        out = model(inputs_BT)
        logits_NV = rows_of(getattr(out, "logits", out))
        return then(logits_NV, Head(lambda rows_NV: rows_NV, logits_NV.shape[-1]))

    found = []

    def unembed(hidden_BTD: torch.Tensor) -> torch.Tensor:
        rows_ND = decoder.norm(rows_of(hidden_BTD))
        found.append(then(rows_ND, Head.of(decoder.output, fp32_logits)))
        return rows_ND  # what the model returns goes through FSDP2, which may cast it

    options = {} if positions is None else {"input_pos": positions.view(-1, inputs_BT.shape[1])}
    with _unembed_replaced(decoder, unembed):
        model(inputs_BT, **options)
    return found[0]


def chunks_of(count: int, size: int) -> Iterator[slice]:
    """``count`` rows, at most ``size`` (and at least one) at a time."""
    size = max(1, size)
    for begin in range(0, count, size):
        yield slice(begin, begin + size)


def wide_dtype(rows: torch.Tensor) -> torch.dtype:
    """What losses are computed in: fp64 of fp64 rows, else fp32."""
    return torch.float64 if rows.dtype == torch.float64 else torch.float32


def unwrapped(model: nn.Module) -> Any:
    """The module inside DistributedDataParallel and torch.compile's wrapper."""
    inner: Any = model
    for name in ("module", "_orig_mod"):
        inner = getattr(inner, name, inner)
    return inner


@contextmanager
def _unembed_replaced(decoder: nn.Module, unembed: Callable[..., torch.Tensor]) -> Iterator[None]:
    """torchtune's decoder ends its forward with ``self.unembed(h)``: norm, head, ``.float()``."""
    before = vars(decoder).get("unembed")  # of a pass that this one runs in
    object.__setattr__(decoder, "unembed", unembed)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(decoder, "unembed")
        else:
            object.__setattr__(decoder, "unembed", before)


@dataclass(frozen=True)
class Head:
    """A decoder's ``output`` as what gives a loss: a linear layer, a tied one, or any callable.

    Attributes:
        function: hidden states [N, D] -> logits [N, V], or this rank's part of them.
        largest_vocabulary: most logits of a token on any rank.
        part: how the vocabulary is split, if it is.
        weight_VD: what ``function`` multiplies by, if it does no more than that.
        fp32: multiply in fp32.
        soft_cap: see :class:`CappedHead`.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    largest_vocabulary: int
    part: VocabularyPart | None = None
    weight_VD: torch.Tensor | None = None
    fp32: bool = True
    soft_cap: float | None = None

    @classmethod
    def of(cls, output: Any, fp32: bool) -> "Head":
        """Under FSDP2 call it inside the root's forward, where parameters are gathered."""
        if isinstance(output, CappedHead):
            return replace(cls.of(output.head, fp32), soft_cap=output.soft_cap)
        owner = getattr(output, "tied_module", output)  # torchtune's TiedLinear is no nn.Module
        part = vocabulary_part(owner)
        if part is not None:
            return cls.by_weight(part.weight_VD, fp32, part)
        weight_VD = _plain_weight(output)
        if weight_VD is None:
            return cls(output, _LARGE_VOCABULARY)
        return cls.by_weight(weight_VD, fp32)

    @classmethod
    def by_weight(
        cls, weight_VD: torch.Tensor, fp32: bool, part: VocabularyPart | None = None
    ) -> "Head":
        """The product with a weight, or with this rank's rows of it."""
        largest = len(weight_VD) if part is None else part.largest
        return cls(lambda h: _product(h, weight_VD, fp32), largest, part, weight_VD, fp32)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of hidden states, or this rank's part of them."""
        logits_NV = self.function(hidden_ND)
        return logits_NV if self.soft_cap is None else soft_capped(logits_NV, self.soft_cap)

    def split_like(self, other: "Head") -> "Head":
        """This head with the ids that ``other`` has on this rank; ids that ``other`` lacks go to
        the last of its ranks.

        Ranks that split this head gather its weight, unless both are split alike; so all of them
        call it.
        """
        theirs, mine = other.part, self.part
        if theirs is None and mine is None:
            return self
        if theirs is not None and mine is not None and theirs.is_like(mine):
            return self
        if mine is None:
            weight_VD = self.weight_VD
        else:
            padded = F.pad(mine.weight_VD, (0, 0, 0, mine.largest - len(mine.weight_VD)))
            weight_VD = all_gather(padded, mine.group).flatten(0, 1)[: mine.num_ids]
        if theirs is None:
            assert weight_VD is not None
            return replace(self.by_weight(weight_VD, self.fp32), soft_cap=self.soft_cap)
        if weight_VD is None:
            raise UserError(
                "parallel.tp splits the student's head, but the teacher's head is no plain matrix:"
                " set parallel.tp=1 and teacher_parallel.tp=1"
            )
        num_ids = len(weight_VD)
        end = num_ids if theirs.is_last else theirs.first + theirs.largest
        rows_VD = weight_VD[theirs.first : end]
        rows_VD = rows_VD if mine is None else rows_VD.clone()  # or the whole would be kept
        before_last = theirs.largest * (dist.get_world_size(theirs.group) - 1)
        largest = max(theirs.largest, num_ids - before_last)
        part = VocabularyPart(rows_VD, theirs.first, largest, theirs.group, num_ids)
        return replace(self.by_weight(rows_VD, self.fp32, part), soft_cap=self.soft_cap)

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
