"""Text -> documents -> windows -> batches, and the components that a config names."""

from ppl_eval.data.corpus import named_corpora, text_corpus
from ppl_eval.data.documents import Document
from ppl_eval.data.tokenizer import HFTokenizer as hf_tokenizer

__all__ = ["Document", "hf_tokenizer", "named_corpora", "text_corpus"]
