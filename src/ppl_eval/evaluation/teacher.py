"""A teacher: what it must share with its student, and its place on the ranks."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppl_eval import components
from ppl_eval.checkpoint.checkpoint import config_of
from ppl_eval.config.schema import EvalConfig
from ppl_eval.data import tokenizer as tokenizers
from ppl_eval.data.tokenizer import HFTokenizer, TextTokenizer
from ppl_eval.errors import UserError
from ppl_eval.model.from_folder import tokenizer_section
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.parallel.tensor import ranks_of, tp_group
from ppl_eval.score.reader import Reader


@contextmanager
def of_the_teacher() -> Iterator[None]:
    """An error raised within it says that it is about the teacher."""
    try:
        yield
    except UserError as error:
        raise UserError(f"the teacher: {error}") from error


def teacher_dims(cfg: EvalConfig, dims: ParallelDims) -> ParallelDims:
    """The student's parallel degrees ``dims`` with the teacher's tp and cp; raises as
    :func:`teacher_degrees` does."""
    tp, cp = teacher_degrees(cfg)
    return replace(dims, tp=tp, cp=cp)


def teacher_degrees(cfg: EvalConfig) -> tuple[int, int]:
    """tp and cp of the teacher: the student's, except where ``teacher_parallel`` gives others.

    Raises:
        UserError: tp * cp differs from the student's, so the models would read different batches.
    """
    student, teacher = cfg.parallel, cfg.teacher_parallel
    tp = student.tp if teacher.tp is None else teacher.tp
    cp = student.cp if teacher.cp is None else teacher.cp
    if tp * cp != student.tp * student.cp:
        raise UserError(
            f"teacher_parallel has tp({tp}) * cp({cp}) = {tp * cp} and parallel has"
            f" tp({student.tp}) * cp({student.cp}) = {student.tp * student.cp}, but both models"
            " read the same batches on the same processes: make the products equal"
        )
    return tp, cp


def check_tokenizer(
    cfg: EvalConfig, tokenizer: TextTokenizer, num_ids: int, teacher_num_ids: int
) -> Iterator[str]:
    """Refuse a teacher with another tokenizer.

    Args:
        cfg: names both checkpoints.
        tokenizer: the student's tokenizer.
        num_ids: rows of the student's head.
        teacher_num_ids: rows of the teacher's head.

    Yields:
        A note for everything that could not be compared, and for heads of different sizes.

    Raises:
        UserError: the tokenizers differ.
    """
    files, section = _teachers_tokenizer(cfg)
    if section is None:
        yield (
            f"{cfg.teacher_checkpointer.get('checkpoint_dir', 'the teacher')} has no tokenizer"
            " files that are known: the teacher is taken to have the student's tokenizer"
        )
    else:
        found = tokenizers.difference(tokenizer, components.build(section, "tokenizer"))
        if found is None and not isinstance(tokenizer, HFTokenizer):
            differing = (
                f"{student} and {teacher}"
                for student, teacher in files
                if student.is_file() and student.read_bytes() != teacher.read_bytes()
            )
            found = next(differing, None)
            if not files:
                yield (
                    "the tokenizers of student and teacher come from different kinds of files, and"
                    " were compared on a short text only"
                )
        if found is not None:
            raise UserError(
                f"student and teacher have different tokenizers ({found}), so that their"
                " distributions are over different tokens: run each alone and compare"
                " metrics.bits_per_byte"
            )
    if num_ids != teacher_num_ids:
        yield (
            f"the student's head has {num_ids:,} rows and the teacher's {teacher_num_ids:,}: they"
            f" are compared over the {min(num_ids, teacher_num_ids):,} ids that both have"
        )


def _teachers_tokenizer(
    cfg: EvalConfig,
) -> tuple[list[tuple[Path, Path]], dict[str, Any] | None]:
    """(pairs of a student's and a teacher's file, the teacher's ``tokenizer`` section or None).

    The section is the student's with the teacher's files of the same names; without these, what
    the teacher's folder says, and there are no pairs.
    """
    if cfg.teacher_checkpointer.get("checkpoint_dir") is None:
        return [], None
    teacher_folder = Path(cfg.teacher_checkpointer["checkpoint_dir"])
    student_folder = Path(cfg.checkpointer.get("checkpoint_dir") or "").resolve()
    section, files = dict(cfg.tokenizer), []
    for key, value in cfg.tokenizer.items():
        if key == "_component_" or not isinstance(value, str) or not Path(value).exists():
            continue
        path = Path(value).resolve()
        if path.is_relative_to(student_folder):
            section[key] = str(teacher_folder / path.relative_to(student_folder))
            files.append((Path(value), Path(section[key])))
    if files and all(_has_counterpart(*pair) for pair in files):
        return files, section
    try:
        return [], tokenizer_section(teacher_folder, config_of(cfg.teacher_checkpointer))
    except UserError:
        return [], None


def _has_counterpart(student: Path, teacher: Path) -> bool:
    """Whether the teacher has the student's file, or a folder with a tokenizer in its place."""
    return teacher.is_file() if student.is_file() else (teacher / "tokenizer.json").is_file()


def check_same_batches(student: Reader, teacher: Reader) -> None:
    """Refuse a teacher whose ranks do not read the student's batches.

    Raises:
        UserError: ranks that share the teacher's matrices or windows read different batches, or
            tp * cp differs between teacher and student.
    """
    shared = (tp_group(teacher.model), teacher.groups.cp)
    batch_ranks = ranks_of(student.groups.batch)
    mixed = any(len(batch_ranks & ranks_of(group)) > 1 for group in shared)

    def size(reader: Reader) -> int:
        groups = (tp_group(reader.model), reader.groups.cp)
        return math.prod(max(1, len(ranks_of(group))) for group in groups)

    if mixed or size(student) != size(teacher):
        raise UserError(
            f"the student shares a batch among {size(student)} ranks (tp * cp) and the teacher"
            f" among {size(teacher)}: both read the same batches on the same ranks; give"
            " teacher_meshes with the student's dp_replicate and dp_shard, and the same product of"
            " tp and cp"
        )
