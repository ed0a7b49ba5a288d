"""The tensors of an adapter by torchtune or PEFT, in torchtune's names and order of rows."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ppl_eval.adapter.merge import LowRank
from ppl_eval.checkpoint.checkpoint import Checkpoint
from ppl_eval.checkpoint.names import HUGGING_FACE, TORCHTUNE, Names
from ppl_eval.checkpoint.tensor_files import FileSource
from ppl_eval.errors import UserError
from ppl_eval.plural import counted, some

_PEFT_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+)\.((?P<a>lora_A\.weight)|(?P<b>lora_B\.weight)"
    r"|(?P<magnitude>lora_magnitude_vector(\.weight)?))"
)
_TUNE_NAME = re.compile(
    r"(?P<module>.+)\.((?P<a>lora_a\.weight)|(?P<b>lora_b\.weight)"
    r"|(?P<magnitude>magnitude(\.weight)?))"
)
_COPIES = {
    "base_model.model.model.embed_tokens": "tok_embeddings.weight",
    "base_model.model.lm_head": "output.weight",
}
"""Base weights that PEFT stores with an adapter of the head -> torchtune's names."""


@dataclass(frozen=True)
class Contents:
    """An adapter's tensors.

    Attributes:
        updates: torchtune's name of the adapted module -> its update, before b is scaled.
        file_names: torchtune's name of the adapted module -> its name in the file.
        copies: torchtune's name -> a base weight that PEFT stores with the adapter.
        is_peft: whether the file has PEFT's layout.
    """

    updates: dict[str, LowRank]
    file_names: dict[str, str]
    copies: dict[str, torch.Tensor]
    is_peft: bool


def read_contents(
    path: Path, checkpoint: Checkpoint, model: Any, *, exported: bool | None
) -> Contents:
    """All tensors of an adapter. Their names tell torchtune's layout from PEFT's.

    Args:
        path: the adapter's file.
        checkpoint: the base weights.
        model: a decoder, not split over tp.
        exported: whether torchtune wrote a file in PEFT's layout; None if that is not known.

    Raises:
        UserError: the file cannot be read, holds tensors of another kind or numbers that are not
            finite, or an A without its B.
    """
    tensors = _read(path)
    is_peft = any(".lora_A." in name or ".lora_B." in name for name in tensors)
    modules: dict[str, dict[str, torch.Tensor]] = {}
    others: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        found = (_PEFT_NAME if is_peft else _TUNE_NAME).fullmatch(name)
        if found:
            part = next(key for key in ("a", "b", "magnitude") if found[key])
            modules.setdefault(found["module"], {})[part] = tensor.float()
        else:
            others[name] = tensor
    for module, parts in modules.items():
        _check_parts(path, module, parts)
    names = Names(TORCHTUNE, None, {})
    if is_peft:
        if exported is None:
            raise UserError(
                f"{path} has PEFT's layout and no adapter_config.json, which tells the order of the"
                " rows too: add the one that was written with it"
            )
        names = _peft_names(checkpoint, model, exported=exported)
    contents = Contents({}, {}, {}, is_peft)
    unknown = []
    for module, parts in modules.items():
        updates = _converted(module, parts, names, magnitude_is_tune=bool(exported))
        if not updates:
            unknown += [name for name in tensors if f".{module}." in name]
        contents.updates.update(updates)
        contents.file_names.update(dict.fromkeys(updates, module))
    for name, tensor in others.items():
        copied = _COPIES.get(name.removesuffix(".weight").removesuffix(".base_layer"))
        if copied is None or not is_peft:
            unknown.append(name)
        else:
            contents.copies[copied] = tensor
    if unknown:
        raise UserError(
            f"{path} holds {counted(len(unknown), 'tensor')} that are no LoRA or DoRA matrices of"
            f" the model's modules: {some(unknown)}"
        )
    return contents


def _peft_names(checkpoint: Checkpoint, model: Any, *, exported: bool) -> Names:
    """The names of PEFT's matrices: Hugging Face's, whatever layout the base weights have.

    Sizes that config.json of the base weights lacks are taken from the model. ``exported``:
    torchtune 0.6.1 permutes B of q and k as for Llama in all families that it exports; Qwen 2's
    weights are not permuted, so PEFT misreads such a file.
    """
    attention = model.layers[0].attn
    sizes = {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_size": model.tok_embeddings.embedding_dim,
    }
    is_qwen2 = checkpoint.model_type == "QWEN2"
    model_type = "LLAMA3" if exported and is_qwen2 else checkpoint.model_type
    return Names(HUGGING_FACE, model_type, {**sizes, **checkpoint.config.values})


def _read(path: Path) -> dict[str, torch.Tensor]:
    source = FileSource([path])
    for name, stored in source.stored.items():
        if isinstance(stored.dtype, str):
            raise UserError(
                f"{name} is {stored.dtype} in {path}: quantised adapters are not evaluated"
            )
        if ".lora_embedding_" in name:
            raise UserError(f"{path} adapts the embedding ({name}), which is not evaluated")
    tensors = dict(source.tensors())
    if not tensors:
        raise UserError(f"{path} holds no tensors: was the adapter saved by one rank of several?")
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(
                f"{name} in {path} holds NaN or infinite numbers: its training diverged"
            )
    return tensors


def _check_parts(path: Path, module: str, parts: Mapping[str, torch.Tensor]) -> None:
    lacking = [f"lora_{part.upper()}" for part in ("a", "b") if part not in parts]
    if lacking:
        raise UserError(
            f"{module} has no {' and no '.join(lacking)} in {path}: the adapter is incomplete"
        )
    a, b = parts["a"], parts["b"]
    magnitude = parts.get("magnitude")
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise UserError(
            f"lora_A of {module} is {tuple(a.shape)} and lora_B {tuple(b.shape)} in {path}, but"
            " they are [r, in] and [out, r]"
        )
    if magnitude is not None and magnitude.shape != b.shape[:1]:
        raise UserError(
            f"the magnitude of {module} is {tuple(magnitude.shape)} in {path}, but lora_B has"
            f" {counted(b.shape[0], 'row')}"
        )


def _converted(
    module: str, parts: Mapping[str, torch.Tensor], names: Names, *, magnitude_is_tune: bool
) -> dict[str, LowRank]:
    """Updates of torchtune's modules by one in the file: three by Phi 3's qkv_proj, with one A.

    Empty if the module is unknown. ``magnitude_is_tune``: the magnitude's rows have torchtune's
    order already.
    """
    convert = partial(names.convert, f"{module}.weight", where="adapter")
    b_by_name = convert(parts["b"]) or {}
    magnitudes: Mapping[str, torch.Tensor] = {}
    if "magnitude" in parts:
        column = parts["magnitude"].unsqueeze(1)
        magnitudes = (
            dict.fromkeys(b_by_name, column) if magnitude_is_tune else convert(column) or {}
        )
    return {
        name.removesuffix(".weight"): LowRank(
            parts["a"], b, magnitudes[name].squeeze(1) if magnitudes else None
        )
        for name, b in b_by_name.items()
    }
