"""The folder where results land."""

import tempfile
from pathlib import Path

from ppl_eval.errors import UserError


def make_output_dir(name: str) -> Path:
    """Create the folder if need be and make sure that files can be written there.

    Raises:
        UserError: they cannot.
    """
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"output_dir is {name}, but nothing can be written there: {reason}"
        ) from error
    return folder
