"""text_corpus: a Hugging Face data set or local files as documents, one row each."""

import glob
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppl_eval import components, fingerprint
from ppl_eval.data.documents import Corpus, NamedCorpora, as_documents
from ppl_eval.errors import UserError

_LOADERS = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
_LOADER_NAMES = {"text": "text", "txt": "text", "json": "json", "jsonl": "json"} | {
    name: name for name in ("csv", "parquet")
}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True)
class _Source:
    """What is to be read, and by what.

    Attributes:
        name: as an error calls it.
        loader: json, text, csv or parquet, or None for a data set's own name or format.
        files: local or remote files, if they are known one by one.
        folder: a local folder of files for ``loader``, whose names tell their splits.
    """

    name: str
    loader: str | None
    files: tuple[str, ...] = ()
    folder: str | None = None

    @property
    def local_files(self) -> list[Path]:
        """The files that lie on this machine."""
        if self.folder is not None:
            return _files_in(Path(self.folder))
        return [Path(file) for file in self.files if "://" not in file]


def text_corpus(
    source: str | None = None,
    data_files: str | list[str] | None = None,
    split: str | None = None,
    column: str = "text",
    domain_column: str | None = None,
    name: str | None = None,
    revision: str | None = None,
    unit: str = "line",
) -> Corpus:
    """Config component: texts of a Hugging Face data set or of local files.

    A local file, folder or loader name is recognised before any hub is asked.

    Args:
        source: a data set's name, a local file or folder, or a loader (json, text, csv, parquet).
            None with ``data_files``: the suffix decides.
        data_files: files or glob patterns, read in the order given.
        split: which split; None takes the only one there is.
        column: holds the text.
        domain_column: holds each row's domain, for results by domain. None takes a column named
            ``domain`` if there is one; an empty string takes none.
        name: the data set's configuration, such as ``wikitext-2-raw-v1``.
        revision: the data set's commit, tag or branch.
        unit: of a .txt file: each ``line`` is a document, or the whole ``file``.

    Raises:
        UserError: no such file, split or column; a file that is not UTF-8 or not JSON; no rows.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    _check_arguments(source, data_files, column, unit)
    found = _locate(source, data_files)
    options = {"split": split, "revision": revision, **_loader_options(found, column, unit)}
    # datasets takes a file with the same name and time for the same file; the name of the
    # configuration is part of its cache's key as well
    key = fingerprint.of_files(found.local_files) if found.loader else None
    try:
        with _quiet_datasets():
            loaded = datasets.load_dataset(
                found.loader or found.name,
                name=name if key is None else f"content-{key}",
                **options,
            )
    except StopIteration as error:
        raise UserError(f"{found.name} is empty: there is nothing to measure") from error
    except (DatasetsError, OSError, ValueError) as error:
        raise UserError(_explain(found, error)) from error
    table = _only_split(loaded, found.name)
    for argument, wanted in (("column", column), ("domain_column", domain_column or column)):
        if wanted not in table.column_names:
            raise UserError(
                f"dataset.{argument} is {wanted!r}, but {found.name} has the columns"
                f" {', '.join(table.column_names)}"
            )
    if len(table) == 0:
        raise UserError(f"{found.name} has no rows: there is nothing to measure")
    if domain_column is None and "domain" in table.column_names:
        domain_column = "domain"
    id_column = "id" if "id" in table.column_names else None
    return Corpus(
        table,
        column,
        domain_column or None,
        id_column,
        found.name,
        explain=lambda error: _explain(found, error),
    )


def build_dataset(node: Mapping[str, Any], key: str, tokenizer: Any) -> Any:
    """Build a data set's component; torchtune's take the tokenizer as an argument.

    Args:
        node: the component.
        key: of the config, for errors.
        tokenizer: the model's.

    Raises:
        UserError: whatever the component raises.
    """
    wanted = "tokenizer" in components.argument_names(node, key) and "tokenizer" not in node
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


def _check_arguments(source: Any, data_files: Any, column: Any, unit: Any) -> None:
    if unit not in ("line", "file"):
        raise UserError(f"dataset.unit is {unit!r}, but it is line or file")
    if not isinstance(column, str) or not column:
        raise UserError(f"dataset.column is {column!r}, but it is the name of a column")
    if source is not None and (not isinstance(source, str) or not source):
        raise UserError(f"dataset.source is {source!r}, but it is a name, a path or null")
    files = data_files if isinstance(data_files, Sequence) or data_files is None else [data_files]
    if not all(isinstance(file, str) and file for file in files or []):
        raise UserError(
            f"dataset.data_files is {data_files!r}, but it is a file or a list of files"
        )


def _locate(source: str | None, data_files: str | Sequence[str] | None) -> _Source:
    patterns = [data_files] if isinstance(data_files, str) else list(data_files or [])
    if source is not None and source not in _LOADER_NAMES and not patterns:
        path = Path(source)
        if path.is_dir():
            files = _files_in(path)
            loader = _loader_of([str(file) for file in files]) if files else None
            return _Source(source, loader, folder=source if files else None)
        if path.is_file():
            return _Source(source, _loader_of([source]), files=(source,))
        if _suffix(source) in _LOADERS or source.startswith((".", "/", "~")):
            raise UserError(f"dataset.source is {source!r}, but there is no such file or folder")
        return _Source(source, None)
    if not patterns:
        which = "no source" if source is None else f"source {source!r}, which is a loader's name,"
        raise UserError(f"dataset has {which} and no data_files: set dataset.data_files=FILE")
    files = [file for pattern in patterns for file in _expand(pattern)]
    if source is None:
        return _Source(", ".join(files), _loader_of(files), files=tuple(files))
    if source not in _LOADER_NAMES:
        raise UserError(
            f"dataset.source is {source!r} and data_files is {data_files!r}, but with data_files it"
            " is a loader (json, text, csv, parquet) or null: the suffix decides"
        )
    return _Source(", ".join(files), _LOADER_NAMES[source], files=tuple(files))


def _expand(pattern: str) -> list[str]:
    if "://" in pattern:
        return [pattern]
    if Path(pattern).is_dir():
        raise UserError(
            f"dataset.data_files is {pattern!r}, but that is a folder: name its files, or set"
            " dataset.source to it"
        )
    found = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))
    if not found:
        raise UserError(f"dataset.data_files is {pattern!r}, but there is no such file")
    return found


def _files_in(folder: Path) -> list[Path]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [file for file in files if _suffix(str(file)) in _LOADERS]


def _suffix(file: str) -> str:
    path = Path(file)
    return Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix


def _loader_of(files: Sequence[str]) -> str:
    loaders = {_LOADERS.get(_suffix(file)) for file in files}
    if len(loaders) != 1 or None in loaders:
        raise UserError(
            f"cannot tell what {', '.join(files[:5])} is by its suffix (known:"
            f" {', '.join(_LOADERS)}): set dataset.source to json, text, csv or parquet"
        )
    return str(loaders.pop())


def _loader_options(found: _Source, column: str, unit: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if found.files:
        # datasets reads brackets and stars in a name as a pattern
        options["data_files"] = [
            file if "://" in file else glob.escape(file) for file in found.files
        ]
    elif found.folder is not None:
        options["data_dir"] = found.folder
    if found.loader == "text":
        sample_by = {"line": "line", "file": "document"}[unit]
        options |= {"encoding": "utf-8-sig", "sample_by": sample_by}
    elif found.loader == "csv":  # a field is text as it stands, also when it reads NA or 007
        as_they_stand = dict.fromkeys((column, "id", "domain"), str)
        options |= {"encoding": "utf-8-sig", "na_filter": False, "converters": as_they_stand}
        if any(_suffix(str(file)) == ".tsv" for file in found.files):
            options["sep"] = "\t"
    return options


@contextmanager
def _quiet_datasets() -> Iterator[None]:
    """No progress bar where nobody looks, and no error message beside ours."""
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


def _only_split(loaded: Any, origin: str) -> Any:
    if not isinstance(loaded, Mapping):
        return loaded
    if len(loaded) != 1:
        raise UserError(f"{origin} has the splits {', '.join(loaded)}: choose one by dataset.split")
    return next(iter(loaded.values()))


def _explain(found: _Source, error: Exception) -> str:
    """One sentence for a corpus that cannot be read, with file and line if there is one."""
    for file in found.local_files:
        if file.suffix in _COMPRESSED:
            continue
        if file.stat().st_size == 0:
            return f"{file} is empty: there is nothing to measure"
        if found.loader in ("text", "json", "csv"):
            fault = _first_bad_line(file, is_json=found.loader == "json")
            if fault:
                return fault
    reason = error if error.__cause__ is None else error.__cause__
    return f"{found.name} cannot be read as a data set: {' '.join(str(reason).split())}"


def _first_bad_line(file: Path, *, is_json: bool) -> str | None:
    is_array = False
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                return f"{file}, line {number} is not UTF-8: {error.reason} at byte {error.start}"
            is_array |= number == 1 and text.lstrip().startswith("[")
            if is_json and not is_array and text.strip():
                try:
                    json.loads(text)
                except ValueError as error:
                    return f"{file}, line {number} is not JSON: {error}"
    return None
