"""The checkpointer section: which files it means, what identifies them, and how to read them."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppl_eval import compat, components
from ppl_eval import fingerprint as fingerprints
from ppl_eval.checkpoint.config_json import ModelConfig
from ppl_eval.checkpoint.names import Convert, converter, layout_of
from ppl_eval.checkpoint.tensor_files import DistributedSource, FileSource, Source, StateSource
from ppl_eval.checkpoint.weight_files import check_shards, find_weight_files, need_folder
from ppl_eval.errors import UserError
from ppl_eval.files import refuse_lfs_pointer
from ppl_eval.plural import some

_OF_TRAINING = (
    "adapter_checkpoint",
    "recipe_checkpoint",
    "resume_from_checkpoint",
    "should_load_recipe_state",
)
"""Arguments of torchtune's checkpointers that would name what an evaluation does not load."""


def complete_checkpointer(node: Mapping[str, Any]) -> dict[str, Any]:
    """The ``checkpointer`` section with its weight files filled in and checked.

    Raises:
        UserError: no folder, no files, a model type that torchtune does not know, or an argument
            that only training uses.
    """
    node = dict(node)
    for name in _OF_TRAINING:
        if node.get(name):
            raise UserError(
                f"checkpointer.{name} is {node[name]!r}, but a checkpointer reads full weights"
                " here: remove it, point checkpoint_dir at them, and adapter.dir at an adapter"
            )
    if "checkpoint_dir" in node and not isinstance(node["checkpoint_dir"], str):
        raise UserError(
            f"checkpointer.checkpoint_dir is {node['checkpoint_dir']!r}, but it is the folder with"
            " the weights: set checkpointer.checkpoint_dir=DIR"
        )
    model_type = node.get("model_type", compat.model_types()[0])
    if model_type not in compat.model_types():
        raise UserError(
            f"checkpointer.model_type is {model_type!r}, but it is one of"
            f" {', '.join(compat.model_types())}"
        )
    if not isinstance(node.get("output_dir", ""), str | None):
        raise UserError(f"checkpointer.output_dir is {node['output_dir']!r}, but it is a folder")
    distributed_folder(node)
    if "checkpoint_files" in node and "checkpoint_dir" in node:
        files = node["checkpoint_files"] or find_weight_files(node["checkpoint_dir"])
        node["checkpoint_files"] = files
        weight_files(node)
    return node


def weight_files(node: Mapping[str, Any]) -> list[Path]:
    """Paths of the weight files that a checked ``checkpointer`` section names, if it does.

    Raises:
        UserError: one of them does not exist.
    """
    if "checkpoint_files" not in node or "checkpoint_dir" not in node:
        return []
    files = node["checkpoint_files"]
    if not isinstance(files, dict) and not (
        isinstance(files, list) and all(isinstance(name, str) for name in files)
    ):
        raise UserError(f"checkpointer.checkpoint_files is {files!r}, but it is a list of names")
    folder = Path(node["checkpoint_dir"])
    need_folder(folder, "checkpointer.checkpoint_dir")
    paths = [folder / name for name in compat.file_names(files)]
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise UserError(f"{folder} lacks weight files that are asked for: {some(absent)}")
    check_shards([path.name for path in paths])
    for path in paths:
        refuse_lfs_pointer(path)
    return paths


def fingerprint(node: Mapping[str, Any], model_node: Mapping[str, Any]) -> str:
    """Hash of what makes the model: its component, its weight files, and how they are read.

    Args:
        node: from :func:`complete_checkpointer`. Where the folder is does not count.
        model_node: the ``model`` section.
    """
    distributed = distributed_folder(node)
    paths = sorted(distributed.iterdir()) if distributed else weight_files(node)
    folder = node.get("checkpoint_dir")
    config = Path(folder) / "config.json" if folder else None
    if config is not None and config.is_file():
        paths.append(config)
    places = ("checkpoint_dir", "checkpoint_files", "output_dir")
    reading = {k: v for k, v in node.items() if k not in places or not paths}
    return fingerprints.of(model_node, reading, fingerprints.of_files(paths))


def open_checkpoint(
    node: Mapping[str, Any], config: ModelConfig
) -> tuple[Source, Convert, str | None]:
    """The checkpoint's tensors, not yet read, and what turns their names into torchtune's.

    torchtune's own checkpointers are not called: they read everything on every rank. Any other
    component is, and its whole state dict is taken.

    Args:
        node: from :func:`complete_checkpointer`.
        config: the checkpoint's config.json.

    Returns:
        The source, the conversion, and the layout of the names (None if the component is not
        torchtune's).

    Raises:
        UserError: a file that cannot be read, or a family that is not evaluated.
    """
    layout = layout_of(node)
    convert = converter(node, config.values)
    distributed = distributed_folder(node)
    if distributed is not None:
        return DistributedSource(distributed), convert, "torchtune"
    if layout is not None:
        return FileSource(weight_files(node)), convert, layout
    # a checkpointer of torchtune's kind makes its output_dir at once; nothing is written to it
    with tempfile.TemporaryDirectory() as nowhere:
        more = {"output_dir": nowhere} if "output_dir" in node else {}
        checkpointer = components.build(node, "checkpointer", **more)
        return StateSource(compat.load_model_state(checkpointer)), convert, layout


def distributed_folder(node: Mapping[str, Any]) -> Path | None:
    """The newest folder of a distributed checkpoint, for torchtune's DistributedCheckpointer.

    It is ``checkpoint_dir`` itself or its ``dist_epoch_N`` with the largest N.

    Raises:
        UserError: neither holds a distributed checkpoint.
    """
    if str(node["_component_"]).rsplit(".", 1)[-1] != "DistributedCheckpointer":
        return None
    folder = Path(node["checkpoint_dir"])
    if (folder / ".metadata").is_file():
        return folder
    epochs = [p.parent for p in folder.glob("dist_epoch_*/.metadata")]
    if not epochs:
        raise UserError(
            f"{folder} holds no distributed checkpoint: no .metadata, and no dist_epoch_N with one"
        )
    return max(epochs, key=lambda path: int(path.name.rsplit("_", 1)[-1]))
