"""A Hugging Face tokenizer folder behind torchtune's tokenizer interface.

torchtune 0.6.1's HuggingFaceBaseTokenizer fails on a tokenizer without BOS, has no pad_id and no
max_seq_len, and adds what the file's template says even when told not to.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from ppl_eval import fingerprint
from ppl_eval.errors import UserError
from ppl_eval.files import read_json, refuse_lfs_pointer


class TextTokenizer(Protocol):
    """What evaluation needs; torchtune's tokenizers and :class:`HFTokenizer` have it."""

    bos_id: int | None
    eos_id: int | None

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Token ids of ``text``."""
        ...


class HFTokenizer:
    """Config component ``ppl_eval.data.hf_tokenizer``: the tokenizer of a Hugging Face folder.

    Special tokens that are written in a text are read as text, unless asked otherwise: a corpus
    that mentions ``</s>`` does not end there.

    Args:
        path: folder with tokenizer.json, and usually tokenizer_config.json.
        max_seq_len: where torchtune's datasets cut a conversation. ``encode`` never cuts.
        special_tokens_in_text: read special tokens that are written in a text as such.

    Attributes:
        bos_id: what tokenizer_config.json names, else what the tokenizer puts before a text, else
            None.
        eos_id: None if there is none.
        pad_id: the EOS id (or 0) if there is no padding token.
        adds_bos: whether the tokenizer adds a BOS to the empty string or ``add_bos_token`` is true.
        fingerprint: hash of what decides the ids.

    Raises:
        UserError: a missing or unreadable file, or a special token that the vocabulary lacks.
    """

    def __init__(
        self, path: str, max_seq_len: int | None = None, special_tokens_in_text: bool = False
    ) -> None:
        if not isinstance(path, str):
            raise UserError(f"tokenizer.path is {path!r}, but it is a Hugging Face folder")
        folder = Path(path)
        settings = folder / "tokenizer_config.json"
        config = read_json(settings) if settings.is_file() else {}
        raw = _read_tokenizer(folder / "tokenizer.json")
        self._set(raw, config, folder, max_seq_len, special_tokens_in_text)

    @classmethod
    def from_transformers(cls, tokenizer: Any) -> "HFTokenizer":
        """The tokenizer inside one of transformers (AutoTokenizer), with its special tokens."""
        self = cls.__new__(cls)
        raw = _without_padding(Tokenizer.from_str(tokenizer.backend_tokenizer.to_str()))
        names = ("bos_token", "eos_token", "pad_token")
        config = {name: getattr(tokenizer, name, None) for name in names}
        config["add_bos_token"] = tokenizer.bos_token_id in tokenizer("")["input_ids"]
        self._set(raw, config, Path(tokenizer.name_or_path), None, False)
        return self

    def _set(
        self,
        tokenizer: Tokenizer,
        config: dict[str, Any],
        folder: Path,
        max_seq_len: int | None,
        special_tokens_in_text: bool,
    ) -> None:
        self.max_seq_len = max_seq_len
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = not special_tokens_in_text
        self._loses, self._unknown_id = _what_it_loses(self._tokenizer)
        self.bos_id = self._special_id(config, "bos_token", folder)
        self.eos_id = self._special_id(config, "eos_token", folder)
        pad_id = self._special_id(config, "pad_token", folder)
        fallback = 0 if self.eos_id is None else self.eos_id
        self.pad_id = fallback if pad_id is None else pad_id
        self.stop_tokens = [] if self.eos_id is None else [self.eos_id]
        added_tokens = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {t.content: index for index, t in added_tokens.items() if t.special}
        added = self._tokenizer.encode("").ids
        if self.bos_id is None and _split_of_added(added, self._tokenizer.encode("a").ids) > 0:
            self.bos_id = added[0]
        self.adds_bos = self.bos_id is not None and (
            self.bos_id in added or bool(config.get("add_bos_token"))
        )
        self.fingerprint = fingerprint.of(
            *(self._tokenizer.to_str(), self.bos_id, self.eos_id, self.adds_bos),
            *(["special tokens in text"] if special_tokens_in_text else []),
        )

    def _special_id(self, config: dict[str, Any], key: str, folder: Path) -> int | None:
        token = config.get(key)
        if isinstance(token, dict):
            token = token.get("content")
        if token is None:
            return None
        index = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if index is None:
            raise UserError(
                f"{folder / 'tokenizer_config.json'}: {key} is {token!r}, but tokenizer.json has no"
                " such token: are the two files of one model?"
            )
        return index

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(
        self,
        text: str,
        add_bos: bool = True,
        add_eos: bool = True,
        trim_leading_whitespace: bool = False,
    ) -> list[int]:
        """Token ids of ``text``, with BOS before and EOS after if asked and if they exist.

        ``trim_leading_whitespace`` says that ``text`` continues another, so a tokenizer that puts a
        blank before the first word must not do it here.
        """
        ids = self._plain(text)
        if trim_leading_whitespace:
            lead, joined = self._plain("\n"), self._plain("\n" + text)
            # where the line break merged with the text there is no clean cut
            ids = joined[len(lead) :] if joined[: len(lead)] == lead else ids
        before = [self.bos_id] if add_bos and self.bos_id is not None else []
        after = [self.eos_id] if add_eos and self.eos_id is not None else []
        return [*before, *ids, *after]

    def tokens(self) -> dict[int, str]:
        """Id -> token, added ones included."""
        return {index: token for token, index in self._tokenizer.get_vocab().items()}

    def cuts(self) -> str:
        """The sections of tokenizer.json that decide where a text is cut, as JSON."""
        content = json.loads(self._tokenizer.to_str())
        return json.dumps([content.get(k) for k in ("model", "normalizer", "pre_tokenizer")])

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of many texts, without BOS and EOS, on several threads."""
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [e.ids for e in encoded]

    def lost_bytes(self, text: str) -> int:
        """UTF-8 bytes of ``text`` that no token stands for, white space aside.

        A vocabulary without bytes writes an unknown token for what it lacks, or nothing.
        """
        if not self._loses:
            return 0
        if self._unknown_id is None:  # what is left out shifts the offsets of what follows
            missing = {c for c in set(text) if not c.isspace() and not self._plain(c)}
            return sum(len(character.encode()) for character in text if character in missing)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        lost = set(range(len(text)))
        for index, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if index != self._unknown_id:
                lost.difference_update(range(begin, end))
        return sum(len(text[number].encode()) for number in lost if not text[number].isspace())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text behind ``token_ids``."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def tokenize_messages(
        self, messages: list[Any], add_end_tokens: bool = True
    ) -> tuple[list[int], list[bool]]:
        """Tokens and mask (True: not trained on) of a conversation, joined as torchtune joins it.

        No chat template is applied. ``messages`` are torchtune's ``Message`` objects;
        ``add_end_tokens`` puts EOS after each answer of the assistant.
        """
        from torchtune.modules.transforms.tokenizers import tokenize_messages_no_special_tokens

        return tokenize_messages_no_special_tokens(
            tokenizer=self,  # pyright: ignore[reportArgumentType]
            messages=messages,
            bos_id=self.bos_id if self.adds_bos else None,
            eos_id=self.eos_id if add_end_tokens else None,
        )

    def __call__(self, sample: dict[str, Any], inference: bool = False) -> dict[str, Any]:
        """torchtune's transform: replace ``messages`` in ``sample`` by ``tokens`` and ``mask``."""
        messages = sample.pop("messages")
        tokens, mask = self.tokenize_messages(messages, add_end_tokens=not inference)
        return {**sample, "tokens": tokens, "mask": mask}


