"""The texts of a run as token ids a second time: each tokenised by the tokenizer's own call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ppl_eval import components
from ppl_eval.config.schema import EvalConfig
from ppl_eval.data.corpus import build_dataset
from ppl_eval.data.documents import Document, NamedCorpora, as_documents
from ppl_eval.data.tokenizer import text_encoder
from ppl_eval.files import read_json
from ppl_eval.verify.windows import Settings, Window, tokens_of, windows_of


class Texts:
    """The documents of a run, their tokens and their windows.

    Args:
        cfg: the config of the run.
        protocol: the ``protocol`` of results.json: name, max_seq_len, stride and separator are
            taken from it. Which special tokens are added is found again in the tokenizer's files.

    Attributes:
        documents: as the run counts them; under a protocol that joins texts, one for each stream.

    Raises:
        UserError: a file of the texts or of the tokenizer cannot be read.
    """

    def __init__(self, cfg: EvalConfig, protocol: Mapping[str, Any]) -> None:
        tokenizer = components.build(cfg.tokenizer, "tokenizer")
        is_folder = cfg.tokenizer["_component_"] == "ppl_eval.data.hf_tokenizer"
        special = _of_folder(**cfg.tokenizer) if is_folder else _of_object(tokenizer)
        self._encode, bos_id, eos_id, adds_bos = special
        asked = cfg.protocol
        wants_bos = adds_bos if asked.add_bos == "auto" else asked.add_bos
        self._settings = Settings(
            name=protocol["name"],
            size=protocol["max_seq_len"],
            stride=protocol["stride"],
            bos_id=bos_id if wants_bos else None,
            eos_id=eos_id if asked.add_eos else None,
            prefix_id=eos_id if bos_id is None else bos_id,
        )
        rows = as_documents(build_dataset(cfg.dataset, "dataset", tokenizer), cfg.max_documents)
        self.documents = rows
        if protocol["separator"] is not None:
            parts = rows.parts.values() if isinstance(rows, NamedCorpora) else [rows]
            joined = (protocol["separator"].join(row.text for row in part) for part in parts)
            self.documents = [Document(text) for text in joined]

    def tokens(self, document: int) -> list[int]:
        """The tokens of a document, with those that the protocol adds and scores."""
        row = self.documents[document]
        if row.tokens is not None:
            return row.tokens.tolist()
        return tokens_of(self._encode(row.text), self._settings)

    def windows(self, document: int) -> list[Window]:
        """The windows of a document that score a token, or would if it were not masked."""
        row, settings = self.documents[document], self._settings
        if row.tokens is not None:  # such rows have their special tokens
            settings = replace(settings, bos_id=None, eos_id=None)
        found = windows_of(self.tokens(document), settings)
        if row.counts is None:
            return found
        counts = row.counts.tolist()
        return [replace(w, scored=[i for i in w.scored if counts[w.start + i]]) for w in found]


_Special = tuple[Callable[[str], Sequence[int]], int | None, int | None, bool]
"""(text -> ids without special tokens, BOS, EOS, whether the tokenizer puts a BOS before a text)"""


def _of_folder(path: str, special_tokens_in_text: bool = False, **_: Any) -> _Special:
    raw = Tokenizer.from_file(str(Path(path, "tokenizer.json")))
    raw.no_truncation()
    raw.no_padding()
    raw.encode_special_tokens = not special_tokens_in_text
    settings = Path(path, "tokenizer_config.json")
    config = read_json(settings) if settings.is_file() else {}

    def named(key: str) -> int | None:
        token = config.get(key)
        content = token.get("content") if isinstance(token, dict) else token
        return None if content is None else raw.token_to_id(content)

    bos_id, with_special = named("bos_token"), raw.encode("a").ids
    plain = raw.encode("a", add_special_tokens=False).ids
    if bos_id is None and with_special != plain and with_special[-1:] == plain[-1:]:
        bos_id = with_special[0]
    adds_bos = bos_id is not None and (bos_id in with_special or config.get("add_bos_token"))
    return (
        lambda text: raw.encode(text, add_special_tokens=False).ids,
        bos_id,
        named("eos_token"),
        bool(adds_bos),
    )


def _of_object(tokenizer: Any) -> _Special:
    encode = text_encoder(tokenizer)
    adds_bos = getattr(tokenizer, "adds_bos", tokenizer.bos_id in tokenizer.encode("")[:1])
    return lambda text: encode([text])[0], tokenizer.bos_id, tokenizer.eos_id, adds_bos
