"""Steps 2 and 9 of 10: converts prompts to tokens, and output tokens to text.

`Tokenizer` reads a model directory. `TextStream` converts the output tokens of one request to text incrementally.

Qwen3's tokenizer is a byte-level BPE: each token stands for a fixed sequence of bytes, so the text of a token sequence
is the UTF-8 decoding of the concatenated bytes. Streaming is therefore exact and cheap: the bytes of new tokens are
looked up and fed to an incremental UTF-8 decoder, which holds back an incomplete character. No token is decoded twice.
"""

import codecs
import copy
import functools
import logging
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..api.errors import NEEDS_TOKENIZER, InvalidRequestError, UnavailableFeatureError, UnsupportedModelError
from ..api.generation_config import read_eos_token_ids
from ..api.model_config import read_json

_DECODER = codecs.getincrementaldecoder("utf-8")
_DECODED_TOKENS = 8_192  # at a time
_log = logging.getLogger(__name__)
_transformers_log = logging.getLogger("transformers")


def _unicode_bytes() -> dict[str, int]:
    """Returns the byte that each character of a byte-level BPE token stands for.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards, in order. Source: Radford et
    al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.2, and the code released with it.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the parsed file, or an empty dict if it does not exist."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}


class Tokenizer:
    """The tokenizer of a model directory. Thread-safe.

    Args:
      directory: Contains tokenizer.json, and optionally tokenizer_config.json, chat_template.jinja, config.json and
        generation_config.json.

    Raises:
      UnsupportedModelError: A file is missing or unreadable, or the tokenizer is not a byte-level BPE.
    """

    has_text = True  # whether it converts between tokens and text; see `NoTokenizer`

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedModelError(
                f"{path} does not exist. A model directory must contain the model's tokenizer.json."
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UnsupportedModelError(f"{path} is not a readable tokenizer: {error}.") from error
        # A tokenizer.json may configure truncation or padding, but prompts must reach the model unchanged.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        decoder = self._tokenizer.decoder
        if not isinstance(decoder, tokenizers.decoders.ByteLevel):
            raise UnsupportedModelError(
                f"{path} has the decoder {type(decoder).__name__}; meshserve supports only ByteLevel tokenizers."
            )
        self._unicode_bytes = _unicode_bytes()
        added = self._tokenizer.get_added_tokens_decoder()
        # Filled as tokens are generated, so its size is bounded by the vocabulary.
        self._token_bytes: dict[int, bytes] = {token_id: b"" for token_id, token in added.items() if token.special}
        self._special_bytes = {token_id: token.content.encode() for token_id, token in added.items() if token.special}
        self._loaded_renderer: Any = None
        self._renderer_lock = threading.Lock()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        # A character in the vocabulary stands for a byte, so this also bounds the characters of text per token.
        self.max_token_chars = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self.eos_token_ids = read_eos_token_ids(self.directory)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template, which `render_chat` requires."""
        config = _read_json(self.directory / "tokenizer_config.json")
        return bool(config.get("chat_template")) or (self.directory / "chat_template.jinja").is_file()

    def knows(self, token_id: int) -> bool:
        """Returns whether the token exists. A model's vocabulary may be padded beyond its tokenizer's."""
        return self._tokenizer.id_to_token(token_id) is not None

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token given by its name in the vocabulary; None if there is none."""
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, is_completed: bool = False) -> tuple[int, ...]:
        """Returns the tokens of `text`.

        The text of a special token is encoded as that token. No tokens are added, because a rendered chat contains all
        it needs, unless `is_completed` asks for those that tokenizer.json adds to each text (its post-processor):
        Qwen3-Embedding's appends an end token.

        Raises:
          InvalidRequestError: The text is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                "text", f"got half a surrogate pair at character {error.start}; the text must be valid Unicode."
            ) from None
        # Encoded as a batch of one, because the library releases the GIL only for batches.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=is_completed)
        return tuple(encoding.ids)

    @functools.cached_property
    def num_added_tokens(self) -> int:
        """How many tokens `encode` adds to a completed text; all of them must come after the text."""
        return self._tokenizer.num_special_tokens_to_add(False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of the tokens.

        Special tokens and ids outside the vocabulary have no text. Bytes that are not valid UTF-8 become U+FFFD.
        """
        texts, start = [], 0
        while start < len(token_ids):
            end = start + _DECODED_TOKENS
            while end < len(token_ids) and not self._starts_character(token_ids[end]):
                end += 1
            piece = list(token_ids[start:end])  # converting all at once would hold the GIL for long
            texts += self._tokenizer.decode_batch([piece], skip_special_tokens=True)  # see `encode`
            start = end
        return "".join(texts)

    def _starts_character(self, token_id: int) -> bool:
        """Returns whether the text can be cut before this token without cutting a character."""
        return bool(text := self.token_bytes(token_id)) and text[0] & 0xC0 != 0x80

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the UTF-8 bytes that a token adds to the text. They may start or end within a character."""
        found = self._token_bytes.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:
                return b""  # padding of the model's vocabulary; not cached, so that the table stays bounded
            try:
                found = bytes(self._unicode_bytes[char] for char in token)
            except KeyError:
                found = token.encode()  # added tokens are stored as plain text
            self._token_bytes[token_id] = found
        return found

    def all_token_bytes(self, token_id: int) -> bytes:
        """Like `token_bytes`, but special tokens have their text."""
        return self._special_bytes.get(token_id) or self.token_bytes(token_id)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_last_message: bool = False,
        **template_options: Any,
    ) -> str:
        """Renders the prompt of a conversation with the model's chat template.

        Args:
          messages: Messages such as `{"role": "user", "content": "..."}`, oldest first.
          add_generation_prompt: Whether to end the prompt with the header of a new assistant message.
          continue_last_message: Whether to end the prompt after the last message's content, so that the message is
            continued. Requires `add_generation_prompt` to be False.
          **template_options: Variables of the template, for example `enable_thinking=False` or `tools=[...]`.

        Raises:
          UnsupportedModelError: The directory has no chat template.
          InvalidRequestError: The template rejects the messages.
        """
        renderer = self._renderer()
        if renderer.chat_template is None:
            raise UnsupportedModelError(
                f"{self.directory} has no chat template. Add chat_template.jinja, or send the prompt as plain text."
            )
        try:
            rendered = renderer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_last_message,
                **template_options,
            )
        except Exception as error:  # jinja2 errors, and any error of a template on unexpected messages
            raise InvalidRequestError("messages", f"the chat template refused them: {error}") from error
        return str(rendered)

    def _renderer(self) -> Any:
        """Returns the chat renderer, created on first use because importing transformers takes a second."""
        with self._renderer_lock:
            if self._loaded_renderer is None:
                _transformers_log.addFilter(_drop)  # drops its warning that torch is missing
                try:
                    from transformers import PreTrainedTokenizerFast
                finally:
                    _transformers_log.removeFilter(_drop)
                self._loaded_renderer = PreTrainedTokenizerFast.from_pretrained(self.directory)
            return self._loaded_renderer


