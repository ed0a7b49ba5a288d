"""Numbers of things, as people write them."""


def counted(number: int, noun: str) -> str:
    """``1 batch``, ``2 batches``, ``1,000 documents``."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:,} {noun}{ending}"
