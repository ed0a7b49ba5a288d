"""Which local files a data set consists of: paths, patterns and folders -> files by split."""

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppl_eval.data import hub
from ppl_eval.errors import UserError
from ppl_eval.plural import some

SUFFIXES = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
"""Suffix -> loader."""

LOADERS = {loader: loader for loader in SUFFIXES.values()} | {
    suffix[1:]: loader for suffix, loader in SUFFIXES.items()
}
"""What ``source`` may call a loader -> loader."""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


@dataclass(frozen=True)
class File:
    """A file of this machine.

    Attributes:
        name: as the user wrote it, or its address, for errors.
        loader: text, json, csv, parquet or arrow.
    """

    name: str
    path: Path
    loader: str

    @property
    def suffix(self) -> str:
        """In lower case, without that of a compression."""
        return _suffixes(self.name)[0]

    @property
    def compression(self) -> str:
        """The suffix of the compression, or an empty string."""
        return _suffixes(self.name)[1]


@dataclass(frozen=True)
class Files:
    """The files of a data set.

    Attributes:
        name: for errors about all of them.
        loader: text, json, csv, parquet or arrow, the same for all files.
        splits: name of a split -> its files, in the order in which they are read.
        left_out: files of the folder that are in no split.
    """

    name: str
    loader: str
    splits: Mapping[str, tuple[File, ...]]
    left_out: tuple[str, ...] = ()


def find(
    source: str | None, data_files: str | Sequence[str] | None, name: str | None, revision: Any
) -> Files | Path | None:
    """The files that a data set's arguments name; see :func:`ppl_eval.data.text_corpus` for these.

    Addresses among ``data_files`` are fetched.

    Returns:
        Files; a folder that ``save_to_disk`` of the datasets library wrote; or None for a data set
        of a hub.

    Raises:
        UserError: there is no such file, or what there is cannot be read; arguments that contradict
            each other.
    """
    source = source and os.path.expanduser(source)
    patterns = [data_files] if isinstance(data_files, str) else data_files or []
    patterns = [os.path.expanduser(pattern) for pattern in patterns]
    loader = None if source is None else LOADERS.get(source)
    key = "data_files"
    if source is not None and loader is None:
        if patterns:
            raise UserError(
                f"dataset.source is {source!r} and data_files is {data_files!r}, but with"
                f" data_files it is a loader ({', '.join(dict.fromkeys(LOADERS.values()))}) or"
                " null: the suffix decides"
            )
        if not _is_local(source):
            return None
        patterns, key = [source], "source"
    elif not patterns:
        which = "no source" if source is None else f"source {source!r}, which is a loader's name,"
        raise UserError(f"dataset has {which} and no data_files: set dataset.data_files=FILE")
    for argument, value in (("name", name), ("revision", revision)):
        if value is not None:
            raise UserError(
                f"dataset.{argument} is {value!r}, but that is for data sets of a hub, and"
                f" {patterns[0]} is read here: remove it"
            )
    folder = Path(patterns[0])
    if len(patterns) == 1 and folder.is_dir():
        is_saved = any((folder / f).is_file() for f in ("dataset_dict.json", "state.json"))
        return folder if is_saved else _of_folder(folder, loader)
    names = paths = [path for pattern in patterns for path in _expand(pattern, key)]
    if any("://" in path for path in paths):
        names, paths = hub.download(paths)
    repeated = [name for number, name in enumerate(names) if name in names[:number]]
    if repeated:
        raise UserError(f"dataset.data_files names {repeated[0]} twice: name each file once")
    kind = loader or _loader_of(names)
    found = tuple(File(n, Path(path), kind) for n, path in zip(names, paths, strict=True))
    # the datasets library calls the split of single files so
    return Files(some(names, 3), kind, {"train": found})


def _is_local(source: str) -> bool:
    """Whether a source can be nothing but a path, or is one."""
    has_suffix = _suffixes(source)[0] in SUFFIXES
    if has_suffix or "://" in source:
        return has_suffix
    return os.path.lexists(source) or source.startswith((".", "/")) or glob.has_magic(source)


def _expand(pattern: str, key: str) -> list[str]:
    """The files that a path or a pattern names; an address stays as it is."""
    if "://" in pattern:
        return [pattern]
    found = [pattern]
    if not os.path.lexists(pattern):
        matches = sorted(glob.glob(pattern, recursive=True))
        found = [name for name in matches if not os.path.isdir(name)]
    if not found:
        what = "file" if key == "data_files" else "file or folder"
        raise UserError(f"dataset.{key} is {pattern!r}, but there is no such {what}")
    for name in found:
        _check_file(name, key)
    return found


