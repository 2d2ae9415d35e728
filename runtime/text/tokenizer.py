"""Steps 2 and 9 of 10: text to tokens on the way in, tokens to text on the way out.

`Tokenizer` reads a model directory. `TextStream` turns the tokens of one request into text as they come.

Qwen3's tokenizer is a byte-level BPE: each token stands for a fixed run of bytes, so the text of many tokens is the
UTF-8 decoding of their bytes, one after the other. That makes streaming exact and cheap: look up the new tokens' bytes
and feed them to an incremental UTF-8 decoder, which keeps an unfinished character back. Nothing is decoded twice.
"""

import codecs
import copy
import functools
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..api.errors import InvalidRequestError, UnsupportedModelError
from ..api.model_config import read_json

_DECODER = codecs.getincrementaldecoder("utf-8")
_transformers_log = logging.getLogger("transformers")


def _unicode_bytes() -> dict[str, int]:
    """The alphabet of byte-level BPE: which byte each character of a token stands for.

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards, in order. Source: Radford et
    al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.2, and the code released with it.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def _read_json(path: Path) -> dict[str, Any]:
    """The parsed file; empty if there is none."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}


class Tokenizer:
    """The tokenizer of a model directory. Safe to use from several threads.

    Args:
      directory: holds tokenizer.json, and if they are there tokenizer_config.json, chat_template.jinja, config.json and
        generation_config.json.

    Raises:
      UnsupportedModelError: a file is missing or unreadable, or the tokenizer is not a byte-level BPE.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedModelError(
                f"{path} does not exist. A model directory holds the tokenizer.json of its model."
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise UnsupportedModelError(f"{path} is not a readable tokenizer: {error}.") from error
        # A tokenizer.json may ask to cut or pad what it encodes; a prompt must reach the model as it was sent.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        decoder = self._tokenizer.decoder
        if not isinstance(decoder, tokenizers.decoders.ByteLevel):
            raise UnsupportedModelError(
                f"{path} has the decoder {type(decoder).__name__}; meshserve streams text of ByteLevel tokenizers only."
            )
        self._unicode_bytes = _unicode_bytes()
        added = self._tokenizer.get_added_tokens_decoder()
        # Grows by one entry for each token that is ever generated, so it is bounded by the vocabulary.
        self._token_bytes: dict[int, bytes] = {token_id: b"" for token_id, token in added.items() if token.special}
        self._loaded_renderer: Any = None
        self._renderer_lock = threading.Lock()
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        # Tokens are written in the alphabet of bytes, so this is an upper bound for characters too.
        self.max_token_chars = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self.eos_token_ids = self._read_eos_token_ids()

    def _read_eos_token_ids(self) -> frozenset[int]:
        """What ends a request. The files name different tokens for one model, and each of them means it: all count."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _read_json(self.directory / name).get("eos_token_id")
            token_ids = [] if value is None else value if isinstance(value, list) else [value]
            if not all(type(token_id) is int and token_id >= 0 for token_id in token_ids):
                path = self.directory / name
                raise UnsupportedModelError(f"{path}: eos_token_id is {value!r}; allowed are token ids.")
            found.update(token_ids)
        token = _read_json(self.directory / "tokenizer_config.json").get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and (token_id := self._tokenizer.token_to_id(text)) is not None:
            found.add(token_id)
        return frozenset(found)

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works."""
        config = _read_json(self.directory / "tokenizer_config.json")
        return bool(config.get("chat_template")) or (self.directory / "chat_template.jinja").is_file()

    def knows(self, token_id: int) -> bool:
        """Whether there is such a token; a model's vocabulary may be padded beyond its tokenizer's."""
        return self._tokenizer.id_to_token(token_id) is not None

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of `text`. The text of a special token becomes that token; none is added of its own accord,
        because a rendered chat holds all it needs.

        Raises:
          InvalidRequestError: the text is not Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                "text", f"got half a surrogate pair at character {error.start}; allowed is Unicode text."
            ) from None
        # As a batch of one: only for batches does the library let other threads of Python run meanwhile.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens. Special tokens and ids outside the vocabulary have none; bytes that are not UTF-8
        become U+FFFD."""
        [text] = self._tokenizer.decode_batch([token_ids], skip_special_tokens=True)  # see `encode`
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text, in UTF-8; it may end or begin within a character."""
        found = self._token_bytes.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:
                return b""  # the model's padding of the vocabulary; not remembered, so that the table stays bounded
            try:
                found = bytes(self._unicode_bytes[char] for char in token)
            except KeyError:
                found = token.encode()  # an added token is written as it is
            self._token_bytes[token_id] = found
        return found

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_last_message: bool = False,
        **template_options: Any,
    ) -> str:
        """The prompt of a conversation, as the model's chat template writes it.

        Args:
          messages: `{"role": "user", "content": "..."}` and the like, oldest first.
          add_generation_prompt: end with the words that begin an answer.
          continue_last_message: end within the last message, after its content; without a generation prompt.
          **template_options: variables of the template, for example `enable_thinking=False` or `tools=[...]`.

        Raises:
          UnsupportedModelError: the directory has no chat template.
          InvalidRequestError: the template refuses the messages.
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
        except Exception as error:  # jinja2's errors, and whatever a template does with messages it did not expect
            raise InvalidRequestError("messages", f"the chat template refused them: {error}") from error
        return str(rendered)

    def _renderer(self) -> Any:
        """What renders chats; made at the first call, because the import takes a second and only those who chat need
        it."""
        with self._renderer_lock:
            if self._loaded_renderer is None:
                _transformers_log.addFilter(_drop)  # at its import it warns that there is no torch, as should be
                try:
                    from transformers import PreTrainedTokenizerFast
                finally:
                    _transformers_log.removeFilter(_drop)
                self._loaded_renderer = PreTrainedTokenizerFast.from_pretrained(self.directory)
            return self._loaded_renderer


