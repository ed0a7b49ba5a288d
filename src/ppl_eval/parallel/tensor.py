"""Tensor parallelism for a forward pass: every matrix is split once, whatever the family.

Parameters become DTensors on the ``tp`` mesh, so that FSDP2 shards them further and loading finds
their placement. The products run on the local parts, because DTensor's dispatch costs more than a
small layer. A decoder layer makes two all-reduces of its hidden states, the embedding one. An
unmerged adapter on a matrix that is split by rows adds one of [..., rank]. A quantised layer (any
module with a ``split_kind``) computes with its parts by itself.
"""

import re
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
from ppl_eval.parallel.cut import local_part
from ppl_eval.parallel.lora import AdaptedLinear
from ppl_eval.parallel.products import wide_product

_AXES = {"vocabulary": 0, "columns": 0, "rows": 1}
"""How a matrix is split -> the dim of its weight that is split. Each rank adds the whole bias of a
matrix that is split by rows, after the all-reduce. Norms are not split."""

_SPLIT_WITH = {"columns": "lora_b", "rows": "lora_a"}
"""How a matrix is split -> which matrix of its adapter is split in the same way; the other stays
whole."""


def check_heads(
    decoder: Decoder, tp: int, name: str = "the model", key: str = "parallel.tp"
) -> None:
    """Refuse a degree that does not divide the heads.

    Args:
        decoder: on any device, not yet split.
        tp: ranks that share a matrix.
        name: what the message calls the model.
        key: the config key of ``tp``, for the message.

    Raises:
        UserError: ``tp`` does not divide the heads, or a module cannot be split.
    """
    if tp == 1:
        return
    model, planned = decoder.model, _planned(decoder)
    for heads, kv_heads in decoder.num_heads:
        if heads % tp or kv_heads % tp:
            fits = [n for n in range(1, kv_heads + 1) if not heads % n and not kv_heads % n]
            raise UserError(
                f"{key} is {tp}, but {name} has {heads} heads and {kv_heads} kv heads, which"
                f" tp must both divide: set {key} to {' or '.join(map(str, fits))}"
            )
    for path, parameter in model.named_parameters():
        owner = path.rpartition(".")[0]
        module: Any = model.get_submodule(owner)
        if owner in planned and hasattr(module, "split_kind"):
            module.check_split(planned[owner], tp, owner, key)
        if parameter.ndim > 1 and not _can_split(decoder, owner, planned):
            raise UserError(
                f"{key} is {tp}, but how to split {path} of a"
                f" {type(model.get_submodule(owner)).__name__} is not known: set {key}=1"
            )
        if planned.get(owner) == "vocabulary" and path.endswith(".bias"):
            raise UserError(f"{key} is {tp}, but the head has a bias: set {key}=1")


def check_groups(model: nn.Module, loss_group: dist.ProcessGroup | None) -> None:
    """Refuse ranks that share matrices but read different windows: all-reduces would mix them.

    Args:
        model: split by :func:`split_decoder` or not.
        loss_group: ranks that read different windows or parts of windows.

    Raises:
        UserError: the model is split over ranks of ``loss_group``.
    """
    if len(ranks_of(loss_group) & ranks_of(tp_group(model))) > 1:
        raise UserError(
            "the model is split over tp, so not all processes read different documents: give"
            " evaluate() the meshes, meshes=..."
        )


def tp_group(model: nn.Module) -> dist.ProcessGroup | None:
    """The group over which :func:`split_decoder` has split the model; None if it has not."""
    groups: Any = (getattr(module, "tp_group", None) for module in model.modules())
    return next((group for group in groups if group is not None), None)


def ranks_of(group: dist.ProcessGroup | None) -> set[int]:
    """Global ranks of a group; empty for None, this rank alone."""
    return set() if group is None else set(dist.get_process_group_ranks(group))


def split_axes(decoder: Decoder) -> dict[str, int]:
    """Name of each parameter that tp splits -> the dim; the others stay whole on every rank."""
    return {
        f"{name}.{key}": _AXES[kind]
        for name, kind in _planned(decoder).items()
        for key, parameter in decoder.model.get_submodule(name).named_parameters(recurse=False)
        if _is_split(parameter, kind)
    }


