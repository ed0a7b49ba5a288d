"""Weights into a sharded model, tensor by tensor: each rank reads and keeps its own shards."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from tqdm import tqdm

from ppl_eval import compat
from ppl_eval.components import describe
from ppl_eval.errors import UserError
from ppl_eval.model.convert import Convert
from ppl_eval.model.source import DistributedSource, Source, Stored

_LISTED = 5
_HEAD, _EMBEDDING = "output.weight", "tok_embeddings.weight"


def check_names(model: nn.Module, source: Source, convert: Convert, layout: str | None) -> str:
    """Compare names, shapes and dtypes of checkpoint and model, without reading a weight.

    Args:
        model: on the meta device, sharded or not.
        source: the checkpoint.
        convert: from its names to torchtune's.
        layout: what ``convert`` takes the names for, to say what they look like instead.

    Returns:
        The dtype that most of the checkpoint's numbers have, such as ``bfloat16``.

    Raises:
        UserError: names that are missing, unknown or twice there, shapes that differ, weights that
            are no floating-point numbers.
    """
    sizes: Counter[str] = Counter()
    shapes: dict[str, torch.Size] = {}
    unknown = []
    for name, stored in source.stored.items():
        if isinstance(stored.dtype, str):
            raise UserError(
                f"{name} is {stored.dtype} in the checkpoint: quantised weights are not evaluated"
            )
        sizes[str(stored.dtype).removeprefix("torch.")] += stored.num_bytes
        converted = _convert_shape(name, stored, convert)
        if converted is None:
            unknown.append(name)
        else:
            shapes |= converted
    slots = dict(model.named_parameters())
    if _HEAD not in slots and _EMBEDDING in slots and shapes.get(_HEAD) == shapes.get(_EMBEDDING):
        shapes.pop(_HEAD, None)  # a second copy of the tied weight; its values are compared later
    missing = [name for name in slots if name not in shapes]
    unknown += [name for name in shapes if name not in slots]
    differing = [
        f"{name} is {tuple(shapes[name])} in the checkpoint and {tuple(slots[name].shape)} in the"
        " model"
        for name in slots
        if name in shapes and shapes[name] != slots[name].shape
    ]
    found = (
        ("missing from the checkpoint", missing),
        ("unknown to the model", unknown),
        ("of another shape", differing),
    )
    problems = [f"{len(names)} {what}: {_some(names)}" for what, names in found if names]
    if problems:
        raise UserError(
            f"checkpoint and model do not match: {' | '.join(problems)}: {_advice(source, layout)}"
        )
    return sizes.most_common(1)[0][0]


def load(
    model: nn.Module,
    source: Source,
    convert: Convert,
    device: torch.device,
    *,
    show_progress: bool = False,
) -> None:
    """Give every parameter its values; each rank keeps its own shards only.

    No communication: a tensor is mapped from its file, converted, sliced, and the slice is copied,
    so that a rank never holds more than its shards and two full tensors.

    Args:
        model: on the meta device, sharded or not (any placements); afterwards on ``device``.
        source: the checkpoint, checked by :func:`check_names`.
        convert: from its names to torchtune's.
        device: of this rank.
        show_progress: show a bar, if stderr is a terminal.

    Raises:
        UserError: a weight that is NaN or infinite; an ``output.weight`` that differs from the
            embedding which the model ties its head to.
    """
    slots = dict(model.named_parameters())
    if isinstance(source, DistributedSource):
        shards = _read_distributed(source, slots, convert, device)
    else:
        shards = _read_in_turn(source, slots, convert, device, show_progress)
    model.load_state_dict(shards, strict=True, assign=True)
    with device:
        compat.rebuild_rope(model)
    unset = [n for n, t in chain(model.named_parameters(), model.named_buffers()) if t.is_meta]
    if unset:
        raise RuntimeError(f"no value for {_some(unset)}")


def _read_in_turn(
    source: Source,
    slots: Mapping[str, torch.Tensor],
    convert: Convert,
    device: torch.device,
    show_progress: bool,
) -> dict[str, nn.Parameter]:
    shards: dict[str, nn.Parameter] = {}
    tied_copy = None
    bar = tqdm(
        total=sum(stored.num_bytes for stored in source.stored.values()),
        desc="loading",
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        disable=not (show_progress and sys.stderr.isatty()),
    )
    with bar:
        for stored_name, tensor in source.tensors():
            for name, full in convert({stored_name: tensor}).items():
                if name in slots:
                    shard = _own_shard(full, slots[name], device)
                    _refuse_non_finite(shard, stored_name)
                    shards[name] = nn.Parameter(shard, requires_grad=False)
                elif name == _HEAD:
                    tied_copy = _own_shard(full, slots[_EMBEDDING], device)
            bar.update(source.stored[stored_name].num_bytes)
    if tied_copy is not None:
        _refuse_other_head(tied_copy, shards[_EMBEDDING])
    return shards


def _read_distributed(
    source: DistributedSource,
    slots: Mapping[str, torch.Tensor],
    convert: Convert,
    device: torch.device,
) -> dict[str, nn.Parameter]:
    """A distributed checkpoint knows by itself which slices a sharded tensor needs."""
    places: dict[str, torch.Tensor] = {}
    homes: dict[str, str] = {}
    for stored_name, stored in source.stored.items():
        for name in convert({stored_name: torch.empty(stored.shape, device="meta")}):
            if name in slots:
                places[stored_name] = torch.empty_like(slots[name], device=device)
                homes[name] = stored_name
    source.read_into(places)
    for stored_name, place in places.items():
        _refuse_non_finite(place, stored_name)
    return {name: nn.Parameter(places[home], requires_grad=False) for name, home in homes.items()}


def _convert_shape(name: str, stored: Stored, convert: Convert) -> dict[str, torch.Size] | None:
    """Names and shapes that a tensor becomes; None if its name is not known."""
    empty = torch.empty(stored.shape, device="meta")
    try:
        return {new: tensor.shape for new, tensor in convert({name: empty}).items()}
    except (RuntimeError, ValueError) as error:  # q, k and fused tensors are cut up by head
        raise UserError(
            f"{name} is {stored.shape} in the checkpoint, which does not go with the heads and"
            f" sizes in its config.json: {describe(error)}"
        ) from error
    except Exception as error:
        if type(error) is not Exception:  # torchtune reports an unknown name by a bare one
            raise
        return None


def _own_shard(full: torch.Tensor, slot: torch.Tensor, device: torch.device) -> torch.Tensor:
    """This rank's part of a tensor that every rank can see, in the dtype of ``slot``."""
    if isinstance(slot, DTensor):
        shard = distribute_tensor(full, slot.device_mesh, slot.placements, src_data_rank=None)
        return shard.to(device=device, dtype=slot.dtype)
    return torch.empty(full.shape, dtype=slot.dtype, device=device).copy_(full)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _refuse_non_finite(shard: torch.Tensor, name: str) -> None:
    if not _local(shard).isfinite().all():
        raise UserError(
            f"{name} holds NaN or infinite numbers: the checkpoint is damaged, or its training"
            " diverged, or dtype=fp16 cannot hold them"
        )


