"""Tensor parallelism for a forward pass: every matrix is split once, whatever the family.

Parameters become DTensors on the ``tp`` mesh, so that FSDP2 shards them further and loading finds
their placement; the products run on the local parts, because DTensor's dispatch costs more than a
small layer. A decoder layer communicates two sums of its output, the embedding one; an unmerged
adapter of a matrix that is split by rows one more, of its rank.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from ppl_eval.decoder import Decoder
from ppl_eval.errors import UserError
from ppl_eval.parallel.lora import AdaptedLinear, local_part
from ppl_eval.parallel.products import wide_product

_AXES = {"vocabulary": 0, "columns": 0, "rows": 1}
"""How a matrix is split -> the axis of its weight.

A bias of a matrix that is split by rows is added after the sum, whole. Vectors (norms) stay whole
on every rank. Of an adapter's two matrices the one that faces a split dim is split with it."""


def check_heads(
    decoder: Decoder, tp: int, name: str = "the model", key: str = "parallel.tp"
) -> None:
    """Refuse a degree that does not divide the heads.

    Args:
        decoder: on any device, not yet split.
        tp: ranks that share a matrix.
        name: what the message calls the model.
        key: the config key that says ``tp``, for the message.

    Raises:
        UserError: naming heads, kv heads and tp; or a module that the plan cannot split.
    """
    if tp == 1:
        return
    model, planned = decoder.model, dict(_planned(decoder))
    for heads, kv_heads in decoder.num_heads:
        if heads % tp or kv_heads % tp:
            fits = [n for n in range(1, kv_heads + 1) if not heads % n and not kv_heads % n]
            raise UserError(
                f"{key} is {tp}, but {name} has {heads} heads and {kv_heads} kv heads, which"
                f" tp must both divide: set {key} to {' or '.join(map(str, fits))}"
            )
    for path, parameter in model.named_parameters():
        owner = path.rpartition(".")[0]
        if parameter.ndim > 1 and not _is_known(decoder, owner, planned):
            raise UserError(
                f"{key} is {tp}, but how to split {path} of a"
                f" {type(model.get_submodule(owner)).__name__} is not known: set {key}=1"
            )
        if owner in planned and planned[owner] == "vocabulary" and path.endswith(".bias"):
            raise UserError(f"{key} is {tp}, but the head has a bias: set {key}=1")


def check_groups(model: nn.Module, loss_group: dist.ProcessGroup | None) -> None:
    """Refuse ranks that share matrices and would read different windows: sums would mix them.

    Args:
        model: split by :func:`split_decoder` or not.
        loss_group: ranks that read different windows or parts of windows.

    Raises:
        UserError: the model is split over ranks of that group.
    """
    apart = ranks_of(loss_group)
    for group in tp_groups(model):
        if len(apart & ranks_of(group)) > 1:
            raise UserError(
                "the model is split over tp, so not all processes read different documents: give"
                " evaluate() the meshes, meshes=..."
            )


def tp_groups(model: nn.Module) -> set[dist.ProcessGroup]:
    """Groups over which :func:`split_decoder` has split the model: one, or none."""
    groups: set[Any] = {getattr(module, "tp_group", None) for module in model.modules()}
    return groups - {None}


def ranks_of(group: dist.ProcessGroup | None) -> set[int]:
    """Global ranks of a group; empty for None, this rank alone."""
    return set() if group is None else set(dist.get_process_group_ranks(group))


def split_axes(decoder: Decoder) -> dict[str, int]:
    """Name of each parameter that tp splits -> the axis; the others stay whole on every rank."""
    return {
        f"{name}.{key}": _AXES[kind]
        for name, kind in _planned(decoder)
        for key, parameter in decoder.model.get_submodule(name).named_parameters(recurse=False)
        if parameter.ndim > _AXES[kind]
    }


