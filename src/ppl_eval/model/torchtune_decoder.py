"""torchtune's decoders as the package sees them: see :class:`ppl_eval.decoder.Decoder`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torchtune.modules import TransformerDecoder

from ppl_eval.decoder import Tail, unwrapped
from ppl_eval.errors import UserError
from ppl_eval.model.attention import Attention, SplitAttention, soft_capped
from ppl_eval.parallel.context import ContextSplit
from ppl_eval.quantize.linear import quantized_layers

_at_head: ContextVar[Callable[[torch.Tensor], torch.Tensor]] = ContextVar("at_head")
"""What the current forward pass ends in. A student's forward runs inside its teacher's end."""


class CappedHead(nn.Module):
    """A head (linear or torchtune's TiedLinear) whose logits are soft-capped, as Gemma 2's are."""

    def __init__(self, head: Any, soft_cap: float) -> None:
        super().__init__()
        self.head = head
        self.soft_cap = soft_cap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Capped logits."""
        return soft_capped(self.head(hidden), self.soft_cap)


@dataclass(frozen=True)
class LayerAttention:
    """Replaces ``_attention_call``, which torchtune's MultiHeadAttention calls on rotated q, k."""

    attention: Attention | SplitAttention

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        dropout_p: float,
        is_causal: bool,
    ) -> torch.Tensor:
        """Attended values of q, k, v [B, H, T, K]; raises UserError if the layer gives a mask."""
        if mask is not None:
            raise UserError(
                "a layer gives its attention a mask, which only plain attention can take"
            )
        return self.attention(q, k, v)


class TorchtuneDecoder:
    """A :class:`ppl_eval.decoder.Decoder` of torchtune's model, on any device, sharded or not."""

    split_plan: Mapping[str, str] = {
        "tok_embeddings": "vocabulary",
        "layers.*.attn.q_proj": "columns",
        "layers.*.attn.k_proj": "columns",
        "layers.*.attn.v_proj": "columns",
        "layers.*.attn.output_proj": "rows",
        "layers.*.mlp.w1": "columns",
        "layers.*.mlp.w3": "columns",
        "layers.*.mlp.w2": "rows",
        "output": "vocabulary",
    }
    """The same for all families. A tied head has no entry: it reads the embedding's weight."""

    def __init__(self, model: TransformerDecoder) -> None:
        self.model = model

    @property
    def layers(self) -> Sequence[Any]:
        """torchtune's TransformerSelfAttentionLayers."""
        layers: Any = self.model.layers
        return layers

    @property
    def embedding(self) -> nn.Embedding:
        """The input embedding."""
        return self.model.tok_embeddings

    @property
    def num_ids(self) -> int:
        """Rows of the embedding."""
        return self.embedding.num_embeddings

    @property
    def max_seq_len(self) -> int:
        """Most tokens that the model reads at once."""
        return self.model.max_seq_len

    @property
    def num_heads(self) -> list[tuple[int, int]]:
        """(query heads, key and value heads) of each layer."""
        return [(layer.attn.num_heads, layer.attn.num_kv_heads) for layer in self.layers]

    @property
    def attentions(self) -> list[Attention | None]:
        """What each layer's attention computes of whole windows; None where it is not known."""
        return [_attention_of(layer.attn) for layer in self.layers]

    def weights(self) -> dict[str, torch.Tensor]:
        """torchtune computes all of its buffers, so these are the parameters; of a quantised layer
        the weight that it is made of."""
        slots: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        for name, layer in quantized_layers(self.model).items():
            slots = {key: slot for key, slot in slots.items() if not key.startswith(f"{name}.")}
            slots[f"{name}.weight"] = layer.weight_slot
            if layer.bias is not None:
                slots[f"{name}.bias"] = layer.bias
        return slots

    def forward(
        self,
        wrapped: nn.Module,
        inputs_BT: torch.Tensor,
        positions_T: torch.Tensor | None,
        at_head: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """torchtune's forward ends with ``self.unembed(h)``: norm, head, ``.float()``."""
        options = {}
        if positions_T is not None:
            options["input_pos"] = positions_T.view(-1, inputs_BT.shape[1])
        before = vars(self.model).get("unembed")  # of a forward that this one runs in
        object.__setattr__(self.model, "unembed", _unembed)
        token = _at_head.set(at_head)
        try:
            wrapped(inputs_BT, **options)
        finally:
            _at_head.reset(token)
            if before is None:
                object.__delattr__(self.model, "unembed")
            else:
                object.__setattr__(self.model, "unembed", before)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        return self.model.norm(hidden)

    def head(self) -> tuple[nn.Module, Tail | None]:
        """The output layer, or the embedding that it is tied to; Gemma 2 caps the logits."""
        output: Any = self.model.output
        tail = None
        if isinstance(output, CappedHead):
            output, tail = output.head, partial(soft_capped, soft_cap=output.soft_cap)
        return getattr(output, "tied_module", output), tail

    @contextmanager
    def split_attention(self, context: ContextSplit | None) -> Iterator[None]:
        """Swaps what each layer's attention calls, and puts it back."""
        if context is None:
            yield
            return
        self.check_attention(f"parallel.cp is {context.size}", "parallel.cp=1")
        before = [layer.attn._attention_call for layer in self.layers]
        for layer, whole in zip(self.layers, self.attentions, strict=True):
            assert whole is not None
            queries_per_key = layer.attn.num_heads // layer.attn.num_kv_heads
            split = SplitAttention(whole, context, queries_per_key)
            layer.attn._attention_call = LayerAttention(split)
        try:
            yield
        finally:
            for layer, call in zip(self.layers, before, strict=True):
                layer.attn._attention_call = call

    def check_attention(self, why: str, instead: str) -> None:
        """Refuse a layer that masks in a way that is not known."""
        for layer, attention in zip(self.layers, self.attentions, strict=True):
            if attention is None:
                kind = type(layer.attn).__name__
                raise UserError(f"{why}, but how a {kind} masks is not known: set {instead}")

    def divide_heads(self, tp: int) -> None:
        """torchtune's attention counts its heads by these attributes."""
        for layer in self.layers:
            layer.attn.num_heads //= tp
            layer.attn.num_kv_heads //= tp


def decoder_of(model: nn.Module) -> TorchtuneDecoder | None:
    """The decoder inside DDP or torch.compile's wrapper; None for any other module."""
    inner = unwrapped(model)
    return TorchtuneDecoder(inner) if isinstance(inner, TransformerDecoder) else None


@torch.compiler.disable
def _unembed(hidden_BTD: torch.Tensor) -> torch.Tensor:
    """One function for all forwards, so that a compiled model is not compiled again for each."""
    return _at_head.get()(hidden_BTD)


def _attention_of(module: Any) -> Attention | None:
    call = getattr(module, "_attention_call", None)
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if kind == "torchtune.modules.attention.MultiHeadAttention" and module.is_causal:
        if isinstance(call, LayerAttention) and isinstance(call.attention, Attention):
            return call.attention
        if getattr(call, "__module__", None) == "torchtune.modules.attention_utils":
            return Attention()  # torchtune's own, which is plain
    return None
