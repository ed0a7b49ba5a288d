"""Reader: a model that reads windows, with the process groups that it is laid out on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from ppl_eval.decoder import Decoder
from ppl_eval.errors import UserError
from ppl_eval.parallel.context import ContextSplit
from ppl_eval.parallel.dims import Groups
from ppl_eval.parallel.shard import reshard
from ppl_eval.score.batch import Tokens
from ppl_eval.score.head import Head, gathered

Found = TypeVar("Found")


@dataclass(frozen=True)
class Reader:
    """A model on this rank's device, and how the ranks share its work.

    Attributes:
        model: as it is called; sharded or not, perhaps inside DDP or torch.compile. Without a
            ``decoder`` it maps token ids [B, T] to logits [B, T, V], itself or as ``.logits``.
        decoder: its parts, if its library has an adapter.
        groups: ranks that read other windows, and ranks that share a window with this one.
        fp32_logits: compute logits as ``hidden.float() @ weight.float().T``, also of a bf16 model.
            A bf16 product rounds each logit (0.015 nats rms for a token). False uses that.
    """

    model: nn.Module
    decoder: Decoder | None = None
    groups: Groups = field(default_factory=Groups)
    fp32_logits: bool = True

    @property
    def context(self) -> ContextSplit | None:
        """How windows are split over ranks; None where each rank has whole windows."""
        return ContextSplit.of(self.groups.cp)

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the first floating-point parameter; fp32 without any."""
        dtypes = (parameter.dtype for parameter in self.model.parameters())
        return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)

    @property
    def can_round_layers(self) -> bool:
        """Whether hooks see the output of each layer: of a decoder that is not compiled."""
        return self.decoder is not None and not hasattr(self.model, "_orig_mod")

    def read(
        self,
        inputs_BT: torch.Tensor,
        positions_T: torch.Tensor | None,
        choose: Callable[[torch.Tensor], torch.Tensor],
        then: Callable[[torch.Tensor, Head], Found],
    ) -> Found:
        """One forward pass that ends in ``then``, where the head can be run.

        A decoder computes hidden states at every position; its final norm and its head run on the
        chosen ones only. Every rank that shares the model calls it equally often.

        Args:
            inputs_BT: token ids (int64) on the model's device.
            positions_T: places of the inputs in their windows (int64), or None for 0, 1, 2, ...
            choose: hidden states [B, T, D] -> the N rows [N, D] whose logits are wanted. A model
                without a decoder gives logits [B, T, V] instead.
            then: takes these rows, normed, and the head. Under FSDP2 it runs inside the root's
                forward, where parameters are gathered.

        Returns:
            What ``then`` returns.
        """
        decoder = self.decoder
        if decoder is None:
            out = self.model(inputs_BT)
            logits_NV = choose(getattr(out, "logits", out))
            return then(logits_NV, Head(lambda rows_NV: rows_NV, logits_NV.shape[-1]))
        found: list[Found] = []

        def at_head(hidden_BTD: torch.Tensor) -> torch.Tensor:
            rows_ND = decoder.norm(choose(hidden_BTD))
            owner, tail = decoder.head()
            with gathered(owner):
                options = {"fp32": self.fp32_logits, "num_ids": decoder.num_ids}
                found.append(then(rows_ND, Head.of(owner, tail, **options)))
            return rows_ND  # what the model returns goes through FSDP2, which may cast it

        decoder.forward(self.model, inputs_BT, positions_T, at_head)
        return found[0]

    def nll(
        self, inputs_BT: torch.Tensor, tokens: Tokens, positions_T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """NLL in nats of the scored tokens, in one forward pass.

        A head that is split by vocabulary stays split: see
        :func:`ppl_eval.score.nll.sharded_token_nll_`.

        Args:
            inputs_BT: token ids (int64) on the model's device.
            tokens: what is scored; none on a rank that has only padding.
            positions_T: places of the inputs in their windows, or None for 0, 1, 2, ...

        Returns:
            [N], fp32 (fp64 from fp64 logits).
        """
        return self.read(
            inputs_BT,
            positions_T,
            partial(rows_of, index_N=tokens.index_N),
            lambda rows_ND, head: head.nll(rows_ND, tokens.target_N),
        )


def rows_of(values_BTD: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
    """Rows [N, D] of hidden states or logits, by their places among the B x T positions."""
    return values_BTD.flatten(0, 1).index_select(0, index_N)


@contextmanager
def evaluating(readers: Sequence[Reader]) -> Iterator[None]:
    """Models in eval mode, without gradients, their attention split by their contexts.

    Afterwards every module is in the mode that it was in, and what FSDP2 has gathered is freed.

    Raises:
        UserError: windows are to be split for a model whose attention is not known.
    """
    was_training = {
        module: module.training for reader in readers for module in reader.model.modules()
    }
    for reader in readers:
        reader.model.eval()
        reshard(reader.model)
    try:
        # no_grad, not inference_mode: that would leave FSDP buffers that later training trips over
        with torch.no_grad(), ExitStack() as stack:
            for reader in readers:
                if reader.decoder is not None:
                    stack.enter_context(reader.decoder.split_attention(reader.context))
                elif reader.context is not None:
                    raise UserError(
                        f"parallel.cp is {reader.context.size}, but a {type(reader.model).__name__}"
                        " has no decoder layers whose attention could be told: set parallel.cp=1"
                    )
            yield
    finally:
        for module, mode in was_training.items():
            module.training = mode
        for reader in readers:
            reshard(reader.model)
