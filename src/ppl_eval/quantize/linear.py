"""A linear layer whose weight is quantised by torchao, kept as plain parameters.

FSDP2 cannot shard torchao's tensors. Their inner tensors (integers, scales, zero points) all have
the output features as first dim, so they are parameters of their own here, which FSDP2 shards like
any other. Each forward wraps the gathered ones again and calls torchao's kernel. A row's integers
depend on that row alone, so a rank quantises only the rows that it keeps.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ppl_eval.errors import UserError
from ppl_eval.parallel.cut import as_shard, local_part, own_part
from ppl_eval.parallel.products import wide_product
from ppl_eval.quantize.schemes import SCHEMES, Quantizer


class QuantizedLinear(nn.Module):
    """``y = W x + bias`` with a quantised W; activations too, if the scheme does so.

    Args:
        linear: the layer, on the meta device.
        quantizer: how W is quantised.

    Attributes:
        weight_slot: an empty meta tensor of W's shape and dtype: what the checkpoint has.
        split_kind: how tensor parallelism has split W, ``columns`` or ``rows``; None: not.
        tp_group: the ranks that share W then.
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
        self.split_kind: str | None = None
        self.tp_group: dist.ProcessGroup | None = None
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
        # whole rows: a scale is that of the row, also where tp cuts it
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
        return self._cut(parts, device)

    def _cut(
        self, rows: Mapping[str, torch.Tensor], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """The columns of this rank, of inner tensors of its rows."""
        found = {}
        for name, part in rows.items():
            slot = self.get_parameter(name)
            if part.ndim > 1:
                part = own_part(part, slot, 1)
            found[name] = as_shard(part.to(device).contiguous(), slot)
        return found

    def check_split(self, kind: str, tp: int, name: str, key: str) -> None:
        """Refuse a degree of tensor parallelism that cuts a group.

        Args:
            kind: ``rows`` (input features) or ``columns``.
            tp: ranks that share the matrix.
            name: what the message calls the layer.
            key: the config key of ``tp``.

        Raises:
            UserError: it does.
        """
        size = self.quantizer.group_size or 1
        if kind == "rows" and self.in_features % (tp * size):
            what = f"{self.in_features} input features"
            groups = "" if size == 1 else f" in groups of {size}"
            raise UserError(
                f"{key} is {tp}, but {name} has {what}{groups}, which {tp} ranks cannot share: set"
                f" {key}=1 or a smaller quantizer.group_size"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """By torchao's kernel; in the dtype of ``input``. Split by rows, summed over tp in fp32."""
        parts = {path: local_part(self.get_parameter(n)) for n, path in self._leaves.items()}
        bias = None if self.bias is None else local_part(self.bias)
        if self.split_kind != "rows":
            return F.linear(input, _wrapped(self._template, parts), bias)
        if self.quantizer.activations is None:
            out = wide_product(input, _wrapped(self._template, parts).dequantize())
        else:
            extended = self._with_extremes(input)
            padded = {path: self._padded(path, part) for path, part in parts.items()}
            out = F.linear(extended, _wrapped(self._template, padded)).float()
        dist.all_reduce(out, group=self.tp_group)
        out = out.to(input.dtype)
        return out if bias is None else out + bias

    def _with_extremes(self, input: torch.Tensor) -> torch.Tensor:
        """Features that hold each token's extremes over all ranks, beside this rank's: torchao then
        quantises every rank's part of a token by the scale of the whole token."""
        extremes = torch.stack([input.amax(dim=-1), -input.amin(dim=-1)], dim=-1)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.tp_group)
        extremes[..., 1].neg_()
        width = self.quantizer.group_size or 2
        return torch.cat([input, F.pad(extremes, (0, width - 2))], dim=-1)

    def _padded(self, path: str, part: torch.Tensor) -> torch.Tensor:
        """An inner tensor with zero weights for the features of :meth:`_with_extremes`."""
        if part.ndim < 2 or part.shape[1] == 1:
            return part
        is_scale = path.endswith("scale")
        width = 1 if path.endswith(("scale", "zero_point")) else self.quantizer.group_size or 2
        return F.pad(part, (0, width), value=float(is_scale))


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
    """torchao's tensor of the shape of ``leaves``, built as ``template`` [1, in] is."""
    names, context = template.__tensor_flatten__()
    numbers = next(leaf for path, leaf in leaves.items() if path.endswith(_NUMBERS))
    inner = {}
    for name in names:
        value, path = getattr(template, name), f"{prefix}{name}"
        is_inner = hasattr(value, "__tensor_flatten__")
        inner[name] = _wrapped(value, leaves, f"{path}.") if is_inner else leaves[path]
    shape = numbers.shape

    def changed(value: Any) -> Any:  # torchao keeps the shape, and the block of a whole row
        if isinstance(value, torch.Size) and value == template.shape:
            return shape
        is_row = isinstance(value, tuple | list) and tuple(value) == tuple(template.shape)
        return type(value)((1, shape[1])) if is_row else value

    if isinstance(context, dict):
        context = {key: changed(value) for key, value in context.items()}
    else:
        context = type(context)(changed(value) for value in context)
    return type(template).__tensor_unflatten__(inner, context, shape, None)


_NUMBERS = ("qdata", "int_data")
"""Ends of the paths of the tensors that hold the quantised numbers [out, in]."""
