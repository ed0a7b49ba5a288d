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
    """Hash of anything that JSON can hold; other objects by ``str``."""
    return _short(hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()))


def of_arrays(*arrays: Any) -> str:
    """Hash of numpy arrays, their values and order."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return _short(digest)


def of_files(paths: Iterable[Path]) -> str:
    """Hash of the sizes of files and of samples of their content, not of their names.

    Samples are the header of a .safetensors file and four blocks of 4 KiB in each tensor, so that
    any training step changes the hash; in other files 1,024 such blocks, evenly spaced.
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
    """(begin, end, number of blocks) of each part of a file that is sampled."""
    start = 8 + int.from_bytes(file.read(8), "little")
    if path.suffix != ".safetensors" or start > size:
        return [(0, size, _BLOCKS_OF_A_FILE)]
    try:
        header = json.loads(file.read(start - 8))
        tensors = [v["data_offsets"] for k, v in header.items() if k != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError):
        tensors = []  # not safetensors after all: whoever loads it will raise an error
    whole_header = (0, start, -(-start // _BLOCK))
    return [whole_header, *((start + b, start + e, _BLOCKS_OF_A_TENSOR) for b, e in tensors)]


def _evenly(begin: int, end: int, blocks: int) -> list[int]:
    last = max(begin, end - _BLOCK)
    if blocks == 1 or last == begin:
        return [begin]
    return sorted({begin + (last - begin) * n // (blocks - 1) for n in range(blocks)})


def _short(digest: Any) -> str:
    return digest.hexdigest()[:16]
