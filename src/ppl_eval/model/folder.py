"""Which files of a checkpoint folder hold the weights, and what identifies them."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from ppl_eval.errors import UserError

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PATTERNS = ("model*.safetensors", "pytorch_model*.bin")

_SAMPLES = 64
_SAMPLE_BYTES = 4096


def find_weight_files(folder: str | Path) -> list[str]:
    """Names of the weight files in a Hugging Face folder.

    Those that the index names if there is one, else ``model*.safetensors``, else
    ``pytorch_model*.bin``. Adapters, ``consolidated*`` and sub-folders are left alone.

    Raises:
        UserError: no such folder, no weights in it, an unreadable index, or one that names files
            that are absent.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"checkpoint_dir is {folder}, but there is no such folder")
    for index in _INDEXES:
        if (folder / index).is_file():
            return _files_of_index(folder, index)
    for pattern in _PATTERNS:
        found = sorted(path.name for path in folder.glob(pattern) if path.is_file())
        if found:
            return found
    raise UserError(
        f"{folder} has no weights: neither {' nor '.join((*_INDEXES, *_PATTERNS))};"
        " name other files by checkpointer.checkpoint_files"
    )


def _files_of_index(folder: Path, index: str) -> list[str]:
    try:
        names = sorted(
            set(json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values())
        )
    except (ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{folder / index} is not a readable index of weights: {error}") from error
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise UserError(
            f"{folder / index} names files that are not there: {', '.join(absent[:5])}"
            f"{' and more' if len(absent) > 5 else ''}: is the download complete?"
        )
    return names


def fingerprint_files(folder: str | Path, names: Sequence[str]) -> str:
    """Hash of weight files: of their sizes and of 64 evenly spaced blocks of 4 KiB of each.

    It reads little of a large checkpoint and still differs after any step of training. It does not
    depend on where the folder is or what the files are called.
    """
    digest = hashlib.sha256()
    for name in names:
        path = Path(folder) / name
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for part in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * part // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
