"""What a step of an evaluation does: a batch -> values of each token -> where they add up."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ppl_eval.data.batch import Batch
from ppl_eval.errors import UserError
from ppl_eval.metrics.fidelity import SUMS, Fidelity, ledger_values
from ppl_eval.metrics.ledger import NLL, Ledger
from ppl_eval.metrics.perplexity import Perplexity
from ppl_eval.metrics.positions import PositionLoss
from ppl_eval.metrics.tokens import TokenRecords
from ppl_eval.model.attention import attention_split
from ppl_eval.parallel.context import ContextSplit
from ppl_eval.parallel.dims import Meshes
from ppl_eval.parallel.shard import reshard
from ppl_eval.parallel.tensor import ranks_of, tp_groups
from ppl_eval.score.divergence import COLUMNS
from ppl_eval.score.head import score, unwrapped
from ppl_eval.score.teacher_student import PairScorer, Reader, score_perturbed

NOISE_EVERY = 16
"""One batch in so many is read twice more, by the teacher and by the teacher rounded otherwise."""


@dataclass(frozen=True)
class Teacher:
    """A model that reads the same windows as the student, on the same ranks.

    Attributes:
        model: on the student's device, sharded or not.
        loss_group: ranks that read different parts of windows (its batch x cp); None for this one.
        cp_group: ranks that share a window in its layout; None where none is shared.
    """

    model: nn.Module
    loss_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None

    @classmethod
    def on(cls, model: nn.Module, meshes: Meshes | None) -> "Teacher":
        """A teacher that lies on ``meshes``; on this rank alone if there are none."""
        if meshes is None:
            return cls(model)
        return cls(model, meshes.loss.get_group(), meshes.cp.get_group())


def check_meshes(
    student: nn.Module,
    batch_group: dist.ProcessGroup | None,
    cp_group: dist.ProcessGroup | None,
    teacher: Teacher,
) -> None:
    """Refuse a teacher whose ranks do not read the student's batches.

    Raises:
        UserError: ranks that share the teacher's matrices or windows read different batches, or the
            teacher shares them among more or fewer ranks than the student.
    """
    shared = [*tp_groups(teacher.model), teacher.cp_group]
    mixed = any(len(ranks_of(batch_group) & ranks_of(group)) > 1 for group in shared)

    def size(model: nn.Module, cp: dist.ProcessGroup | None) -> int:
        tp = max((len(ranks_of(group)) for group in tp_groups(model)), default=1)
        return tp * max(1, len(ranks_of(cp)))

    own, its = size(student, cp_group), size(teacher.model, teacher.cp_group)
    if mixed or own != its:
        raise UserError(
            f"the student shares a batch among {own} ranks (tp * cp) and the teacher among {its}:"
            " both read the same batches on the same ranks; give teacher_meshes with the student's"
            " dp_replicate and dp_shard, and the same product of tp and cp"
        )


class Alone:
    """Steps of one model.

    Args:
        model: on ``device``.
        device: of the model.
        context: how windows are split, if they are.
        fp32_logits: see :func:`ppl_eval.score.head.score`.
        records: filled with every token that this rank scores, if given.
    """

    columns: tuple[str, ...] = NLL

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        context: ContextSplit | None,
        fp32_logits: bool,
        records: TokenRecords | None,
    ) -> None:
        self._model, self._device, self._context = model, device, context
        self._fp32_logits, self._records = fp32_logits, records
        self._by_position = PositionLoss(device)
        self.running = Perplexity(device)

    def run(self, whole: Batch, ledger: Ledger) -> None:
        """Score a batch; the same number of calls on every rank.

        Args:
            whole: this rank's batch, of whole windows.
            ledger: written to.
        """
        batch = whole.part(self._context).to(self._device)
        nll_BT = score(
            self._model,
            batch.inputs_BT,
            batch.targets_BT,
            batch.scored_BT,
            positions=batch.positions,
            fp32_logits=self._fp32_logits,
        )
        ledger.write(batch.rows, torch.stack([nll_BT, nll_BT.square()]), batch.scored_BT)
        _record(self._records, batch, nll_nats=nll_BT)
        self._by_position.update(nll_BT, batch.scored_BT, batch.positions)
        self.running.update(nll_BT, batch.scored_BT)

    def assemble(self, loss_group: dist.ProcessGroup | None) -> None:
        """Complete on every rank what was added up beside the ledger."""
        self._by_position.assemble(loss_group)

    def by_position(self) -> list[dict[str, Any]]:
        """See :meth:`PositionLoss.rows`."""
        return self._by_position.rows()


class BesideTeacher:
    """Steps of a student and its teacher.

    Args:
        student: on ``device``.
        teacher: reads the same windows.
        device: of both models.
        context: how the student's windows are split, if they are.
        records: filled with every token that this rank scores, if given.

    Attributes:
        fidelity: what was found beside the sums by window.
    """

    columns: tuple[str, ...] = SUMS

    def __init__(
        self,
        student: nn.Module,
        teacher: Teacher,
        device: torch.device,
        context: ContextSplit | None,
        records: TokenRecords | None,
    ) -> None:
        self._student, self._teacher, self._device = student, teacher, device
        self._context, self._teacher_context = context, ContextSplit.of(teacher.cp_group)
        self._records = records
        self._scorer = PairScorer()
        self._by_position = PositionLoss(device)
        self._teacher_by_position = PositionLoss(device)
        self.running = Perplexity(device)
        dtypes = [dtype_of(model) for model in (student, teacher.model)]
        self.fidelity = Fidelity(device, max(dtypes, key=lambda dtype: torch.finfo(dtype).eps))

    def run(self, whole: Batch, ledger: Ledger) -> None:
        """See :meth:`Alone.run`."""
        batch = whole.part(self._context).to(self._device)
        teachers = batch
        if self._context is not None or self._teacher_context is not None:
            teachers = whole.part(self._teacher_context).to(self._device)
        values_CBT = self._scorer.score(
            _reader(self._student, batch, self._context),
            _reader(self._teacher.model, teachers, self._teacher_context),
            batch.targets_BT,
            batch.scored_BT,
            whole.inputs_BT.shape[1],
        )
        ledger.write(batch.rows, ledger_values(values_CBT), batch.scored_BT)
        nll_BT, teacher_nll_BT, kl_BT = values_CBT[: COLUMNS.index("kl_teacher_student") + 1]
        _record(
            self._records,
            batch,
            nll_nats=nll_BT,
            teacher_nll_nats=teacher_nll_BT,
            kl_teacher_student_nats=kl_BT,
        )
        where = (batch.scored_BT, batch.positions)
        self._by_position.update(nll_BT, *where)
        self._teacher_by_position.update(teacher_nll_BT, *where)
        self.fidelity.update(values_CBT, *where, batch.document_BT, batch.token_BT)
        self.running.update(nll_BT, batch.scored_BT)

    @property
    def measures_noise(self) -> bool:
        """Whether the outputs of the teacher's layers can be rounded: those of a decoder that is
        not compiled."""
        model = self._teacher.model
        decoder = unwrapped(model)
        is_decoder = hasattr(decoder, "unembed") and isinstance(decoder.layers, nn.ModuleList)
        return is_decoder and not hasattr(model, "_orig_mod")

    def run_noise(self, whole: Batch, seed: int) -> None:
        """Let the teacher be its own student, rounded otherwise, on a batch; on every rank.

        Args:
            whole: this rank's batch, of whole windows, or one that counts nothing.
            seed: of the rounding.
        """
        batch = whole.part(self._teacher_context).to(self._device)
        values_CBT = score_perturbed(
            _reader(self._teacher.model, batch, self._teacher_context),
            batch.targets_BT,
            batch.scored_BT,
            seed,
            torch.finfo(self.fidelity.coarser).eps,
        )
        self.fidelity.update_noise(values_CBT, batch.scored_BT)

    def assemble(self, loss_group: dist.ProcessGroup | None) -> None:
        """See :meth:`Alone.assemble`."""
        self._by_position.assemble(loss_group)
        self._teacher_by_position.assemble(loss_group)
        self.fidelity.assemble(loss_group, self._teacher.loss_group)

    def by_position(self) -> list[dict[str, Any]]:
        """The student's loss."""
        return self._by_position.rows()

    def teacher_by_position(self) -> list[dict[str, Any]]:
        """The teacher's loss."""
        return self._teacher_by_position.rows()


