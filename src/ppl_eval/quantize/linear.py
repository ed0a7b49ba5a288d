"""A linear layer whose weight is quantised by torchao, kept as plain parameters.

FSDP2 cannot shard torchao's tensors. Their inner tensors (integers, scales, zero points) all have
the output features as first dim, so they are parameters of their own here, which FSDP2 shards like
any other. Each forward wraps the gathered ones again and calls torchao's kernel. A row's integers
depend on that row alone, so a rank quantises only the rows that it keeps.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ppl_eval.errors import UserError
from ppl_eval.parallel.cut import as_shard, own_part
from ppl_eval.quantize.schemes import SCHEMES, Quantizer


class QuantizedLinear(nn.Module):
    """``y = W x + bias`` with a quantised W; activations too, if the scheme does so.

    Args:
        linear: the layer, on the meta device.
        quantizer: how W is quantised.

    Attributes:
        weight_slot: an empty meta tensor of W's shape and dtype: what the checkpoint has.
        error_in_steps: largest |dequantised - W| of this rank's rows, in quantisation steps; nan
            before loading.
    """

    def __init__(self, linear: nn.Linear, quantizer: Quantizer) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight_slot = torch.empty_like(linear.weight, device="meta")
        self.quantizer = quantizer
        self.error_in_steps = float("nan")
        self.bias = linear.bias
        row = torch.zeros(1, linear.in_features, dtype=linear.weight.dtype)
        self._template = quantize(row, quantizer)
        self._leaves = {path.replace(".", "_"): path for path, _ in _leaves(self._template)}
        for name, (_, leaf) in zip(self._leaves, _leaves(self._template), strict=True):
            shape = (linear.out_features, *leaf.shape[1:])
            parameter = torch.empty(shape, dtype=leaf.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(parameter, requires_grad=False))

    @property
    def kernel(self) -> str:
        """torchao's class of the weight, whose linear function runs."""
        inner = getattr(self._template, "original_weight_tensor", self._template)
        impl = getattr(inner, "tensor_impl", None)
        names = [type(each).__name__ for each in (self._template, inner, impl) if each is not None]
        return " of ".join(dict.fromkeys(names))

    def shards(self, full: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
        """This rank's shards of the inner tensors, by the names of their parameters.

        Args:
            full: W in any floating dtype. It is rounded to the model's dtype, then quantised.
            device: where this rank computes.

        Raises:
            UserError: W holds NaN or infinite numbers, or the kernel is off by more than a step.
        """
        slots = {name: self.get_parameter(name) for name in self._leaves}
        rows = own_part(full, next(iter(slots.values())), 0).to(device, self.weight_slot.dtype)
        if not len(rows):
            empty = {
                n: slot.new_empty((0, *slot.shape[1:]), device=device) for n, slot in slots.items()
            }
            return {name: as_shard(part, slots[name]) for name, part in empty.items()}
        if not rows.isfinite().all():
            raise UserError("a weight holds NaN or infinite numbers")
        quantised = quantize(rows, self.quantizer)
        self.error_in_steps = error_in_steps(quantised, rows, self.quantizer)
        # half a step of rounding, half for kernels whose range is not symmetric, and the rounding
        # of up to 127 steps in the model's dtype
        if self.error_in_steps > 1 + 127 * torch.finfo(rows.dtype).eps / 2:
            raise UserError(
                f"quantizer.scheme {self.quantizer.scheme}: torchao's weight is up to"
                f" {self.error_in_steps:.1f} quantisation steps from the checkpoint's, and one is"
                f" the most: this torchao cannot do it in {rows.dtype}; try dtype=fp32"
            )
        parts = {name: leaf for name, (_, leaf) in zip(slots, _leaves(quantised), strict=True)}
        return {name: as_shard(part.contiguous(), slots[name]) for name, part in parts.items()}

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """By torchao's kernel; in the dtype of ``input``."""
        parts = {path: self.get_parameter(name) for name, path in self._leaves.items()}
        return F.linear(input, _wrapped(self._template, parts), self.bias)


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The quantised layers of a model, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def quantize(weight: torch.Tensor, quantizer: Quantizer) -> Any:
    """A weight [out, in] as torchao's tensor, as ``torchao.quantization.quantize_`` makes it."""
    from torchao import quantization as ao

    size, int4 = quantizer.group_size or 0, getattr(torch, "int4")  # noqa: B009 (not in its stubs)
    config = {
        # version 2 is several steps off in bf16
        "int8_weight_only": lambda: ao.Int8WeightOnlyConfig(version=1),
        "int8_dynamic": lambda: ao.Int8DynamicActivationInt8WeightConfig(version=1),
        "int8_dynamic_int4": lambda: ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=int4, weight_granularity=ao.PerGroup(size)
        ),
        "int4_weight_only": lambda: ao.IntxWeightOnlyConfig(
            weight_dtype=int4, granularity=ao.PerGroup(size)
        ),
        "float8_weight_only": lambda: ao.Float8WeightOnlyConfig(),
    }[quantizer.scheme]()
    layer = nn.Linear(*reversed(weight.shape), bias=False, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    ao.quantize_(layer, config)
    return layer.weight.data


def error_in_steps(quantised: Any, weight: torch.Tensor, quantizer: Quantizer) -> float:
    """Largest |dequantised - weight|, in steps: distances of two neighbouring quantised numbers if
    the largest of a group is the scheme's largest number.

    Args:
        quantised: torchao's tensor.
        weight: what it was made of [out, in].
        quantizer: how.
    """
    wide = weight.double()
    dequantised = getattr(quantised, "original_weight_tensor", quantised).dequantize().double()
    groups = wide.unflatten(1, (-1, quantizer.group_size or weight.shape[1]))
    kind = SCHEMES[quantizer.scheme].weight
    scale = groups.abs().amax(dim=2, keepdim=True).clamp(min=1e-300) / _LARGEST[kind]
    step = scale.expand_as(groups).flatten(1)
    if kind == "float8":  # e4m3 has three bits after the first, down to 2 ** -9
        step = step * torch.exp2((wide / step).abs().clamp(min=2.0**-6).log2().floor() - 3)
    return float(((dequantised - wide).abs() / step).max())


_LARGEST = {"int8": 127, "int4": 7, "float8": 448}
"""Largest number of a weight's type."""


def _leaves(tensor: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of the plain tensors inside one of torchao's."""
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if hasattr(inner, "__tensor_flatten__"):
            yield from _leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def _wrapped(template: Any, leaves: Mapping[str, torch.Tensor], prefix: str = "") -> Any:
    """torchao's tensor of the shape of ``leaves``, built as ``template`` is."""
    names, context = template.__tensor_flatten__()
    rows = len(next(iter(leaves.values())))
    inner = {}
    for name in names:
        value, path = getattr(template, name), f"{prefix}{name}"
        is_inner = hasattr(value, "__tensor_flatten__")
        inner[name] = _wrapped(value, leaves, f"{path}.") if is_inner else leaves[path]
    shape = torch.Size((rows, *template.shape[1:]))

    def changed(value: Any) -> Any:  # torchao keeps the shape among the constants
        return shape if isinstance(value, torch.Size) and value == template.shape else value

    if isinstance(context, dict):
        context = {key: changed(value) for key, value in context.items()}
    else:
        context = type(context)(changed(value) for value in context)
    return type(template).__tensor_unflatten__(inner, context, shape, None)
