"""Weights into a sharded model, tensor by tensor: each rank reads and keeps its own shards."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from ppl_eval import compat
from ppl_eval.adapter.check import Adapter
from ppl_eval.adapter.merge import LowRank, dora_scale_shard, merged_shard
from ppl_eval.checkpoint.names import Convert, convert_one
from ppl_eval.checkpoint.tensor_files import DistributedSource, Source
from ppl_eval.errors import UserError
from ppl_eval.parallel.cut import as_shard, own_part, own_shard
from ppl_eval.parallel.lora import local_part
from ppl_eval.plural import some

_HEAD, _EMBEDDING = "output.weight", "tok_embeddings.weight"
_ADAPTED = ("lora_a.weight", "lora_b.weight", "dora_scale")


_QUANTISED_BY = {
    "qweight": "GPTQ or AWQ",
    "weight_scale_inv": "FP8",
    "_blocks": "MXFP4",
    "absmax": "bitsandbytes",
    "SCB": "bitsandbytes",
}
"""How names of tensors end that a method of quantisation adds."""


def _quantised_by(names: Iterable[str]) -> str:
    found = (how for name in names for end, how in _QUANTISED_BY.items() if name.endswith(end))
    return "".join(f" by {method}" for method in sorted(found)[:1])


def check_names(
    model: nn.Module,
    source: Source,
    convert: Convert,
    layout: str | None,
    adapter: Adapter | None = None,
) -> str:
    """Compare names, shapes and dtypes of checkpoint and model, without reading a weight.

    Args:
        model: on the meta device, sharded or not.
        source: the checkpoint.
        convert: from its names to torchtune's.
        layout: what ``convert`` takes the names for, to say what they look like instead.
        adapter: what the checkpoint need not have, if it is in the model.

    Returns:
        The dtype that most of the checkpoint's numbers have, such as ``bfloat16``.

    Raises:
        UserError: names that are missing, unknown or twice there, shapes that differ, weights that
            are no floating-point numbers; a DoRA adapter on a distributed checkpoint.
    """
    if isinstance(source, DistributedSource):
        _refuse_dora(adapter)
    sizes: Counter[str] = Counter()
    shapes: dict[str, torch.Size] = {}
    unknown = []
    for name, stored in source.stored.items():
        if isinstance(stored.dtype, str):
            raise UserError(
                f"{name} is {stored.dtype} in the checkpoint: weights that are quantised"
                f"{_quantised_by(source.stored)} are not evaluated"
            )
        sizes[str(stored.dtype).removeprefix("torch.")] += stored.num_bytes
        converted = convert_one(convert, name, torch.empty(stored.shape, device="meta"))
        if converted is None:
            unknown.append(name)
        else:
            shapes |= {new: tensor.shape for new, tensor in converted.items()}
    slots = dict(model.named_parameters())
    for name in _unmerged(adapter):
        slots.pop(name, None)
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
    problems = [f"{len(names)} {what}: {some(names, 5, '; ')}" for what, names in found if names]
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
    adapter: Adapter | None = None,
    show_progress: bool = False,
) -> None:
    """Give every parameter its values; each rank keeps its own shards only.

    No communication: a tensor is mapped from its file, converted, sliced, and the slice is copied,
    so that a rank never holds more than its shards and two full tensors.

    Args:
        model: on the meta device, sharded or not (any placements); afterwards on ``device``.
            An adapter is merged into plain layers, and loaded beside the weights of adapted ones.
        source: the checkpoint, checked by :func:`check_names`.
        convert: from its names to torchtune's.
        device: of this rank.
        adapter: for the model, see :func:`ppl_eval.adapter.check.read_adapter`.
        show_progress: show a bar, if stderr is a terminal.

    Raises:
        UserError: a weight that is NaN or infinite; an ``output.weight`` that differs from the
            embedding which the model ties its head to; base weights that an adapter comes with and
            that are not the checkpoint's.
    """
    slots = dict(model.named_parameters())
    if isinstance(source, DistributedSource):
        tensors = _read_distributed(source, slots, convert, device, adapter)
    else:
        tensors = _read_in_turn(source, slots, convert, device, adapter, show_progress)
    shards = {name: nn.Parameter(t, requires_grad=False) for name, t in tensors.items()}
    model.load_state_dict(shards, strict=True, assign=True)
    with device:
        compat.rebuild_rope(model)
    unset = [n for n, t in chain(model.named_parameters(), model.named_buffers()) if t.is_meta]
    if unset:
        raise RuntimeError(f"no value for {some(unset)}")


def _read_in_turn(
    source: Source,
    slots: Mapping[str, torch.Tensor],
    convert: Convert,
    device: torch.device,
    adapter: Adapter | None,
    show_progress: bool,
) -> dict[str, torch.Tensor]:
    shards: dict[str, torch.Tensor] = {}
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
                    _refuse_other_copy(full, name, slots, adapter)
                    found = _shards(full, name, slots, device, adapter)
                    for shard in found.values():
                        _refuse_non_finite(shard, stored_name)
                    shards |= found
                elif name == _HEAD:
                    tied_copy = own_shard(full, slots[_EMBEDDING], device)
            bar.update(source.stored[stored_name].num_bytes)
    if tied_copy is not None:
        _refuse_other_head(tied_copy, shards[_EMBEDDING])
    return shards


def _read_distributed(
    source: DistributedSource,
    slots: Mapping[str, torch.Tensor],
    convert: Convert,
    device: torch.device,
    adapter: Adapter | None,
) -> dict[str, torch.Tensor]:
    """A distributed checkpoint knows by itself which slices a sharded tensor needs."""
    _refuse_dora(adapter)
    places: dict[str, torch.Tensor] = {}
    homes: dict[str, str] = {}
    for stored_name, stored in source.stored.items():
        for name in convert({stored_name: torch.empty(stored.shape, device="meta")}):
            if name in slots:
                # what an adapter is merged into is not rounded before
                assert isinstance(stored.dtype, torch.dtype)
                dtype = slots[name].dtype if _update(name, adapter) is None else stored.dtype
                shape = local_part(slots[name]).shape
                own = torch.empty(shape, dtype=dtype, device=device)
                places[stored_name] = as_shard(own, slots[name])
                homes[name] = stored_name
    source.read_into(places)
    shards: dict[str, torch.Tensor] = {}
    for name, home in homes.items():
        _refuse_non_finite(places[home], home)
        _refuse_other_copy(places[home], name, slots, adapter)
        if _update(name, adapter) is None:
            shards[name] = places[home]
        else:
            shards |= _shards(places[home], name, slots, device, adapter)
    return shards


def _shards(
    full: torch.Tensor,
    name: str,
    slots: Mapping[str, torch.Tensor],
    device: torch.device,
    adapter: Adapter | None,
) -> dict[str, torch.Tensor]:
    """This rank's shards of the parameter ``name``, and of the adapter beside it."""
    update = _update(name, adapter)
    if update is None:
        return {name: own_shard(full, slots[name], device)}
    names = {key: f"{name.removesuffix('weight')}{key}" for key in _ADAPTED}
    if names["lora_a.weight"] not in slots:
        return {name: merged_shard(full, update, slots[name], device)}
    shards = {
        name: own_shard(full, slots[name], device),
        **{
            names[key]: own_shard(tensor, slots[names[key]], device)
            for key, tensor in (("lora_a.weight", update.a), ("lora_b.weight", update.b))
        },
    }
    if update.magnitude is not None:
        slot = slots[names["dora_scale"]]
        shards[names["dora_scale"]] = dora_scale_shard(full, update, slot, device)
    return shards


