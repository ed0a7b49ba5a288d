"""Decoder: what scoring, sharding and loading need of a causal language model.

A library's models meet this protocol through one adapter each: torchtune's through
:mod:`ppl_eval.model.torchtune_decoder`. Nothing else in the package looks inside a decoder. A model
without an adapter is any module that gives logits: see :class:`ppl_eval.score.reader.Reader`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from ppl_eval.parallel.context import ContextSplit

Tail = Callable[[torch.Tensor], torch.Tensor]
"""Applied to logits [N, V] after the head's product, to each by itself, such as a soft cap or a
scale. It may overwrite them."""


class Decoder(Protocol):
    """The parts of a causal language model, under one set of names.

    Attributes:
        model: the module itself, without the wrappers of DistributedDataParallel or torch.compile.
        layers: its decoder layers, in order. Each becomes an FSDP2 unit.
        embedding: the module that holds the input embedding.
        num_ids: rows of the embedding: valid token ids are 0 to ``num_ids - 1``.
        max_seq_len: most tokens that the model reads at once.
        num_heads: (query heads, key and value heads) of each layer.
        split_plan: pattern of a module's name -> how tensor parallelism splits its matrix:
            ``columns`` (output features), ``rows`` (input features) or ``vocabulary``. ``*`` stands
            for a layer's number. Matrices without an entry cannot be split.
    """

    @property
    def model(self) -> nn.Module: ...

    @property
    def layers(self) -> Sequence[nn.Module]: ...

    @property
    def embedding(self) -> nn.Module: ...

    @property
    def num_ids(self) -> int: ...

    @property
    def max_seq_len(self) -> int: ...

    @property
    def num_heads(self) -> Sequence[tuple[int, int]]: ...

    @property
    def split_plan(self) -> Mapping[str, str]: ...

    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name, without those that are computed, not loaded (the tables
        of a rotary embedding)."""
        ...

    def forward(
        self,
        wrapped: nn.Module,
        inputs_BT: torch.Tensor,
        positions_T: torch.Tensor | None,
        at_head: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """One forward pass that ends where the final norm and the head would run.

        Args:
            wrapped: the model as it is called, perhaps inside DDP or torch.compile.
            inputs_BT: token ids (int64).
            positions_T: places of the inputs in their windows (int64 [T] or [B, T]); None stands
                for 0, 1, 2, ...
            at_head: called once with the hidden states [B, T, D] before the final norm, inside the
                forward of the FSDP2 root, where its parameters are gathered. Its return value is
                the forward's.
        """
        ...

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm of hidden states [..., D]."""
        ...

    def head(self) -> tuple[nn.Module, Tail | None]:
        """The module whose weight [V, D] gives the logits (the embedding, if they are tied), and
        what happens to logits after its product."""
        ...

    def split_attention(self, context: "ContextSplit | None") -> AbstractContextManager[None]:
        """Within it, attention is over windows split by ``context``; None changes nothing.

        Raises:
            UserError: see :meth:`check_attention`.
        """
        ...

    def check_attention(self, why: str, instead: str) -> None:
        """Refuse a layer whose attention cannot be told which keys a query sees.

        Args:
            why: the reason that it must be, such as ``parallel.cp is 2``.
            instead: the setting that avoids it, such as ``parallel.cp=1``.

        Raises:
            UserError: naming the layer's class.
        """
        ...

    def divide_heads(self, tp: int) -> None:
        """Tell every layer that this rank has 1 / ``tp`` of its heads."""
        ...


def unwrapped(model: nn.Module) -> Any:
    """The module inside DistributedDataParallel and torch.compile's wrapper."""
    inner: Any = model
    for name in ("module", "_orig_mod"):
        inner = getattr(inner, name, inner)
    return inner