def as_text_tokenizer(tokenizer: Any) -> TextTokenizer:
    """A tokenizer of torchtune, of this module, or of transformers, as evaluation takes it.

    Raises:
        UserError: it is none of these.
    """
    if hasattr(tokenizer, "encode") and hasattr(tokenizer, "bos_id"):
        return tokenizer
    if hasattr(tokenizer, "backend_tokenizer"):
        return HFTokenizer.from_transformers(tokenizer)
    if hasattr(tokenizer, "bos_token_id"):
        raise UserError(
            f"tokenizer is a {type(tokenizer).__name__} of transformers without a tokenizer.json"
            " inside: use AutoTokenizer, or ppl_eval.data.hf_tokenizer(DIR)"
        )
    raise UserError(
        f"tokenizer is of type {type(tokenizer).__name__}, but it needs encode(text, add_bos,"
        " add_eos), bos_id and eos_id, as torchtune's have; or take AutoTokenizer's, or"
        " ppl_eval.data.hf_tokenizer(DIR)"
    )


def wants_bos(tokenizer: TextTokenizer) -> bool:
    """Whether ``add_bos=auto`` puts a BOS before a text: ``tokenizer.adds_bos``, else whether the
    tokenizer puts one before the empty string."""
    adds_bos = getattr(tokenizer, "adds_bos", None)
    if adds_bos is not None:
        return adds_bos
    return tokenizer.bos_id is not None and tokenizer.bos_id in tokenizer.encode("")[:1]


