"""Reader: a model that reads windows, and the process groups over which it is split."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn

from ppl_eval.decoder import Decoder
from ppl_eval.errors import UserError
from ppl_eval.parallel.context import ContextSplit
from ppl_eval.parallel.dims import Groups
from ppl_eval.parallel.shard import reshard
from ppl_eval.score.batch import Batch
from ppl_eval.score.head import Head, gathered

Result = TypeVar("Result")


@dataclass(frozen=True)
class Reader:
    """A model on this rank's device, and how the ranks share its work.

    Attributes:
        model: what is called; sharded or not, perhaps inside DDP or torch.compile. Without a
            ``decoder`` it maps token ids [B, T] to logits [B, T, V], or to an object with
            ``.logits``.
        decoder: its parts, if its library has an adapter.
        groups: ranks that read other windows, and ranks that share a window with this one.
        fp32_logits: compute logits as ``hidden.float() @ weight.float().T``, also of a bf16 model.
            False: in the model's dtype; bf16 rounds each logit (0.015 nats rms for a token).
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
        """The dtype of the first floating-point parameter; fp32 without any."""
        dtypes = (parameter.dtype for parameter in self.model.parameters())
        return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)

    @property
    def can_round_layers(self) -> bool:
        """Whether hooks see the output of each layer: the model has a decoder, not compiled."""
        return self.decoder is not None and not hasattr(self.model, "_orig_mod")

    def read(
        self,
        batch: Batch,
        then: Callable[[torch.Tensor, Head], Result],
        choose: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Result:
        """One forward pass that ends in ``then``, where the head can be run.

        A decoder computes hidden states at every position; its final norm and its head run on the
        chosen ones only. Every rank that shares the model calls it equally often.

        Args:
            batch: this rank's part of the windows, on the model's device.
            then: takes the chosen hidden states [N, D], normed, and the head. Under FSDP2 it runs
                inside the root's forward, where parameters are gathered.
            choose: hidden states [B, T, D] (without a decoder: logits [B, T, V]) -> the N rows that
                ``then`` takes; None: those that predict the batch's scored tokens.

        Returns:
            What ``then`` returns.
        """
        choose = choose or (lambda values_BTD: rows_of(values_BTD, batch.tokens.index_N))
        decoder = self.decoder
        if decoder is None:
            out = self.model(batch.inputs_BT)
            logits_NV = choose(getattr(out, "logits", out))
            return then(logits_NV, Head(lambda rows_NV: rows_NV, logits_NV.shape[-1]))
        results: list[Result] = []

        def at_head(hidden_BTD: torch.Tensor) -> torch.Tensor:
            rows_ND = decoder.norm(choose(hidden_BTD))
            owner, tail = decoder.head()
            with gathered(owner):
                head = Head.of(owner, tail, fp32=self.fp32_logits, num_ids=decoder.num_ids)
                results.append(then(rows_ND, head))
            return rows_ND  # the model's output goes through FSDP2, which may cast it

        decoder.forward(self.model, batch.inputs_BT, batch.positions_T, at_head)
        return results[0]

    def nll(self, batch: Batch) -> torch.Tensor:
        """NLL in nats of the batch's scored tokens, in one forward pass: [N], fp32 (fp64 from fp64
        logits). ``batch`` is as for :meth:`read`; a rank that has only padding has no tokens."""
        return self.read(batch, lambda rows_ND, head: head.nll(rows_ND, batch.tokens.target_N))


def rows_of(values_BTD: torch.Tensor, index_N: torch.Tensor) -> torch.Tensor:
    """Rows [N, D] of hidden states or logits, by their places among the B x T positions."""
    return values_BTD.flatten(0, 1).index_select(0, index_N)


@contextmanager
def evaluating(readers: Sequence[Reader]) -> Iterator[None]:
    """Within it models are in eval mode, without gradients, and attend over split windows if their
    windows are split.

    Afterwards every module is in its former mode, and parameters that FSDP2 has gathered are freed.

    Raises:
        UserError: windows are to be split, but it is not known how the model attends.
    """
    was_training = {
        module: module.training for reader in readers for module in reader.model.modules()
    }
    for reader in readers:
        reader.model.eval()
        reshard(reader.model)
    try:
        # under inference_mode FSDP2 would keep buffers that later training cannot write to
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
