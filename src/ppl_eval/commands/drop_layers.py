"""``ppl-eval drop-layers``: make a student to distil from a model, by removing layers."""

import json
import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ppl_eval.checkpoint.weight_files import find_weight_files
from ppl_eval.errors import UserError
from ppl_eval.files import read_json
from ppl_eval.plural import counted

_LAYER = re.compile(r"^((?:model\.)?layers\.)(\d+)(\..*)$")
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", "adapter_config.json")


def drop_layers(teacher: Path, student: Path, dropped: Collection[int]) -> list[int]:
    """Write ``student``: the model in ``teacher`` without the layers ``dropped``.

    The remaining layers are renumbered from 0, in config.json as well (``num_hidden_layers``, and
    ``layer_types`` if it is there; all else stays). The bits of the weights stay the same, each
    file of ``teacher`` gives a file of ``student``. Other files are copied, folders are not.

    Args:
        teacher: Hugging Face folder with config.json and .safetensors files.
        student: folder to make; if it exists it must be empty.
        dropped: numbers of layers, from 0.

    Returns:
        The numbers that the student's layers have in the teacher.

    Raises:
        UserError: a folder that is not as described above, a layer that the teacher does not have,
            or no layer left. Nothing has been written then.
    """
    path = teacher / "config.json"
    if not path.is_file():
        raise UserError(f"there is no {path}: the teacher must be a Hugging Face folder")
    config = read_json(path)
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        raise UserError(f"{path} has no num_hidden_layers: only decoders of text can lose layers")
    types = config.get("layer_types") or ()
    if types and len(types) != num_layers:
        raise UserError(
            f"{path} has {counted(len(types), 'layer')} in layer_types and num_hidden_layers"
            f" {num_layers}: make them the same"
        )
    files = _weight_files(teacher)
    absent = sorted(set(dropped) - set(range(num_layers)))
    if absent:
        raise UserError(
            f"{teacher} has no layer {absent[0]}: it has {counted(num_layers, 'layer')}, from 0"
        )
    kept = sorted(set(range(num_layers)) - set(dropped))
    if not kept:
        raise UserError(f"every layer of {teacher} would go: leave at least one")
    names = _new_names(files, num_layers, kept)
    if student.exists() and (not student.is_dir() or any(student.iterdir())):
        raise UserError(f"{student} is there and not empty: name a new folder for the student")

    student.mkdir(parents=True, exist_ok=True)
    for path in sorted(teacher.iterdir()):
        if path.is_file() and not path.name.endswith(_NOT_COPIED):
            shutil.copyfile(path, student / path.name)
    config["num_hidden_layers"] = len(kept)
    if types:
        config["layer_types"] = [types[number] for number in kept]
    _write_json(student / "config.json", config)
    _write_weights(names, student)
    return kept


def _weight_files(teacher: Path) -> list[Path]:
    if not any(teacher.glob("*.safetensors")):
        raise UserError(f"{teacher} has no weights in .safetensors files: no other format will do")
    files = [teacher / name for name in find_weight_files(teacher)]
    others = [path.name for path in files if path.suffix != ".safetensors"]
    if others:
        raise UserError(f"{teacher} has its weights in {others[0]}: only .safetensors files do")
    return files


def _new_names(files: list[Path], num_layers: int, kept: list[int]) -> dict[Path, dict[str, str]]:
    """File -> old name -> new name, for the tensors that stay.

    Raises:
        UserError: a file that cannot be read, or layers that are not those of config.json.
    """
    found: set[int] = set()
    names: dict[Path, dict[str, str]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                old_names = list(file.keys())
        except SafetensorError as error:
            raise UserError(f"{path} cannot be read as safetensors: {error}") from error
        renamed = {name: name for name in old_names if not _LAYER.match(name)}
        for layer in filter(None, map(_LAYER.match, old_names)):
            found.add(int(layer[2]))
            if int(layer[2]) in kept:
                renamed[layer[0]] = f"{layer[1]}{kept.index(int(layer[2]))}{layer[3]}"
        if renamed:
            names[path] = renamed
    if found != set(range(num_layers)):
        raise UserError(
            f"{files[0].parent} has weights of {counted(len(found), 'layer')}, but"
            f" num_hidden_layers is {num_layers} in its config.json: is the download complete?"
        )
    return names


def _write_weights(names: Mapping[Path, Mapping[str, str]], student: Path) -> None:
    """Write a file for each that keeps a tensor, and an index if there are several."""
    index: dict[str, str] = {}
    num_bytes = 0
    for number, (path, renamed) in enumerate(names.items(), 1):
        name = "model.safetensors"
        if len(names) > 1:
            name = f"model-{number:05}-of-{len(names):05}.safetensors"
        with safe_open(path, framework="pt") as file:
            tensors = {new: file.get_tensor(old) for old, new in renamed.items()}
            save_file(tensors, student / name, metadata={"format": "pt"})
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        index |= dict.fromkeys(tensors, name)
    if len(names) > 1:
        content = {"metadata": {"total_size": num_bytes}, "weight_map": index}
        _write_json(student / "model.safetensors.index.json", content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
