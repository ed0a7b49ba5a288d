"""A LoRA or DoRA adapter on disk, by torchtune or PEFT: in torchtune's names and order of rows."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ppl_eval.checkpoint.checkpoint import Checkpoint
from ppl_eval.checkpoint.names import HUGGING_FACE, Names
from ppl_eval.checkpoint.tensor_files import FileSource
from ppl_eval.errors import UserError
from ppl_eval.plural import counted, some

_PEFT_NAME = re.compile(
    r"base_model\.model\.(?P<module>.+)\."
    r"(?P<part>lora_A(?=\.weight$)|lora_B(?=\.weight$)|lora_magnitude_vector)(?:\.weight)?"
)
_PEFT_COPY = re.compile(
    r"base_model\.model\.(?P<module>model\.embed_tokens|lm_head)(?:\.base_layer)?\.weight"
)
_COPIED = {"model.embed_tokens": "tok_embeddings.weight", "lm_head": "output.weight"}
_TUNE_NAME = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_a(?=\.weight$)|lora_b(?=\.weight$)|magnitude)(?:\.weight)?"
)
_PARTS = {
    "lora_A": "a",
    "lora_a": "a",
    "lora_B": "b",
    "lora_b": "b",
    "lora_magnitude_vector": "magnitude",
    "magnitude": "magnitude",
}


@dataclass(frozen=True)
class Matrices:
    """What an adapter adds to one matrix, before it is scaled.

    Attributes:
        module: the adapted module's own name in the file, less a prefix.
        a: [r, in], fp32.
        b: [out, r], fp32, rows in torchtune's order.
        magnitude: [out], fp32, rows in torchtune's order; None for LoRA.
    """

    module: str
    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None


@dataclass(frozen=True)
class Contents:
    """An adapter's tensors.

    Attributes:
        matrices: torchtune's name of the adapted module -> its matrices.
        copies: torchtune's name -> a base weight that PEFT stores beside the adapter.
        is_peft: whether it is in PEFT's layout.
    """

    matrices: dict[str, Matrices]
    copies: dict[str, torch.Tensor]
    is_peft: bool


def weight_file(folder: Path) -> Path | None:
    """The file with an adapter's tensors; of several that one that its writer did not convert.

    torchtune's recipes write an adapter twice. adapter_model.pt is what was trained; in the copy in
    PEFT's layout 0.6.1 permutes B of q and k but leaves DoRA's magnitudes in the old order.
    """
    numbered = [p for p in folder.glob("adapter_*.pt") if p.stem.rsplit("_", 1)[-1].isdigit()]
    newest = sorted(numbered, key=lambda path: int(path.stem.rsplit("_", 1)[-1]))[-1:]
    named = [folder / f"adapter_model.{kind}" for kind in ("pt", "safetensors", "bin")]
    return next((path for path in (named[0], *newest, *named[1:]) if path.is_file()), None)


def read_contents(
    path: Path, checkpoint: Checkpoint, model: Any, *, exported: bool | None
) -> Contents:
    """All tensors of an adapter; the names say in which layout they are.

    Args:
        path: from :func:`weight_file`.
        checkpoint: the base weights.
        model: a decoder, not split over tp.
        exported: whether, if the layout is PEFT's, torchtune wrote it; None if nothing tells.

    Raises:
        UserError: a file that cannot be read, tensors that are no adapter's or no finite
            floating-point numbers, an A without its B.
    """
    tensors = _read(path)
    is_peft = any(".lora_A." in name or ".lora_B." in name for name in tensors)
    modules: dict[str, dict[str, torch.Tensor]] = {}
    others: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        found = (_PEFT_NAME if is_peft else _TUNE_NAME).fullmatch(name)
        if found:
            modules.setdefault(found["module"], {})[_PARTS[found["part"]]] = tensor
        else:
            others[name] = tensor
    for module, parts in modules.items():
        _check_parts(path, module, parts)
    if not is_peft:
        _refuse_unknown(path, list(others))
        return Contents({m: Matrices(m, **_filled(p)) for m, p in modules.items()}, {}, False)
    if exported is None:
        raise UserError(
            f"{path} has PEFT's layout and no adapter_config.json, which tells the order of its"
            " rows too: add the one that was written with it"
        )
    names = _peft_names(checkpoint, model, exported=exported)
    matrices: dict[str, Matrices] = {}
    unknown = []
    for module, parts in modules.items():
        known = _from_peft(module, parts, names, magnitude_is_tune=exported)
        if known is None:
            unknown += [name for name in tensors if f".{module}." in name]
        else:
            matrices |= known
    found_copies = {name: _PEFT_COPY.fullmatch(name) for name in others}
    _refuse_unknown(path, unknown + [name for name, found in found_copies.items() if not found])
    copies = {_COPIED[m["module"]]: others[name] for name, m in found_copies.items() if m}
    return Contents(matrices, copies, True)


def _peft_names(checkpoint: Checkpoint, model: Any, *, exported: bool) -> Names:
    """The names of PEFT's matrices: Hugging Face's, whatever layout the base weights have.

    What config.json of the base weights lacks is taken from the model. ``exported``: 0.6.1 of
    torchtune permutes B of q and k as for Llama in all families that it exports; Qwen 2's weights
    are not permuted, so PEFT misreads them.
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
        if isinstance(stored.dtype, str) or stored.dtype.itemsize < 2:
            raise UserError(
                f"{name} is {str(stored.dtype).removeprefix('torch.')} in {path}: quantised"
                " adapters are not evaluated"
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


def _filled(parts: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {key: parts[key].float() if key in parts else None for key in ("a", "b", "magnitude")}


def _from_peft(
    module: str,
    parts: Mapping[str, torch.Tensor],
    names: Names,
    *,
    magnitude_is_tune: bool,
) -> dict[str, Matrices] | None:
    """The matrices of one of PEFT's modules: three of Phi 3's qkv_proj, which share their A."""
    whole = _filled(parts)
    convert = partial(names.convert, f"{module}.weight", where="adapter")
    rows = convert(whole["b"])
    if rows is None:
        return None
    magnitudes: Mapping[str, torch.Tensor] | None = None
    if whole["magnitude"] is not None:
        column: torch.Tensor = whole["magnitude"].unsqueeze(1)
        magnitudes = dict.fromkeys(rows, column) if magnitude_is_tune else convert(column)
    return {
        name.removesuffix(".weight"): Matrices(
            module, whole["a"], b, magnitudes[name].squeeze(1) if magnitudes else None
        )
        for name, b in rows.items()
    }


def _refuse_unknown(path: Path, names: Sequence[str]) -> None:
    if names:
        raise UserError(
            f"{path} holds {counted(len(names), 'tensor')} that are no LoRA or DoRA matrices of"
            f" the model's modules: {some(names)}"
        )
