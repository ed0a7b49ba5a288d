"""``ppl-eval drop-layers``: a student to distil, made of a model without some of its layers.

The student is a smaller model of the same family and vocabulary, worse than its teacher until it is
distilled.
"""

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ppl_eval.checkpoint.weight_files import find_weight_files
from ppl_eval.errors import UserError
from ppl_eval.plural import counted

_LAYER = re.compile(r"^((?:model\.)?layers\.)(\d+)(\..*)$")
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", "adapter_config.json")


def drop_layers(teacher: Path, student: Path, dropped: Collection[int]) -> list[int]:
    """Write ``student``: the model in ``teacher`` without the layers ``dropped``.

    The layers that are left are renumbered from 0, in config.json as well (``num_hidden_layers``,
    and ``layer_types`` if it is there; all else stays). Weights keep their bits, one file of
    ``teacher`` after the other; files that are not weights are copied, folders are not.

    Args:
        teacher: Hugging Face folder with config.json and .safetensors files.
        student: folder to make; one that is there must be empty.
        dropped: numbers of layers, from 0.

    Returns:
        The numbers that the student's layers have in the teacher.

    Raises:
        UserError: a folder that is not as said above, a layer that the teacher does not have, or no
            layer left. Nothing has been written then.
    """
    config = _read_config(teacher)
    files = _weight_files(teacher)
    kept = _kept_layers(teacher, config["num_hidden_layers"], dropped)
    names = _new_names(files, config["num_hidden_layers"], kept)
    if student.exists() and (not student.is_dir() or any(student.iterdir())):
        raise UserError(f"{student} is there and not empty: name a new folder for the student")

    student.mkdir(parents=True, exist_ok=True)
    for path in sorted(teacher.iterdir()):
        if path.is_file() and not path.name.endswith(_NOT_COPIED):
            shutil.copyfile(path, student / path.name)
    config["num_hidden_layers"] = len(kept)
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][number] for number in kept]
    _write_json(student / "config.json", config)
    _write_weights(names, student)
    return kept


def _read_config(teacher: Path) -> dict[str, Any]:
    path = teacher / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): the teacher is a Hugging Face folder"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("num_hidden_layers"), int):
        raise UserError(f"{path} has no num_hidden_layers: only decoders of text lose layers here")
    return config


def _weight_files(teacher: Path) -> list[Path]:
    if not any(teacher.glob("*.safetensors")):
        raise UserError(f"{teacher} has no weights in .safetensors files: other formats do not do")
    files = [teacher / name for name in find_weight_files(teacher)]
    others = [path.name for path in files if path.suffix != ".safetensors"]
    if others:
        raise UserError(f"{teacher} has its weights in {others[0]}: only .safetensors files do")
    return files


def _kept_layers(teacher: Path, num_layers: int, dropped: Collection[int]) -> list[int]:
    absent = sorted(set(dropped) - set(range(num_layers)))
    if absent:
        raise UserError(
            f"{teacher} has no layer {absent[0]}: it has {counted(num_layers, 'layer')}, from 0"
        )
    kept = [number for number in range(num_layers) if number not in dropped]
    if not kept:
        raise UserError(f"every layer of {teacher} would go: leave at least one")
    return kept


def _new_names(files: list[Path], num_layers: int, kept: list[int]) -> dict[Path, dict[str, str]]:
    """File -> old name -> new name, of the tensors that stay.

    Raises:
        UserError: the layers in the files are not those of config.json.
    """
    place = {number: position for position, number in enumerate(kept)}
    found: set[int] = set()
    names: dict[Path, dict[str, str]] = {}
    for path, name in _tensor_names(files):
        match = _LAYER.match(name)
        if match is None:
            names.setdefault(path, {})[name] = name
            continue
        number = int(match[2])
        found.add(number)
        if number in place:
            names.setdefault(path, {})[name] = f"{match[1]}{place[number]}{match[3]}"
    if found != set(range(num_layers)):
        raise UserError(
            f"{files[0].parent} has weights of {counted(len(found), 'layer')}, but"
            f" num_hidden_layers is {num_layers} in its config.json: is the download complete?"
        )
    return names


def _tensor_names(files: list[Path]) -> Iterator[tuple[Path, str]]:
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                yield from ((path, name) for name in file.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise UserError(f"{path} cannot be read as safetensors: {error}") from error


def _write_weights(names: Mapping[Path, Mapping[str, str]], student: Path) -> None:
    """One file for each that keeps a tensor, and an index if there are several."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    index: dict[str, str] = {}
    num_bytes = 0
    for number, (path, renamed) in enumerate(names.items(), 1):
        name = f"model-{number:05}-of-{len(names):05}.safetensors"
        name = name if len(names) > 1 else "model.safetensors"
        with safe_open(path, framework="pt") as file:
            tensors: dict[str, torch.Tensor] = {
                new: file.get_tensor(old) for old, new in renamed.items()
            }
            save_file(tensors, student / name, metadata={"format": "pt"})
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        index |= dict.fromkeys(tensors, name)
    if len(names) > 1:
        content = {"metadata": {"total_size": num_bytes}, "weight_map": index}
        _write_json(student / "model.safetensors.index.json", content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