def _update(name: str, adapter: Adapter | None) -> LowRank | None:
    """What the adapter adds to the parameter ``name``."""
    return None if adapter is None else adapter.updates.get(name.removesuffix(".weight"))


def _unmerged(adapter: Adapter | None) -> list[str]:
    """Names that the adapter's own parameters have where it is not merged."""
    return [f"{name}.{key}" for name in (adapter.updates if adapter else ()) for key in _ADAPTED]


def _refuse_non_finite(shard: torch.Tensor, name: str) -> None:
    if not local_part(shard).isfinite().all():
        raise UserError(
            f"{name} holds NaN or infinite numbers: the checkpoint is damaged, or its training"
            " diverged, or dtype=fp16 cannot hold them"
        )


def _refuse_dora(adapter: Adapter | None) -> None:
    dora = [n for n, u in (adapter.updates if adapter else {}).items() if u.magnitude is not None]
    if dora:
        raise UserError(
            f"the adapter is DoRA ({len(dora)} matrices), whose norms need whole rows, but of a"
            " distributed checkpoint a rank reads its slices only: convert the checkpoint to"
            " safetensors"
        )


def _refuse_other_copy(
    full: torch.Tensor,
    name: str,
    slots: Mapping[str, torch.Tensor],
    adapter: Adapter | None,
) -> None:
    """PEFT stores embedding and head beside an adapter of the head; they need not have changed."""
    copy = None if adapter is None else adapter.copies.get(name)
    if copy is None:
        return
    slot = slots[name]
    own = local_part(full) if isinstance(full, DTensor) else own_part(full, slot)
    if not torch.equal(own.to(slot.dtype), own_part(copy, slot).to(own.device, slot.dtype)):
        raise UserError(
            f"the adapter comes with a {name} that is not the checkpoint's: it was trained too, or"
            " on another model; merge it with PEFT's merge_and_unload() first"
        )


def _refuse_other_head(copy: torch.Tensor, embedding: torch.Tensor) -> None:
    if not torch.equal(local_part(copy), local_part(embedding)):
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
