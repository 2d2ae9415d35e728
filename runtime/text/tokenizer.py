"""Steps 2 and 9 of 10: converts prompts to tokens, and output tokens to text.

`Tokenizer` reads a model directory. `TextStream` converts the output tokens of one request to text incrementally.

Qwen3's tokenizer is a byte-level BPE: each token stands for a fixed sequence of bytes, so the text of a token sequence
is the UTF-8 decoding of the concatenated bytes. Streaming is therefore exact and cheap: the bytes of new tokens are
looked up and fed to an incremental UTF-8 decoder, which holds back an incomplete character. No token is decoded twice.
"""

import codecs
import copy
import functools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from meshserve.sharding.guarded_files import contained, read_guarded

from ..api.errors import NEEDS_TOKENIZER, InvalidRequestError, UnavailableFeatureError, UnsupportedModelError
from ..api.sampling_params import SamplingParams
from ..model_files.generation_config import eos_token_ids_by_file, read_eos_token
from ..model_files.model_config import read_json_if_present
from ..model_files.number_bounds import parse_json, shown
from .chat_template import ChatTemplate
from .known_text_files import is_known_tokenizer, without_rules
from .limited_text import LimitedText
from .token_bytes import added_token_bytes, vocabulary_bytes

_DECODER = codecs.getincrementaldecoder("utf-8")
_MAX_FILE_BYTES = 64 << 20  # Qwen3's has 11 MB
_DECODED_TOKENS = 8_192  # at a time
# Rules that are fast for short texts may backtrack for hours in long runs, which prompts have.
_PROBE_RUN = 100_000
_PROBE = "".join(char * _PROBE_RUN for char in "a 0.\n")
_log = logging.getLogger(__name__)


def read_tokenizer(path: Path) -> tuple[dict[str, Any], bytes]:
    """Returns the contents of a tokenizer.json, parsed and as they are.

    Raises:
      UnsupportedModelError: It cannot be read, or is of a kind that meshserve does not support.
    """
    try:
        data = read_guarded(contained(path.parent, path.name), _MAX_FILE_BYTES).data
        content = parse_json(data.decode("utf-8"))
    except OSError as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error}.") from None
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(f"{path} is not a readable tokenizer: {error}.") from None
    decoder = content.get("decoder") if isinstance(content, dict) else None
    kind = decoder.get("type") if isinstance(decoder, dict) else type(decoder).__name__
    if kind != "ByteLevel":
        raise UnsupportedModelError(
            f"{path} has the decoder {shown(kind)}; meshserve supports only ByteLevel tokenizers."
        )
    return content, data


def _eos_files(directory: Path, token_id: Callable[[str], int | None]) -> dict[int, tuple[str, ...]]:
    """Returns the end tokens, with the names of the files that name each.

    Chat models that were made of base models often name their end token in the tokenizer's file only.
    """
    name, token_ids = eos_token_ids_by_file(directory)
    files: dict[int, tuple[str, ...]] = {each: (name,) for each in token_ids}
    name, token = read_eos_token(directory)
    if token and (found := token_id(token)) is not None:
        files[found] = (*files.get(found, ()), name)
    return files


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
        self._chat_template = ChatTemplate(self.directory)
        self._limited: LimitedText | None = None  # encodes, if what the tokenizer does is not known
        self._tokenizer = self._loaded(path)
        # A tokenizer.json may configure truncation or padding, but prompts must reach the model unchanged.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        shown, self._special_bytes = added_token_bytes(self._tokenizer)
        # Filled as tokens are generated, so its size is bounded by the vocabulary.
        self._token_bytes: dict[int, bytes] = {**shown, **dict.fromkeys(self._special_bytes, b"")}
        # Added tokens that the library decodes as if they were not: characters of "café" stand for bytes, too.
        self._misread = {token_id for token_id, text in shown.items() if vocabulary_bytes(text.decode()) != text}
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        # A character in the vocabulary stands for a byte, so this also bounds the characters of text per token.
        self.max_token_chars = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self.eos_files = _eos_files(self.directory, self.token_id)

    def _loaded(self, path: Path) -> tokenizers.Tokenizer:
        """Returns the tokenizer of a file: without the rules by which it divides texts, if they are not known.

        Raises:
          UnsupportedModelError: The file is not readable, of another kind, or takes too long to load.
        """
        content, data = read_tokenizer(path)
        if not is_known_tokenizer(content):
            _log.info("%s has rules that are not known; texts are encoded in processes of limited time", path)
            self._limited = self._chat_template.limited
            self._limited.encode(f"the tokenizer {path}", "", is_completed=False)  # so that the start names it
            what = f"the tokenizer {path}, tried with runs of {_PROBE_RUN} equal characters,"
            self._limited.encode(what, _PROBE, is_completed=False)
            data = json.dumps(without_rules(content)).encode()
        try:
            return tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises plain Exception
            raise UnsupportedModelError(f"{path} is not a readable tokenizer: {error}.") from error

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The end tokens of the model, and that of its tokenizer."""
        return frozenset(self.eos_files)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template, which `render_chat` requires."""
        config = read_json_if_present(self.directory / "tokenizer_config.json")
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
        if self._limited is not None:
            file = self.directory / "tokenizer.json"
            return tuple(self._limited.encode(f"the tokenizer {file}", text, is_completed=is_completed))
        # Encoded as a batch of one, because the library releases the GIL only for batches.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=is_completed)
        return tuple(encoding.ids)

    @functools.cached_property
    def num_added_tokens(self) -> int:
        """How many tokens `encode` adds to a completed text; all of them must come after the text."""
        if self._limited is not None:
            return len(self.encode("", is_completed=True))
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
            if self._misread.isdisjoint(piece):
                texts += self._tokenizer.decode_batch([piece], skip_special_tokens=True)  # see `encode`
            else:
                texts.append(b"".join(map(self.token_bytes, piece)).decode(errors="replace"))
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
            found = self._token_bytes[token_id] = vocabulary_bytes(token)
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
          InvalidRequestError: The template rejects the messages, or has none of a message's role.
        """
        options = template_options | {"add_generation_prompt": add_generation_prompt}
        return self._chat_template.render(messages, continue_last_message=continue_last_message, **options)

    @property
    def chat_template(self) -> str:
        """The text of the chat template; empty if there is none."""
        return self._chat_template.text


class NoTokenizer(Tokenizer):
    """Stands in for the tokenizer of a model directory without one: outputs have no text, and text is refused."""

    has_text = has_chat_template = False

    def __init__(self, directory: str | Path):
        self._directory = Path(directory)
        self.vocab_size = 0
        self.max_token_chars = sys.maxsize
        self.eos_files = _eos_files(self._directory, self.token_id)

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


def text_stream(tokenizer: Tokenizer, params: SamplingParams) -> TextStream:
    """Returns the text stream of a new sample with these parameters."""
    return TextStream(
        tokenizer,
        params.stop,
        include_stop=params.include_stop,
        skip_special_tokens=params.skip_special_tokens,
        num_free_tokens=params.min_tokens,
    )