def _refuse_other_head(copy: torch.Tensor, embedding: torch.Tensor) -> None:
    if not torch.equal(_local(copy), _local(embedding)):
        raise UserError(
            "the model ties its head to the embedding, but the checkpoint has an output.weight that"
            " differs from tok_embeddings.weight: use an untied builder (or tie_word_embeddings:"
            " false)"
        )


def _advice(source: Source, layout: str | None) -> str:
    looks = _layout_by_names(source.stored)
    if looks is not None and layout is not None and looks != layout:
        checkpointer = {
            "Hugging Face": "FullModelHFCheckpointer",
            "Meta": "FullModelMetaCheckpointer",
            "torchtune": "FullModelTorchTuneCheckpointer",
        }[looks]
        return f"the names are {looks}'s: use torchtune.training.{checkpointer}"
    return "check the model section against the checkpoint's config.json"


def _layout_by_names(names: Mapping[str, object]) -> str | None:
    for mark, layout in (
        (".self_attn.", "Hugging Face"),
        (".attention.w", "Meta"),
        (".attn.", "torchtune"),
    ):
        if any(mark in name for name in names):
            return layout
    return None


def _some(names: Sequence[str]) -> str:
    return "; ".join(names[:_LISTED]) + ("; ..." if len(names) > _LISTED else "")