def split_decoder(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Split a decoder's matrices in place over a one-dimensional mesh, before FSDP2 if at all.

    No communication. Afterwards the model can evaluate, but not train.

    Args:
        decoder: on the meta device or materialised (equally on all ranks).
        mesh: the ``tp`` mesh; nothing is done on a mesh of one rank.

    Raises:
        UserError: see :func:`check_heads`.
    """
    tp = mesh.size()
    if tp == 1:
        return
    check_heads(decoder, tp)
    planned = _planned(decoder)
    decoder.divide_heads(tp)
    for name, kind in planned:
        module: Any = decoder.model.get_submodule(name)
        axis = _AXES[kind]
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim > axis:
                part = distribute_tensor(parameter.data, mesh, [Shard(axis)], src_data_rank=None)
                module.register_parameter(key, nn.Parameter(part, requires_grad=False))
        module.tp_group = mesh.get_group()
        own = type(module)
        mixin = _split_class(module, kind)
        # as FSDP2 does; a subclass (Gemma scales its embedding) keeps what it adds
        bases = (mixin,) if own in (nn.Embedding, nn.Linear, AdaptedLinear) else (own, mixin)
        module.__class__ = type(f"TensorParallel{own.__name__}", bases, {})


@dataclass(frozen=True)
class VocabularyPart:
    """What one rank has of a head that is split by vocabulary.

    Attributes:
        weight_VD: its rows, possibly none.
        first: id of the first of them.
        largest: most rows that any rank has.
        group: the ranks that have the others.
        num_ids: rows of the whole.
    """

    weight_VD: torch.Tensor
    first: int
    largest: int
    group: dist.ProcessGroup
    num_ids: int

    @property
    def is_last(self) -> bool:
        """Whether no rank has ids after this one's."""
        return dist.get_rank(self.group) == dist.get_world_size(self.group) - 1

    def is_like(self, other: "VocabularyPart") -> bool:
        """Whether both are of as many ids, split over the same ranks."""
        ranks = (dist.get_process_group_ranks(part.group) for part in (self, other))
        return self.num_ids == other.num_ids and len({tuple(r) for r in ranks}) == 1


def vocabulary_part(module: nn.Module) -> VocabularyPart | None:
    """This rank's rows of an embedding or head that :func:`split_decoder` split; else None.

    Under FSDP2 call it inside the root's forward, where the parameter is gathered.
    """
    group = getattr(module, "tp_group", None)
    if group is None:
        return None
    weight: Any = module.weight
    num_ids = weight.shape[0]
    largest = -(-num_ids // dist.get_world_size(group))
    return VocabularyPart(
        local_part(weight), largest * dist.get_rank(group), largest, group, num_ids
    )


class _EmbeddingRows(nn.Embedding):
    """Each rank looks up the ids whose rows it has; the others give zero."""

    tp_group: dist.ProcessGroup

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        part = vocabulary_part(self)
        assert part is not None
        rows = input - part.first
        absent = (rows < 0) | (rows >= len(part.weight_VD))
        if len(part.weight_VD):
            found = F.embedding(rows.masked_fill(absent, 0), part.weight_VD)
            found = found.masked_fill_(absent.unsqueeze(-1), 0)
        else:
            found = part.weight_VD.new_zeros(*input.shape, part.weight_VD.shape[1])
        dist.all_reduce(found, group=part.group)
        return found


class _Columns(nn.Linear):
    """Each rank computes its own output features."""

    tp_group: dist.ProcessGroup

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else local_part(self.bias)
        return F.linear(input, local_part(self.weight), bias)


class _Rows(nn.Linear):
    """Each rank reads its own input features; the outputs are added up, then the bias once.

    Parts and their sum are fp32 and rounded once, as inside one process's product. Rounding the
    parts too moves a bf16 model's loss as much as bf16 itself does.
    """

    tp_group: dist.ProcessGroup

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = _summed_product(input, local_part(self.weight), self.tp_group)
        return out if self.bias is None else out + self.bias


class _AdaptedColumns(AdaptedLinear):
    """Each rank computes its own output features; A is whole, B and the scale are its rows."""

    def product(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, local_part(self.weight))


class _AdaptedRows(AdaptedLinear):
    """The outputs of W and those of A are added up over the ranks; what comes after is whole."""

    tp_group: dist.ProcessGroup

    def product(self, input: torch.Tensor) -> torch.Tensor:
        return _summed_product(input, local_part(self.weight), self.tp_group)


def _summed_product(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    out = wide_product(x, weight)
    dist.all_reduce(out, group=group)
    return out.to(x.dtype)


_LINEAR = {"columns": _Columns, "vocabulary": _Columns, "rows": _Rows}
_ADAPTED = {"columns": _AdaptedColumns, "rows": _AdaptedRows}
_FACING = {"columns": "lora_b", "rows": "lora_a"}


def _split_class(module: nn.Module, kind: str) -> type[nn.Module]:
    """What a module computes once its parameters are split."""
    if isinstance(module, nn.Embedding):
        return _EmbeddingRows
    return (_ADAPTED if isinstance(module, AdaptedLinear) else _LINEAR)[kind]


def _is_known(decoder: Decoder, owner: str, planned: Mapping[str, str]) -> bool:
    """Whether the matrix of the module ``owner`` can be split, or may stay whole."""
    module = decoder.model.get_submodule(owner)
    if module is decoder.embedding:
        return isinstance(module, nn.Embedding)
    adapted, _, part = owner.rpartition(".")
    name = adapted if part in ("lora_a", "lora_b") else owner
    # a subclass may do more than a product
    return name in planned and type(module) in (nn.Linear, AdaptedLinear)


def _planned(decoder: Decoder) -> list[tuple[str, str]]:
    """(module name, how it is split) for the modules that the model has.

    An adapter adds up to its matrix's output, so B is split as W by columns, and A as W by rows;
    the other of the two is small and stays whole.
    """
    patterns = {
        re.compile(re.escape(pattern).replace(r"\*", r"\d+")): kind
        for pattern, kind in decoder.split_plan.items()
    }
    model = decoder.model
    matrices = [
        (name, kind)
        for name, module in model.named_modules()
        for pattern, kind in patterns.items()
        if pattern.fullmatch(name) and next(module.parameters(recurse=False), None) is not None
    ]
    return matrices + [
        (f"{name}.{_FACING[kind]}", kind)
        for name, kind in matrices
        if isinstance(model.get_submodule(name), AdaptedLinear)
    ]
