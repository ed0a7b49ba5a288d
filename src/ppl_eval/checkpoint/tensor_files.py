"""The tensors of a checkpoint: names, shapes and dtypes first, their values later.

Tensors are mapped from their files, so a rank that takes a slice of a tensor reads that slice only.
"""

import math
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ppl_eval.checkpoint.quantized_files import find_joints
from ppl_eval.errors import UserError, one_line
from ppl_eval.quantize.tensors import is_quantized, mapped, num_bytes

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I8": torch.int8, "U8": torch.uint8, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn},
}
"""safetensors' name of a dtype -> the dtype, for those of weights, quantised or not."""

_FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_UNREADABLE = (
    *(OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError),
    *(ImportError, AssertionError, MemoryError, OverflowError, pickle.UnpicklingError),
    struct.error,
)
"""What reading a damaged pickle raises, also where it states an absurd size."""


@dataclass(frozen=True)
class Stored:
    """Shape and dtype of a tensor in a file.

    Attributes:
        dtype: a floating dtype, or the name of any other.
        quantized: torchao's tensor on the meta device, if the weight is quantised by torchao.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    quantized: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Size in the file; 0 for a dtype that weights cannot have, which is refused."""
        if self.quantized is not None:
            return num_bytes(self.quantized)
        size = self.dtype.itemsize if isinstance(self.dtype, torch.dtype) else 0
        return math.prod(self.shape) * size


class FileSource:
    """Tensors in .safetensors files, or in files of ``torch.save``.

    Args:
        paths: the files of one model, all of one kind.

    Attributes:
        stored: the tensor's name in the checkpoint -> its shape and dtype. The plain tensors that
            a quantised weight is made of count as one.

    Raises:
        UserError: a file cannot be read, two files hold the same tensor, or the parts of a
            quantised weight do not go together.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.stored: dict[str, Stored] = {}
        shapes: dict[str, torch.Tensor] = {}
        metadata: dict[str, str] = {}
        file_of: dict[str, Path] = {}
        for path in paths:
            contents, about = _contents(path)
            for name in contents.keys() & file_of.keys():
                raise UserError(
                    f"{name} is in {file_of[name].name} and in {path.name}: name the right files"
                    " by checkpointer.checkpoint_files"
                )
            file_of |= dict.fromkeys(contents, path)
            metadata |= about
            for name, found in contents.items():
                self.stored[name] = found if isinstance(found, Stored) else _stored(found)
                if isinstance(found, torch.Tensor):
                    shapes[name] = found
        joints = find_joints(shapes, metadata)
        self._joint_of = {part: joint for joint in joints.values() for part in joint.parts}
        for name, joint in joints.items():
            for part in joint.parts:
                del self.stored[part]
            self.stored[name] = _stored(joint.join({part: shapes[part] for part in joint.parts}))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every (name, tensor), mapped, file after file; a quantised weight as torchao's tensor."""
        waiting: dict[str, torch.Tensor] = {}
        for name, tensor in self._plain():
            joint = self._joint_of.get(name)
            if joint is None:
                yield name, tensor
                continue
            waiting[name] = tensor
            if waiting.keys() >= set(joint.parts):
                yield joint.name, joint.join({part: waiting.pop(part) for part in joint.parts})

    def _plain(self) -> Iterator[tuple[str, torch.Tensor]]:
        for path in self._paths:
            if path.suffix == ".safetensors":
                with _safe_open(path) as file:
                    for name in file.keys():  # noqa: SIM118  (it is no mapping)
                        yield name, file.get_tensor(name)
            else:
                yield from _torch_load(path).items()


class StateSource:
    """A state dict in memory, from a checkpointer that is not torchtune's; reading empties it."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self._state = state
        self.stored = {name: _stored(tensor) for name, tensor in state.items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every (name, tensor)."""
        while self._state:
            yield self._state.popitem()


class DistributedSource:
    """A folder that ``torch.distributed.checkpoint`` wrote, with torchtune's names.

    Each rank reads only the slices that its shards need.

    Args:
        folder: holds ``.metadata``. Tensors under ``model.`` are taken if there are any, as
            torchtune's recipes save them; else all.

    Raises:
        UserError: its metadata cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._folder = folder
        try:
            entries = FileSystemReader(folder).read_metadata().state_dict_metadata
        except _UNREADABLE as error:
            raise UserError(f"{folder} is no distributed checkpoint: {one_line(error)}") from error
        self._prefix = "model." if any(name.startswith("model.") for name in entries) else ""
        self.stored = {
            name.removeprefix(self._prefix): _stored(
                torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            )
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata) and name.startswith(self._prefix)
        }

    def read_into(self, tensors: dict[str, torch.Tensor]) -> None:
        """Fill tensors by name. Of a DTensor only the local shard is read."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        state = {self._prefix + name: tensor for name, tensor in tensors.items()}
        try:
            load(state, storage_reader=FileSystemReader(self._folder), no_dist=True)
        except (OSError, CheckpointException) as error:
            raise UserError(f"{self._folder} cannot be read: {one_line(error)}") from error


def _contents(path: Path) -> tuple[dict[str, Stored | torch.Tensor], dict[str, str]]:
    """The tensors of a file by name, on the meta device, and its metadata. Of a tensor whose dtype
    torch lacks there is shape and name of the dtype."""
    if path.suffix != ".safetensors":
        return {name: _on_meta(tensor) for name, tensor in _torch_load(path).items()}, {}
    with _safe_open(path) as file:
        headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        found = {name: _of_header(header) for name, header in headers.items()}
        return found, file.metadata() or {}


def _of_header(header: Any) -> Stored | torch.Tensor:
    shape, dtype = tuple(header.get_shape()), str(header.get_dtype())
    if dtype not in _DTYPES:
        return Stored(shape, dtype)
    return torch.empty(shape, dtype=_DTYPES[dtype], device="meta")


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return mapped(tensor, _on_meta) if is_quantized(tensor) else tensor.to("meta")


def _stored(tensor: torch.Tensor) -> Stored:
    dtype, shape = tensor.dtype, tuple(tensor.shape)
    if is_quantized(tensor):
        return Stored(shape, dtype, _on_meta(tensor))
    return Stored(shape, dtype if dtype in _FLOATING else str(dtype).removeprefix("torch."))


def _safe_open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {one_line(error)}") from error


def _torch_load(path: Path) -> dict[str, torch.Tensor]:
    try:
        # the format before torch 1.6 is no zip file and cannot be mapped
        mmap = zipfile.is_zipfile(path)
        state = torch.load(path, map_location="cpu", mmap=mmap, weights_only=True)
    except _UNREADABLE as error:
        reason = re.split(r"\. |\n", one_line(error))[0]
        raise UserError(f"{path} cannot be loaded with weights_only=True: {reason}") from error
    if not isinstance(state, dict) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise UserError(
            f"{path} is no state dict of tensors by name: name the file with the model's weights by"
            " checkpointer.checkpoint_files"
        )
    return state
