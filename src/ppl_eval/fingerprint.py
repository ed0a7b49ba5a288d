"""Short hashes that tell inputs apart."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_BLOCK = 4096
_BLOCKS_OF_A_TENSOR = 4
_BLOCKS_OF_A_FILE = 1024


def of(*content: Any) -> str:
    """Hash of anything that JSON can hold; other objects count by their text."""
    return _short(hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()))


def of_arrays(*arrays: Any) -> str:
    """Hash of numpy arrays, their values and order."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return _short(digest)


def of_files(paths: Iterable[Path]) -> str:
    """Hash of files by their sizes and samples of their content, not by their names.

    Little of a large file is read: of a .safetensors file the header and four blocks of 4 KiB of
    every tensor, so that a change anywhere in training shows; of others 1,024 such blocks, evenly
    spaced.
    """
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for begin, end, blocks in _sampled_ranges(path, file, size):
                for offset in _evenly(begin, end, blocks):
                    file.seek(offset)
                    digest.update(file.read(min(_BLOCK, end - offset)))
    return _short(digest)


def _sampled_ranges(path: Path, file: Any, size: int) -> list[tuple[int, int, int]]:
    """(begin, end, number of blocks) of what is sampled."""
    if path.suffix == ".safetensors":
        length = int.from_bytes(file.read(8), "little")
        if 8 + length <= size:
            try:
                header = json.loads(file.read(length))
                tensors = [v["data_offsets"] for k, v in header.items() if k != "__metadata__"]
            except (ValueError, KeyError, TypeError, AttributeError):
                tensors = []  # not safetensors after all: whoever loads it will say so
            start = 8 + length
            whole = [(0, start, -(-start // _BLOCK))]
            return whole + [(start + b, start + e, _BLOCKS_OF_A_TENSOR) for b, e in tensors]
    return [(0, size, _BLOCKS_OF_A_FILE)]


def _evenly(begin: int, end: int, blocks: int) -> list[int]:
    last = max(begin, end - _BLOCK)
    if blocks == 1 or last == begin:
        return [begin]
    return sorted({begin + (last - begin) * n // (blocks - 1) for n in range(blocks)})


def _short(digest: Any) -> str:
    return digest.hexdigest()[:16]
