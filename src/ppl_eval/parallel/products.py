"""Matrix products with fp32 results, also of bf16 and fp16 matrices."""

import torch
import torch.nn.functional as F

CAST_ROWS = 8192
"""Rows of a bf16 or fp16 matrix that are cast to fp32 at a time."""

_HAS_OUT_DTYPE = hasattr(torch.ops.aten.mm, "dtype")
"""Whether ``torch.mm`` can return the fp32 sums of a bf16 product on CUDA (torch 2.8 and later)."""


def wide_product(x: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` in fp32 (fp64 if the weight is fp64): sums are not rounded to bf16 or fp16.

    Args:
        x: [..., D].
        weight_VD: a plain tensor (no DTensor), in any floating dtype.

    Returns:
        [..., V].
    """
    if weight_VD.dtype in (torch.float32, torch.float64):
        return F.linear(x.to(weight_VD.dtype), weight_VD)
    if x.is_cuda and x.dtype == weight_VD.dtype and _HAS_OUT_DTYPE:
        product = torch.mm(x.flatten(0, -2), weight_VD.T, out_dtype=torch.float32)
        return product.unflatten(0, x.shape[:-1])
    x = x.float()
    if len(weight_VD) <= CAST_ROWS:
        return F.linear(x, weight_VD.float())
    product = x.new_empty(*x.shape[:-1], len(weight_VD))
    for columns, rows in zip(
        product.split(CAST_ROWS, dim=-1), weight_VD.split(CAST_ROWS), strict=True
    ):
        columns.copy_(F.linear(x, rows.float()))
    return product
