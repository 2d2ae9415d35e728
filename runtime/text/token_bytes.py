"""The bytes of text that the tokens of a byte-level BPE stand for.

In its vocabulary, each character of a token stands for a byte. A token that was added to the vocabulary is stored as
plain text instead. Imports only tokenizers, because `constraint_vocabulary` needs it in a small process.
"""

from collections.abc import Mapping

import tokenizers


def _byte_characters() -> dict[int, str]:
    """Returns the character U+00XX for each character that stands for the byte XX in a byte-level BPE token.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards, in order. Source: Radford et
    al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.2, and the code released with it.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    latin = {code: chr(code) if code in set(printable) else "\uffff" for code in range(256)}
    return latin | {0x100 + index: chr(byte) for index, byte in enumerate(others)}


_BYTE_CHARACTERS = _byte_characters()


def vocabulary_bytes(token: str) -> bytes:
    """Returns the bytes of a token that is not an added one, by its name in the vocabulary."""
    try:
        return token.translate(_BYTE_CHARACTERS).encode("latin-1")
    except UnicodeEncodeError:  # a character stands for no byte, as in "<unk>" of some vocabularies
        return token.encode()


def added_token_bytes(tokenizer: tokenizers.Tokenizer) -> tuple[Mapping[int, bytes], Mapping[int, bytes]]:
    """Returns the texts of the added tokens by id: of those that outputs show, and of special ones."""
    added = tokenizer.get_added_tokens_decoder()
    shown = {token_id: token.content.encode() for token_id, token in added.items() if not token.special}
    special = {token_id: token.content.encode() for token_id, token in added.items() if token.special}
    return shown, special
