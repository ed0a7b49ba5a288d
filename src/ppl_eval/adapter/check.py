"""LoRA and DoRA adapters: read, checked against the model, merged into each rank's own shards."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune.modules.peft import DoRALinear, LoRALinear

from ppl_eval.adapter import files as adapter_files
from ppl_eval.adapter import settings as adapter_settings
from ppl_eval.adapter.files import Contents, Matrices
from ppl_eval.adapter.merge import Adapter, LowRank
from ppl_eval.checkpoint.checkpoint import Checkpoint
from ppl_eval.checkpoint.weight_files import has_adapter
from ppl_eval.errors import UserError
from ppl_eval.parallel.lora import AdaptedLinear
from ppl_eval.plural import some

_HEAD = "output"


@dataclass(frozen=True)
class Slot:
    """Where a lora_* builder has an adapter."""

    rank: int
    alpha: float
    is_dora: bool


def strip(model: nn.Module) -> dict[str, Slot]:
    """Replace torchtune's adapted layers by plain ones with the same weights, in place.

    Args:
        model: of a lora_* builder, or of any other; on the meta device.

    Returns:
        Module name -> what the builder put there.

    Raises:
        UserError: a layer whose base weight is quantised.
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
    folder: str,
    checkpoint: Checkpoint,
    model: nn.Module,
    slots: Mapping[str, Slot],
) -> Adapter:
    """An adapter, checked against the model that it is for.

    Args:
        folder: adapter_model.pt, .safetensors or .bin, or torchtune's adapter_N.pt, in torchtune's
            or PEFT's layout, and adapter_config.json, which a lora_* builder can stand in for.
        checkpoint: the base weights; their model type gives the family.
        model: without adapters, see :func:`strip`; on meta, not split.
        slots: from :func:`strip`.

    Raises:
        UserError: no adapter; one that cannot be read, is incomplete, does not fit the model or
            its lora_* builder, or is of a kind that is not evaluated.
    """
    weights = adapter_files.weight_file(Path(folder))
    if weights is None:
        raise UserError(_nothing_in(Path(folder)))
    settings_file = Path(folder) / "adapter_config.json"
    settings = None
    if settings_file.is_file():
        settings = adapter_settings.read_settings(settings_file)
    elif not slots:
        raise UserError(
            f"{folder} has no adapter_config.json, which gives alpha: add the one that training"
            " wrote, or name the lora_* builder with its lora_rank and lora_alpha in the model"
            " section"
        )
    exported = None if settings is None else adapter_settings.is_by_torchtune(settings)
    contents = adapter_files.read_contents(weights, checkpoint, model, exported=exported)
    linears = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
    _check_places(weights, contents, linears, slots, settings)
    updates = {
        name: _update(weights, name, matrices, settings, slots.get(name))
        for name, matrices in contents.matrices.items()
    }
    _check_kinds(weights, updates)
    _check_copies(weights, contents.copies, model)
    return Adapter(
        folder=Path(folder),
        files=(weights, settings_file) if settings is not None else (weights,),
        updates=updates,
        warnings=tuple(
            _warnings(updates, linears, folder, by_torchtune=exported or not contents.is_peft)
        ),
        copies=contents.copies,
    )


def install(model: nn.Module, adapter: Adapter) -> None:
    """Put unmerged layers where the adapter has a matrix, in place, to be loaded and sharded.

    The head stays a plain matrix, into which loading merges: it is scored in parts.

    Args:
        model: on the meta device, neither split nor sharded.
        adapter: for it.
    """
    for name, update in adapter.updates.items():
        plain: Any = model.get_submodule(name)
        if name == _HEAD:
            continue
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


