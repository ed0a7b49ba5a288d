"""A linear layer with an adapter: LoRA (arXiv:2106.09685) or DoRA (arXiv:2402.09353)."""

import torch
import torch.nn.functional as F
from torch import nn

from ppl_eval.parallel.cut import local_part


class AdaptedLinear(nn.Linear):
    """``y = s * (W x + B A x) + bias``, with ``s = magnitude / ||W + B A||`` of each row for DoRA.

    torchtune's and PEFT's layers compute s in every forward. It does not depend on the input, so
    here it is a parameter that loading fills.

    Args:
        in_features: columns of W and A.
        out_features: rows of W and B.
        rank: rows of A, columns of B.
        bias: whether W has a bias; DoRA does not scale it.
        is_dora: whether there is a ``dora_scale``.
        device: the device of the parameters.
        dtype: the dtype of the parameters except ``dora_scale``. That is at least fp32: it scales a
            whole output feature, so its rounding would not average out as that of weights does.

    Attributes:
        lora_a: A.
        lora_b: B, multiplied by alpha / r.
        dora_scale: s [out]; None for LoRA.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        bias: bool,
        is_dora: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.lora_a = nn.Linear(in_features, rank, bias=False, device=device, dtype=dtype)
        self.lora_b = nn.Linear(rank, out_features, bias=False, device=device, dtype=dtype)
        wide = torch.promote_types(dtype, torch.float32)
        scale = torch.empty(out_features, device=device, dtype=wide) if is_dora else None
        self.dora_scale = None if scale is None else nn.Parameter(scale)
        for parameter in (*self.lora_a.parameters(), *self.lora_b.parameters(), self.dora_scale):
            if parameter is not None:  # FSDP2 needs one dtype for all parameters that are trained
                parameter.requires_grad_(False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Under tensor parallelism the output features of this rank; in the dtype of ``input``."""
        out = self.product(input) + self.lora_b(self.lora_a(input))
        if self.dora_scale is not None:
            out = out * local_part(self.dora_scale)
        if self.bias is not None:
            out = out + local_part(self.bias)
        return out.to(input.dtype)

    def product(self, input: torch.Tensor) -> torch.Tensor:
        """``W x``, by the rows of W that this rank has."""
        return F.linear(input, local_part(self.weight))
