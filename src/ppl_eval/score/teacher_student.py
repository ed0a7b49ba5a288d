"""A student and its teacher on the same windows, their heads in the same chunks."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ppl_eval.parallel.context import ContextSplit
from ppl_eval.score.divergence import COLUMNS, Ids, compare_logits_
from ppl_eval.score.head import CHUNK_ELEMENTS, Head, chunks_of, run_to_head, unwrapped, wide_dtype


@dataclass(frozen=True)
class Reader:
    """One model's forward pass over a batch.

    Attributes:
        model: sharded or not.
        inputs_BT: token ids that this rank reads (int64).
        positions: places of the inputs in their windows, or None for 0, 1, 2, ...
        context: how windows are split, if they are.
    """

    model: nn.Module
    inputs_BT: torch.Tensor
    positions: torch.Tensor | None = None
    context: ContextSplit | None = None

    def run(
        self,
        rows_of: Callable[[torch.Tensor], torch.Tensor],
        then: Callable[[torch.Tensor, Head], Any],
    ) -> Any:
        """See :func:`ppl_eval.score.head.run_to_head`."""
        return run_to_head(self.model, self.inputs_BT, rows_of, then, positions=self.positions)


class PairScorer:
    """Compares a student with its teacher, batch after batch.

    Where the two are laid out differently the teacher follows: its hidden states are gathered and
    cut as the student's windows are, and its head is split as the student's is (once; it is kept).
    The student's forward runs inside the teacher's, so that FSDP2 has both heads gathered and no
    full logits of either exist.
    """

    def __init__(self) -> None:
        self._aligned_head: Head | None = None

    def score(
        self,
        student: Reader,
        teacher: Reader,
        targets_BT: torch.Tensor,
        scored_BT: torch.Tensor,
        num_positions: int,
    ) -> torch.Tensor:
        """Every scored token of this rank's part of a batch.

        Args:
            student: decides which part of the windows this rank scores.
            teacher: reads the same windows.
            targets_BT: the token after each of the student's inputs (int64).
            scored_BT: which of them to score (bool).
            num_positions: length of the whole windows.

        Returns:
            :data:`COLUMNS` [columns, B, T] (float64), 0 where nothing is scored.
        """
        targets_N = targets_BT[scored_BT]

        def teachers_rows(hidden_BTD: torch.Tensor) -> torch.Tensor:
            aligned_BTD = _cut_like(hidden_BTD, teacher.context, student.context, num_positions)
            return aligned_BTD[scored_BT]

        def with_teacher(teacher_ND: torch.Tensor, teacher_head: Head) -> torch.Tensor:
            def with_both(student_ND: torch.Tensor, head: Head) -> torch.Tensor:
                other = self._aligned(teacher_head, head)
                return compare_rows(student_ND, head, teacher_ND, other, targets_N)

            return student.run(lambda hidden_BTD: hidden_BTD[scored_BT], with_both)

        return _spread(teacher.run(teachers_rows, with_teacher), scored_BT)

    def _aligned(self, teacher: Head, student: Head) -> Head:
        if self._aligned_head is not None:
            return self._aligned_head
        head = teacher.split_like(student)
        if head is not teacher and teacher.part is not None:  # it took communication
            self._aligned_head = head
        return head


def score_perturbed(
    reader: Reader, targets_BT: torch.Tensor, scored_BT: torch.Tensor, seed: int, epsilon: float
) -> torch.Tensor:
    """A model as the student of itself: its layers' outputs are rounded once more, at random.

    What differs then is what its dtype leaves open: the floor below which a divergence says nothing
    of the models.

    Args:
        reader: a torchtune decoder on a batch.
        targets_BT: the token after each input (int64).
        scored_BT: which of them to score (bool).
        seed: of the rounding; ranks that share matrices give the same.
        epsilon: of the dtype whose rounding it is.

    Returns:
        :data:`COLUMNS` [columns, B, T] (float64), 0 where nothing is scored.
    """

    def rows_of(hidden_BTD: torch.Tensor) -> torch.Tensor:
        return hidden_BTD[scored_BT]

    with rounded_at_random(unwrapped(reader.model).layers, seed, epsilon):
        other_ND = reader.run(rows_of, lambda rows_ND, head: rows_ND)
    targets_N = targets_BT[scored_BT]
    return _spread(
        reader.run(rows_of, lambda own, head: compare_rows(other_ND, head, own, head, targets_N)),
        scored_BT,
    )


@contextmanager
def rounded_at_random(layers: Iterable[nn.Module], seed: int, epsilon: float) -> Iterator[None]:
    """Multiply what each layer gives by 1 + u, |u| at most half of ``epsilon``."""

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


def _spread(values_CN: torch.Tensor, scored_BT: torch.Tensor) -> torch.Tensor:
    values_CBT = values_CN.new_zeros(len(values_CN), *scored_BT.shape)
    values_CBT[:, scored_BT] = values_CN
    return values_CBT


def compare_rows(
    student_ND: torch.Tensor,
    student: Head,
    teacher_ND: torch.Tensor,
    teacher: Head,
    targets_N: torch.Tensor,
) -> torch.Tensor:
    """:func:`compare_logits_` of normed hidden states, in chunks; both heads are split alike."""
    largest = max(student.largest_vocabulary, teacher.largest_vocabulary)
    found = [student_ND.new_zeros(len(COLUMNS), 0, dtype=torch.float64)]
    for chunk in chunks_of(len(targets_N), CHUNK_ELEMENTS // 2 // largest):
        rows = (student_ND[chunk], teacher_ND[chunk])
        found.append(_compare_chunk((student, teacher), rows, targets_N[chunk]))
    return torch.cat(found, dim=1)


def _compare_chunk(
    heads: tuple[Head, Head], rows_ND: tuple[torch.Tensor, torch.Tensor], targets_N: torch.Tensor
) -> torch.Tensor:
    """A function of its own, so that one chunk's logits are gone before the next one's."""
    own, other = (head.logits(rows) for head, rows in zip(heads, rows_ND, strict=True))
    dtype = torch.promote_types(torch.promote_types(own.dtype, other.dtype), torch.float32)
    part, teachers = (head.part for head in heads)
    if part is None or teachers is None:
        ids = Ids(0, min(own.shape[1], other.shape[1]))
    else:
        ids = Ids(part.first, min(part.num_ids, teachers.num_ids), part.group)
    return compare_logits_(own.to(dtype), other.to(dtype), targets_N, ids)


def _cut_like(
    hidden_BTD: torch.Tensor,
    context: ContextSplit | None,
    wanted: ContextSplit | None,
    num_positions: int,
) -> torch.Tensor:
    """Hidden states of windows that are split by ``context``, as ``wanted`` splits them."""
    size, wanted_size = (1 if c is None else c.size for c in (context, wanted))
    if size == wanted_size:
        return hidden_BTD
    if context is not None:
        hidden_BTD = context.gather(hidden_BTD, dim=1)[:, :num_positions]
    return hidden_BTD if wanted is None else wanted.take(hidden_BTD)
