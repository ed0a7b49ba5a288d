"""Which files of a checkpoint folder hold the weights."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from ppl_eval.errors import UserError
from ppl_eval.files import refuse_lfs_pointer
from ppl_eval.plural import some

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PATTERNS = ("model*.safetensors", "pytorch_model*.bin")
_ADAPTERS = (
    *("adapter_model.pt", "adapter_model.safetensors", "adapter_model.bin"),
    "adapter_[0-9]*.pt",
)
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.")


_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def need_folder(folder: str | Path, key: str) -> None:
    """Refuse what is not a folder on this machine.

    Args:
        folder: the value of a config key.
        key: that key, for messages.

    Raises:
        UserError: a file, a model's name on the hub, or nothing at all.
    """
    if Path(folder).is_dir():
        return
    name = str(folder)
    if Path(folder).exists():
        raise UserError(f"{key} is {name}, which is a file: give its folder, {Path(folder).parent}")
    hint = ""
    if _HUB_ID.fullmatch(name):
        hint = (
            f"; if it is a model of the hub, `tune download {name} --output-dir DIR"
            f" --ignore-patterns None` brings it, and {key}=DIR names it"
        )
    raise UserError(f"{key} is {name}, but there is no such folder{hint}")


def check_shards(names: Sequence[str]) -> None:
    """Refuse a part of a model that is stored in several files.

    Args:
        names: files that are to be read, such as ``model-00001-of-00002.safetensors``.

    Raises:
        UserError: naming the files that are missing.
    """
    for name in names:
        shard = _SHARD.search(name)
        if shard is None:
            continue
        begin, end = shard.span()
        width, total = len(shard[1]), int(shard[2])
        every = [
            f"{name[:begin]}-{number:0{width}}-of-{shard[2]}.{name[end:]}"
            for number in range(1, total + 1)
        ]
        absent = [one for one in every if one not in names]
        if absent:
            raise UserError(
                f"{name} is one of {total} files of a model, and {some(absent)}"
                f" {'is' if len(absent) == 1 else 'are'} missing: is the download complete?"
            )


def find_weight_files(folder: str | Path) -> list[str]:
    """Names of the weight files in a Hugging Face folder.

    Those that the index names if there is one, else ``model*.safetensors``, else
    ``pytorch_model*.bin``. Adapters, ``consolidated*`` and sub-folders are left alone.

    Raises:
        UserError: no such folder, no weights in it, an unreadable index, or one that names files
            that are absent.
    """
    folder = Path(folder)
    need_folder(folder, "checkpoint_dir")
    orphan = None
    for index in _INDEXES:
        if not (folder / index).is_file():
            continue
        names = _names_in_index(folder / index)
        absent = [name for name in names if not (folder / name).is_file()]
        if not absent:
            return names
        if len(absent) < len(names):
            raise _incomplete(folder / index, absent)
        orphan = orphan or _incomplete(folder / index, absent)
    for pattern in _PATTERNS:  # `tune download` leaves the index of files that it did not take
        found = sorted(path.name for path in folder.glob(pattern) if path.is_file())
        if found:
            return _one_set(folder, found)
    refuse_adapter_only(folder)
    if any(folder.glob("*.gguf")):
        raise UserError(
            f"{folder} has GGUF files only, which are not read: give the Hugging Face folder that"
            " they were made from"
        )
    raise orphan or UserError(
        f"{folder} has no weights: neither {' nor '.join((*_INDEXES, *_PATTERNS))};"
        f" {_advice(folder)}"
    )


def refuse_adapter_only(folder: Path) -> None:
    """Say what to do with a folder that has an adapter; called where it has no weights.

    Raises:
        UserError: it has.
    """
    if has_adapter(folder):
        raise UserError(
            f"{folder} holds an adapter and no model weights: set adapter.dir={folder}, and"
            " checkpoint_dir to the folder of the model that it was trained on (a teacher's is"
            " merged first)"
        )


def has_adapter(folder: Path) -> bool:
    """Whether torchtune or PEFT saved a LoRA adapter here."""
    return any(path.is_file() for pattern in _ADAPTERS for path in folder.glob(pattern))


def _advice(folder: Path) -> str:
    """torchtune's recipes write a sub-folder for each epoch."""
    held = sorted(
        {path.parent for pattern in _PATTERNS for path in folder.glob(f"*/{pattern}")},
        key=lambda path: path.stat().st_mtime,
    )
    if held:
        return f"did you mean checkpoint_dir={held[-1]}?"
    return "name other files by checkpointer.checkpoint_files"


def _incomplete(index: Path, absent: list[str]) -> UserError:
    return UserError(
        f"{index} names files that are not there: {some(absent)}: is the download complete?"
    )


def _names_in_index(index: Path) -> list[str]:
    refuse_lfs_pointer(index)
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index} is not a readable index of weights: {error!r}") from error
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{index} is not a readable index of weights: it maps to no file names")
    return sorted(names)


def _one_set(folder: Path, found: list[str]) -> list[str]:
    """The files of ``found`` that belong together: one file, or all shards of one set.

    Two complete models in one folder would be merged silently, and the last one would win.
    """
    single = [name for name in found if name in ("model.safetensors", "pytorch_model.bin")]
    if single:
        return single
    shards = [_SHARD.search(name) for name in found]
    totals = {int(shard[2]) for shard in shards if shard}
    if all(shards) and len(totals) == 1:
        check_shards(found)
        return found
    if len(found) > 1:
        raise UserError(
            f"{folder} has several files of weights, no index, and they are not the shards of one"
            f" model: {', '.join(found[:5])}: name the right ones by checkpointer.checkpoint_files"
        )
    return found
