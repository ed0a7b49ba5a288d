"""Scoring: a batch -> what one model, or a student and its teacher, make of its tokens.

With a teacher the student's forward runs inside the teacher's, so that FSDP2 has both heads
gathered. Both heads run on the same chunk of tokens, so that full logits of neither exist.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ppl_eval.parallel.context import ContextSplit
from ppl_eval.score.batch import Batch, Tokens
from ppl_eval.score.divergence import COLUMNS, Ids, compare_logits_
from ppl_eval.score.head import CHUNK_ELEMENTS, Head
from ppl_eval.score.nll import row_blocks, wide_dtype
from ppl_eval.score.reader import Reader, rows_of

Scored = tuple[Tokens, Mapping[str, torch.Tensor]]
"""The tokens that this rank scored, and their values by name ([N] each)."""


class Scorer:
    """Scores batches with one model, or with a student and its teacher.

    If teacher and student are split differently, the teacher's results are brought into the
    student's layout: its hidden states are gathered and cut like the student's windows, and its
    head is split like the student's, once for all batches.

    Args:
        readers: the model that is measured and, if there is one, its teacher after it.
        device: the device of the models.
    """

    def __init__(self, readers: Sequence[Reader], device: torch.device) -> None:
        self._student, self._teacher = readers[0], (readers[1] if len(readers) > 1 else None)
        self._device = device
        self._aligned_head: Head | None = None

    def score(self, whole: Batch) -> Scored:
        """Score a batch; every rank calls it equally often.

        Args:
            whole: this rank's batch of whole windows, on the CPU.

        Returns:
            The tokens of this rank's part of the windows, and their ``nll_nats``; with a teacher
            all of :data:`ppl_eval.score.divergence.COLUMNS` (float64).
        """
        student, teacher = self._student, self._teacher
        part = whole.part(student.context).to(self._device)
        tokens = part.tokens
        if teacher is None:
            return tokens, {"nll_nats": student.nll(part)}
        teachers_part = part
        if teacher.context != student.context:
            teachers_part = whole.part(teacher.context).to(self._device)

        def choose(hidden_BTD: torch.Tensor) -> torch.Tensor:
            length = whole.inputs_BT.shape[1]
            aligned_BTD = _cut_like(hidden_BTD, teacher.context, student.context, length)
            return rows_of(aligned_BTD, tokens.index_N)

        def at_teachers_head(teacher_ND: torch.Tensor, teacher_head: Head) -> torch.Tensor:
            def at_both_heads(student_ND: torch.Tensor, head: Head) -> torch.Tensor:
                aligned = self._aligned(teacher_head, head)
                return compare_rows(student_ND, head, teacher_ND, aligned, tokens.target_N)

            return student.read(part, at_both_heads)

        values_CN = teacher.read(teachers_part, at_teachers_head, choose)
        return tokens, dict(zip(COLUMNS, values_CN, strict=True))

    def score_noise(self, whole: Batch, seed: int, epsilon: float) -> Scored:
        """Compare the teacher with itself, rounded differently: :func:`rounded_at_random`.

        A divergence below what this gives tells nothing about the models.

        Args:
            whole: this rank's batch of whole windows, on the CPU.
            seed: decides the rounding; ranks that share matrices give the same.
            epsilon: spacing at 1 of the dtype whose rounding is imitated.

        Returns:
            As of :meth:`score`; the student's columns are the rounded teacher's.
        """
        teacher = self._teacher
        assert teacher is not None
        assert teacher.decoder is not None
        part = whole.part(teacher.context).to(self._device)
        with rounded_at_random(teacher.decoder.layers, seed, epsilon):
            rounded_ND = teacher.read(part, lambda rows_ND, head: rows_ND)
        targets_N = part.tokens.target_N
        values_CN = teacher.read(
            part, lambda rows_ND, head: compare_rows(rounded_ND, head, rows_ND, head, targets_N)
        )
        return part.tokens, dict(zip(COLUMNS, values_CN, strict=True))

    def _aligned(self, teacher: Head, student: Head) -> Head:
        """The teacher's head, split like the student's; kept if that took communication."""
        if self._aligned_head is not None:
            return self._aligned_head
        head = teacher.split_like(student)
        if head is not teacher and teacher.part is not None:
            self._aligned_head = head
        return head


@contextmanager
def rounded_at_random(layers: Sequence[nn.Module], seed: int, epsilon: float) -> Iterator[None]:
    """Within it the output of each layer is multiplied by 1 + u, where |u| <= epsilon / 2."""

    def hook_of(number: int) -> Callable[..., torch.Tensor]:
        def hook(module: nn.Module, args: Any, hidden: torch.Tensor) -> torch.Tensor:
            generator = torch.Generator(hidden.device).manual_seed(seed * 1_000_003 + number)
            wide = wide_dtype(hidden)
            noise = torch.rand(hidden.shape, generator=generator, dtype=wide, device=hidden.device)
            factor = noise.sub_(0.5).mul_(epsilon).add_(1)
            return (hidden.to(wide) * factor).to(hidden.dtype)

        return hook

    handles = [layer.register_forward_hook(hook_of(n)) for n, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def compare_rows(
    student_ND: torch.Tensor,
    student: Head,
    teacher_ND: torch.Tensor,
    teacher: Head,
    targets_N: torch.Tensor,
) -> torch.Tensor:
    """:func:`compare_logits_` of normed hidden states, in chunks.

    Args:
        student_ND: the student's hidden states.
        student: the student's head.
        teacher_ND: the teacher's hidden states.
        teacher: the teacher's head, split like the student's.
        targets_N: the ids that followed (int64).

    Returns:
        :data:`COLUMNS` [columns, N] (float64).
    """
    largest = max(student.largest_vocabulary, teacher.largest_vocabulary)
    blocks = row_blocks(CHUNK_ELEMENTS // 2, largest, student_ND, teacher_ND, targets_N)
    chunks = [_compare_chunk(student, teacher, *block) for block in blocks]
    return torch.cat([student_ND.new_zeros(len(COLUMNS), 0, dtype=torch.float64), *chunks], dim=1)


def _compare_chunk(
    student: Head,
    teacher: Head,
    student_ND: torch.Tensor,
    teacher_ND: torch.Tensor,
    targets_N: torch.Tensor,
) -> torch.Tensor:
    """A function of its own, so that a chunk's logits are freed before the next chunk."""
    student_NV, teacher_NV = student.logits(student_ND), teacher.logits(teacher_ND)
    dtype = wide_dtype(student_NV, teacher_NV)
    if student.part is None or teacher.part is None:
        ids = Ids(0, min(student_NV.shape[1], teacher_NV.shape[1]))
    else:
        num_shared = min(student.part.num_ids, teacher.part.num_ids)
        ids = Ids(student.part.first, num_shared, student.part.group)
    return compare_logits_(student_NV.to(dtype), teacher_NV.to(dtype), targets_N, ids)


def _cut_like(
    hidden_BTD: torch.Tensor,
    context: ContextSplit | None,
    wanted: ContextSplit | None,
    length: int,
) -> torch.Tensor:
    """Hidden states of windows of ``length`` that are split by ``context``, split by ``wanted``."""
    size, wanted_size = (1 if c is None else c.size for c in (context, wanted))
    if size == wanted_size:
        return hidden_BTD
    if context is not None:
        hidden_BTD = context.gather(hidden_BTD, dim=1)[:, :length]
    return hidden_BTD if wanted is None else wanted.take(hidden_BTD)
