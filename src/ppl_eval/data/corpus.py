"""The data set components of a config: text_corpus, and several data sets with names."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppl_eval import components
from ppl_eval.data import files, hub
from ppl_eval.data.documents import Corpus, NamedCorpora, as_documents
from ppl_eval.data.files import Files
from ppl_eval.data.rows import UNITS, Columns, Wanted
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

    Local files, folders and loader names are recognised without asking a hub. Text, id (from a
    column ``id``, if there is one) and domain are kept as the file spells them. Other columns are
    not read.

    Args:
        source: a data set's name, a local file or folder (of files, or made by ``save_to_disk``),
            or a loader for ``data_files`` (json, text, csv, parquet, arrow). None: their suffix
            decides.
        data_files: files or glob patterns, read in the order given, or one folder.
        split: a split, or a part of it such as ``train[:10]`` or ``test[50%:]``. None: the only
            split there is. Files that are not in a folder are the split ``train``.
        column: the column with the text.
        domain_column: the column with each row's domain, for results by domain. None: ``domain``,
            if there is such a column; an empty string: no column.
        name: the configuration of a data set on a hub, such as ``wikitext-2-raw-v1``.
        revision: commit, tag or branch of a data set on a hub.
        unit: how to split a .txt file into documents: each ``line``, each ``paragraph`` (blank
            lines separate paragraphs) or the whole ``file``. None: lines, and an error for blank
            lines between others.

    Raises:
        UserError: no such file, split or column; a file that is not what its name says; a row
            without a text; no rows.
    """
    _check_arguments(**locals())
    with _quiet_datasets():
        local = files.find(source, data_files, name, revision)
        if unit is not None and not (isinstance(local, Files) and local.loader == "text"):
            rows = local.name if isinstance(local, Files) else local or source
            raise UserError(
                f"dataset.unit is {unit!r}, but it is for .txt files: {rows} has rows, which are"
                " the documents"
            )
        wanted = Wanted(column, domain_column, unit)
        if isinstance(local, Files):
            return _read_files(local, split, wanted)
        origin = str(local or source)
        splits = _load_saved(local) if local else hub.load(origin, name, revision)
        rows = _choose(splits, split, origin)
    columns = Columns(wanted)
    _, id_column, domain_column = columns.find(origin, rows.column_names)
    columns.need_domain(origin)
    notes = _time_notes(rows, [id_column, domain_column], origin)
    return Corpus(rows, column, domain_column, id_column, origin, notes)


def check_files(node: Mapping[str, Any]) -> None:
    """Check the arguments of a ``text_corpus`` component, and that its local files exist.

    No file is read, and no server is asked.

    Raises:
        UserError: a file is missing, or an argument has a value that it cannot have.
    """
    given = {key: value for key, value in node.items() if key != "_component_"}
    _check_arguments(**{"column": "text", **given})
    if "://" not in f"{given.get('source')} {given.get('data_files')}":
        files.find(*(given.get(name) for name in ("source", "data_files", "name", "revision")))


def build_dataset(node: Mapping[str, Any], key: str, tokenizer: Any) -> Any:
    """Build the component of a data set; components with a parameter ``tokenizer`` get it.

    Args:
        node: the component.
        key: the config key with the component, for errors.
        tokenizer: the model's tokenizer.

    Raises:
        UserError: the component raised an error.
    """
    wanted = "tokenizer" in components.parameters(node, key) and "tokenizer" not in node
    with _quiet_datasets():
        return components.build(node, key, **({"tokenizer": tokenizer} if wanted else {}))


def named_corpora(corpora: Mapping[str, Mapping[str, Any]], tokenizer: Any = None) -> NamedCorpora:
    """Config component: several data sets in one run; each data set's name is its domain.

    A ``dataset`` in a config that is a list of components becomes this component.

    Args:
        corpora: name -> component of a data set.
        tokenizer: goes to the components that have a parameter ``tokenizer``.
    """
    return NamedCorpora(
        {
            name: as_documents(build_dataset(node, f"dataset {name}", tokenizer))
            for name, node in corpora.items()
        }
    )


def _check_arguments(unit: Any = None, data_files: Any = None, **texts: Any) -> None:
    if unit is not None and unit not in UNITS:
        raise UserError(f"dataset.unit is {unit!r}, but it is line, paragraph, file or null")
    each = [data_files] if isinstance(data_files, str) else data_files
    if each is not None and not (
        isinstance(each, Sequence) and all(isinstance(file, str) and file for file in each)
    ):
        raise UserError(
            f"dataset.data_files is {data_files!r}, but it is a file or a list of files"
        )
    kinds = {
        "column": "the name of a column",
        "domain_column": "the name of a column or null",
        "source": "a name, a path or null",
    }
    for key, value in texts.items():
        may_be = (value is None and key != "column") or (value == "" and key == "domain_column")
        if not (may_be or (isinstance(value, str) and value)):
            kind = kinds.get(key, "a name or null")
            raise UserError(f"dataset.{key} is {value!r}, but it is {kind}")


def _read_files(found: Files, split: str | None, wanted: Wanted) -> Corpus:
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


def _load_saved(folder: Path) -> Any:
    """The data sets in a folder that save_to_disk wrote."""
    import datasets

    try:
        return datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder} was made by save_to_disk, but cannot be loaded:"
            f" {' '.join(str(error).split())}: copy the whole folder"
        ) from error


def _parts(sizes: Mapping[str, int], split: str | None, origin: str) -> list[tuple[str, int, int]]:
    """(split, first row, row after the last) for each part that ``split`` chooses.

    Raises:
        UserError: there are several splits and none is chosen, or there is no such split.
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
    """The rows that ``split`` chooses."""
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
    """Notes on columns of times: the datasets library turns dates in JSON into times."""
    types = {name: getattr(table.features.get(name), "dtype", "") for name in labels}
    return tuple(
        f"{origin}: column {name!r} holds {kind}, which is printed as Arrow does; to keep ids and"
        " domains as the file spells them, download the data set and name its files in"
        " dataset.data_files"
        for name, kind in types.items()
        if kind.startswith(("timestamp", "date", "time"))
    )


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """Silence the datasets library: our errors are enough, and a log needs no progress bars."""
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
