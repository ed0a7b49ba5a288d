"""Where a checkpoint's tensors lie: names, shapes and dtypes without reading them, and each one.

Tensors are mapped from their files, so a rank that takes a slice of one reads that slice.
"""

import pickle
import re
import struct
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ppl_eval.errors import UserError, one_line

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

_UNREADABLE = (
    *(OSError, EOFError, RuntimeError, ValueError, LookupError, TypeError, AttributeError),
    *(ImportError, AssertionError, MemoryError, OverflowError, pickle.UnpicklingError),
    struct.error,
)
"""What reading a damaged pickle raises, also where it states an absurd size."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        shape: its sizes.
        dtype: a floating-point dtype, or the file's own name of any other.
        num_bytes: size in the file.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | str
    num_bytes: int


class Source(Protocol):
    """A checkpoint that can be read tensor by tensor."""

    stored: dict[str, Stored]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every (name, tensor), in the order of the files."""
        ...


class FileSource:
    """Tensors in .safetensors files, or in files of ``torch.save``.

    Args:
        paths: of one model; all of one kind.

    Attributes:
        stored: the checkpoint's own name -> what is stored.

    Raises:
        UserError: a file that cannot be read, or a tensor that two files hold.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = list(paths)
        self.stored: dict[str, Stored] = {}
        home: dict[str, Path] = {}
        for path in self._paths:
            for name, stored in _contents(path):
                if name in home:
                    raise UserError(
                        f"{name} is in {home[name].name} and in {path.name}: which one?"
                    )
                home[name] = path
                self.stored[name] = stored

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every (name, tensor), mapped, file after file."""
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
            name = next(iter(self._state))
            yield name, self._state.pop(name)


class DistributedSource:
    """A folder that ``torch.distributed.checkpoint`` wrote, with torchtune's names.

    Each rank reads the slices that its own shards need.

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

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every (name, tensor), whole."""
        for name, stored in self.stored.items():
            tensor = torch.empty(stored.shape, dtype=stored.dtype)  # pyright: ignore
            self.read_into({name: tensor})
            yield name, tensor

    def read_into(self, tensors: dict[str, torch.Tensor]) -> None:
        """Fill tensors by name; of a DTensor the local shard, of which nothing else is moved."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        state = {self._prefix + name: tensor for name, tensor in tensors.items()}
        try:
            load(state, storage_reader=FileSystemReader(self._folder), no_dist=True)
        except (OSError, CheckpointException) as error:
            raise UserError(f"{self._folder} cannot be read: {one_line(error)}") from error


def _contents(path: Path) -> list[tuple[str, Stored]]:
    if path.suffix != ".safetensors":
        return [(name, _stored(tensor)) for name, tensor in _torch_load(path).items()]
    with _safe_open(path) as file:
        found = []
        for name in file.keys():  # noqa: SIM118
            header = file.get_slice(name)
            shape, dtype = tuple(header.get_shape()), header.get_dtype()
            known = _SAFETENSORS_DTYPES.get(dtype)
            size = 1 if known is None else known.itemsize
            found.append((name, Stored(shape, known or str(dtype), size * _numel(shape))))
        return found


def _stored(tensor: torch.Tensor) -> Stored:
    dtype = tensor.dtype if tensor.is_floating_point() else str(tensor.dtype).split(".")[-1]
    return Stored(tuple(tensor.shape), dtype, tensor.numel() * tensor.element_size())


def _numel(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


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
