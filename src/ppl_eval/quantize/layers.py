"""Which layers of a model are quantised, and what the report says about them."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ppl_eval.decoder import Decoder
from ppl_eval.errors import UserError
from ppl_eval.parallel.lora import AdaptedLinear
from ppl_eval.plural import some
from ppl_eval.quantize import tensors
from ppl_eval.quantize.linear import QuantizedLinear, quantized_layers
from ppl_eval.quantize.schemes import Quantizer


@dataclass(frozen=True)
class Quantized:
    """What is quantised.

    Attributes:
        quantizer: the scheme; None for a checkpoint that is quantised already.
        num_linear: linear layers of the model, the head included.
        bytes_before: bytes of all parameters in the model's dtype.
        bytes_after: bytes of all parameters as they are kept.
        left_out: reason -> names of the embedding and of linear layers, which keep their dtype.
    """

    quantizer: Quantizer | None
    num_linear: int
    bytes_before: int
    bytes_after: int
    left_out: Mapping[str, list[str]] = field(default_factory=dict)


def quantize_layers(decoder: Decoder, quantizer: Quantizer, device_type: str) -> Quantized:
    """Replace the linear layers of a decoder on the meta device by quantised ones, in place.

    The embedding keeps its dtype, and the head unless the quantizer says otherwise, and layers of
    sizes that the scheme cannot quantise.

    Raises:
        UserError: no layer can be quantised, a layer has an unmerged adapter, or the device has no
            kernel for the scheme.
    """
    dtype = next(decoder.model.parameters()).dtype
    quantizer = tensors.for_device(quantizer, dtype, device_type)
    in_layers = {id(module) for layer in decoder.layers for module in layer.modules()}

    def how(name: str, linear: nn.Linear) -> Quantizer | str:
        if id(linear) not in in_layers and not quantizer.head:
            return "head"
        return tensors.why_not(linear.weight, quantizer) or quantizer

    found = _replace(decoder, how, quantizer)
    if not quantized_layers(decoder.model):
        reasons = "; ".join(r for r in found.left_out if r not in ("embedding", "head"))
        raise UserError(
            f"quantizer is {quantizer.scheme} with group_size {quantizer.group_size}, but no layer"
            f" can be quantised: {reasons}"
        )
    return found


def take_quantized(
    decoder: Decoder, stored: Mapping[str, torch.Tensor], device_type: str
) -> Quantized:
    """Replace the linear layers whose weights a checkpoint has quantised, in place.

    Args:
        decoder: on the meta device.
        stored: name of a parameter -> its quantised tensor on the meta device; not empty.
        device_type: where it is to compute.

    Raises:
        UserError: a parameter that is no weight of a linear layer is quantised, or by a class
            that is not evaluated; a layer has an unmerged adapter.
    """
    weights, tied = decoder.weights(), "output.weight"
    dtype = next(decoder.model.parameters()).dtype
    for name, tensor in stored.items():
        owner = name.rpartition(".")[0]
        if name == tied and tied not in weights:
            raise UserError(
                f"{tied} is quantised in the checkpoint, but the model ties its head to the"
                " embedding, which is not: use an untied builder (or tie_word_embeddings: false)"
            )
        if name in weights and not isinstance(decoder.model.get_submodule(owner), nn.Linear):
            raise UserError(
                f"{name} is quantised in the checkpoint ({tensors.kernel(tensor)}), but of these"
                " only weights of linear layers are evaluated"
            )
        tensors.check_evaluated(tensor, name, dtype, device_type)

    def how(name: str, linear: nn.Linear) -> torch.Tensor | str:
        tensor = stored.get(f"{name}.weight", "not quantised in the checkpoint")
        has_shape = isinstance(tensor, str) or tensor.shape == linear.weight.shape
        return tensor if has_shape else "of another shape"  # which the check of names refuses

    return _replace(decoder, how, None)


def _replace(
    decoder: Decoder,
    how: Callable[[str, nn.Linear], Quantizer | torch.Tensor | str],
    quantizer: Quantizer | None,
) -> Quantized:
    """Quantise each linear layer as ``how`` says, or keep it for the reason that it gives."""
    model, before = decoder.model, _num_bytes(decoder.model)
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    names = [name for name, m in model.named_modules() if m is decoder.embedding]
    left_out = {"embedding": names}
    for name, module in linear.items():
        found = how(name, module)
        if isinstance(found, str):
            left_out.setdefault(found, []).append(name)
        elif isinstance(module, AdaptedLinear):
            raise UserError(
                "adapter.merge is false, but a quantised layer has no matrices beside it: set"
                " adapter.merge=true"
            )
        elif type(module) is not nn.Linear or _has_hooks(module):
            raise UserError(
                f"{name} is a {type(module).__name__} that may compute more than a product, and a"
                " quantised layer computes no more: build the model of plain nn.Linear"
            )
        else:
            model.set_submodule(name, QuantizedLinear(module, found))
    return Quantized(quantizer, len(linear), before, _num_bytes(model), left_out)


def _has_hooks(module: nn.Module) -> bool:
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or hasattr(module, "parametrizations")


def report(
    quantized: Quantized, model: nn.Module, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """The ``quantization`` of results.json. Every rank of ``group`` calls it.

    Args:
        quantized: from :func:`quantize_layers` or :func:`take_quantized`.
        model: loaded.
        group: ranks that may hold different rows; a number is reduced over it.
    """
    layers, quantizer = quantized_layers(model).values(), quantized.quantizer
    largest = torch.tensor(max(layer.error_in_steps for layer in layers), dtype=torch.float64)
    if group is not None and quantizer is not None:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    sizes = sorted({layer.group_size for layer in layers if layer.group_size is not None})
    return {
        "scheme": None if quantizer is None else quantizer.scheme,
        "weights": _only(layer.number_type for layer in layers),
        "activations": _only(layer.activations for layer in layers if layer.activations) or None,
        "group_size": sizes[0] if len(sizes) == 1 else sizes or None,
        "kernel": _only(layer.kernel for layer in layers),
        "linear_layers": quantized.num_linear,
        "quantized_linear_layers": len(layers),
        "left_out": dict(quantized.left_out),
        "bytes_before": quantized.bytes_before,
        "bytes_after": quantized.bytes_after,
        "largest_error_in_steps": None if quantizer is None else float(largest),
    }


def _only(values: Iterable[str]) -> str:
    """The value that all layers have, or all values."""
    return some(sorted(set(values)), 9)


def _num_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())
