"""What a teacher must have in common with its student: batches and tokenizer."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ppl_eval import components
from ppl_eval.data import tokenizer as tokenizers
from ppl_eval.data.tokenizer import TextTokenizer
from ppl_eval.errors import UserError
from ppl_eval.model.agree import read_config_beside
from ppl_eval.model.auto import tokenizer_section
from ppl_eval.parallel.dims import ParallelDims
from ppl_eval.schema import EvalConfig


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
    other = _teachers_tokenizer(cfg)
    if other is None:
        yield (
            f"{cfg.teacher_checkpointer.get('checkpoint_dir', 'the teacher')} has no tokenizer"
            " files: the teacher is taken to have the student's tokenizer"
        )
    else:
        difference = tokenizers.difference(tokenizer, other)
        if difference is not None:
            raise UserError(
                f"student and teacher have different tokenizers ({difference}), so that their"
                " distributions are over different tokens: run each alone and compare"
                " metrics.bits_per_byte"
            )
    if num_ids != teacher_num_ids:
        yield (
            f"the student's head has {num_ids:,} rows and the teacher's {teacher_num_ids:,}: they"
            f" are compared over the {min(num_ids, teacher_num_ids):,} ids that both have"
        )


def _teachers_tokenizer(cfg: EvalConfig) -> TextTokenizer | None:
    """The tokenizer in the teacher's folder, of the same files as the student's if they are there;
    None if there is none."""
    folder = cfg.teacher_checkpointer.get("checkpoint_dir")
    if folder is None:
        return None
    own = Path(cfg.checkpointer.get("checkpoint_dir") or "")
    node = dict(cfg.tokenizer)
    for key, value in cfg.tokenizer.items():
        if key != "_component_" and isinstance(value, str) and Path(value).exists():
            inside = Path(value).resolve()
            if inside.is_relative_to(own.resolve()):
                node[key] = str(Path(folder) / inside.relative_to(own.resolve()))
    moved = [node[key] for key in node if node[key] != cfg.tokenizer[key]]
    if moved and all(Path(path).is_file() or _has_tokenizer(Path(path)) for path in moved):
        return components.build(node, "tokenizer")
    if not _has_tokenizer(Path(folder)):
        return None
    config = read_config_beside(cfg.teacher_checkpointer)
    return components.build(tokenizer_section(Path(folder), config), "tokenizer")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
