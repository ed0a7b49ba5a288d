"""A linear layer whose weight is quantised by torchao, kept as plain parameters.

FSDP2 shards the inner tensors of the weight like any other parameters. Each forward puts the
gathered ones together again and calls torchao's kernel.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ppl_eval.errors import UserError
from ppl_eval.parallel.cut import as_shard, local_part, own_part
from ppl_eval.parallel.products import wide_product
from ppl_eval.quantize import tensors
from ppl_eval.quantize.schemes import Quantizer


class QuantizedLinear(nn.Module):
    """``y = W x + bias`` with a quantised W; activations too, if the weight's class does so.

    Args:
        linear: the layer, on the meta device.
        how: a quantizer, by which W is quantised as it is read; or a quantised W on the meta
            device, as the checkpoint has it.

    Attributes:
        weight_slot: an empty meta tensor of W's shape and the model's dtype.
        quantizer: by what W is quantised; None for a quantised checkpoint.
        group_size: input features that share a scale; None for all of an output feature.
        activations: what activations are quantised to; None: they are not.
        split_kind: how tensor parallelism has split W, ``columns`` or ``rows``; None: not.
        tp_group: the ranks that share W then.
        error_in_steps: largest |dequantised - W| of this rank's rows, in quantisation steps; -1
            before loading, and for a quantised checkpoint.
    """

    def __init__(self, linear: nn.Linear, how: Quantizer | torch.Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight_slot = torch.empty_like(linear.weight, device="meta")
        self.quantizer = how if isinstance(how, Quantizer) else None
        self.error_in_steps = -1.0
        self.bias = linear.bias
        self.split_kind: str | None = None
        self.tp_group: dist.ProcessGroup | None = None
        self._template: Any = _template(self.weight_slot, how)
        self.group_size = tensors.group_size(self._template)
        self.activations = tensors.activations(self._template)
        self._by_rows = tensors.by_rows(self._template)
        self._paths = {path.replace(".", "_"): path for path, _ in tensors.leaves(self._template)}
        for name, (_, leaf) in zip(self._paths, tensors.leaves(self._template), strict=True):
            shape = (self.out_features, *leaf.shape[1:]) if self._by_rows else leaf.shape or (1,)
            parameter = torch.empty(shape, dtype=leaf.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(parameter, requires_grad=False))

    @property
    def kernel(self) -> str:
        """torchao's class of the weight, whose linear function runs."""
        return tensors.kernel(self._template)

    @property
    def number_type(self) -> str:
        """What W is kept in, such as ``int4``."""
        return tensors.number_type(self._template)

    def shards(self, full: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
        """This rank's shards of the inner tensors, by the names of their parameters.

        Args:
            full: W: quantised as the checkpoint has it; or, for a quantizer, in any floating dtype,
                rounded to the model's and then quantised.
            device: where this rank computes.

        Raises:
            UserError: W holds NaN or infinite numbers, or the kernel is off by more than a step.
        """
        slots = {path: self.get_parameter(name) for name, path in self._paths.items()}
        own = {
            path: torch.empty(local_part(slot).shape, dtype=slot.dtype, device=device)
            for path, slot in slots.items()
        }
        if self.quantizer is not None and self._by_rows:
            # whole rows: a scale is that of the row, also where tp cuts it
            rows = own_part(full, next(iter(slots.values())), 0)
            step = max(1, _AT_ONCE // self.in_features)
            for start in range(0, len(rows), step):
                some = self._checked(rows[start : start + step].to(device))
                for path, part in tensors.leaves(some):
                    cut = own_part(part, slots[path], 1) if part.ndim > 1 else part
                    own[path][start : start + step] = cut
        else:
            if self.quantizer is not None:
                full = self._checked(full.to(device))
            for path, part in tensors.leaves(full):
                own[path].copy_(own_part(part.reshape(slots[path].shape), slots[path]))
        for part in own.values():
            if part.is_floating_point() and not part.float().isfinite().all():
                raise UserError(_NOT_FINITE if self.quantizer is None else self._too_small())
        return {name: as_shard(own[path], slots[path]) for name, path in self._paths.items()}

    def _checked(self, rows: torch.Tensor) -> Any:
        """Rows of W quantised, if the result is not off by more than a step."""
        assert self.quantizer is not None
        rows = rows.to(self.weight_slot.dtype)
        if not rows.isfinite().all():
            raise UserError(_NOT_FINITE)
        quantised = quantize(rows, self.quantizer)
        error = tensors.error_in_steps(quantised, rows)
        self.error_in_steps = max(error, self.error_in_steps)
        # half a step of rounding, half for kernels whose range is not symmetric, and the rounding
        # of up to 127 steps in the model's dtype
        if error > 1 + 127 * torch.finfo(rows.dtype).eps / 2:
            raise UserError(
                f"quantizer.scheme {self.quantizer.scheme}: torchao's weight is up to"
                f" {error:.1f} quantisation steps from the checkpoint's, and one is the most:"
                f" {self._too_small()}"
            )
        return quantised

    def _too_small(self) -> str:
        assert self.quantizer is not None
        advice = "" if self.weight_slot.dtype == torch.float32 else ", or dtype=fp32"
        return (
            f"torchao's {self.quantizer.scheme} cannot hold it in {self.weight_slot.dtype}, as"
            f" where all weights of a row are 0 or tiny: take another scheme{advice}"
        )

    def check_split(self, kind: str, tp: int, name: str, key: str) -> None:
        """Refuse a degree of tensor parallelism that cuts a group.

        Args:
            kind: ``rows`` (input features), ``columns`` or ``vocabulary``.
            tp: ranks that share the matrix.
            name: what the message calls the layer.
            key: the config key of ``tp``.

        Raises:
            UserError: it does, or the weight's class is not kept by rows.
        """
        padded = self.activations is not None and tensors.has_float_zeros(self._template)
        if not self._by_rows or self.activations == "float8" or kind == "vocabulary" or padded:
            what = "the head" if kind == "vocabulary" else name
            raise UserError(
                f"{key} is {tp}, but {what} is quantised to {self.number_type} by {self.kernel},"
                f" which ranks cannot share: set {key}=1 and split by dp_shard or cp"
            )
        size = self.group_size or 1
        if kind == "rows" and self.in_features % (tp * size):
            what = f"{self.in_features} input features"
            groups = "" if size == 1 else f" in groups of {size}"
            raise UserError(
                f"{key} is {tp}, but {name} has {what}{groups}, which {tp} ranks cannot share: set"
                f" {key}=1 or a smaller quantizer.group_size"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """By torchao's kernel; in the dtype of ``input``. Split by rows, summed over tp in fp32, of
        parts that are in the dtype of ``input`` if activations are quantised."""
        bias = None if self.bias is None else local_part(self.bias).to(input.dtype)
        if self.split_kind != "rows":
            return tensors.linear(input, self._weight(self._parts(), input.dtype), bias)
        if self.activations is None:
            out = wide_product(input, self.dequantized())
        else:
            extended = self._with_extremes(input)
            padded = {path: self._padded(path, part) for path, part in self._parts().items()}
            out = tensors.linear(extended, self._weight(padded, input.dtype), None).float()
        dist.all_reduce(out, group=self.tp_group)
        out = out.to(input.dtype)
        return out if bias is None else out + bias

    def dequantized(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's part of W as the quantised numbers stand for it, in the model's dtype if no
        other is given."""
        return tensors.dequantized(self._weight(self._parts(), dtype or self.weight_slot.dtype))

    def _parts(self) -> dict[str, torch.Tensor]:
        """This rank's inner tensors, gathered by FSDP2, by their paths."""
        template = dict(tensors.leaves(self._template))
        parts = {path: local_part(self.get_parameter(n)) for n, path in self._paths.items()}
        return {path: part if template[path].ndim else part[0] for path, part in parts.items()}

    def _weight(self, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Any:
        return tensors.rebuilt(self._template, parts, dtype)

    def _with_extremes(self, input: torch.Tensor) -> torch.Tensor:
        """Features that hold each token's extremes over all ranks, beside this rank's: torchao then
        quantises every rank's part of a token by the scale of the whole token."""
        extremes = torch.stack([input.amax(dim=-1), -input.amin(dim=-1)], dim=-1)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.tp_group)
        extremes[..., 1].neg_()
        width = self.group_size or 2
        return torch.cat([input, F.pad(extremes, (0, width - 2))], dim=-1)

    def _padded(self, path: str, part: torch.Tensor) -> torch.Tensor:
        """An inner tensor with zero weights for the features of :meth:`_with_extremes`."""
        if part.ndim < 2 or (self.group_size is None and part.shape[1] == 1):
            return part
        is_scale = path.endswith("scale")
        width = 1 if path.endswith(("scale", "zero_point")) else self.group_size or 2
        return F.pad(part, (0, width), value=float(is_scale))


_AT_ONCE = 2**18
"""Weights that are quantised at a time (1 MiB in fp32); several copies of them exist."""

_NOT_FINITE = "it holds NaN or infinite numbers"


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """The quantised layers of a model, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


def quantize(weight: torch.Tensor, quantizer: Quantizer) -> Any:
    """A weight [out, in] as torchao's tensor, as ``torchao.quantization.quantize_`` makes it."""
    from torchao import quantization as ao
    from torchao.dtypes.nf4tensor import to_nf4
    from torchao.quantization.quantize_.workflows import Int4PackingFormat

    size, int4 = quantizer.group_size or 0, getattr(torch, "int4")  # noqa: B009 (not in its stubs)
    if quantizer.scheme == "nf4":
        return to_nf4(weight.contiguous(), block_size=size)
    if quantizer.scheme == "float8_dynamic":
        return _float8_dynamic(weight)
    if quantizer.tiled:
        tiles = ao.Int4WeightOnlyConfig(
            size, int4_packing_format=Int4PackingFormat.TILE_PACKED_TO_4D
        )
        return _as_quantize(weight, tiles)
    config = {
        # version 2 is several steps off in bf16
        "int8_weight_only": lambda: ao.Int8WeightOnlyConfig(version=1),
        "int8_dynamic": lambda: ao.Int8DynamicActivationInt8WeightConfig(version=1),
        "int8_dynamic_int4": lambda: ao.Int8DynamicActivationIntxWeightConfig(
            weight_dtype=int4,
            weight_granularity=ao.PerGroup(size),
            weight_scale_dtype=torch.float32 if quantizer.fp32_scales else None,
        ),
        "int4_weight_only": lambda: ao.IntxWeightOnlyConfig(
            weight_dtype=int4, granularity=ao.PerGroup(size)
        ),
        "float8_weight_only": lambda: ao.Float8WeightOnlyConfig(),
    }[quantizer.scheme]()
    return _as_quantize(weight, config)


def _as_quantize(weight: torch.Tensor, config: Any) -> Any:
    from torchao import quantization as ao

    layer = nn.Linear(*reversed(weight.shape), bias=False, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    ao.quantize_(layer, config)
    return layer.weight.data


def _float8_dynamic(weight: torch.Tensor) -> Any:
    """As ``quantize_`` makes it with PerRow; ``quantize_`` leaves few rows as they are."""
    from torchao import quantization as ao
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    config = ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())
    shared = {"granularity": ao.PerRow(), "kernel_preference": config.kernel_preference}
    return ao.Float8Tensor.from_hp(
        weight,
        float8_dtype=config.weight_dtype,
        mm_config=config.mm_config,
        act_quant_kwargs=QuantizeTensorToFloat8Kwargs(config.activation_dtype, **shared),
        **shared,
    )


def _template(slot: torch.Tensor, how: Quantizer | torch.Tensor) -> Any:
    """The quantised W in one row, which shows class and settings; whole if rows depend on each
    other."""
    if not isinstance(how, Quantizer):
        return how
    if how.scheme == "nf4" or how.tiled:
        return quantize(torch.empty_like(slot, device="meta"), how)
    return quantize(torch.zeros(1, slot.shape[1], dtype=slot.dtype), how)
