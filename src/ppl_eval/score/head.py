"""The model's head as a function of chosen hidden states: full logits [B, T, V] never exist."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ppl_eval.decoder import Tail
from ppl_eval.errors import UserError
from ppl_eval.parallel.lora import AdaptedLinear
from ppl_eval.parallel.products import wide_product
from ppl_eval.parallel.reduce import all_gather
from ppl_eval.parallel.tensor import VocabularyPart, vocabulary_part
from ppl_eval.quantize.linear import QuantizedLinear
from ppl_eval.score.nll import row_blocks, sharded_token_nll_, token_nll_, wide_dtype

CHUNK_ELEMENTS = 2**25
"""Most logits that exist at a time (128 MiB in fp32)."""


@dataclass(frozen=True)
class Head:
    """A function of normed hidden states that gives logits and losses.

    Attributes:
        product: hidden states [N, D] -> logits [N, V] before the tail, or this rank's part of them.
        largest_vocabulary: most logits of a token that any rank has.
        tail: what happens to logits after the product; None for nothing.
        part: this rank's rows of the weight, if the vocabulary is split.
        weight_VD: the weight on this rank, if ``product`` only multiplies by it.
        fp32: whether ``product`` multiplies in fp32.
    """

    product: Callable[[torch.Tensor], torch.Tensor]
    largest_vocabulary: int
    tail: Tail | None = None
    part: VocabularyPart | None = None
    weight_VD: torch.Tensor | None = None
    fp32: bool = True

    @classmethod
    def of(cls, owner: nn.Module, tail: Tail | None, *, fp32: bool, num_ids: int) -> "Head":
        """The head of a decoder; call it where the owner's parameters are gathered.

        Args:
            owner: the module that holds the weight: a linear layer or the embedding.
            tail: what happens to logits afterwards.
            fp32: compute logits as ``hidden.float() @ weight.float().T``, also of a bf16 model.
            num_ids: number of logits of a token, used if the owner has no plain weight.

        Raises:
            UserError: the weight is sharded in an unknown way, or ``fp32`` is asked of a bf16 or
                fp16 head that is more than a linear layer.
        """
        part = vocabulary_part(owner)
        if part is not None:
            return cls.by_weight(part.weight_VD, fp32, part, tail)
        weight: Any = getattr(owner, "weight", None)
        if isinstance(weight, DTensor):
            raise UserError(
                f"the head is a {type(owner).__name__} whose weight is spread over ranks in a way"
                " that is not known: shard the model by FSDP2 or split_decoder"
            )
        if isinstance(owner, AdaptedLinear):
            return cls(partial(_adapted_product, owner, fp32), len(owner.weight), tail)
        if isinstance(owner, QuantizedLinear):
            if owner.activations is None and owner.bias is None:
                return cls.by_weight(
                    owner.dequantized(torch.float32 if fp32 else None), fp32, tail=tail
                )
            return cls(partial(_quantized_product, owner, fp32), num_ids, tail)
        if _is_plain(owner):
            bias = getattr(owner, "bias", None)
            if bias is None:
                return cls.by_weight(weight, fp32, tail=tail)
            return cls(partial(_product, weight, bias, fp32), len(weight), tail)
        dtype = next((p.dtype for p in owner.parameters()), torch.float32)
        if fp32 and dtype.itemsize < 4:
            raise UserError(
                f"logits_dtype is fp32, but the head is a {type(owner).__name__} that multiplies in"
                f" {str(dtype).removeprefix('torch.')}: set logits_dtype=model (fp32_logits=False)"
            )
        # its forward alone: FSDP2's hooks would gather and free the parameters for each chunk
        return cls(owner.forward, num_ids, tail)

    @classmethod
    def by_weight(
        cls,
        weight_VD: torch.Tensor,
        fp32: bool,
        part: VocabularyPart | None = None,
        tail: Tail | None = None,
    ) -> "Head":
        """The product with a weight, or with this rank's rows of it."""
        largest = len(weight_VD) if part is None else part.largest
        return cls(partial(_product, weight_VD, None, fp32), largest, tail, part, weight_VD, fp32)

    def logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Logits [N, V] of normed hidden states, or this rank's part of them."""
        logits_NV = self.product(hidden_ND)
        return logits_NV if self.tail is None else self.tail(logits_NV)

    def nll(self, hidden_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """NLL in nats [N] (fp32 or fp64), in chunks; if the vocabulary is split, a collective.

        Args:
            hidden_ND: normed hidden states.
            targets_N: the ids that followed (int64).
        """
        blocks = row_blocks(CHUNK_ELEMENTS, self.largest_vocabulary, hidden_ND, targets_N)
        chunks = [self._chunk_nll(*block) for block in blocks]
        return torch.cat([hidden_ND.new_zeros(0, dtype=wide_dtype(hidden_ND)), *chunks])

    def _chunk_nll(self, hidden_ND: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """A function of its own, so that a chunk's logits are freed before the next chunk."""
        logits_NV = self.logits(hidden_ND)
        if self.part is None:
            return token_nll_(logits_NV, targets_N)
        return sharded_token_nll_(logits_NV, targets_N, self.part.first, self.part.group)

    def split_like(self, other: "Head") -> "Head":
        """This head, split like ``other``; ids that ``other`` lacks go to the last of its ranks.

        If this head is split differently, its ranks gather the weight, so all of them must call it.

        Raises:
            UserError: ``other`` is split, and this head is more than a product with a weight.
        """
        part, wanted = self.part, other.part
        if part is wanted is None or (part and wanted and part.is_like(wanted)):
            return self
        weight_VD = self.weight_VD
        if part is not None:
            padded = F.pad(part.weight_VD, (0, 0, 0, part.largest - len(part.weight_VD)))
            weight_VD = all_gather(padded, part.group).flatten(0, 1)[: part.num_ids]
        if weight_VD is None:
            raise UserError(
                "parallel.tp splits the student's head, but the teacher's head is no plain matrix:"
                " set parallel.tp=1 and teacher_parallel.tp=1"
            )
        if wanted is None:
            return self.by_weight(weight_VD, self.fp32, tail=self.tail)
        first_of_last = wanted.largest * (dist.get_world_size(wanted.group) - 1)
        num_ids, is_last = len(weight_VD), wanted.first == first_of_last
        rows_VD = weight_VD[wanted.first : num_ids if is_last else wanted.first + wanted.largest]
        if part is not None:  # a view would keep the gathered weight
            rows_VD = rows_VD.clone()
        largest = max(wanted.largest, num_ids - first_of_last)
        new_part = replace(wanted, weight_VD=rows_VD, largest=largest, num_ids=num_ids)
        return self.by_weight(rows_VD, self.fp32, new_part, self.tail)


@contextmanager
def gathered(owner: nn.Module) -> Iterator[None]:
    """Within it the parameters of a module are gathered, also where it is an FSDP2 unit of its own;
    every rank enters it once a forward pass."""
    if not isinstance(owner, FSDPModule):
        yield
        return
    owner.unshard()
    try:
        yield
    finally:
        owner.reshard()


def _product(
    weight_VD: torch.Tensor, bias_V: torch.Tensor | None, fp32: bool, x_ND: torch.Tensor
) -> torch.Tensor:
    product_NV = wide_product(x_ND, weight_VD) if fp32 else F.linear(x_ND, weight_VD)
    return product_NV if bias_V is None else product_NV + bias_V.to(product_NV.dtype)


def _adapted_product(owner: AdaptedLinear, fp32: bool, x_ND: torch.Tensor) -> torch.Tensor:
    """:meth:`AdaptedLinear.forward`, in fp32 if asked."""
    if not fp32:
        return owner.forward(x_ND)
    product_NV = wide_product(x_ND, owner.weight)
    product_NV += wide_product(wide_product(x_ND, owner.lora_a.weight), owner.lora_b.weight)
    if owner.dora_scale is not None:
        product_NV *= owner.dora_scale
    return product_NV if owner.bias is None else product_NV + owner.bias


def _quantized_product(owner: QuantizedLinear, fp32: bool, x_ND: torch.Tensor) -> torch.Tensor:
    wide = fp32 and owner.activations != "float8"  # whose kernel needs bf16
    return owner.forward(x_ND.float() if wide else x_ND)


def _is_plain(owner: nn.Module) -> bool:
    """Whether a module is an embedding, or a linear layer that computes no more than its product
    and bias, with a weight that is neither quantised nor a tensor subclass."""
    weight = getattr(owner, "weight", None)
    if not isinstance(weight, torch.Tensor) or hasattr(weight, "__tensor_flatten__"):
        return False
    is_product = isinstance(owner, nn.Embedding) or type(owner).forward is nn.Linear.forward
    return is_product and weight.is_floating_point()
