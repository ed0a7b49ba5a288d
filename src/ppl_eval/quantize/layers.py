"""Which layers of a model are quantised, and what the report says about them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ppl_eval.decoder import Decoder
from ppl_eval.errors import UserError
from ppl_eval.parallel.lora import AdaptedLinear
from ppl_eval.quantize.linear import QuantizedLinear, quantized_layers
from ppl_eval.quantize.schemes import Quantizer


@dataclass(frozen=True)
class Quantized:
    """What was quantised.

    Attributes:
        quantizer: the scheme.
        num_linear: linear layers of the model, the head included.
        left_out: reason -> names of the linear layers that keep their dtype.
        bytes_before: bytes of all parameters in the model's dtype.
        bytes_after: bytes of all parameters as they are kept.
    """

    quantizer: Quantizer
    num_linear: int
    left_out: Mapping[str, list[str]]
    bytes_before: int
    bytes_after: int


def quantize_layers(decoder: Decoder, quantizer: Quantizer) -> Quantized:
    """Replace the linear layers of a decoder on the meta device by quantised ones, in place.

    Embedding and head keep their dtype, as do layers whose input features the group size does not
    divide.

    Raises:
        UserError: no layer can be quantised, or a layer has an unmerged adapter.
    """
    model, size = decoder.model, quantizer.group_size
    before = _num_bytes(model)
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    in_layers = {id(m) for layer in decoder.layers for m in layer.modules()}
    left_out: dict[str, list[str]] = {}
    for name, module in linear.items():
        if isinstance(module, AdaptedLinear):
            raise UserError(
                "adapter.merge is false and quantizer is set, but a quantised layer has no matrices"
                " beside it: set adapter.merge=true"
            )
        if id(module) not in in_layers:
            left_out.setdefault("head", []).append(name)
        elif size is not None and module.in_features % size:
            reason = f"{module.in_features} input features are no multiple of {size}"
            left_out.setdefault(reason, []).append(name)
        else:
            model.set_submodule(name, QuantizedLinear(module, quantizer))
    if not quantized_layers(model):
        reasons = "; ".join(reason for reason in left_out if reason != "head")
        raise UserError(f"quantizer.group_size is {size}, but no layer can be quantised: {reasons}")
    return Quantized(quantizer, len(linear), left_out, before, _num_bytes(model))


def report(
    quantized: Quantized, model: nn.Module, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """The ``quantization`` of results.json. Every rank of ``group`` calls it.

    Args:
        quantized: from :func:`quantize_layers`.
        model: loaded.
        group: ranks that may hold different rows; a number is reduced over it.
    """
    layers = quantized_layers(model).values()
    errors = [layer.error_in_steps for layer in layers if layer.error_in_steps >= 0]
    largest = torch.tensor(max(errors, default=0.0), dtype=torch.float64)
    if group is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return {
        "scheme": quantized.quantizer.scheme,
        "group_size": quantized.quantizer.group_size,
        "kernel": next(iter(layers)).kernel,
        "linear_layers": quantized.num_linear,
        "quantized_linear_layers": len(layers),
        "left_out": dict(quantized.left_out),
        "bytes_before": quantized.bytes_before,
        "bytes_after": quantized.bytes_after,
        "largest_error_in_steps": float(largest),
    }


def _num_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())
