"""Which files of a folder hold a model's weights, and which an adapter."""

import re
from collections.abc import Sequence
from pathlib import Path

from ppl_eval.errors import UserError
from ppl_eval.files import read_json
from ppl_eval.plural import some

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_PATTERNS = ("model*.safetensors", "pytorch_model*.bin")
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def need_folder(folder: str | Path, key: str) -> None:
    """Refuse what is not a folder on this machine.

    Args:
        folder: the value of a config key.
        key: that key, for messages.

    Raises:
        UserError: it is a file, a model's name on the hub, or does not exist.
    """
    path, hint = Path(folder), ""
    if path.is_dir():
        return
    if path.exists():
        raise UserError(f"{key} is {path}, which is a file: give its folder, {path.parent}")
    if _HUB_ID.fullmatch(str(folder)):
        hint = (
            f"; if it is a model of the hub, `tune download {folder} --output-dir DIR"
            f" --ignore-patterns None` brings it, and {key}=DIR names it"
        )
    raise UserError(f"{key} is {folder}, but there is no such folder{hint}")


def check_shards(names: Sequence[str]) -> None:
    """Refuse file names such as ``model-00001-of-00002.safetensors`` if other parts are missing."""
    for name in names:
        shard = _SHARD.search(name)
        if shard is None:
            continue
        width, total = len(shard[1]), shard[2]
        every = (
            _SHARD.sub(f"-{number:0{width}}-of-{total}.", name)
            for number in range(1, int(total) + 1)
        )
        absent = [one for one in every if one not in names]
        if absent:
            raise UserError(
                f"{name} is one of {int(total)} files of a model, and {some(absent)}"
                f" {'is' if len(absent) == 1 else 'are'} missing: is the download complete?"
            )


def find_weight_files(folder: str | Path) -> list[str]:
    """Names of the weight files in a Hugging Face folder.

    They are those that the index names if there is one, else ``model*.safetensors``, else
    ``pytorch_model*.bin``. Adapters, ``consolidated*`` and sub-folders are not searched.

    Raises:
        UserError: there is no such folder or it has no weights; an index cannot be read or names
            files that are absent.
    """
    folder = Path(folder)
    need_folder(folder, "checkpoint_dir")
    incomplete = None
    for index in (folder / name for name in _INDEXES):
        if not index.is_file():
            continue
        names = _names_in_index(index)
        absent = [name for name in names if not (folder / name).is_file()]
        if not absent:
            return names
        error = UserError(
            f"{index} names files that are not there: {some(absent)}: is the download complete?"
        )
        if len(absent) < len(names):
            raise error
        incomplete = incomplete or error
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
    if incomplete is not None:
        raise incomplete
    # torchtune's recipes write a sub-folder for each epoch
    epochs = {path.parent for pattern in _PATTERNS for path in folder.glob(f"*/{pattern}")}
    newest = max(epochs, key=lambda path: path.stat().st_mtime, default=None)
    advice = f"did you mean checkpoint_dir={newest}?"
    if newest is None:
        advice = "name other files by checkpointer.checkpoint_files"
        others = [path.name for path in sorted(folder.glob("*.pt"))]
        if others:
            advice = (
                f"if {others[0]} is torchtune's, set checkpointer.checkpoint_files=[{others[0]}]"
                " checkpointer._component_=torchtune.training.FullModelTorchTuneCheckpointer"
            )
    raise UserError(
        f"{folder} has no weights: neither {' nor '.join((*_INDEXES, *_PATTERNS))}; {advice}"
    )


def refuse_adapter_only(folder: Path) -> None:
    """Refuse a folder without model weights if it has an adapter, which needs its base model."""
    if find_adapter(folder) is not None:
        raise UserError(
            f"{folder} holds an adapter and no model weights: set adapter.dir={folder}, and"
            " checkpoint_dir to the folder of the model that it was trained on (a teacher's is"
            " merged first)"
        )


def find_adapter(folder: Path) -> Path | None:
    """The file with the tensors of a LoRA adapter, as torchtune or PEFT saves it, if there is one.

    torchtune's recipes write an adapter twice. adapter_model.pt is what was trained, and comes
    first: in the copy in PEFT's layout torchtune 0.6.1 permutes B of q and k but leaves DoRA's
    magnitudes in the old order.
    """
    numbered = [p for p in folder.glob("adapter_*.pt") if p.stem.rsplit("_", 1)[-1].isdigit()]
    newest = sorted(numbered, key=lambda path: int(path.stem.rsplit("_", 1)[-1]))[-1:]
    first, *others = (folder / f"adapter_model.{kind}" for kind in ("pt", "safetensors", "bin"))
    return next((path for path in (first, *newest, *others) if path.is_file()), None)


def _names_in_index(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UserError(
            f"{index} is not a readable index of weights: its weight_map gives no file names"
        )
    return sorted(set(names))


def _one_set(folder: Path, found: list[str]) -> list[str]:
    """The files of ``found`` that belong together: one file, or all shards of one set.

    Two complete models in one folder would be merged silently, and the last one would win.
    """
    single = [name for name in found if name in ("model.safetensors", "pytorch_model.bin")]
    if single:
        return single
    totals = {shard and shard[2] for shard in map(_SHARD.search, found)}
    if len(found) > 1 and (None in totals or len(totals) > 1):
        raise UserError(
            f"{folder} has several files of weights, no index, and they are not the shards of one"
            f" model: {', '.join(found[:5])}: name the right ones by checkpointer.checkpoint_files"
        )
    check_shards(found)
    return found