def _check_file(path: str, key: str) -> None:
    """Refuse what is no file that every rank can read from its beginning."""
    if os.path.isfile(path):
        return
    if os.path.islink(path) and not os.path.exists(path):
        raise UserError(
            f"dataset.{key}: {path} is a link to {os.readlink(path)}, but there is no such file:"
            " was it moved, or a download cut off?"
        )
    if os.path.isdir(path):
        raise UserError(
            f"dataset.{key} has {path!r} among other files, but that is a folder: name its files,"
            f" as in {path.rstrip('/')}/*.jsonl"
        )
    raise UserError(
        f"dataset.{key}: {path} is no regular file (a pipe or a device?), and every rank reads the"
        " text from its beginning: write it to a file first"
    )


def _of_folder(folder: Path, loader: str | None) -> Files:
    """The files of a folder and its subfolders, whose names tell their splits."""
    card = folder / "README.md"
    text = card.read_text("utf-8", errors="replace") if card.is_file() else ""
    header = re.match(r"\ufeff?---\s*\n.*?^---", text, re.DOTALL | re.MULTILINE)
    if header and re.search(r"^configs:", header[0], re.MULTILINE):
        raise UserError(
            f"the README.md of {folder} says which of its files are which split, and is not read:"
            " set dataset.data_files to the files, or dataset.source to the subfolder with them"
        )
    paths = glob.glob(os.path.join(glob.escape(str(folder)), "**"), recursive=True)
    known = [
        path
        for path in map(Path, sorted(paths))
        if _suffixes(path.name)[0] in SUFFIXES and not path.is_dir()
        # such as __MACOSX, which the datasets library leaves out, too
        if not any(part.startswith("__") for part in path.relative_to(folder).parts[:-1])
    ]
    if not known:
        raise UserError(
            f"{folder} has no file that can be read (known: {', '.join(SUFFIXES)}): set"
            " dataset.data_files to its files and dataset.source to json, text, csv, parquet or"
            " arrow"
        )
    for path in known:
        _check_file(str(path), "source")
    splits = _by_names(folder, known)
    chosen = {path for paths in splits.values() for path in paths}
    left_out = tuple(str(path) for path in known if path not in chosen)
    kind = loader or _loader_of([str(path) for path in sorted(chosen)])
    found = {s: tuple(File(str(path), path, kind) for path in paths) for s, paths in splits.items()}
    return Files(str(folder), kind, found, left_out)


def _by_names(folder: Path, known: Sequence[Path]) -> dict[str, list[Path]]:
    """Split -> files, as the datasets library tells them by their names."""
    from datasets.data_files import DataFilesDict, get_data_patterns

    root = os.path.abspath(folder)
    base = glob.escape(root)
    try:
        patterns: Any = get_data_patterns(base)
        files = DataFilesDict.from_patterns(patterns, base_path=base)
    except FileNotFoundError:
        files = {}
    splits = {
        str(split): [
            p for p in (folder / Path(name).relative_to(root) for name in names) if p in known
        ]
        for split, names in files.items()
    }
    return {split: paths for split, paths in splits.items() if paths} or {"train": [*known]}


def _suffixes(name: str) -> tuple[str, str]:
    """(suffix, compression) in lower case."""
    path = Path(name.split("?")[0] if "://" in name else name)
    if path.suffix.lower() in COMPRESSED:
        return Path(path.stem).suffix.lower(), path.suffix.lower()
    return path.suffix.lower(), ""


def _loader_of(names: Sequence[str]) -> str:
    """What files are by their suffixes, which are of one kind."""
    examples: dict[str | None, str] = {}
    for name in names:
        examples.setdefault(SUFFIXES.get(_suffixes(name)[0]), name)
    if None in examples:
        raise UserError(
            f"cannot tell what {examples[None]} is by its suffix (known: {', '.join(SUFFIXES)}):"
            " set dataset.source to json, text, csv, parquet or arrow"
        )
    if len(examples) > 1:
        kinds = ", ".join(f"{name} ({loader})" for loader, name in examples.items())
        raise UserError(
            f"the files are of several kinds: {kinds}: set dataset.data_files to files of one kind,"
            " or make dataset a list of data sets with names"
        )
    return str(next(iter(examples)))
