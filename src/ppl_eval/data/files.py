"""Which local files a data set consists of: paths, patterns and folders -> files by split."""

import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
        name: as errors call it.
        path: where it lies.
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
        name: as errors call them together.
        loader: of each of them.
        splits: name of a split -> its files, in the order in which they are read.
        left_out: files of the folder that are in no split.
    """

    name: str
    loader: str
    splits: Mapping[str, tuple[File, ...]]
    left_out: tuple[str, ...] = ()


def is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` of the datasets library wrote the folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def expand(pattern: str, key: str) -> list[str]:
    """The files that a path or a pattern names; an address stays as it is.

    Args:
        pattern: what the user wrote.
        key: of ``dataset``, for errors.

    Raises:
        UserError: there is none, or what there is is no file.
    """
    if "://" in pattern:
        return [pattern]
    if os.path.lexists(pattern):
        check_file(pattern, f"dataset.{key}")
        return [pattern]
    found = sorted(name for name in glob.glob(pattern, recursive=True) if not os.path.isdir(name))
    if not found:
        what = "file" if key == "data_files" else "file or folder"
        raise UserError(f"dataset.{key} is {pattern!r}, but there is no such {what}")
    for name in found:
        check_file(name, f"dataset.{key}")
    return found


def check_file(path: str, key: str) -> None:
    """Refuse what is no file that every rank can read from its beginning.

    Raises:
        UserError: a link to nothing, a folder, or a pipe.
    """
    if os.path.isfile(path):
        return
    if os.path.islink(path) and not os.path.exists(path):
        raise UserError(
            f"{key}: {path} is a link to {os.readlink(path)}, but there is no such file: was it"
            " moved, or a download cut off?"
        )
    if os.path.isdir(path):
        raise UserError(
            f"{key} has {path!r} among other files, but that is a folder: name its files, as in"
            f" {path.rstrip('/')}/*.jsonl"
        )
    raise UserError(
        f"{key}: {path} is no regular file (a pipe or a device?), and every rank reads the text"
        " from its beginning: write it to a file first"
    )


def named(names: Sequence[str], paths: Sequence[str], loader: str | None) -> Files:
    """Files that are given one by one; their split is ``train``, as the datasets library has it.

    Args:
        names: as the user knows them.
        paths: where they lie, in the same order.
        loader: what they are; None: their suffixes decide.

    Raises:
        UserError: the suffixes are unknown or of several kinds; a file stands there twice.
    """
    repeated = [name for number, name in enumerate(names) if name in names[:number]]
    if repeated:
        raise UserError(f"dataset.data_files names {repeated[0]} twice: name each file once")
    loader = loader or _loader_of(names)
    files = tuple(File(n, Path(p), loader) for n, p in zip(names, paths, strict=True))
    return Files(some(names, 3), loader, {"train": files})


def of_folder(folder: Path, loader: str | None = None) -> Files:
    """The files of a folder and its subfolders, whose names tell their splits.

    Args:
        folder: where they lie.
        loader: what they are; None: their suffixes decide.

    Raises:
        UserError: there are none, or of several kinds; or a README.md tells the splits.
    """
    card = folder / "README.md"
    text = card.read_text("utf-8", errors="replace") if card.is_file() else ""
    header = re.match(r"\ufeff?---\s*\n.*?^---", text, re.DOTALL | re.MULTILINE)
    if header and re.search(r"^configs:", header[0], re.MULTILINE):
        raise UserError(
            f"the README.md of {folder} says which of its files are which split, and is not read:"
            " set dataset.data_files to the files, or dataset.source to the subfolder with them"
        )
    found = glob.glob(os.path.join(glob.escape(str(folder)), "**"), recursive=True)
    known = [
        path
        for path in map(Path, sorted(found))
        if suffix_is_known(path.name) and not path.is_dir()
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
        check_file(str(path), "dataset.source")
    splits = _by_names(folder, known)
    chosen = {path for found in splits.values() for path in found}
    kind = loader or _loader_of([str(path) for path in sorted(chosen)])
    return Files(
        str(folder),
        kind,
        {split: tuple(File(str(p), p, kind) for p in found) for split, found in splits.items()},
        tuple(str(path) for path in known if path not in chosen),
    )


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


def suffix_is_known(name: str) -> bool:
    """Whether a name ends as a file that can be read does."""
    return _suffixes(name)[0] in SUFFIXES


def _loader_of(names: Iterable[str]) -> str:
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
