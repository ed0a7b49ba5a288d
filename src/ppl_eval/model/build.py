"""A model component on the meta device: shapes without weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchtune.modules import TransformerDecoder
from torchtune.training.precision import set_default_dtype

from ppl_eval import components
from ppl_eval.checkpoint.config_json import ModelConfig
from ppl_eval.errors import UserError
from ppl_eval.model.corrections import correct


def build_on_meta(
    node: Mapping[str, Any], dtype: torch.dtype, config: ModelConfig
) -> TransformerDecoder:
    """Build the ``model`` component without allocating its parameters, and correct it.

    Args:
        node: ``_component_`` and its arguments.
        dtype: the dtype of the parameters.
        config: the checkpoint's config.json; see :mod:`ppl_eval.model.corrections`.

    Raises:
        UserError: the builder rejects its arguments, or gives no decoder.
    """
    with set_default_dtype(dtype), torch.device("meta"):
        model: nn.Module = components.build(node, "model")
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
    correct(model, config)
    return model
