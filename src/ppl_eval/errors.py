"""What ends a run in one sentence."""


class UserError(ValueError):
    """A mistake in the input, told in one sentence: the value found, the rule, and the fix.

    Whoever raises it has checked something that the user chose (a config key, a file, a number of
    processes). :mod:`ppl_eval.boundary` shows its message once, without a traceback. Every other
    exception is a defect of ours or of the machine, and is shown with its traceback.
    """

    exit_code = 1


class LimitExceeded(UserError):
    """A metric is above what ``fail_if`` allows. The results are written, and the run fails."""

    exit_code = 3
