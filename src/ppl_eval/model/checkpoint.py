"""Weights: found, read through torchtune's checkpointer, checked, and put into a sharded model."""

import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ppl_eval import compat, components
from ppl_eval.errors import UserError
from ppl_eval.model.folder import find_weight_files, fingerprint_files

_LISTED = 5


def complete_checkpointer(node: Mapping[str, Any]) -> dict[str, Any]:
    """The ``checkpointer`` section with its weight files filled in and checked.

    Raises:
        UserError: no folder, no files, or a model type that torchtune does not know.
    """
    node = dict(node)
    if "checkpoint_files" in node and not node["checkpoint_files"]:
        node["checkpoint_files"] = find_weight_files(node["checkpoint_dir"])
    model_type = node.get("model_type")
    if isinstance(model_type, str) and model_type not in compat.model_types():
        raise UserError(
            f"checkpointer.model_type is {model_type!r}, but it is one of"
            f" {', '.join(compat.model_types())}"
        )
    return node


def fingerprint(node: Mapping[str, Any], model_node: Mapping[str, Any]) -> str:
    """Hash of the model's component and of its weight files (see ``fingerprint_files``).

    Args:
        node: from :func:`complete_checkpointer`. A checkpointer that has no ``checkpoint_files`` is
            identified by its arguments.
        model_node: the ``model`` section.
    """
    files = node.get("checkpoint_files")
    weights = (
        fingerprint_files(node["checkpoint_dir"], compat.file_names(files))
        if files and "checkpoint_dir" in node
        else json.dumps(node, sort_keys=True, default=str)
    )
    content = json.dumps([model_node, weights], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def read_state(node: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """All weights by torchtune's names, on CPU, as the ``checkpointer`` component reads them.

    Args:
        node: from :func:`complete_checkpointer`.

    Raises:
        UserError: a file that is missing or cannot be read.
    """
    # torchtune's checkpointers make their output_dir at once; an evaluation never writes to it
    with tempfile.TemporaryDirectory() as nowhere:
        more = {"output_dir": nowhere} if "output_dir" in node and not node["output_dir"] else {}
        try:
            checkpointer = components.build(node, "checkpointer", **more)
        except (OSError, ValueError, KeyError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"checkpointer ({node['_component_']}): {reason}") from error
        return compat.load_model_state(checkpointer)


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
