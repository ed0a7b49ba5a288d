"""Read JSON files, and refuse pointers of git-lfs."""

import json
from pathlib import Path
from typing import Any

from ppl_eval.errors import UserError

_LFS = b"version https://git-lfs.github.com/spec/"


def refuse_lfs_pointer(path: Path, name: str | None = None) -> None:
    """Refuse a pointer of git-lfs, whose content is still on the server.

    Args:
        path: the file.
        name: a name of the file that the user knows better than its path.
    """
    if not path.is_file() or path.stat().st_size > 1024:
        return
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            raise UserError(
                f"{name or path} is a git-lfs pointer, not the file itself: run `git lfs pull` in"
                " its folder, or download it again"
            )


def read_json(path: Path) -> dict[str, Any]:
    """The mapping in a JSON file.

    Raises:
        UserError: the file is missing, is not JSON, or holds something else.
    """
    refuse_lfs_pointer(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, but it is a mapping of keys")
    return content
