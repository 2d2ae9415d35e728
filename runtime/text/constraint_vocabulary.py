"""A model's vocabulary as llguidance takes it: the text of each token, and how a text that must follow is tokenised.

llguidance works on the bytes of tokens' texts. Where a constraint leaves no choice, it tokenises the bytes that must
follow and allows the first of these tokens only. Given a tokenizer.json, it would tokenise as for a prompt: the
normalizer would change texts that are not in its form, and the text of an added token would become that token, which
llguidance takes for a control token without a text. So it is given texts and a function instead:

* An added token that outputs show, such as <think>, is a token like any other: a text that contains its text may be
  written in the token or in others.
* A special token, such as <|im_end|>, and any end token has no text. Its text is written in other tokens.
* Whatever the tokenizer does to a text, the tokens of a text that must follow have its bytes.

Used in the processes of constraints, which import neither numpy nor jax.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import llguidance
import tokenizers

from .token_bytes import added_token_bytes, vocabulary_bytes

_NO_TOKEN = 2**32 - 1  # an end token that llguidance never allows
_CONTROL = b"\xff"  # with this byte, which no text has, llguidance marks the names of tokens without a text


class ConstraintVocabulary:
    """The tokens that a model has.

    Args:
      tokenizer_file: The model's tokenizer.json.
      vocab_size: Vocabulary size of the model, which may be smaller or larger than the tokenizer's.
      eos_token_ids: The end tokens.

    Attributes:
      tokens: For llguidance.
      shown: The ids of the added tokens that outputs show, by their texts.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
        shown, special = added_token_bytes(self._tokenizer)
        self._texts = [b""] * vocab_size
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=False).items():
            if token_id < vocab_size:
                self._texts[token_id] = vocabulary_bytes(token)
        for token_id, text in {**shown, **special}.items():
            if token_id < vocab_size:
                self._texts[token_id] = text
        for token_id in {*special, *eos_token_ids}:
            if token_id < vocab_size:
                self._texts[token_id] = _CONTROL + self._texts[token_id]
        self.shown: Mapping[str, int] = {
            text.decode(): token_id
            for token_id, text in shown.items()
            if token_id < vocab_size and token_id not in eos_token_ids
        }
        self._tokenizer.normalizer = None
        self._tokenizer.encode_special_tokens = True  # as text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        wrapped: Any = _Wrapped(self)
        self.tokens = llguidance.LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)

    @property
    def texts(self) -> Sequence[bytes]:
        """The text of each token, after a control byte if outputs do not show it."""
        return self._texts

    def encode(self, text: str) -> list[int]:
        """Returns tokens whose texts are together `text`: those of the tokenizer, if it does not change the text."""
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        size = len(self._texts)
        if b"".join([self._texts[each] if each < size else _CONTROL for each in token_ids]) == text.encode():
            return token_ids
        return self.tokens.greedy_tokenize(text)


class _Wrapped:
    """What llguidance asks of a tokenizer that is not a file."""

    is_tokenizer_wrapper = True
    eos_token_id = _NO_TOKEN  # unless given otherwise
    bos_token_id = None
    special_token_ids: Sequence[int] = ()  # they are marked already

    def __init__(self, vocabulary: ConstraintVocabulary):
        self.tokens = vocabulary.texts
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)
