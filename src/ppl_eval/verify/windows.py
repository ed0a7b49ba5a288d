"""The windows of every protocol a second time, as plain lists, from docs/protocols.md alone.

Nothing here is shared with :mod:`ppl_eval.data.windows`: a mistake there must not be repeated here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ppl_eval.errors import UserError


@dataclass(frozen=True)
class Window:
    """What the model reads at once.

    Attributes:
        start: first token of the document that is read.
        ids: what is read, a BOS or prefix token before the text included.
        scored: indices into ``ids`` of the tokens that are scored.
        num_added: tokens before the document's (0 or 1).
    """

    start: int
    ids: list[int]
    scored: list[int]
    num_added: int


@dataclass(frozen=True)
class Settings:
    """The protocol of a run.

    Attributes:
        name: one of the names in docs/protocols.md.
        size: most ids in a window.
        stride: tokens from the start of a window to the start of the next; None: no overlap.
        bos_id: BOS that the run wants, or None.
        eos_id: EOS that ends each document, or None.
        prefix_id: what lm_eval_rolling puts before a document.
    """

    name: str
    size: int
    stride: int | None
    bos_id: int | None
    eos_id: int | None
    prefix_id: int | None


def tokens_of(text_ids: Sequence[int], settings: Settings) -> list[int]:
    """The tokens of a document: its text, a closing EOS, and under lm_eval_rolling a BOS.

    A special token that the text itself begins or ends with replaces the added one.
    """
    ids = list(text_ids)
    if settings.bos_id is not None and ids[:1] == [settings.bos_id]:
        ids = ids[1:]
    if settings.eos_id is not None and ids[-1:] == [settings.eos_id]:
        ids = ids[:-1]
    opening = [settings.bos_id] if settings.name == "lm_eval_rolling" else []
    ids = [*(id_ for id_ in opening if id_ is not None), *ids]
    return [*ids, settings.eos_id] if ids and settings.eos_id is not None else ids


def windows_of(tokens: Sequence[int], settings: Settings) -> list[Window]:
    """The windows of one document (or stream) that score a token.

    Raises:
        UserError: an unknown protocol.
    """
    if settings.name not in _PROTOCOLS:
        raise UserError(
            f"the run's protocol is {settings.name!r}, but verify knows {', '.join(_PROTOCOLS)}"
        )
    found = _PROTOCOLS[settings.name](list(tokens), settings)
    return [window for window in found if window.scored]


def _sliding(tokens: list[int], settings: Settings) -> Iterator[Window]:
    lead = [] if settings.bos_id is None else [settings.bos_id]
    room = settings.size - len(lead)
    start = seen = 0
    while seen < len(tokens):
        ids = lead + tokens[start : start + room]
        places = range(max(1, len(lead)), len(ids))
        yield Window(start, ids, [i for i in places if start + i - len(lead) >= seen], len(lead))
        seen = min(start + room, len(tokens))
        start += room if settings.stride is None else settings.stride


def _rolling(tokens: list[int], settings: Settings) -> Iterator[Window]:
    assert settings.prefix_id is not None
    size, done = settings.size, 0
    while done < len(tokens):
        count = min(size, len(tokens) - done)
        end = done + count
        if done == 0:
            yield Window(0, [settings.prefix_id, *tokens[:end]], list(range(1, end + 1)), 1)
        else:  # one token of context, or more where fewer than a window's are left
            ids = tokens[end - size - 1 : end]
            yield Window(end - size - 1, ids, list(range(len(ids) - count, len(ids))), 0)
        done = end


def _llama_cpp(tokens: list[int], settings: Settings) -> Iterator[Window]:
    size, bos_id = settings.size, settings.bos_id
    added = 0 if bos_id is None else 1
    stream = tokens if bos_id is None else [bos_id, *tokens]
    for first in range(0, len(stream) - size + 1, size):
        ids = stream[first : first + size]
        if bos_id is not None:
            ids[0] = bos_id
        yield Window(first, ids, list(range(size // 2 + 1, size)), added)


def _gptq(tokens: list[int], settings: Settings) -> Iterator[Window]:
    lead = [] if settings.bos_id is None else [settings.bos_id]
    room = settings.size - len(lead)
    for start in range(0, len(tokens) - room + 1, room):
        ids = lead + tokens[start : start + room]
        yield Window(start, ids, list(range(1, len(ids))), len(lead))


_PROTOCOLS: Mapping[str, Callable[[list[int], Settings], Iterator[Window]]] = {
    "document": _sliding,
    "concat": _sliding,
    "hf_stride": _sliding,
    "lm_eval_rolling": _rolling,
    "llama_cpp": _llama_cpp,
    "gptq": _gptq,
}
