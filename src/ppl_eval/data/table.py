"""Files -> a memory-mapped table in the cache of the datasets library, built once by any process.

The module is imported when there is something to read: it needs the datasets library.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import datasets.config
from datasets.exceptions import DatasetsError

from ppl_eval import fingerprint
from ppl_eval.data.files import File
from ppl_eval.data.formats import Wanted, read
from ppl_eval.errors import UserError

_READING = 1
"""To be counted up by a change that makes other rows of the same files: older tables in the cache
are then left alone."""


class _TextBuilder(datasets.ArrowBasedBuilder):
    """Writes the rows into the cache, under the library's lock: one process does, others wait."""

    def __init__(self, key: str, splits: Mapping[str, tuple[File, ...]], wanted: Wanted) -> None:
        self._files, self._wanted = splits, wanted
        super().__init__(dataset_name="ppl_eval_text", config_name=f"content-{key}")

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=_features())

    def _split_generators(self, dl_manager: Any) -> list[datasets.SplitGenerator]:
        return [
            datasets.SplitGenerator(name=split, gen_kwargs={"split": split})
            for split in self._files
        ]

    def _generate_tables(self, **kwargs: Any) -> Iterator[tuple[Any, Any]]:
        yield from enumerate(read(self._files[kwargs["split"]], self._wanted))


def of_files(splits: Mapping[str, tuple[File, ...]], wanted: Wanted) -> Mapping[str, Any]:
    """The files' rows as data sets with the columns text, id and domain, by split.

    Processes that ask for the same files at the same time share one table.

    Args:
        splits: name of a split -> its files, all of one loader.
        wanted: which columns.

    Raises:
        UserError: what cannot be read, naming file and line; a cache that cannot be written.
    """
    files = [file for found in splits.values() for file in found]
    try:
        facts = [(str(file.path.absolute()), file.path.stat().st_mtime_ns) for file in files]
        # a file may change within a tick of the clock, or keep its time
        content = fingerprint.of_files(file.path for file in files)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from error
    shape = [(split, [(f.name, f.loader) for f in found]) for split, found in splits.items()]
    key = fingerprint.of(_READING, content, facts, shape, vars(wanted))
    try:
        builder = _TextBuilder(key, splits, wanted)
        builder.download_and_prepare()
        rows = builder.info.splits or {}
        return {
            # the library refuses to give a split without rows
            name: builder.as_dataset(name) if rows[name].num_examples else _no_rows()
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


def unwritable(error: OSError) -> str:
    """What to say when the cache cannot be written."""
    return (
        f"the cache of data sets {Path(datasets.config.HF_DATASETS_CACHE)} cannot be written:"
        f" {error.strerror or error}: set HF_DATASETS_CACHE to a folder that can"
    )


def _features() -> datasets.Features:
    text = datasets.Value("large_string")
    return datasets.Features({"text": text, "id": text, "domain": text})


def _no_rows() -> datasets.Dataset:
    return datasets.Dataset.from_dict({name: [] for name in _features()}, features=_features())
