"""How long a window a model reads, and how many ids it knows, whatever library it is from."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from ppl_eval.data.protocol import RULES
from ppl_eval.decoder import unwrapped
from ppl_eval.errors import UserError


def fit_window(
    models: Sequence[nn.Module], protocol: str, max_seq_len: int | None
) -> tuple[int | None, tuple[str, ...]]:
    """The window that is read where none is given: the protocol's own, or less if a model reads
    less.

    Args:
        models: what reads the windows.
        protocol: its name.
        max_seq_len: tokens in a window, or None if it is not given.

    Returns:
        (tokens in a window, a sentence if the models decided).
    """
    if max_seq_len is not None or protocol not in RULES:
        return max_seq_len, ()
    own = RULES[protocol].max_seq_len
    window = min([own, *(limit for limit in map(window_limit, models) if limit is not None)])
    if window == own:
        return own, ()
    return window, (
        f"protocol.max_seq_len is not given: windows have {window:,} tokens, all that the model"
        f" reads ({protocol} would take {own:,})",
    )


def window_limit(model: nn.Module) -> int | None:
    """Most tokens that a model reads at once, by torchtune's ``max_seq_len`` or transformers'
    configuration; None if it does not say. In a module of one's own the model inside says it."""
    for inner in unwrapped(model).modules():
        config: Any = getattr(inner, "config", None)
        is_of_transformers = hasattr(config, "get_text_config")
        text = config.get_text_config() if is_of_transformers else config
        for owner, name in (
            (inner, "max_seq_len"),
            (text, "max_position_embeddings"),
            (text, "max_seq_len"),  # MPT's
        ):
            limit = getattr(owner, name, None)
            if isinstance(limit, int) and limit > 0:
                return limit
        if is_of_transformers:
            return None
    return None


def check_window(model: nn.Module, max_seq_len: int) -> None:
    """Refuse windows that are longer than the model allows.

    Raises:
        UserError: naming both lengths.
    """
    limit = window_limit(model)
    if limit is not None and max_seq_len > limit:
        raise UserError(
            f"protocol.max_seq_len is {max_seq_len}, but the model reads at most {limit} tokens:"
            f" set protocol.max_seq_len={limit} or less"
        )


def vocab_size_of(model: nn.Module) -> int | None:
    """Rows of the embedding of torchtune's or transformers' model, or None for other modules."""
    inner = unwrapped(model)
    embedding = getattr(inner, "tok_embeddings", None)
    if embedding is None and hasattr(getattr(inner, "config", None), "get_text_config"):
        embedding = inner.get_input_embeddings()
    return getattr(embedding, "num_embeddings", None)
