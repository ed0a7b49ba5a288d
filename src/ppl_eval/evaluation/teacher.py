"""A teacher: what it must share with its student, and how both are laid out and loaded."""

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
from ppl_eval.parallel.tensor import ranks_of, tp_groups
from ppl_eval.score.reader import Reader


@contextmanager
def of_the_teacher() -> Iterator[None]:
    """A sentence that a model's checks raise says that it is about the teacher."""
    try:
        yield
    except UserError as error:
        raise UserError(f"the teacher: {error}") from error


def teacher_dims(cfg: EvalConfig, dims: ParallelDims) -> ParallelDims:
    """The teacher's degrees: the student's, but for what ``teacher_parallel`` says.

    Raises:
        UserError: tp * cp is another than the student's, so that they would not read the same
            batches.
    """
    tp, cp = teacher_degrees(cfg)
    return replace(dims, tp=tp, cp=cp)


def teacher_degrees(cfg: EvalConfig) -> tuple[int, int]:
    """tp and cp of the teacher; see :func:`teacher_dims`."""
    own, asked = cfg.parallel, cfg.teacher_parallel
    tp = own.tp if asked.tp is None else asked.tp
    cp = own.cp if asked.cp is None else asked.cp
    if tp * cp != own.tp * own.cp:
        raise UserError(
            f"teacher_parallel has tp({tp}) * cp({cp}) = {tp * cp} and parallel has tp({own.tp}) *"
            f" cp({own.cp}) = {own.tp * own.cp}, but both models read the same batches on the same"
            " processes: make the products equal"
        )
    return tp, cp


def check_tokenizer(
    cfg: EvalConfig, tokenizer: TextTokenizer, num_ids: int, teacher_num_ids: int
) -> Iterator[str]:
    """Refuse a teacher with another tokenizer; say so where one has more rows, or no tokenizer.

    Args:
        cfg: names both checkpoints.
        tokenizer: the text's.
        num_ids: rows of the student's head.
        teacher_num_ids: rows of the teacher's head.

    Raises:
        UserError: the tokenizers differ.
    """
    moved, node = _teachers_section(cfg)
    if node is None:
        yield (
            f"{cfg.teacher_checkpointer.get('checkpoint_dir', 'the teacher')} has no tokenizer"
            " files that are known: the teacher is taken to have the student's tokenizer"
        )
    else:
        other = components.build(node, "tokenizer")
        found = tokenizers.difference(tokenizer, other)
        if found is None and not isinstance(tokenizer, HFTokenizer):
            found = next((f"{own} and {its}" for own, its in moved if not _same(own, its)), None)
            if not moved:
                yield (
                    "the tokenizers of student and teacher are of different kinds of files, and"
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


def _teachers_section(
    cfg: EvalConfig,
) -> tuple[list[tuple[Path, Path]], dict[str, Any] | None]:
    """(the student's tokenizer files and the teacher's of the same names, the section of the
    teacher's tokenizer).

    It is the student's section on the teacher's files if they are there, else what the teacher's
    folder says; None if it says nothing.
    """
    if cfg.teacher_checkpointer.get("checkpoint_dir") is None:
        return [], None
    folder = Path(cfg.teacher_checkpointer["checkpoint_dir"])
    student = Path(cfg.checkpointer.get("checkpoint_dir") or "").resolve()
    node, moved = dict(cfg.tokenizer), []
    for key, value in cfg.tokenizer.items():
        if key == "_component_" or not isinstance(value, str) or not Path(value).exists():
            continue
        own = Path(value).resolve()
        if own.is_relative_to(student):
            node[key] = str(folder / own.relative_to(student))
            moved.append((Path(value), Path(node[key])))
    if moved and all(_is_there(own, its) for own, its in moved):
        return moved, node
    try:
        return [], tokenizer_section(folder, config_of(cfg.teacher_checkpointer))
    except UserError:
        return [], None


def _is_there(own: Path, its: Path) -> bool:
    """Whether the teacher has the file, or the folder with the file that is read of one."""
    return its.is_file() if own.is_file() else (its / "tokenizer.json").is_file()


def _same(own: Path, its: Path) -> bool:
    return own.is_dir() or own.read_bytes() == its.read_bytes()


def check_same_batches(student: Reader, teacher: Reader) -> None:
    """Refuse a teacher whose ranks do not read the student's batches.

    Raises:
        UserError: ranks that share the teacher's matrices or windows read different batches, or the
            teacher shares them among more or fewer ranks than the student.
    """
    shared = [*tp_groups(teacher.model), teacher.groups.cp]
    batch_ranks = ranks_of(student.groups.batch)
    mixed = any(len(batch_ranks & ranks_of(group)) > 1 for group in shared)

    def size(reader: Reader) -> int:
        tp = max((len(ranks_of(group)) for group in tp_groups(reader.model)), default=1)
        return tp * max(1, len(ranks_of(reader.groups.cp)))

    if mixed or size(student) != size(teacher):
        raise UserError(
            f"the student shares a batch among {size(student)} ranks (tp * cp) and the teacher"
            f" among {size(teacher)}: both read the same batches on the same ranks; give"
            " teacher_meshes with the student's dp_replicate and dp_shard, and the same product of"
            " tp and cp"
        )
