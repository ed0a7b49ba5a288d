"""text_corpus: a Hugging Face data set or local files as documents, one row each."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppl_eval import components
from ppl_eval.data import files
from ppl_eval.data.documents import Corpus, NamedCorpora, as_documents
from ppl_eval.data.files import Files
from ppl_eval.data.formats import UNITS, Wanted
from ppl_eval.errors import UserError
from ppl_eval.plural import counted, some


def text_corpus(
    source: str | None = None,
    data_files: str | list[str] | None = None,
    split: str | None = None,
    column: str = "text",
    domain_column: str | None = None,
    name: str | None = None,
    revision: str | None = None,
    unit: str | None = None,
) -> Corpus:
    """Config component: texts of a Hugging Face data set or of local files.

    A local file, folder or loader name is recognised before any hub is asked. Text, id (a column
    called ``id``, if there is one) and domain are taken as the file spells them; other columns are
    not read.

    Args:
        source: a data set's name, a local file or folder (of files, or made by ``save_to_disk``),
            or a loader (json, text, csv, parquet, arrow). None with ``data_files``: the suffix
            decides.
        data_files: files or glob patterns, read in the order given, or one folder.
        split: which split, or a part of it such as ``train[:10]`` or ``test[50%:]``; None takes the
            only one there is. Files that are not in a folder are ``train``.
        column: holds the text.
        domain_column: holds each row's domain, for results by domain. None takes a column named
            ``domain`` if there is one; an empty string takes none.
        name: the configuration of a hub's data set, such as ``wikitext-2-raw-v1``.
        revision: the data set's commit, tag or branch.
        unit: what is a document of a .txt file: each ``line``, each ``paragraph`` (blank lines
            separate them) or the whole ``file``. None: lines, of files without blank lines between
            others.

    Raises:
        UserError: no such file, split or column; a file that is not what its name says; a row
            without a text; no rows.
    """
    _check_arguments(
        unit,
        data_files,
        column=column,
        domain_column=domain_column,
        source=source,
        split=split,
        name=name,
        revision=revision,
    )
    with _quiet_datasets():
        local = files.find(source, data_files, name, revision)
        if unit is not None and not (isinstance(local, Files) and local.loader == "text"):
            rows = local.name if isinstance(local, Files) else local or source
            raise UserError(
                f"dataset.unit is {unit!r}, but it is for .txt files: {rows} has rows, which are"
                " the documents"
            )
        if isinstance(local, Files):
            return _of_files(local, split, Wanted(column, domain_column, unit))
        if local is not None:
            origin, splits = str(local), _saved(local)
        else:
            from ppl_eval.data import hub

            origin = str(source)
            splits = hub.load(origin, name, revision)
        table = _choose(splits, split, origin)
    for argument, wanted in (("column", column), ("domain_column", domain_column or column)):
        if wanted not in table.column_names:
            raise UserError(
                f"dataset.{argument} is {wanted!r}, but {origin} has the columns"
                f" {', '.join(table.column_names)}"
            )
    if domain_column is None and "domain" in table.column_names:
        domain_column = "domain"
    id_column = "id" if "id" in table.column_names else None
    notes = _time_notes(table, [id_column, domain_column], origin)
    return Corpus(table, column, domain_column or None, id_column, origin, notes)


def check_files(node: Mapping[str, Any]) -> None:
    """Refuse a ``text_corpus`` component whose local files are not there, without reading any.

    Args:
        node: the component. Files and data sets elsewhere are not looked for.

    Raises:
        UserError: naming the file, or an argument that cannot be.
    """
    given = {key: value for key, value in node.items() if key != "_component_"}
    texts = {"column": "text", **given}
    _check_arguments(texts.pop("unit", None), texts.pop("data_files", None), **texts)
    if "://" not in f"{given.get('source')} {given.get('data_files')}":
        files.find(*(given.get(name) for name in ("source", "data_files", "name", "revision")))


def build_dataset(node: Mapping[str, Any], key: str, tokenizer: Any) -> Any:
    """Build a data set's component; torchtune's take the tokenizer as an argument.

    Args:
        node: the component.
        key: the config key that holds it, for errors.
        tokenizer: the model's.

    Raises:
        UserError: whatever the component raises.
    """
    wanted = "tokenizer" in components.parameters(node, key) and "tokenizer" not in node
    with _quiet_datasets():
        return components.build(node, key, **({"tokenizer": tokenizer} if wanted else {}))


def named_corpora(corpora: Mapping[str, Mapping[str, Any]], tokenizer: Any = None) -> NamedCorpora:
    """Config component: several data sets in one run, each with a name that is its domain.

    A config's ``dataset`` that is a list of components with names becomes this.

    Args:
        corpora: name -> component of a data set.
        tokenizer: for those that take it.
    """
    return NamedCorpora(
        {
            name: as_documents(build_dataset(node, f"dataset {name}", tokenizer))
            for name, node in corpora.items()
        }
    )


def _check_arguments(unit: Any, data_files: Any, **texts: Any) -> None:
    if unit is not None and unit not in UNITS:
        raise UserError(f"dataset.unit is {unit!r}, but it is line, paragraph, file or null")
    each = [data_files] if data_files is None or isinstance(data_files, str) else data_files
    if data_files is not None and not (
        isinstance(each, Sequence) and all(isinstance(file, str) and file for file in each)
    ):
        raise UserError(
            f"dataset.data_files is {data_files!r}, but it is a file or a list of files"
        )
    kinds = {"column": "the name of a column", "source": "a name, a path or null"}
    kinds["domain_column"] = "the name of a column or null"
    for key, value in texts.items():
        may_be = (value is None and key != "column") or (value == "" and key == "domain_column")
        if not (may_be or (isinstance(value, str) and value)):
            kind = kinds.get(key, "a name or null")
            raise UserError(f"dataset.{key} is {value!r}, but it is {kind}")


def _of_files(found: Files, split: str | None, wanted: Wanted) -> Corpus:
    from ppl_eval.data import table

    parts = _parts(dict.fromkeys(found.splits, 10**9), split, found.name)
    tables = table.of_files({name: found.splits[name] for name, _, _ in parts}, wanted)
    notes = []
    if found.left_out:
        notes.append(
            f"{found.name}: {counted(len(found.left_out), 'file')} in no split by name, not read:"
            f" {some(found.left_out, 3)}"
        )
    rows = _choose(tables, split, found.name)
    if wanted.unit is None and found.loader == "text":
        notes.append(
            f"{found.name} is read by line: {counted(len(rows), 'document')};"
            " dataset.unit=paragraph or dataset.unit=file reads it otherwise"
        )
    domain = "domain" if wanted.domain != "" else None
    return Corpus(rows, "text", domain, "id", found.name, tuple(notes))


def _saved(folder: Path) -> Any:
    """The data sets of a folder that save_to_disk wrote."""
    import datasets

    try:
        return datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder} was made by save_to_disk, but cannot be loaded:"
            f" {' '.join(str(error).split())}: copy the whole folder"
        ) from error


def _parts(sizes: Mapping[str, int], split: str | None, origin: str) -> list[tuple[str, int, int]]:
    """(split, first row, row after the last) of what is asked for, of splits of these sizes.

    Raises:
        UserError: none is chosen of several, or one that there is not.
    """
    from datasets import ReadInstruction

    has = f"{origin} has the split{'s' if len(sizes) > 1 else ''} {', '.join(sizes)}"
    if split is None:
        if len(sizes) > 1:
            raise UserError(f"{has}: choose one by dataset.split")
        return [(name, 0, size) for name, size in sizes.items()]
    try:
        parts = ReadInstruction.from_spec(split).to_absolute(sizes)
    except ValueError as error:
        raise UserError(f"dataset.split is {split!r}, but {has}: {error}") from error
    return [(part.splitname, part.from_, part.to) for part in parts]


def _choose(loaded: Any, split: str | None, origin: str) -> Any:
    """Rows of the splits, or parts of splits, that are asked for."""
    from datasets import Dataset, concatenate_datasets

    if isinstance(loaded, Dataset):
        loaded = {str(loaded.split or "train"): loaded}
    parts = _parts({name: len(rows) for name, rows in loaded.items()}, split, origin)
    rows = concatenate_datasets([loaded[name].select(range(a, b)) for name, a, b in parts])
    if len(rows) == 0:
        part = "" if split is None else f", split {split},"
        raise UserError(f"{origin}{part} has no rows: there is nothing to measure")
    return rows


def _time_notes(table: Any, labels: Sequence[str | None], origin: str) -> tuple[str, ...]:
    """Labels that were perhaps other texts before: the library takes dates in JSON for times."""
    times = [
        name
        for name in labels
        if getattr(table.features.get(name), "dtype", "").startswith(("timestamp", "date", "time"))
    ]
    return tuple(
        f"{origin}: column {name!r} holds {table.features[name].dtype}, which is printed as Arrow"
        " does; for ids and domains as the file spells them download it and give its files"
        for name in times
    )


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """No progress bar where nobody looks, and no error message but ours."""
    from datasets.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
