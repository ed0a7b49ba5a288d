"""Numbers with nouns, and shortened lists, as text."""

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """``1 batch``, ``2 batches``, ``1,000 documents``."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:,} {noun}{ending}"


def some(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """``a, b``, or ``a, b and 3 more``."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
