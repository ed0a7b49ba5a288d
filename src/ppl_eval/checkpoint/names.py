"""A checkpoint's names and tensors converted to torchtune's, one tensor at a time."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchtune.models import convert_weights
from torchtune.models.gemma2 import _convert_weights as gemma2
from torchtune.models.phi3 import _convert_weights as phi3
from torchtune.models.qwen2 import _convert_weights as qwen2

from ppl_eval.errors import UserError, one_line
from ppl_eval.quantize.tensors import by_rows, is_quantized, kernel, leaves, rebuilt

HUGGING_FACE, META, TORCHTUNE = "Hugging Face", "Meta", "torchtune"

_State = dict[str, torch.Tensor]
_Conversion = tuple[Callable[..., _State], Mapping[str, str | None]]

_META: _Conversion = (convert_weights.meta_to_tune, convert_weights._FROM_META)
_LLAMA: _Conversion = (convert_weights.hf_to_tune, convert_weights._FROM_HF)
_PHI3: _Conversion = (phi3.phi3_hf_to_tune, phi3._PHI3_MINI)
_HF_CONVERSIONS: dict[str, _Conversion] = {
    "GEMMA2": (gemma2.gemma2_hf_to_tune, gemma2._GEMMA2_FROM_HF),
    "PHI3_MINI": _PHI3,
    "PHI4": _PHI3,
    "QWEN2": (qwen2.qwen2_hf_to_tune, qwen2._FROM_HF),
    **dict.fromkeys(("LLAMA2", "LLAMA3", "LLAMA3_2", "MISTRAL", "GEMMA"), _LLAMA),
}
"""checkpointer.model_type -> torchtune's conversion from Hugging Face's layout, and the names that
it knows, with {} for the number of a layer.

The conversions rename, and permute the rows of q and k within each head (not for Qwen 2 and Phi 3,
whose rotary embedding in torchtune is Hugging Face's). They split Phi 3's fused tensors.
"""

_POSITION_TABLES = ("rotary_emb.inv_freq", "rope.freqs")
"""Parts of the names of rotary tables, which the model computes itself."""


@dataclass(frozen=True)
class Names:
    """The conversion of a checkpoint's tensors to torchtune's names and order of rows.

    Attributes:
        layout: ``Hugging Face``, ``Meta`` or ``torchtune``.
        model_type: the family, as checkpointer.model_type names it.
        config: config.json, whose sizes the conversion from Hugging Face's layout needs.

    Raises:
        UserError: the family is not evaluated, or config.json lacks the sizes.
    """

    layout: str
    model_type: str | None
    config: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.layout != HUGGING_FACE:
            return
        if self.model_type not in _HF_CONVERSIONS:
            raise UserError(
                f"checkpointer.model_type is {self.model_type}, but text decoders are one of"
                f" {', '.join(sorted(_HF_CONVERSIONS))}"
            )
        sizes = [self.config.get(key) for key in ("num_attention_heads", "hidden_size")]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise UserError(
                "the checkpoint's config.json does not give num_attention_heads and hidden_size, by"
                " which its weights are converted"
            )

    def convert(
        self, name: str, tensor: torch.Tensor, where: str = "checkpoint"
    ) -> dict[str, torch.Tensor] | None:
        """Convert one tensor; results are views if that is possible.

        Args:
            name: the tensor's name in the checkpoint.
            tensor: the tensor, or one of its shape on the meta device. It may have fewer columns
                than the weight of that name, as the B of an adapter has.
            where: what holds the tensor, for the message.

        Returns:
            Tensors by torchtune's names: several for a fused tensor, none for a table that the
            model computes itself. None if the name is not known.

        Raises:
            UserError: the tensor's rows are not those of the heads.
        """
        if is_quantized(tensor) and self.layout != TORCHTUNE:
            return self._convert_quantized(name, tensor, where)
        state = {name: tensor}
        if self.layout != TORCHTUNE:
            conversion = _META if self.layout == META else _HF_CONVERSIONS[str(self.model_type)]
            function, known = conversion
            if any(part in name for part in _POSITION_TABLES):
                return {}
            if re.sub(r"\.\d+", ".{}", name) not in known:
                return None
            sizes = {} if conversion is _META else self._sizes(tensor, conversion)
            try:
                state = function(state, **sizes)
            except (RuntimeError, ValueError) as error:  # q, k and fused tensors are cut by head
                raise UserError(
                    f"{name} is {tuple(tensor.shape)} in the {where}, which does not go with the"
                    " heads and sizes in the checkpoint's config.json (are they of one model?):"
                    f" {one_line(error)}"
                ) from error
        return {_corrected(new, self.model_type): value for new, value in state.items()}

    def _convert_quantized(
        self, name: str, tensor: torch.Tensor, where: str
    ) -> dict[str, torch.Tensor] | None:
        """Rows of torchao's tensor move as those of a plain one do: each inner tensor by itself."""
        if not by_rows(tensor):
            raise UserError(
                f"{name} is a {kernel(tensor)} in the {where}, whose rows cannot be put into"
                " torchtune's order: quantise the full-precision checkpoint by quantizer.scheme"
            )
        found: dict[str, dict[str, torch.Tensor]] = {}
        for path, leaf in leaves(tensor):
            converted = self.convert(name, leaf if leaf.ndim > 1 else leaf[:, None], where)
            if converted is None:
                return None
            for new, part in converted.items():
                found.setdefault(new, {})[path] = part if leaf.ndim > 1 else part[:, 0]
        return {new: rebuilt(tensor, parts) for new, parts in found.items()}

    def _sizes(self, tensor: torch.Tensor, conversion: _Conversion) -> dict[str, int]:
        """Arguments of the conversion from Hugging Face's layout."""
        heads, hidden = self.config["num_attention_heads"], self.config["hidden_size"]
        kv_heads = self.config.get("num_key_value_heads") or heads
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "dim": hidden}
        if conversion is not _PHI3:  # where dim says at which rows to split
            sizes["dim"] = tensor.shape[-1] if tensor.ndim else 1
            sizes["head_dim"] = self.config.get("head_dim") or hidden // heads
        return sizes


def _corrected(name: str, model_type: str | None) -> str:
    """The right name of a tensor that torchtune's conversion calls ``name``.

    For Gemma 2 torchtune swaps the norms before and after the feed-forward. The final norm moves
    because its soft cap is moved to the head, see :mod:`ppl_eval.model.corrections`.
    """
    if model_type != "GEMMA2":
        return name
    if ".mlp_norm." in name:
        return name.replace(".mlp_norm.", ".mlp_scale.")
    return name.replace(".mlp_scale.", ".mlp_norm.").replace("norm.rms_norm.", "norm.")
