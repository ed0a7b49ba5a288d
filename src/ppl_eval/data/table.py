"""Files -> a memory-mapped table in the cache of the datasets library.

Other modules import this one late, because it imports the datasets library.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import datasets
from datasets.exceptions import DatasetsError

from ppl_eval import fingerprint
from ppl_eval.data.files import File
from ppl_eval.data.formats import Wanted, read
from ppl_eval.data.hub import unwritable
from ppl_eval.errors import UserError

_VERSION = 1
"""Increase it with every change that reads other rows from the same files: tables that are in the
cache already are not used then."""

_FEATURES = datasets.Features(
    {name: datasets.Value("large_string") for name in ("text", "id", "domain")}
)


class _TextBuilder(datasets.ArrowBasedBuilder):
    """Writes the rows into the cache. The library locks it: one process writes, others wait."""

    def __init__(self, key: str, splits: Mapping[str, tuple[File, ...]], wanted: Wanted) -> None:
        self._files, self._wanted = splits, wanted
        super().__init__(dataset_name="ppl_eval_text", config_name=f"content-{key}")

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=_FEATURES)

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        return [
            datasets.SplitGenerator(name=split, gen_kwargs={"split": split})
            for split in self._files
        ]

    def _generate_tables(self, **kwargs: Any) -> Iterator[tuple[Any, Any]]:
        yield from enumerate(read(self._files[kwargs["split"]], self._wanted))


def of_files(splits: Mapping[str, tuple[File, ...]], wanted: Wanted) -> Mapping[str, Any]:
    """The rows of files as data sets with the columns text, id and domain, by split.

    Processes that read the same files share one table.

    Args:
        splits: name of a split -> its files; all files have the same loader.
        wanted: which columns to read.

    Raises:
        UserError: a row cannot be read, or the cache cannot be written.
    """
    files = [file for found in splits.values() for file in found]
    try:
        facts = [(str(file.path.absolute()), file.path.stat().st_mtime_ns) for file in files]
        # the time alone is not enough: a file may change within a tick of the clock, or keep it
        content = fingerprint.of_files(file.path for file in files)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
    shape = [(split, [(f.name, f.loader) for f in found]) for split, found in splits.items()]
    key = fingerprint.of(_VERSION, content, facts, shape, vars(wanted))
    try:
        builder = _TextBuilder(key, splits, wanted)
        builder.download_and_prepare()
        rows = builder.info.splits or {}
        return {
            # as_dataset raises an error for a split without rows
            name: builder.as_dataset(name)
            if rows[name].num_examples
            else datasets.Dataset.from_dict({column: [] for column in _FEATURES}, _FEATURES)
            for name in splits
        }
    except (DatasetsError, OSError) as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from error
        for reason in (error, cause):
            if isinstance(reason, OSError):
                raise UserError(unwritable(reason)) from error
        raise
