"""torchao's quantised weights, taken apart into plain tensors and put together again.

FSDP2 can shard none of them but NF4, and tensor parallelism none. Their inner tensors (integers,
scales, zero points) are plain, so these are what is kept, cut and gathered. Of most classes each
inner tensor has a row for each output feature, and a row's integers depend on that row alone.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from ppl_eval.errors import UserError
from ppl_eval.quantize.schemes import Quantizer

_WHOLE = ("NF4Tensor", "Int4TilePackedTo4dTensor")
"""Classes whose inner tensors have no row for each output feature."""

_BY_ROWS = (
    *("AffineQuantizedTensor", "LinearActivationQuantizedTensor", "IntxUnpackedToInt8Tensor"),
    *("Int8Tensor", "Float8Tensor"),
)
_TOKEN_SCALES = ("_int8_asymm_per_token_quant", "_int8_symm_per_token_reduced_range_quant")
"""torchao's functions that quantise activations by a scale for each token."""

_NUMBERS = ("qdata", "int_data", "float8_data")
"""Ends of the paths of the tensors that hold the quantised numbers [out, in]."""


def is_quantized(tensor: Any) -> bool:
    """Whether a tensor is one of torchao's."""
    return isinstance(tensor, torch.Tensor) and type(tensor).__module__.startswith("torchao.")


