"""Weights: found, read through torchtune's checkpointer, checked, and put into a sharded model."""

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ppl_eval import compat, components
from ppl_eval import fingerprint as fingerprints
from ppl_eval.errors import UserError
from ppl_eval.model.folder import find_weight_files

_LISTED = 5


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
                f"checkpointer.{name} is {node[name]!r}, but only full weights are evaluated:"
                " remove it, and point checkpoint_dir at merged weights"
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
    paths = [folder / name for name in compat.file_names(files)]
    absent = [path.name for path in paths if not path.is_file()]
    if absent:
        raise UserError(f"{folder} lacks weight files that are asked for: {_some(absent)}")
    return paths


def fingerprint(node: Mapping[str, Any], model_node: Mapping[str, Any]) -> str:
    """Hash of what makes the model: its component, its weight files, and how they are read.

    Args:
        node: from :func:`complete_checkpointer`. Where the folder is does not count.
        model_node: the ``model`` section.
    """
    paths = weight_files(node)
    folder = node.get("checkpoint_dir")
    config = Path(folder) / "config.json" if folder else None
    if config is not None and config.is_file():
        paths.append(config)
    places = ("checkpoint_dir", "checkpoint_files", "output_dir")
    reading = {k: v for k, v in node.items() if k not in places or not paths}
    return fingerprints.of(model_node, reading, fingerprints.of_files(paths))


def read_state(node: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """All weights by torchtune's names, on CPU, as the ``checkpointer`` component reads them.

    Args:
        node: from :func:`complete_checkpointer`.

    Raises:
        UserError: a file that is missing or cannot be read.
    """
    # torchtune's checkpointers make their output_dir at once; an evaluation never writes to it
    with tempfile.TemporaryDirectory() as nowhere:
        more = {"output_dir": nowhere} if "output_dir" in node else {}
        return compat.load_model_state(components.build(node, "checkpointer", **more))


def load_into(model: nn.Module, state: dict[str, torch.Tensor], device: torch.device) -> str:
    """Give each rank its shards of ``state`` and empty it on the way.

    Args:
        model: on the meta device, already sharded; afterwards on ``device``.
        state: torchtune's names -> full tensors on CPU, the same on every rank.
        device: of this rank.

    Returns:
        The dtype that most of the checkpoint's numbers have, such as ``bf16``.

    Raises:
        UserError: names or shapes of model and checkpoint differ; both are listed.
    """
    slots = dict(model.named_parameters())
    _drop_copy_of_tied_head(slots, state)
    _check_same(slots, state)
    sizes: Counter[str] = Counter()
    shards = {}
    for name, slot in slots.items():
        full = state.pop(name)
        sizes[str(full.dtype).removeprefix("torch.")] += full.numel()
        full = full.to(device=device, dtype=slot.dtype)
        if isinstance(slot, DTensor):
            # every rank has the full tensor, so it takes its shard without communication
            shard = distribute_tensor(full, slot.device_mesh, slot.placements, src_data_rank=None)
        else:
            shard = full.contiguous()
        shards[name] = nn.Parameter(shard, requires_grad=False)
    model.load_state_dict(shards, strict=True, assign=True)
    with device:
        compat.rebuild_rope(model)
    unset = [n for n, t in chain(model.named_parameters(), model.named_buffers()) if t.is_meta]
    if unset:
        raise RuntimeError(f"no value for {', '.join(unset[:_LISTED])}")
    return sizes.most_common(1)[0][0]


def _drop_copy_of_tied_head(slots: Mapping[str, Any], state: dict[str, torch.Tensor]) -> None:
    """A tied model's checkpoint may carry the shared weight twice, if both are the same."""
    head, embedding = "output.weight", "tok_embeddings.weight"
    if head in slots or head not in state or embedding not in state:
        return
    if not torch.equal(state[head], state[embedding]):
        raise UserError(
            "the model ties its head to the embedding, but the checkpoint has an output.weight that"
            " differs from tok_embeddings.weight: use an untied builder (or tie_word_embeddings:"
            " false)"
        )
    del state[head]


def _check_same(slots: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            raise UserError(
                f"{name} is {str(tensor.dtype).removeprefix('torch.')} in the checkpoint: quantised"
                " weights are not evaluated yet"
            )
    missing = [name for name in slots if name not in state]
    extra = [name for name in state if name not in slots]
    shapes = [
        f"{name} is {tuple(state[name].shape)} in the checkpoint and {tuple(slots[name].shape)} in"
        " the model"
        for name in slots
        if name in state and state[name].shape != slots[name].shape
    ]
    found = (
        ("missing from the checkpoint", missing),
        ("unknown to the model", extra),
        ("of another shape", shapes),
    )
    problems = [f"{len(names)} {what}: {_some(names)}" for what, names in found if names]
    if problems:
        raise UserError(
            f"checkpoint and model do not match: {' | '.join(problems)}: check the model section"
            " against the checkpoint's config.json"
        )


def _some(names: Sequence[str]) -> str:
    return "; ".join(names[:_LISTED]) + ("; ..." if len(names) > _LISTED else "")
