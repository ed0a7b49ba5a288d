"""A student and its teacher on the same windows, their heads on the same chunks of tokens.

The student's forward runs inside the teacher's, so that FSDP2 has both heads gathered and no full
logits of either exist.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ppl_eval.parallel.context import ContextSplit
from ppl_eval.score.batch import Batch
from ppl_eval.score.divergence import COLUMNS, Ids, compare_logits_
from ppl_eval.score.head import CHUNK_ELEMENTS, Head, wide_dtype
from ppl_eval.score.reader import Reader, rows_of


class TeacherStudent:
    """Compares a student with its teacher, batch after batch.

    Where the two are laid out differently the teacher follows: its hidden states are gathered and
    cut as the student's windows are, and its head is split as the student's is (once; it is kept).

    Args:
        student: decides which part of the windows this rank scores.
        teacher: reads the same windows on the same ranks.
    """

    def __init__(self, student: Reader, teacher: Reader) -> None:
        self._student, self._teacher = student, teacher
        self._aligned_head: Head | None = None

    def compare(self, own: Batch, teachers: Batch, num_positions: int) -> dict[str, torch.Tensor]:
        """What is found of every scored token of this rank's part of a batch.

        Args:
            own: the student's part, on its device.
            teachers: the part of the same windows that this rank has of the teacher's.
            num_positions: length of the whole windows.

        Returns:
            Name -> values [N] (float64): :data:`ppl_eval.score.divergence.COLUMNS`.
        """
        student, teacher, tokens = self._student, self._teacher, own.tokens
        choose = partial(rows_of, index_N=tokens.index_N)

        def teachers_rows(hidden_BTD: torch.Tensor) -> torch.Tensor:
            return choose(_cut_like(hidden_BTD, teacher.context, student.context, num_positions))

        def with_teacher(teacher_ND: torch.Tensor, teacher_head: Head) -> torch.Tensor:
            def with_both(student_ND: torch.Tensor, head: Head) -> torch.Tensor:
                other = self._aligned(teacher_head, head)
                return compare_rows(student_ND, head, teacher_ND, other, tokens.target_N)

            return student.read(own.inputs_BT, own.positions_T, choose, with_both)

        found_CN = teacher.read(
            teachers.inputs_BT, teachers.positions_T, teachers_rows, with_teacher
        )
        return dict(zip(COLUMNS, found_CN, strict=True))

    def _aligned(self, teacher: Head, student: Head) -> Head:
        if self._aligned_head is not None:
            return self._aligned_head
        head = teacher.split_like(student)
        if head is not teacher and teacher.part is not None:  # it took communication
            self._aligned_head = head
        return head


def compare_with_rounded(
    reader: Reader, batch: Batch, seed: int, epsilon: float
) -> dict[str, torch.Tensor]:
    """A model as the student of itself, once with the outputs of its layers rounded at random.

    What differs then is what its dtype leaves open: the floor below which a divergence says nothing
    about the models.

    Args:
        reader: of a decoder that is not compiled.
        batch: this rank's part, on the model's device.
        seed: decides the rounding; ranks that share matrices give the same.
        epsilon: spacing, at 1, of the dtype whose rounding it is.

    Returns:
        See :meth:`TeacherStudent.compare`.
    """
    assert reader.decoder is not None
    choose = partial(rows_of, index_N=batch.tokens.index_N)
    read = partial(reader.read, batch.inputs_BT, batch.positions_T, choose)
    with rounded_at_random(reader.decoder.layers, seed, epsilon):
        rounded_ND = read(lambda rows_ND, head: rows_ND)
    found_CN = read(
        lambda own_ND, head: compare_rows(rounded_ND, head, own_ND, head, batch.tokens.target_N)
    )
    return dict(zip(COLUMNS, found_CN, strict=True))


@contextmanager
def rounded_at_random(layers: Sequence[nn.Module], seed: int, epsilon: float) -> Iterator[None]:
    """Multiply what each layer gives by 1 + u, where |u| is at most half of ``epsilon``."""

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
    """:func:`compare_logits_` of normed hidden states, in chunks; both heads are split alike.

    Returns:
        :data:`COLUMNS` [columns, N] (float64).
    """
    largest = max(student.largest_vocabulary, teacher.largest_vocabulary)
    size = max(1, CHUNK_ELEMENTS // 2 // largest)
    found = [student_ND.new_zeros(len(COLUMNS), 0, dtype=torch.float64)]
    for own, other, targets in zip(
        *(values.split(size) for values in (student_ND, teacher_ND, targets_N)), strict=True
    ):
        if len(targets):
            found.append(_compare_chunk((student, teacher), (own, other), targets))
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
