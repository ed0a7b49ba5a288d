"""W + B A: the update of an adapter, merged into the shard of the weight that a rank keeps."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from ppl_eval.errors import UserError
from ppl_eval.parallel.cut import as_shard, own_part, own_shard

_BLOCK_ROWS = 1024
_MATRICES, _DORA_SCALE = ("lora_a.weight", "lora_b.weight"), "dora_scale"


@dataclass(frozen=True)
class LowRank:
    """The update of one matrix.

    Attributes:
        a: [r, in], fp32.
        b: [out, r], fp32, rows in torchtune's order, times alpha / r where an adapter holds it.
        magnitude: [out], fp32, rows in torchtune's order; None for LoRA.
    """

    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None


@dataclass(frozen=True)
class Adapter:
    """An adapter that fits the model.

    Attributes:
        files: the adapter's tensors, and adapter_config.json if there is one.
        updates: torchtune's name of the module, such as ``layers.0.attn.q_proj`` -> the update.
        warnings: one sentence each, for the user before the run.
        copies: base weights that the adapter's file holds too; they must equal the checkpoint's.
    """

    files: tuple[Path, ...]
    updates: dict[str, LowRank]
    warnings: tuple[str, ...]
    copies: dict[str, torch.Tensor] = field(default_factory=dict)

    def update_of(self, name: str) -> LowRank | None:
        """The update of the parameter ``name``, or None."""
        return self.updates.get(name.removesuffix(".weight"))

    def unmerged(self) -> list[str]:
        """Names of the adapter's parameters in a model where it is not merged."""
        return [f"{name}.{key}" for name in self.updates for key in (*_MATRICES, _DORA_SCALE)]

    def shards(
        self,
        full: torch.Tensor,
        name: str,
        slots: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> dict[str, torch.Tensor] | None:
        """This rank's shards of a base weight and of the adapter's matrices, or of both merged.

        Args:
            full: the base weight, or (LoRA only) this rank's shard of it.
            name: the weight's name in the model.
            slots: the model's parameters by name. The adapter's are among them unless it is merged.
            device: the device of this rank.

        Returns:
            Shards by the names of their parameters; None if the adapter does not change the weight.
        """
        update = self.update_of(name)
        if update is None:
            return None
        module = name.removesuffix("weight")
        if module + _MATRICES[0] not in slots:
            return {name: merged_shard(full, update, slots[name], device)}
        whole = {name: full, module + _MATRICES[0]: update.a, module + _MATRICES[1]: update.b}
        shards = {key: own_shard(tensor, slots[key], device) for key, tensor in whole.items()}
        if update.magnitude is not None:
            slot = slots[module + _DORA_SCALE]
            scale = _dora_scale(full, update, slot, device)
            shards[module + _DORA_SCALE] = as_shard(scale.to(slot.dtype), slot)
        return shards

    def refuse_dora(self) -> None:
        """Refuse a DoRA adapter, called for a distributed checkpoint."""
        dora = [name for name, update in self.updates.items() if update.magnitude is not None]
        if dora:
            raise UserError(
                f"the adapter is DoRA ({len(dora)} matrices), whose norms need whole rows, but a"
                " rank reads only its slices of a distributed checkpoint: convert the checkpoint to"
                " safetensors"
            )

    def forget(self) -> None:
        """Free the matrices, once they are in the model."""
        self.updates.clear()
        self.copies.clear()


def merged_shard(
    full: torch.Tensor, update: LowRank, slot: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """This rank's shard of the merged weight: W + B A, for DoRA times magnitude / ||W + B A||.

    A rank multiplies only the rows of B and the columns of A that its shard has. Sums are fp64 and
    rounded once, so that a number hardly ever depends on how the matrix is cut.

    Args:
        full: the base weight, or (LoRA only) this rank's shard of it.
        update: the update of this weight.
        slot: the parameter, plain or a DTensor with any placements; its dtype is the result's.
        device: the device of this rank.
    """
    part = full.to_local() if isinstance(full, DTensor) else own_part(full, slot)
    b, a = own_part(update.b, slot, 0), own_part(update.a, slot, 1).to(device).double()
    merged = torch.empty(part.shape, dtype=slot.dtype, device=device)
    scale = torch.ones(len(part), dtype=torch.float64, device=device)
    if update.magnitude is not None:
        scale = _dora_scale(full, update, slot, device)
    blocks = (merged.split(_BLOCK_ROWS), _sums(part, b, a), scale.split(_BLOCK_ROWS))
    for rows, sums, factors in zip(*blocks, strict=True):
        rows.copy_(sums * factors.unsqueeze(1))
    return as_shard(merged, slot)


def _dora_scale(
    full: torch.Tensor, update: LowRank, slot: torch.Tensor, device: torch.device
) -> torch.Tensor:
    """magnitude / ||W + B A|| of this rank's rows in fp64; a norm needs the whole row."""
    assert update.magnitude is not None
    assert not isinstance(full, DTensor)
    weight, b = own_part(full, slot, 0), own_part(update.b, slot, 0)
    sums = _sums(weight, b, update.a.to(device).double())
    norms = torch.cat([block.norm(dim=1) for block in sums])
    return own_part(update.magnitude, slot, 0).to(device).double() / norms


def _sums(weight: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> Iterator[torch.Tensor]:
    """W + B A in fp64 on the device of ``a``, in blocks of rows."""
    for rows, b_rows in zip(weight.split(_BLOCK_ROWS), b.split(_BLOCK_ROWS), strict=True):
        yield rows.to(a.device).double() + b_rows.to(a.device).double() @ a