def dtype_of(model: nn.Module) -> torch.dtype:
    """Of most of a model's numbers, as its first parameter has it; fp32 of one without any."""
    first = next(model.parameters(), None)
    return torch.float32 if first is None or not first.is_floating_point() else first.dtype


def noise_sample(num_batches: int) -> range:
    """Numbers of the batches that are read for the noise: every 16th, whatever the ranks."""
    return range(0, num_batches, NOISE_EVERY)


def noise_batches(sample: range, batch_rank: int, num_ranks: int) -> Iterator[int | None]:
    """Those of a sample that a rank reads, None for one that counts nothing.

    All ranks have as many turns, as few as there can be.
    """
    for begin in range(0, len(sample), num_ranks):
        place = begin + batch_rank
        yield sample[place] if place < len(sample) else None


@contextmanager
def evaluating(
    models: Sequence[nn.Module], contexts: Sequence[ContextSplit | None]
) -> Iterator[None]:
    """Models in eval mode, without gradients, their attention split by their contexts.

    Afterwards each is as it was, and what FSDP2 has gathered is freed.
    """
    were_training = [model.training for model in models]
    for model in models:
        model.eval()
        reshard(model)
    try:
        # no_grad, not inference_mode: that would leave FSDP buffers that later training trips over
        with torch.no_grad(), ExitStack() as stack:
            for model, context in zip(models, contexts, strict=True):
                stack.enter_context(attention_split(unwrapped(model), context))
            yield
    finally:
        for model, was_training in zip(models, were_training, strict=True):
            model.train(was_training)
            reshard(model)


def _reader(model: nn.Module, batch: Batch, context: ContextSplit | None) -> Reader:
    return Reader(model, batch.inputs_BT, batch.positions, context)


def _record(records: TokenRecords | None, batch: Batch, **values: torch.Tensor) -> None:
    if records is not None:
        records.update(batch.document_BT, batch.token_BT, values, batch.scored_BT)