def _nothing_in(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no folder {folder} with an adapter"
    held = [path for path in folder.iterdir() if path.is_dir() and has_adapter(path)]
    newest = max(held, key=lambda path: path.stat().st_mtime, default=None)
    hint = "" if newest is None else f"; did you mean {newest}?"
    return (
        f"{folder} has no adapter: neither adapter_model.pt, adapter_model.safetensors nor"
        f" adapter_model.bin, nor torchtune's adapter_N.pt{hint}"
    )


def _check_places(
    path: Path,
    contents: Contents,
    linears: Mapping[str, nn.Linear],
    slots: Mapping[str, Slot],
    settings: Mapping[str, Any] | None,
) -> None:
    """Every matrix has a place of its shape, and every place that is to be filled its matrix."""
    matrices = contents.matrices
    if _HEAD in matrices and _HEAD not in linears:
        raise UserError(
            f"{path} adapts the head, which the model ties to its embedding: merged it would change"
            " both; use an untied builder (or tie_word_embeddings: false) and a checkpoint with an"
            " output.weight"
        )
    found = (
        ("modules that the model does not have", [n for n in matrices if n not in linears]),
        (
            "modules that the lora_* builder does not adapt (set model.lora_attn_modules,"
            " apply_lora_to_mlp and apply_lora_to_output as in training)",
            [n for n in matrices if slots and n not in slots],
        ),
    )
    for what, names in found:
        if names:
            raise UserError(f"{path} adapts {len(names)} {what}: {some(names)}")
    wanted = slots or adapter_settings.targeted(settings or {}, linears)
    missing = [name for name in wanted if name not in matrices]
    if missing:
        source = "the lora_* builder" if slots else "target_modules in adapter_config.json"
        raise UserError(
            f"{path} lacks {len(missing)} of the matrices that {source} asks for: {some(missing)}"
        )
    for name, low_rank in matrices.items():
        linear: Any = linears[name]
        shape = (low_rank.b.shape[0], low_rank.a.shape[1])
        if shape != linear.weight.shape:
            raise UserError(
                f"{path} is for a {name} of {shape}, but the model's is"
                f" {tuple(linear.weight.shape)}: was it trained on another model?"
            )


def _update(
    path: Path,
    name: str,
    matrices: Matrices,
    settings: Mapping[str, Any] | None,
    slot: Slot | None,
) -> LowRank:
    """The matrices, scaled; ranks, alphas and kinds agree wherever they are told."""
    rank, is_dora = len(matrices.a), matrices.magnitude is not None
    told = settings or {}
    if settings is None:
        assert slot is not None
        stated: tuple[int, float] = (rank, slot.alpha)
    else:
        stated = adapter_settings.rank_and_alpha(settings, matrices.module)
    if stated[0] != rank:
        raise UserError(
            f"adapter_config.json has r={stated[0]} for {matrices.module}, but lora_A in {path} has"
            f" {rank} rows: they are of different adapters"
        )
    if slot is not None and (slot.rank != rank or not math.isclose(slot.alpha, stated[1])):
        raise UserError(
            f"the model section has lora_rank={slot.rank} and lora_alpha={slot.alpha:g} for {name},"
            f" but the adapter in {path.parent} has rank {rank} and alpha {stated[1]:g}: set"
            " model.lora_rank and model.lora_alpha as in training"
        )
    for what, expected in (
        ("model.use_dora", None if slot is None else slot.is_dora),
        ("use_dora in adapter_config.json", told.get("use_dora")),
    ):
        if expected is not None and bool(expected) != is_dora:
            raise UserError(
                f"{what} is {str(bool(expected)).lower()}, but {path} has"
                f" {'a' if is_dora else 'no'} magnitude for {name}: set it as in training"
            )
    scale = adapter_settings.scale_of(told, *stated)
    return LowRank(matrices.a, matrices.b * scale, matrices.magnitude)


def _check_kinds(path: Path, updates: Mapping[str, LowRank]) -> None:
    plain = [name for name, update in updates.items() if update.magnitude is None]
    if plain and len(plain) < len(updates):
        raise UserError(
            f"{path} has no DoRA magnitude for {len(plain)} of {len(updates)} matrices, and one for"
            f" the others: {some(plain)}"
        )


def _check_copies(path: Path, copies: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    for name, copy in copies.items():
        if name not in parameters or copy.shape != parameters[name].shape:
            there = tuple(parameters[name].shape) if name in parameters else "absent"
            raise UserError(
                f"{path} holds a {name} of {tuple(copy.shape)}, but in the model it is {there}:"
                " adapters that resize the vocabulary are not evaluated, merge it with PEFT first"
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