class NoTokenizer(Tokenizer):
    """Stands in for the tokenizer of a model directory without one: outputs have no text, and text is refused."""

    has_text = has_chat_template = False

    def __init__(self, directory: str | Path):
        self._directory = Path(directory)
        self.vocab_size = 0
        self.max_token_chars = sys.maxsize
        self.eos_token_ids = read_eos_token_ids(self._directory)

    @property
    def directory(self) -> Path:  # type: ignore[override]
        raise UnavailableFeatureError(f"GetTokenizer {NEEDS_TOKENIZER}")

    def knows(self, token_id: int) -> bool:
        return False

    def token_id(self, token: str) -> int | None:
        return None

    def encode(self, text: str, *, is_completed: bool = False) -> tuple[int, ...]:
        raise UnavailableFeatureError(f"text: {NEEDS_TOKENIZER}")

    def decode(self, token_ids: Sequence[int]) -> str:
        raise UnavailableFeatureError(f"Detokenize {NEEDS_TOKENIZER}")

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def all_token_bytes(self, token_id: int) -> bytes:
        return b""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        raise UnavailableFeatureError(f"messages: {NEEDS_TOKENIZER}")


def open_tokenizer(directory: Path) -> Tokenizer:
    """Returns the tokenizer of a model directory, or a `NoTokenizer` if there is no tokenizer.json.

    Raises:
      UnsupportedModelError: See `Tokenizer`.
    """
    if (directory / "tokenizer.json").is_file():
        return Tokenizer(directory)
    _log.warning("%s has no tokenizer.json: prompts must be token ids, and outputs have no text", directory)
    return NoTokenizer(directory)


