"""How long a window a model reads, and how many token ids it has, whatever its library."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from ppl_eval.data.protocol import rule_of
from ppl_eval.decoder import unwrapped
from ppl_eval.errors import UserError
from ppl_eval.model.torchtune_decoder import decoder_of


def fit_window(
    models: Sequence[nn.Module], protocol: str, max_seq_len: int | None
) -> tuple[int, tuple[str, ...]]:
    """Tokens in a window: as given, or the protocol's default, or less if a model reads less.

    Args:
        models: the student and, if there is one, its teacher; on any device.
        protocol: the protocol's name.
        max_seq_len: tokens in a window as the user gives them, or None.

    Returns:
        (tokens in a window, a note if a model shortens it).

    Raises:
        UserError: no such protocol, or the given window is longer than a model reads.
    """
    limits = [window_limit(model) for model in models]
    if max_seq_len is not None:
        for name, limit in zip(("model", "teacher"), limits, strict=False):
            if limit is not None and max_seq_len > limit:
                raise UserError(
                    f"protocol.max_seq_len is {max_seq_len}, but the {name} reads at most {limit}"
                    f" tokens: set protocol.max_seq_len={limit} or less"
                )
        return max_seq_len, ()
    default = rule_of(protocol).max_seq_len
    window = min([default, *(limit for limit in limits if limit is not None)])
    if window == default:
        return window, ()
    return window, (
        f"protocol.max_seq_len is not given: windows have {window:,} tokens, all that the model"
        f" reads ({protocol} would take {default:,})",
    )


def window_limit(model: nn.Module) -> int | None:
    """Most tokens that a model reads at once; None if no module in it has such an attribute."""
    for inner in unwrapped(model).modules():
        decoder = decoder_of(inner)
        if decoder is not None:
            return decoder.max_seq_len
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


def vocab_size_of(model: nn.Module) -> int | None:
    """Rows of the embedding of torchtune's or transformers' model, or None for other modules."""
    decoder = decoder_of(model)
    if decoder is not None:
        return decoder.num_ids
    inner = unwrapped(model)
    embedding = getattr(inner, "tok_embeddings", None)  # torchtune's models of text and images
    if embedding is None and hasattr(getattr(inner, "config", None), "get_text_config"):
        embedding = inner.get_input_embeddings()
    return getattr(embedding, "num_embeddings", None)