def _drop(record: logging.LogRecord) -> bool:
    """A filter that lets nothing through."""
    return False


@functools.lru_cache(maxsize=8)
def _beginnings(stop: tuple[str, ...]) -> frozenset[str]:
    """What a text may end in without being decided: every beginning of every stop string. All samples of a request
    share it, as it may take a MB."""
    return frozenset(text[:end] for text in stop for end in range(1, len(text)))


class TextStream:
    """The text of one request, as its tokens come.

    The output ends as soon as it contains one of the stop strings, and is cut before it, or after it with
    `include_stop`; of several that are complete at the same character, the longest counts. Characters that the first
    `num_free_tokens` complete belong to none. How the tokens are cut into calls changes nothing about the whole text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), *, include_stop: bool = False, num_free_tokens: int = 0
    ):
        self._tokenizer = tokenizer
        self._decoder = _DECODER("replace")
        self._stop = stop
        self._beginnings = _beginnings(stop)
        self._max_held_chars = max(map(len, stop), default=1) - 1
        self._held = ""  # always the longest end of the text so far that is one of the beginnings
        self._include_stop = include_stop
        self._num_free_tokens = num_free_tokens if stop else 0
        self._is_stopped = False

    def fork(self) -> "TextStream":
        """Another that has seen the same tokens."""
        other = copy.copy(self)
        other._decoder = _DECODER("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def push(self, token_ids: Iterable[int]) -> tuple[str, bool]:
        """Takes new tokens.

        Returns:
          The text that is now certain, and whether a stop string has ended the request. Afterwards every call returns
          no text and True.
        """
        if self._num_free_tokens:
            return self._push_free(tuple(token_ids))
        token_bytes = self._tokenizer.token_bytes
        return self._advance(self._decoder.decode(b"".join([token_bytes(token_id) for token_id in token_ids])))

    def _push_free(self, token_ids: tuple[int, ...]) -> tuple[str, bool]:
        free, others = token_ids[: self._num_free_tokens], token_ids[self._num_free_tokens :]
        self._num_free_tokens -= len(free)
        text = self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, free)))
        rest, is_stopped = self.push(others) if others else ("", False)
        return text + rest, is_stopped

    def flush(self) -> str:
        """The rest, once no tokens are left to come: an unfinished character as U+FFFD, and text held for a stop string
        that did not come. Empty if a stop string ended the request, and on a second call."""
        text, _ = self._advance(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _advance(self, new: str) -> tuple[str, bool]:
        """Appends text and looks for stop strings. None is complete in `_held`, so what is found is new."""
        if self._is_stopped or not self._stop:
            return ("", True) if self._is_stopped else (new, False)
        text = self._held + new
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)  # the first to be complete; of several there, the one that began first
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
