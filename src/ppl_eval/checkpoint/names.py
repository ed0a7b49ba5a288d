"""From a checkpoint's own names to torchtune's, one tensor at a time."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torchtune.models.convert_weights import hf_to_tune, meta_to_tune
from torchtune.models.gemma2._convert_weights import gemma2_hf_to_tune
from torchtune.models.phi3._convert_weights import phi3_hf_to_tune
from torchtune.models.qwen2._convert_weights import qwen2_hf_to_tune

from ppl_eval.errors import UserError, one_line
from ppl_eval.model.corrections import renamed

Convert = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]

_HF_CONVERSIONS: dict[str, Callable[..., dict[str, torch.Tensor]]] = {
    "GEMMA2": gemma2_hf_to_tune,
    "PHI3_MINI": phi3_hf_to_tune,
    "PHI4": phi3_hf_to_tune,
    "QWEN2": qwen2_hf_to_tune,
    **dict.fromkeys(("LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL", "GEMMA"), hf_to_tune),
}
"""checkpointer.model_type -> torchtune's conversion from Hugging Face's names.

They rename, and permute the rows of q and k within each head (not for Qwen 2 and Phi 3, whose
rotary embedding in torchtune is Hugging Face's); Phi 3's fused tensors are split.
"""

FORMATS = {
    "FullModelHFCheckpointer": "Hugging Face",
    "FullModelMetaCheckpointer": "Meta",
    "FullModelTorchTuneCheckpointer": "torchtune",
}
"""torchtune's checkpointers whose files we read ourselves -> the layout of their names."""


def converter(
    checkpointer: Mapping[str, Any], config: Mapping[str, Any], *, columns: int | None = None
) -> Convert:
    """The conversion that fits a ``checkpointer`` section.

    Args:
        checkpointer: its ``_component_`` gives the layout, ``model_type`` the family.
        config: the checkpoint's config.json; Hugging Face's layout needs its sizes.
        columns: of the matrices to convert, if they have the rows of a weight and not its columns,
            as the B of an adapter has.

    Raises:
        UserError: a family whose text decoder is not among those that are evaluated, or a
            config.json without the sizes.
    """
    layout = layout_of(checkpointer)
    model_type = checkpointer.get("model_type")
    if layout == "Meta":
        convert: Convert = meta_to_tune
    elif layout == "Hugging Face":
        convert = _from_hugging_face(str(model_type), config, columns)
    else:
        convert = dict

    def convert_and_rename(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {renamed(name, model_type): tensor for name, tensor in convert(state).items()}

    return convert_and_rename


def convert_one(
    convert: Convert, name: str, tensor: torch.Tensor, where: str = "checkpoint"
) -> dict[str, torch.Tensor] | None:
    """What one tensor becomes, by torchtune's names; None if its name is not known.

    Args:
        convert: from :func:`converter`.
        name: the tensor's own.
        tensor: of that name, on any device.
        where: it was found, for the message.

    Raises:
        UserError: its rows are not those of the heads.
    """
    try:
        return convert({name: tensor})
    except (RuntimeError, ValueError) as error:  # q, k and fused tensors are cut up by head
        raise UserError(
            f"{name} is {tuple(tensor.shape)} in the {where}, which does not go with the heads and"
            f" sizes in the checkpoint's config.json (are they of one model?): {one_line(error)}"
        ) from error
    except Exception as error:
        if type(error) is not Exception:  # torchtune reports an unknown name by a bare one
            raise
        return None


def layout_of(checkpointer: Mapping[str, Any]) -> str | None:
    """``Hugging Face``, ``Meta`` or ``torchtune``, or None for a checkpointer that is not ours."""
    component = str(checkpointer["_component_"])
    ours = component.startswith("torchtune.")
    return FORMATS.get(component.rsplit(".", 1)[-1]) if ours else None


def _from_hugging_face(
    model_type: str, config: Mapping[str, Any], columns: int | None = None
) -> Convert:
    if model_type not in _HF_CONVERSIONS:
        raise UserError(
            f"checkpointer.model_type is {model_type}, but text decoders are one of"
            f" {', '.join(sorted(_HF_CONVERSIONS))}"
        )
    sizes = [config.get(key) for key in ("num_attention_heads", "hidden_size")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise UserError(
            "the checkpoint's config.json does not give num_attention_heads and hidden_size, by"
            " which its weights are converted"
        )
    num_heads, dim = sizes
    arguments: dict[str, Any] = {
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "dim": dim,
        "head_dim": config.get("head_dim"),
    }
    function = _HF_CONVERSIONS[model_type]
    accepted = inspect.signature(function).parameters
    if columns is not None and "head_dim" in accepted:  # else dim says where to split the rows
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        arguments |= {"dim": columns, "head_dim": head_dim}
    return partial(function, **{k: v for k, v in arguments.items() if k in accepted})