def split_decoder(decoder: Decoder, mesh: DeviceMesh) -> None:
    """Split a decoder's matrices in place over a one-dimensional mesh, before FSDP2 shards them.

    No communication. Afterwards the model can evaluate, but not train.

    Args:
        decoder: on the meta device, or with the same values on all ranks.
        mesh: the ``tp`` mesh; nothing is done on a mesh of one rank.

    Raises:
        UserError: see :func:`check_heads`.
    """
    if mesh.size() == 1:
        return
    check_heads(decoder, mesh.size())
    planned = _planned(decoder)
    decoder.divide_heads(mesh.size())
    for name, kind in planned.items():
        module: Any = decoder.model.get_submodule(name)
        shard = [Shard(_AXES[kind])]
        for key, parameter in list(module.named_parameters(recurse=False)):
            if _is_split(parameter, kind):
                part = distribute_tensor(parameter.data, mesh, shard, src_data_rank=None)
                module.register_parameter(key, nn.Parameter(part, requires_grad=False))
        module.tp_group = mesh.get_group()
        if hasattr(module, "split_kind"):
            module.split_kind = kind
            continue
        before, split = type(module), _split_class(module, kind)
        # a new class, as FSDP2 makes it; a subclass (Gemma scales its embedding) keeps what it adds
        bases = (split,) if issubclass(split, before) else (before, split)
        module.__class__ = type(f"TensorParallel{before.__name__}", bases, {})


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's rows of a head or embedding that is split by vocabulary.

    Attributes:
        weight_VD: the rows, possibly none.
        first: id of the first row.
        largest: most rows that any rank has.
        group: the ranks that share the matrix.
        num_ids: rows of the whole matrix.
    """

    weight_VD: torch.Tensor
    first: int
    largest: int
    group: dist.ProcessGroup
    num_ids: int

    def is_like(self, other: "VocabularyPart") -> bool:
        """Whether both have the same number of ids, split over the same ranks."""
        ranks, others = (dist.get_process_group_ranks(part.group) for part in (self, other))
        return self.num_ids == other.num_ids and ranks == others


def vocabulary_part(module: nn.Module) -> VocabularyPart | None:
    """This rank's rows of an embedding or head; None unless :func:`split_decoder` has split it.

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
    """Each rank looks up the ids whose rows it has; the others are zero until the all-reduce."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        part = vocabulary_part(self)
        assert part is not None
        rows = input - part.first
        absent = (rows < 0) | (rows >= len(part.weight_VD))
        if len(part.weight_VD):
            out = F.embedding(rows.masked_fill(absent, 0), part.weight_VD)
            out = out.masked_fill_(absent.unsqueeze(-1), 0)
        else:
            out = part.weight_VD.new_zeros(*input.shape, part.weight_VD.shape[1])
        dist.all_reduce(out, group=part.group)
        return out


class _Columns(nn.Linear):
    """Each rank computes the output features whose rows it has."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else local_part(self.bias)
        return F.linear(input, local_part(self.weight), bias)


class _Rows(nn.Linear):
    """Each rank multiplies its input features; the all-reduced sum gets the bias."""

    tp_group: dist.ProcessGroup

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = _summed_product(input, local_part(self.weight), self.tp_group)
        return out if self.bias is None else out + self.bias


class _AdaptedRows(AdaptedLinear):
    """The products with W and with A are all-reduced; B, scale and bias are whole."""

    tp_group: dist.ProcessGroup

    def product(self, input: torch.Tensor) -> torch.Tensor:
        return _summed_product(input, local_part(self.weight), self.tp_group)


def _summed_product(
    x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """``x @ weight.T``, added up over the ranks in fp32 and rounded once, as in one process.

    Rounding each rank's part as well moves a bf16 model's loss as much as bf16 itself does.
    """
    out = wide_product(x, weight)
    dist.all_reduce(out, group=group)
    return out.to(x.dtype)


def _split_class(module: nn.Module, kind: str) -> type[nn.Module]:
    """The class that computes with this rank's part of a module's parameters."""
    if isinstance(module, nn.Embedding):
        return _EmbeddingRows
    if isinstance(module, AdaptedLinear):  # by columns it needs no change: lora_b is a _Columns
        return _AdaptedRows if kind == "rows" else AdaptedLinear
    return _Rows if kind == "rows" else _Columns


def _can_split(decoder: Decoder, owner: str, planned: dict[str, str]) -> bool:
    """Whether the matrix of the module ``owner`` can be split, or stays whole in an adapter."""
    module = decoder.model.get_submodule(owner)
    if module is decoder.embedding:
        return isinstance(module, nn.Embedding)
    adapted = owner.removesuffix(".lora_a").removesuffix(".lora_b")
    if adapted not in planned:
        return False
    # a subclass may compute more than a product
    return type(module) in (nn.Linear, AdaptedLinear) or hasattr(module, "split_kind")


def _is_split(parameter: torch.Tensor, kind: str) -> bool:
    """Whether a parameter is cut; the scale of a whole row [out, 1] is not cut with its row."""
    axis = _AXES[kind]
    return parameter.ndim > axis and parameter.shape[axis] > 1


def _planned(decoder: Decoder) -> dict[str, str]:
    """Name of each module that tp splits -> how, adapters included."""
    patterns = {
        re.compile(re.escape(pattern).replace(r"\*", r"\d+")): kind
        for pattern, kind in decoder.split_plan.items()
    }
    planned = {}
    for name, module in decoder.model.named_modules():
        kinds = (kind for pattern, kind in patterns.items() if pattern.fullmatch(name))
        kind = next(kinds, None)
        if kind is None or next(module.parameters(recurse=False), None) is None:
            continue
        planned[name] = kind
        if isinstance(module, AdaptedLinear):
            planned[f"{name}.{_SPLIT_WITH[kind]}"] = kind
    return planned