def fingerprint_of(tokenizer: TextTokenizer) -> str:
    """Hash that tells tokenizers apart: exact for :class:`HFTokenizer`; for others the hash of the
    ids of a probe text."""
    known = getattr(tokenizer, "fingerprint", None)
    if isinstance(known, str):
        return known
    try:
        ids = tokenizer.encode(_PROBE, add_bos=False, add_eos=False)
    except (ValueError, LookupError):  # it knows other texts only
        ids = None
    return fingerprint.of(type(tokenizer).__name__, tokenizer.bos_id, tokenizer.eos_id, ids)


def difference(tokenizer: TextTokenizer, other: TextTokenizer) -> str | None:
    """How two tokenizers differ in what an id stands for or where a text is cut; None if nowhere.

    Two of :class:`HFTokenizer` are compared by content: vocabulary, merges, normalizer,
    pre-tokenizer and added tokens (one may have more of these). Others by the ids of the probe of
    :func:`fingerprint_of`. What comes before or after a text (BOS, templates) does not count.
    """
    if not (isinstance(tokenizer, HFTokenizer) and isinstance(other, HFTokenizer)):
        ids, other_ids = (text_encoder(each)([_PROBE])[0] for each in (tokenizer, other))
        return None if ids == other_ids else "they give a text different ids"
    tokens, other_tokens = tokenizer.tokens(), other.tokens()
    for index in sorted(tokens.keys() & other_tokens.keys()):
        one, another = tokens[index], other_tokens[index]
        if one != another:
            return f"id {index} is {one!r} in one and {another!r} in the other"
    return None if tokenizer.cuts() == other.cuts() else "they cut texts differently"


_PROBE = (
    "".join(map(chr, range(32, 127)))
    + " The quick brown fox \u00e9\u00df \u4e2d\u6587 \u0416 \U0001f600\n\t 12345"
)


def text_encoder(tokenizer: TextTokenizer) -> Callable[[Sequence[str]], list[list[int]]]:
    """A function that encodes many texts and adds no special token, whatever ``tokenizer`` adds.

    What torchtune's HuggingFaceBaseTokenizer adds is found on two short texts and removed.

    Raises:
        UserError: the added tokens cannot be told from the text's.
    """
    encode_batch = getattr(tokenizer, "encode_batch", None)
    if encode_batch is not None:
        return encode_batch
    before = after = 0
    added = tokenizer.encode("", add_bos=False, add_eos=False)
    if added:
        before = _split_of_added(added, tokenizer.encode("a", add_bos=False, add_eos=False))
        after = len(added) - before

    def encode(texts: Sequence[str]) -> list[list[int]]:
        ids = (tokenizer.encode(text, add_bos=False, add_eos=False) for text in texts)
        return [i[before : len(i) - after] for i in ids]

    return encode


def _split_of_added(added: list[int], ids: list[int]) -> int:
    """How many of the ``added`` special tokens stand before the text whose ids are ``ids``."""
    for before in range(len(added), -1, -1):
        after = len(added) - before
        if ids[:before] == added[:before] and ids[len(ids) - after :] == added[before:]:
            return before
    raise UserError(
        f"the tokenizer adds {added} to an empty text but not to others: use"
        " ppl_eval.data.hf_tokenizer"
    )


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise UserError(
            f"no tokenizer.json in {path.parent}: point tokenizer.path at a Hugging Face folder"
        )
    refuse_lfs_pointer(path)
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable tokenizer: {error}") from error
    return _without_padding(tokenizer)


def _without_padding(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _what_it_loses(tokenizer: Tokenizer) -> tuple[bool, int | None]:
    """(whether characters can be lost, id of the unknown token if there is one)."""
    content = json.loads(tokenizer.to_str())
    model = content["model"]
    has_bytes = "ByteLevel" in json.dumps([content.get(k) for k in ("pre_tokenizer", "normalizer")])
    unknown = model.get("unk_token")
    unknown_id = model.get("unk_id") if unknown is None else tokenizer.token_to_id(unknown)
    return not (has_bytes or model.get("byte_fallback")), unknown_id