def leaves(tensor: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of the plain tensors inside one of torchao's."""
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if hasattr(inner, "__tensor_flatten__"):
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the plain tensors."""
    return sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(tensor))


def rebuilt(
    template: Any,
    parts: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    prefix: str = "",
) -> Any:
    """torchao's tensor with other plain tensors inside, perhaps of other rows or columns.

    Args:
        template: a tensor of the same class and settings, of any shape if it is kept by rows.
        parts: path -> tensor, as :func:`leaves` gives them.
        dtype: what it dequantises to; None leaves that of the template.
        prefix: path of ``template`` within the outermost tensor.
    """
    names, context = template.__tensor_flatten__()
    inner = {}
    for name in names:
        value, path = getattr(template, name), f"{prefix}{name}"
        is_inner = hasattr(value, "__tensor_flatten__")
        inner[name] = rebuilt(value, parts, dtype, f"{path}.") if is_inner else parts[path]
    some = next(iter(parts.values()))
    shape = template.shape
    if type(template).__name__ not in _WHOLE:
        shape = next(leaf.shape for path, leaf in parts.items() if path.endswith(_NUMBERS))

    def changed(value: Any) -> Any:  # torchao keeps shape, dtype, and the block of a whole row
        if value == template.dtype and isinstance(value, torch.dtype):
            return dtype or value
        if hasattr(value, "original_shape"):  # NF4's
            return replace(value, device=some.device, dtype=dtype or value.dtype)
        if isinstance(value, torch.Size) and value == template.shape:
            return shape
        if isinstance(value, tuple | list) and list(value) == [1, template.shape[-1]]:
            return (1, shape[1]) if isinstance(value, tuple) else [1, shape[1]]
        return value

    if isinstance(context, dict):
        context = {key: changed(value) for key, value in context.items()}
    else:
        context = type(context)(changed(value) for value in context)
    return type(template).__tensor_unflatten__(inner, context, shape, None)


def mapped(tensor: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """torchao's tensor with ``function`` applied to each plain tensor inside."""
    return rebuilt(tensor, {path: function(leaf) for path, leaf in leaves(tensor)})


def has_float_zeros(tensor: Any) -> bool:
    """Whether 0 is no number of the weight: zero points are added after the scale."""
    inner = getattr(tensor, "original_weight_tensor", tensor)
    return getattr(getattr(inner, "zero_point_domain", None), "name", "") == "FLOAT"


def by_rows(tensor: torch.Tensor) -> bool:
    """Whether each plain tensor inside has a row for each output feature."""
    return all(leaf.ndim and leaf.shape[0] == tensor.shape[0] for _, leaf in leaves(tensor))


def group_size(tensor: Any) -> int | None:
    """Input features that share a scale; None if all of an output feature do."""
    if type(tensor).__name__ in _WHOLE:
        block = tensor.block_size
        return block if isinstance(block, int) else block[-1]
    scale = next(leaf for path, leaf in leaves(tensor) if path.endswith("scale"))
    groups = scale.shape[1] if scale.ndim > 1 else 1
    return None if groups == 1 else tensor.shape[1] // groups


def activations(tensor: Any) -> str | None:
    """What activations are quantised to in each forward; None: they are not."""
    if getattr(tensor, "act_quant_kwargs", None) is not None:
        return "float8" if type(tensor).__name__ == "Float8Tensor" else "int8"
    dynamic = getattr(tensor, "activation_quantization", None) or hasattr(
        tensor, "input_quant_func"
    )
    return "int8" if dynamic else None


def kernel(tensor: Any) -> str:
    """torchao's class, and the classes inside it: whose linear function runs."""
    inner = getattr(tensor, "original_weight_tensor", tensor)
    parts = (tensor, inner, getattr(inner, "tensor_impl", None))
    return " of ".join(dict.fromkeys(type(part).__name__ for part in parts if part is not None))


def number_type(tensor: Any) -> str:
    """What the numbers are kept in, such as ``int4``."""
    if type(tensor).__name__ in _WHOLE:
        return "nf4" if hasattr(tensor, "nf4") else "int4"
    target = getattr(tensor, "target_dtype", None)
    inner = getattr(tensor, "original_weight_tensor", tensor)
    if target is None and getattr(inner, "quant_min", None) == -8:
        return "int4"
    if target is None:
        target = next(leaf for path, leaf in leaves(tensor) if path.endswith(_NUMBERS)).dtype
    return str(target).removeprefix("torch.")


def dequantized(tensor: Any) -> torch.Tensor:
    """The weight [out, in] that the quantised numbers stand for, in the tensor's dtype."""
    inner = getattr(tensor, "original_weight_tensor", tensor)
    if hasattr(inner, "get_original_weight"):
        return inner.get_original_weight()
    if not hasattr(inner, "qdata") or hasattr(inner, "dequantize"):
        return inner.dequantize()
    identity = torch.eye(inner.shape[1], dtype=inner.dtype, device=inner.device)
    return F.linear(identity, inner).T


def check_evaluated(tensor: Any, name: str, dtype: torch.dtype, device_type: str) -> None:
    """Refuse a stored weight whose product is not known to be the same on every mesh and batch.

    Args:
        tensor: one of torchao's, of any device.
        name: what the message calls it.
        dtype: the model's.
        device_type: where it is to compute, ``cpu`` or ``cuda``.

    Raises:
        UserError: another class or layout, scales of another number than the class states, a scale
            of a whole batch, or no kernel for the device.
    """
    parts = (tensor, getattr(tensor, "original_weight_tensor", tensor))
    impl = type(getattr(parts[-1], "tensor_impl", None)).__name__
    classes = [type(part).__name__ for part in parts]
    known = (*_BY_ROWS, "NF4Tensor")
    layouts = ("NoneType", "PlainAQTTensorImpl", "QDQTensorImpl", "Float8AQTTensorImpl")
    if not all(each in known for each in classes) or impl not in layouts:
        raise UserError(
            f"{name} is of torchao's class {kernel(tensor)}, whose kernel is not evaluated:"
            " quantise the full-precision checkpoint by quantizer.scheme instead"
        )
    blocks = getattr(tensor, "block_size", None)
    if classes[0] in ("Float8Tensor", "Int8Tensor") and blocks:  # these take any scale as it comes
        wanted = [size // block for size, block in zip(tensor.shape, blocks, strict=True)]
        if list(tensor.scale.shape) != wanted and tensor.scale.numel() != math.prod(wanted):
            raise UserError(
                f"{name} has scales of shape {tuple(tensor.scale.shape)}, but its blocks of"
                f" {tuple(blocks)} need {tuple(wanted)}: the checkpoint is damaged"
            )
    settings = getattr(tensor, "act_quant_kwargs", None)
    function = getattr(tensor, "input_quant_func", None)
    per_token = type(getattr(settings, "granularity", None)).__name__ == "PerRow"
    if (settings is not None and not per_token) or (
        function is not None and function.__name__ not in _TOKEN_SCALES
    ):
        how = getattr(function, "__name__", repr(settings))
        raise UserError(
            f"{name} quantises activations by {how}, which is not known to take a scale for each"
            " token, and by any other the loss would depend on the batch: quantise with PerRow"
        )
    if activations(tensor) == "float8":
        _need_float8(f"{name} multiplies in float8", dtype, device_type)


_ON_A_GPU = "run it on a GPU of compute capability 8.9 or more (device=cuda)"


def check_device(scheme: str, dtype: torch.dtype, device_type: str) -> None:
    """Refuse a scheme that the device or dtype has no kernel for.

    Args:
        scheme: of a quantizer.
        dtype: the model's.
        device_type: ``cpu`` or ``cuda``.

    Raises:
        UserError: it has none.
    """
    if scheme == "float8_dynamic":
        _need_float8(f"quantizer.scheme is {scheme}", dtype, device_type)


def _need_float8(what: str, dtype: torch.dtype, device_type: str) -> None:
    if device_type != "cuda" or torch.cuda.get_device_capability() < (8, 9):
        raise UserError(
            f"{what}, which has no kernel on this device: {_ON_A_GPU}, or take float8_weight_only"
            " or int8_dynamic"
        )
    if dtype != torch.bfloat16:
        raise UserError(f"{what}, whose kernel needs dtype=bf16")


def for_device(quantizer: Quantizer, dtype: torch.dtype, device_type: str) -> Quantizer:
    """The quantizer with torchao's kernel of the device: int4 by tiles for bf16 on CUDA.

    Raises:
        UserError: see :func:`check_device`.
    """
    check_device(quantizer.scheme, dtype, device_type)
    tiled = (
        quantizer.scheme == "int4_weight_only"
        and quantizer.group_size in (32, 64, 128, 256)
        and device_type == "cuda"
        and dtype == torch.bfloat16
        and torch.cuda.get_device_capability() >= (8, 0)
    )
    return replace(quantizer, tiled=tiled)


def why_not(weight: torch.Tensor, quantizer: Quantizer) -> str | None:
    """Why a weight [out, in] cannot be quantised; None if it can."""
    (rows, features), size = weight.shape, quantizer.group_size
    if size is not None and features % size:
        return f"{features} input features are no multiple of {size}"
    if quantizer.scheme == "int8_dynamic" and features <= 16:
        return f"{features} input features are no more than 16"
    if quantizer.scheme == "nf4" and rows * features % (256 * (size or 1)):
        return f"{rows} x {features} weights are no multiple of 256 blocks of {size}"
    if quantizer.scheme == "float8_dynamic" and (rows % 16 or features % 16):
        return f"{rows} x {features} weights are no multiples of 16"
    return None


def error_in_steps(quantised: Any, weight: torch.Tensor) -> float:
    """Largest |dequantised - weight|, in steps: distances of two neighbouring quantised numbers if
    the largest of a group is the type's largest number.

    Args:
        quantised: torchao's tensor.
        weight: what it was made of [out, in].
    """
    wide, kind = weight.float(), number_type(quantised)
    groups = wide.unflatten(1, (-1, group_size(quantised) or weight.shape[1]))
    largest = groups.abs().amax(dim=2, keepdim=True)
    step = (largest.clamp(min=1e-30) / _LARGEST[kind]).expand_as(groups).flatten(1)
    if kind == "float8_e4m3fn":  # three bits after the first, down to 2 ** -9
        step = step * torch.exp2((wide / step).abs().clamp(min=2.0**-6).log2().floor() - 3)
    if kind == "nf4":  # the scale of a block is a number of 8 bits, too
        step = step + 2 * (largest - largest.mean()).abs().max() / 255
    return float(((dequantized(quantised).float() - wide).abs() / step).max())


_LARGEST = {"int8": 127, "int4": 7, "float8_e4m3fn": 448, "nf4": 1 / 0.3039}
"""Largest number of a type, in steps. Those of NF4 are at most 0.3039 apart."""


def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """``x W^T + bias`` by torchao's kernel."""
    if hasattr(weight, "nf4"):
        return F.linear(x, dequantized(weight).to(x.dtype), bias)
    return F.linear(x, weight, bias)
