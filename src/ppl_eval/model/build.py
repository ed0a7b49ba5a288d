"""A model component on the meta device: shapes without weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchtune.modules import TransformerDecoder

from ppl_eval import compat, components
from ppl_eval.errors import UserError


def build_on_meta(node: Mapping[str, Any], dtype: torch.dtype) -> TransformerDecoder:
    """Build the ``model`` component without allocating its parameters.

    Args:
        node: ``_component_`` and its arguments.
        dtype: of the parameters.

    Raises:
        UserError: the builder rejects its arguments, or gives no decoder.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model: nn.Module = components.build(node, "model")
    finally:
        torch.set_default_dtype(default)
    if not isinstance(model, TransformerDecoder):
        raise UserError(
            f"model ({node['_component_']}) is a {type(model).__name__}, but only text decoders"
            " (torchtune's TransformerDecoder) can be evaluated"
        )
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise UserError(
                f"model: {name} is {parameter.dtype}: quantised models are not evaluated"
            )
    compat.refuse_wrong(model)
    return model
