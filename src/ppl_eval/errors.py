"""Errors that end a run with one sentence."""

import re


class UserError(ValueError):
    """A mistake in the input, in one sentence: the value found, the rule, and the fix.

    It is about something that the user chose (a config key, a file, a number of processes).
    :mod:`ppl_eval.boundary` shows it once, without a traceback. Every other exception is a defect
    of the program or of the machine, and is shown with its traceback.
    """

    exit_code = 1


class LimitExceeded(UserError):
    """A metric is above what ``fail_if`` allows. The results are written, and the run fails."""

    exit_code = 3


def one_line(error: BaseException) -> str:
    """An exception and its cause in one line of at most 400 characters."""
    text = f"{type(error).__name__}: {error}"
    if error.__cause__ is not None:
        text += f" ({type(error.__cause__).__name__}: {error.__cause__})"
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())
    return text if len(text) <= 400 else f"{text[:400]}..."
