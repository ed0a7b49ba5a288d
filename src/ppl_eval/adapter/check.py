"""LoRA and DoRA adapters: read, checked against the model, merged into each rank's shards."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune.modules.peft import DoRALinear, LoRALinear

from ppl_eval.adapter.files import read_contents
from ppl_eval.adapter.merge import Adapter, LowRank
from ppl_eval.adapter.settings import is_by_torchtune, rank_and_alpha, read_settings, targeted
from ppl_eval.checkpoint.checkpoint import Checkpoint
from ppl_eval.checkpoint.weight_files import find_adapter, need_folder
from ppl_eval.errors import UserError
from ppl_eval.parallel.lora import AdaptedLinear
from ppl_eval.plural import some

_HEAD = "output"


@dataclass(frozen=True)
class Slot:
    """The adapter of one module that a lora_* builder asks for."""

    rank: int
    alpha: float
    is_dora: bool


def strip(model: nn.Module) -> dict[str, Slot]:
    """Replace torchtune's adapted layers by plain ones with the same weights, in place.

    Args:
        model: on the meta device, by a lora_* builder or any other.

    Returns:
        Module name -> the adapter that the builder asks for.

    Raises:
        UserError: a layer's base weight is quantised.
    """
    slots: dict[str, Slot] = {}
    for name, module in list(model.named_modules()):
        if type(module) not in (LoRALinear, DoRALinear):
            continue
        adapted: Any = module
        if adapted._quantize_base:
            raise UserError(
                f"the model section quantises {name} (quantize_base), but nf4 weights are not"
                " evaluated: use the lora_* builder instead of the qlora_* one, or"
                " model.quantize_base=false"
            )
        plain = nn.Linear(adapted.in_dim, adapted.out_dim, bias=adapted.use_bias, device="meta")
        plain.weight, plain.bias = adapted.weight, adapted.bias
        model.set_submodule(name, plain)
        rank = adapted.lora_a.out_features
        is_dora = isinstance(module, DoRALinear)
        slots[name] = Slot(rank, adapted.scaling * rank if is_dora else adapted.alpha, is_dora)
    return slots


def read_adapter(
    folder: str, checkpoint: Checkpoint, model: nn.Module, slots: Mapping[str, Slot]
) -> Adapter:
    """Read an adapter and check it against the model that it is for.

    Args:
        folder: holds adapter_model.pt, .safetensors or .bin, or torchtune's adapter_N.pt, in
            torchtune's or PEFT's layout; and adapter_config.json, unless the model comes from a
            lora_* builder.
        checkpoint: the base weights; the model type gives the family.
        model: without adapters, see :func:`strip`; on meta, not split.
        slots: from :func:`strip`.

    Raises:
        UserError: there is no adapter, or it cannot be read, is incomplete, does not fit the model
            or the lora_* builder, or is of a kind that is not evaluated.
    """
    path = _weight_file(Path(folder))
    files, settings, exported = [path], {}, None
    settings_file = Path(folder) / "adapter_config.json"
    if settings_file.is_file():
        files.append(settings_file)
        settings = read_settings(settings_file)
        exported = is_by_torchtune(settings)
    elif not slots:
        raise UserError(
            f"{folder} has no adapter_config.json, which gives alpha: add the one that training"
            " wrote, or name the lora_* builder with its lora_rank and lora_alpha in the model"
            " section"
        )
    contents = read_contents(path, checkpoint, model, exported=exported)
    linears = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
    _check_modules(path, contents.updates, linears, slots, settings)
    updates = {
        name: _scaled(path, name, update, contents.file_names[name], settings, slots.get(name))
        for name, update in contents.updates.items()
    }
    plain = [name for name, update in updates.items() if update.magnitude is None]
    if plain and len(plain) < len(updates):
        raise UserError(
            f"{path} has no DoRA magnitude for {len(plain)} of {len(updates)} matrices, and one for"
            f" the others: {some(plain)}"
        )
    _check_copies(path, contents.copies, model)
    by_torchtune = exported or not contents.is_peft
    warnings = tuple(_warnings(updates, linears, folder, by_torchtune=by_torchtune))
    return Adapter(tuple(files), updates, warnings, contents.copies)


def install(model: nn.Module, adapter: Adapter) -> None:
    """Put unmerged layers where the adapter has a matrix, in place, to be loaded and sharded.

    The head stays a plain matrix, into which loading merges: it is scored in parts.

    Args:
        model: on the meta device, neither split nor sharded.
        adapter: an adapter for it.
    """
    for name, update in adapter.updates.items():
        if name == _HEAD:
            continue
        plain: Any = model.get_submodule(name)
        adapted = AdaptedLinear(
            plain.in_features,
            plain.out_features,
            len(update.a),
            bias=plain.bias is not None,
            is_dora=update.magnitude is not None,
            device=torch.device("meta"),
            dtype=plain.weight.dtype,
        )
        adapted.weight, adapted.bias = plain.weight, plain.bias
        model.set_submodule(name, adapted)


def _weight_file(folder: Path) -> Path:
    need_folder(folder, "adapter.dir")
    path = find_adapter(folder)
    if path is not None:
        return path
    epochs = [sub for sub in folder.iterdir() if sub.is_dir() and find_adapter(sub) is not None]
    newest = max(epochs, key=lambda sub: sub.stat().st_mtime, default=None)
    hint = "" if newest is None else f"; did you mean {newest}?"
    raise UserError(
        f"{folder} has no adapter: neither adapter_model.pt, adapter_model.safetensors nor"
        f" adapter_model.bin, nor torchtune's adapter_N.pt{hint}"
    )


def _check_modules(
    path: Path,
    updates: Mapping[str, LowRank],
    linears: Mapping[str, nn.Linear],
    slots: Mapping[str, Slot],
    settings: Mapping[str, Any],
) -> None:
    """Every update has a matrix of its shape, and every matrix that needs an update has one."""
    if _HEAD in updates and _HEAD not in linears:
        raise UserError(
            f"{path} adapts the head, which the model ties to its embedding: merged it would change"
            " both; use an untied builder (or tie_word_embeddings: false) and a checkpoint with an"
            " output.weight"
        )
    unknown = [name for name in updates if name not in linears]
    unasked = [name for name in updates if slots and name not in slots]
    missing = [name for name in slots or targeted(settings, linears) if name not in updates]
    source = "the lora_* builder" if slots else "target_modules in adapter_config.json"
    for names, problem in (
        (unknown, f"adapts {len(unknown)} modules that the model does not have"),
        (
            unasked,
            f"adapts {len(unasked)} modules that the lora_* builder does not adapt (set"
            " model.lora_attn_modules, apply_lora_to_mlp and apply_lora_to_output as in training)",
        ),
        (missing, f"lacks {len(missing)} of the matrices that {source} asks for"),
    ):
        if names:
            raise UserError(f"{path} {problem}: {some(names)}")
    for name, update in updates.items():
        shape, expected = (len(update.b), update.a.shape[1]), tuple(linears[name].weight.shape)
        if shape != expected:
            raise UserError(
                f"{path} is for a {name} of {shape}, but the model's is {expected}: was it trained"
                " on another model?"
            )


def _scaled(
    path: Path,
    name: str,
    update: LowRank,
    file_name: str,
    settings: Mapping[str, Any],
    slot: Slot | None,
) -> LowRank:
    """The update times alpha / r; file, settings and builder must have the same r, alpha and kind.

    Without adapter_config.json the settings are empty, and the builder gives alpha.
    """
    rank, is_dora = len(update.a), update.magnitude is not None
    if settings:
        stated_rank, alpha = rank_and_alpha(settings, file_name)
        if stated_rank != rank:
            raise UserError(
                f"adapter_config.json has r={stated_rank} for {file_name}, but lora_A in {path} has"
                f" {rank} rows: they are of different adapters"
            )
    else:
        assert slot is not None
        alpha = slot.alpha
    if slot is not None and (slot.rank != rank or not math.isclose(slot.alpha, alpha)):
        raise UserError(
            f"the model section has lora_rank={slot.rank} and lora_alpha={slot.alpha:g} for {name},"
            f" but the adapter in {path.parent} has rank {rank} and alpha {alpha:g}: set"
            " model.lora_rank and model.lora_alpha as in training"
        )
    stated_kinds = {
        "model.use_dora": None if slot is None else slot.is_dora,
        "use_dora in adapter_config.json": settings.get("use_dora"),
    }
    for key, stated in stated_kinds.items():
        if stated is not None and bool(stated) != is_dora:
            raise UserError(
                f"{key} is {str(bool(stated)).lower()}, but {path} has"
                f" {'a' if is_dora else 'no'} magnitude for {name}: set it as in training"
            )
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return replace(update, b=update.b * scale)


def _check_copies(path: Path, copies: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, copy in copies.items():
        if tuple(copy.shape) != shapes.get(name):
            raise UserError(
                f"{path} holds a {name} of {tuple(copy.shape)}, but in the model it is"
                f" {shapes.get(name, 'absent')}: adapters that resize the vocabulary are not"
                " evaluated, merge it with PEFT first"
            )


def _warnings(
    updates: Mapping[str, LowRank],
    linears: Mapping[str, nn.Linear],
    folder: str,
    *,
    by_torchtune: bool,
) -> Iterator[str]:
    dora = [name for name, update in updates.items() if update.magnitude is not None]
    if not dora and not any(update.b.any() for update in updates.values()):
        yield f"all lora_B of the adapter in {folder} are zero (or alpha is): it changes nothing"
    biased = [name for name in dora if linears[name].bias is not None]
    if by_torchtune and biased:
        yield (
            f"torchtune 0.6.1 trains DoRA with the bias of {len(biased)} matrices scaled too, but"
            " merges it unscaled: this run evaluates the merged model"
        )