def _drop(record: logging.LogRecord) -> bool:
    """Log filter that drops every record."""
    return False


@functools.lru_cache(maxsize=8)
def _beginnings(stop: tuple[str, ...]) -> frozenset[str]:
    """Returns all non-empty prefixes of the stop strings: text that ends in one is undecided.

    Cached so that all samples of a request share the set, which can take 1 MB.
    """
    return frozenset(text[:end] for text in stop for end in range(1, len(text)))


class TextStream:
    """Converts the output tokens of one sample to text as they arrive, and matches stop strings.

    The output ends as soon as it contains a stop string and is cut before it, or after it with `include_stop`. If
    several stop strings are completed by the same character, the longest one counts. Characters completed by the first
    `num_free_tokens` tokens are not matched against stop strings. Special tokens have no text, unless
    `skip_special_tokens` is false. The resulting text does not depend on how the tokens
    are split into calls.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        num_free_tokens: int = 0,
    ):
        self._token_bytes = tokenizer.token_bytes if skip_special_tokens else tokenizer.all_token_bytes
        self._decoder = _DECODER("replace")
        self._stop = stop
        self._beginnings = _beginnings(stop)
        self._max_held_chars = max(map(len, stop), default=1) - 1
        self._held = ""  # the longest suffix of the text so far that is in `_beginnings`
        self._include_stop = include_stop
        self._num_free_tokens = num_free_tokens if stop else 0
        self._is_stopped = False

    def fork(self) -> "TextStream":
        """Returns a copy that has consumed the same tokens."""
        other = copy.copy(self)
        other._decoder = _DECODER("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def push(self, token_ids: Iterable[int]) -> tuple[str, bool]:
        """Consumes new tokens.

        Returns:
          The text that is now final, and whether a stop string has ended the output. After that, every call returns no
          text and True.
        """
        if self._num_free_tokens:
            return self._push_free(tuple(token_ids))
        token_bytes = self._token_bytes
        return self._advance(self._decoder.decode(b"".join([token_bytes(token_id) for token_id in token_ids])))

    def _push_free(self, token_ids: tuple[int, ...]) -> tuple[str, bool]:
        free, others = token_ids[: self._num_free_tokens], token_ids[self._num_free_tokens :]
        self._num_free_tokens -= len(free)
        text = self._decoder.decode(b"".join(map(self._token_bytes, free)))
        rest, is_stopped = self.push(others) if others else ("", False)
        return text + rest, is_stopped

    def flush(self) -> str:
        """Returns the remaining text after the last token.

        An incomplete character becomes U+FFFD, and text held back for a possible stop string is released. Empty if a
        stop string ended the output, and on a second call.
        """
        text, _ = self._advance(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _advance(self, new: str) -> tuple[str, bool]:
        """Appends text and looks for stop strings. `_held` contains no complete stop string, so every match is new."""
        if self._is_stopped or not self._stop:
            return ("", True) if self._is_stopped else (new, False)
        text = self._held + new
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)  # the match that ends first; among those, the one that starts first
            self._is_stopped = True
            self._held = ""
            return text[: end if self._include_stop else start], True
        num_chars = len(text)
        for cut in range(max(0, num_chars - self._max_held_chars), num_chars):
            if text[cut:] in self._beginnings:
                break
        else:
            cut = num_chars
        self._held = text[cut:]
        return text[:cut], False
