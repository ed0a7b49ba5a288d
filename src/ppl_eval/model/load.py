"""Weights into a sharded model, tensor by tensor: each rank reads and keeps its own shards."""

import sys
from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from ppl_eval import compat
from ppl_eval.adapter.merge import Adapter
from ppl_eval.checkpoint.checkpoint import Checkpoint
from ppl_eval.checkpoint.tensor_files import DistributedSource, FileSource, StateSource
from ppl_eval.decoder import Decoder
from ppl_eval.errors import UserError
from ppl_eval.model.check_names import EMBEDDING, HEAD
from ppl_eval.parallel.cut import as_shard, local_part, own_part, own_shard
from ppl_eval.plural import some
from ppl_eval.quantize.linear import quantized_layers


def load(
    decoder: Decoder,
    checkpoint: Checkpoint,
    device: torch.device,
    *,
    adapter: Adapter | None = None,
    show_progress: bool = False,
) -> None:
    """Give every parameter its values; each rank keeps its own shards only.

    No communication: a tensor is mapped from its file, converted and cut, and this rank's part is
    copied, so that a rank never holds more than its shards and two full tensors.

    Args:
        decoder: on the meta device, sharded or not (any placements); afterwards on ``device``.
        checkpoint: checked by :func:`ppl_eval.model.check_names.check_names`.
        device: the device of this rank.
        adapter: from :func:`ppl_eval.adapter.check.read_adapter`; merged into plain layers, loaded
            beside the weights of adapted ones.
        show_progress: show a bar, if stderr is a terminal.

    Raises:
        UserError: a weight is NaN or infinite; ``output.weight`` differs from the embedding that
            the head is tied to; the adapter's copy of a base weight is not the checkpoint's.
    """
    model, slots, source = decoder.model, decoder.weights(), checkpoint.source
    if isinstance(source, DistributedSource):
        source = _read_shards(source, checkpoint, slots, device, adapter)
    quantized = {f"{name}.weight": layer for name, layer in quantized_layers(model).items()}
    shards: dict[str, torch.Tensor] = {}
    tied_copy = None
    for stored_name, name, full in _converted(source, checkpoint, show_progress):
        if name == HEAD and HEAD not in slots:
            tied_copy = own_shard(full, slots[EMBEDDING], device)
        elif name in slots:
            found = None
            if adapter is not None:
                _refuse_other_copy(full, name, slots[name], adapter)
                found = adapter.shards(full, name, slots, device)
            if name in quantized:
                whole = full if found is None else found[name]
                shards |= {
                    f"{name.removesuffix('weight')}{key}": shard
                    for key, shard in quantized[name].shards(whole, device).items()
                }
                continue
            found = found or {name: own_shard(full, slots[name], device)}
            if not all(local_part(shard).isfinite().all() for shard in found.values()):
                raise UserError(
                    f"{stored_name} holds NaN or infinite numbers: the checkpoint is damaged, or"
                    " its training diverged, or dtype=fp16 cannot hold them"
                )
            shards |= found
    if tied_copy is not None and not torch.equal(
        local_part(tied_copy), local_part(shards[EMBEDDING])
    ):
        raise UserError(
            "the model ties its head to the embedding, but the checkpoint has an output.weight that"
            " differs from tok_embeddings.weight: use an untied builder (or tie_word_embeddings:"
            " false)"
        )
    parameters = {name: nn.Parameter(t, requires_grad=False) for name, t in shards.items()}
    model.load_state_dict(parameters, strict=True, assign=True)
    with device:
        compat.rebuild_rope(model)
    unset = [n for n, t in chain(model.named_parameters(), model.named_buffers()) if t.is_meta]
    if unset:
        raise RuntimeError(f"no value for {some(unset)}")


def _converted(
    source: FileSource | StateSource, checkpoint: Checkpoint, show_progress: bool
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(the checkpoint's name, torchtune's name, tensor) of all tensors, in the files' order."""
    stored = checkpoint.source.stored
    bar = tqdm(
        total=sum(tensor.num_bytes for tensor in stored.values()),
        desc="loading",
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        disable=not (show_progress and sys.stderr.isatty()),
    )
    with bar:
        for stored_name, tensor in source.tensors():
            for name, full in (checkpoint.names.convert(stored_name, tensor) or {}).items():
                yield stored_name, name, full
            bar.update(stored[stored_name].num_bytes)


def _read_shards(
    source: DistributedSource,
    checkpoint: Checkpoint,
    slots: Mapping[str, torch.Tensor],
    device: torch.device,
    adapter: Adapter | None,
) -> StateSource:
    """This rank's shards of a distributed checkpoint, whose metadata says where they lie."""
    shards: dict[str, torch.Tensor] = {}
    for stored_name, stored in source.stored.items():
        for name in checkpoint.names.convert(stored_name, torch.empty(0, device="meta")) or {}:
            slot = slots.get(EMBEDDING if name == HEAD and HEAD not in slots else name)
            if slot is None:
                continue
            # a weight that an adapter is merged into is rounded after the merge, not before
            adapted = adapter is not None and adapter.update_of(name) is not None
            dtype = stored.dtype if adapted else slot.dtype
            assert isinstance(dtype, torch.dtype)
            part = torch.empty(local_part(slot).shape, dtype=dtype, device=device)
            shards[stored_name] = as_shard(part, slot)
    source.read_into(shards)
    return StateSource(shards)


def _refuse_other_copy(full: torch.Tensor, name: str, slot: torch.Tensor, adapter: Adapter) -> None:
    """PEFT stores embedding and head beside an adapter of the head; they need not have changed."""
    copy = adapter.copies.get(name)
    if copy is None:
        return
    part = local_part(full) if isinstance(full, DTensor) else own_part(full, slot)
    if not torch.equal(part.to(slot.dtype), own_part(copy, slot).to(part.device, slot.dtype)):
        raise UserError(
            f"the adapter comes with a {name} that is not the checkpoint's: it was trained too, or"
            " on another model; merge it with PEFT's merge_and_unload() first"
        )
