"""Weights into a sharded model, tensor by tensor: each rank reads and keeps its own shards."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from ppl_eval import compat
from ppl_eval.adapter.merge import Adapter
from ppl_eval.checkpoint.checkpoint import Checkpoint
from ppl_eval.checkpoint.tensor_files import DistributedSource
from ppl_eval.decoder import Decoder
from ppl_eval.errors import UserError
from ppl_eval.model.check_names import EMBEDDING, HEAD
from ppl_eval.parallel.cut import as_shard, local_part, own_part, own_shard
from ppl_eval.plural import some
from ppl_eval.quantize.linear import quantized_layers


@dataclass(frozen=True)
class Target:
    """A model that weights are read into.

    Attributes:
        decoder: on the meta device, sharded or not (any placements); afterwards on the device.
        adapter: from :func:`ppl_eval.adapter.check.read_adapter`; merged into plain layers, loaded
            beside the weights of adapted ones.
    """

    decoder: Decoder
    adapter: Adapter | None = None


def load(
    checkpoint: Checkpoint,
    targets: Sequence[Target],
    device: torch.device,
    *,
    show_progress: bool = False,
) -> None:
    """Give every parameter its values; each rank keeps its own shards only. Files are read once.

    No communication: a tensor is mapped from its file, converted and cut, and this rank's part is
    copied, so that a rank never holds more than its shards and two full tensors.

    Args:
        checkpoint: checked by :func:`ppl_eval.model.check_names.check_names` for each target.
        targets: the models that have the weights.
        device: the device of this rank.
        show_progress: show a bar, if stderr is a terminal.

    Raises:
        UserError: a weight is NaN or infinite; ``output.weight`` differs from the embedding that
            the head is tied to; the adapter's copy of a base weight is not the checkpoint's.
    """
    source, readings = checkpoint.source, [_Reading(target, device) for target in targets]
    if isinstance(source, DistributedSource):
        for reading in readings:
            shards = _read_shards(source, checkpoint, reading)
            for stored_name, name, full in _converted(shards, checkpoint, show_progress):
                reading.take(stored_name, name, full)
    else:
        for stored_name, name, full in _converted(source.tensors(), checkpoint, show_progress):
            for reading in readings:
                reading.take(stored_name, name, full)
    for reading in readings:
        reading.finish()


class _Reading:
    """The shards that a model has got so far."""

    def __init__(self, target: Target, device: torch.device) -> None:
        self.model, self.adapter, self.device = target.decoder.model, target.adapter, device
        self.slots = target.decoder.weights()
        self.quantized = {f"{n}.weight": m for n, m in quantized_layers(self.model).items()}
        self._shards: dict[str, torch.Tensor] = {}
        self._tied_copy: torch.Tensor | None = None

    def take(self, stored_name: str, name: str, full: torch.Tensor) -> None:
        """Keep this rank's part of a tensor.

        Args:
            stored_name: its name in the checkpoint.
            name: torchtune's.
            full: the whole tensor, or this rank's shard as a DTensor.
        """
        slots = self.slots
        if name == HEAD and HEAD not in slots:
            self._tied_copy = own_shard(full, slots[EMBEDDING], self.device)
        if name not in slots:
            return
        found = None
        if self.adapter is not None:
            _refuse_other_copy(full, name, slots[name], self.adapter)
            found = self.adapter.shards(full, name, slots, self.device)
        if name in self.quantized:
            self._quantize(stored_name, name, full if found is None else found[name])
            return
        found = found or {name: own_shard(full, slots[name], self.device)}
        if not all(local_part(shard).isfinite().all() for shard in found.values()):
            raise UserError(
                f"{stored_name} holds NaN or infinite numbers: the checkpoint is damaged, or"
                " its training diverged, or dtype=fp16 cannot hold them"
            )
        self._shards |= found

    def _quantize(self, stored_name: str, name: str, whole: torch.Tensor) -> None:
        try:
            shards = self.quantized[name].shards(whole, self.device)
        except UserError as error:
            raise UserError(f"{stored_name}: {error}") from error
        layer = name.removesuffix("weight")
        self._shards |= {f"{layer}{key}": shard for key, shard in shards.items()}

    def finish(self) -> None:
        """Put the shards into the model."""
        shards, copy = self._shards, self._tied_copy
        if copy is not None and not torch.equal(local_part(copy), local_part(shards[EMBEDDING])):
            raise UserError(
                "the model ties its head to the embedding, but the checkpoint has an output.weight"
                " that differs from tok_embeddings.weight: use an untied builder (or"
                " tie_word_embeddings: false)"
            )
        parameters = {n: nn.Parameter(t, requires_grad=False) for n, t in shards.items()}
        self.model.load_state_dict(parameters, strict=True, assign=True)
        with self.device:
            compat.rebuild_rope(self.model)
        tensors = chain(self.model.named_parameters(), self.model.named_buffers())
        unset = [name for name, tensor in tensors if tensor.is_meta]
        if unset:
            raise RuntimeError(f"no value for {some(unset)}")


def _converted(
    tensors: Iterable[tuple[str, torch.Tensor]], checkpoint: Checkpoint, show_progress: bool
) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(the checkpoint's name, torchtune's name, tensor) of all tensors, in their order."""
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
        for stored_name, tensor in tensors:
            for name, full in (checkpoint.names.convert(stored_name, tensor) or {}).items():
                yield stored_name, name, full
            bar.update(stored[stored_name].num_bytes)


def _read_shards(
    source: DistributedSource, checkpoint: Checkpoint, reading: _Reading
) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's shards of a distributed checkpoint, whose metadata says where they lie: all at
    once, but one after the other whole, those that will be quantised."""
    slots, adapter = reading.slots, reading.adapter
    shards: dict[str, torch.Tensor] = {}
    alone: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for stored_name, stored in source.stored.items():
        for name in checkpoint.names.convert(stored_name, torch.empty(0, device="meta")) or {}:
            slot = slots.get(EMBEDDING if name == HEAD and HEAD not in slots else name)
            if slot is None:
                continue
            # a weight that an adapter is merged into is rounded after the merge, not before
            adapted = adapter is not None and adapter.update_of(name) is not None
            dtype = stored.dtype if adapted else slot.dtype
            assert isinstance(dtype, torch.dtype)
            if name in reading.quantized:
                alone[stored_name] = stored.shape, dtype
                continue
            part = torch.empty(local_part(slot).shape, dtype=dtype, device=reading.device)
            shards[stored_name] = as_shard(part, slot)
    source.read_into(shards)
    while shards:
        yield shards.popitem()
    for stored_name, (shape, dtype) in alone.items():
        whole = torch.empty(shape, dtype=dtype, device=reading.device)
        source.read_into({stored_name: whole})
        yield stored_name, whole


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
