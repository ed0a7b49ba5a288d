"""The dtypes in which a model's weights are stored, whatever dtype the config asks for."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_FULL_PRECISION = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class StoredWeights:
    """The same on every rank; of a sharded model all shards count.

    Attributes:
        parameters: dtype -> number of parameters stored in it, such as ``{"bfloat16": 1000}``. A
            quantised tensor counts under the dtype of its integers.
        linear_layers: number of linear layers, adapters included.
        quantized_linear_layers: those whose weight is stored in fewer bits than 16.
    """

    parameters: dict[str, int]
    linear_layers: int
    quantized_linear_layers: int


def stored_weights(model: nn.Module) -> StoredWeights:
    """Count the parameters and linear layers of a model."""
    parameters: Counter[str] = Counter()
    for parameter in model.parameters():
        parameters[str(_stored_dtype(parameter)).removeprefix("torch.")] += parameter.numel()
    linear = [
        module
        for module in model.modules()
        if "Linear" in type(module).__name__ and type(module).__name__ != "LinearPackedParams"
    ]
    return StoredWeights(dict(parameters), len(linear), sum(map(_is_quantized, linear)))


def _is_quantized(module: nn.Module) -> bool:
    if callable(getattr(module, "weight", None)):  # torch.ao's: LinearPackedParams has it
        return True
    stored = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return any(_stored_dtype(t) not in _FULL_PRECISION for name, t in stored if name != "bias")


def _stored_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype that a tensor is stored in. A quantised tensor states a floating one and holds
    integers."""
    dtypes = [leaf.dtype for leaf in _leaves(tensor)]
    return next((dtype for dtype in dtypes if dtype not in _FULL_PRECISION), tensor.dtype)


def _leaves(tensor: Any) -> Iterator[torch.Tensor]:
    """The plain tensors inside a tensor subclass (DTensor, torchao's), or the tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    names, _ = flatten()
    for name in names:
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):  # a DTensor also names its mesh
            yield from _leaves(inner)
