"""Quantised weights as files have them: several plain tensors, joined to torchao's tensor.

torchao's safetensors name class and settings of each weight in the file's metadata. torchtune's
``Int8DynActInt4WeightQATQuantizer.convert`` leaves ``weight`` (int8), ``scales`` and ``zeros`` of a
layer, and no settings.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ppl_eval.errors import UserError, one_line

_DOES_NOT_FIT = (
    *(ValueError, LookupError, TypeError, AttributeError, AssertionError),
    *(ArithmeticError, RuntimeError),
)
"""What torchao raises where tensors do not go together."""


@dataclass(frozen=True)
class Joint:
    """A quantised weight and the plain tensors that it is made of.

    Attributes:
        parts: their names in the files.
        metadata: what torchao's safetensors say about the weight; None for torchtune's QAT.
    """

    name: str
    parts: Sequence[str]
    metadata: str | None = None

    def join(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """torchao's tensor, of plain tensors by their names in the files; of any device.

        Raises:
            UserError: they do not go together.
        """
        try:
            if self.metadata is None:
                return _of_qat(*(parts[name] for name in self.parts))
            from torchao.prototype.safetensors.safetensors_support import (
                unflatten_tensor_state_dict,
            )

            metadata = {"tensor_names": json.dumps([self.name]), self.name: self.metadata}
            found, _ = unflatten_tensor_state_dict(dict(parts), metadata)
            return found[self.name]
        except _DOES_NOT_FIT as error:
            raise UserError(
                f"{self.name} cannot be put together from {', '.join(self.parts)}:"
                f" {one_line(error) or type(error).__name__}"
            ) from error


def find_joints(
    shapes: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> dict[str, Joint]:
    """The quantised weights among tensors, by name.

    Args:
        shapes: every tensor of the checkpoint by its name, on the meta device.
        metadata: of its safetensors files.

    Raises:
        UserError: a weight is there as a plain tensor, too.
    """
    found = {}
    for name, about in metadata.items():
        prefix, _, last = name.rpartition(".")
        parts = [f"{prefix}._{last}_{part}" for part in _names_of_parts(about)]
        if parts:
            found[name] = Joint(name, parts, about)
    for name, tensor in shapes.items():
        layer = name.removesuffix("weight")
        parts = [name, f"{layer}scales", f"{layer}zeros"]
        if name.endswith(".weight") and tensor.dtype == torch.int8 and shapes.keys() >= set(parts):
            found[name] = Joint(name, parts)
    found = {name: joint for name, joint in found.items() if shapes.keys() >= set(joint.parts)}
    for name, joint in found.items():
        if name in shapes and name not in joint.parts:
            raise UserError(
                f"{name} is in the checkpoint twice, plain and quantised"
                f" ({', '.join(joint.parts)}): write it anew from one of them"
            )
    return found


def _names_of_parts(about: str) -> list[str]:
    """Names of a weight's inner tensors by its metadata; none for a plain tensor."""
    try:
        content: Any = json.loads(about)
    except json.JSONDecodeError:
        return []
    names = content.get("_tensor_data_names") if isinstance(content, dict) else None
    return names if isinstance(names, list) else []


def _of_qat(numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """What torchtune's converted layer computes: int4 by groups, int8 activations by token."""
    from torchao.quantization import IntxUnpackedToInt8Tensor

    if (
        not numbers.ndim == scales.ndim == 2
        or scales.shape != zeros.shape
        or len(scales) != len(numbers)
        or not scales.shape[1]
        or numbers.shape[1] % scales.shape[1]
    ):
        raise ValueError(f"scales of {tuple(scales.shape)} and zeros of {tuple(zeros.shape)}")
    if not numbers.is_meta and ((numbers < -8) | (numbers > 7)).any():
        raise ValueError("numbers beyond int4 (-8 to 7), which torchtune's QAT does not write")
    size = numbers.shape[1] // scales.shape[1]
    return IntxUnpackedToInt8Tensor(
        numbers,
        scales,
        zeros,
        getattr(torch, "int4"),  # noqa: B009 (not in torch's stubs)
        (1, size),
        scales.dtype,
        "int8_asym_per_token",
    )
