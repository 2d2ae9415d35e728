"""The forms in which `LLM` takes prompts: text, token ids in lists or arrays, dictionaries; one or several."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

from ..api.errors import InvalidRequestError

if TYPE_CHECKING:
    import numpy as np

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.integer[Any]]]"
PromptForm: TypeAlias = "str | Sequence[int] | Array | Mapping[str, Any]"
Prompts: TypeAlias = "PromptForm | Sequence[PromptForm]"
Conversation = Sequence[Mapping[str, Any]]

_FORMS = "text, token ids, {'prompt': text} or {'prompt_token_ids': token ids}"


def listed_prompts(prompts: Prompts) -> list[str | tuple[int, ...]]:
    """Returns prompts as text or tuples of token ids.

    A single prompt gives a list of one, a two-dimensional array one prompt for each row.

    Raises:
      InvalidRequestError: A prompt has another form. The message names it by its index.
    """
    is_single = isinstance(prompts, str | Mapping) or _is_token_ids(prompts)
    listed: Iterable[Any] = [prompts] if is_single else prompts
    return [_prompt(prompt, f"prompts[{index}]") for index, prompt in enumerate(listed)]


def listed_conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """Returns a list of conversations. A single conversation, that is a list of messages, gives a list of one."""
    if messages and isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return list(messages)  # type: ignore[arg-type]


def _is_token_ids(value: Any) -> bool:
    """Whether `value` is one prompt of token ids, not a sequence of prompts."""
    if hasattr(value, "ndim"):
        return value.ndim == 1 and value.dtype.kind in "iu"
    return isinstance(value, Sequence) and len(value) > 0 and _is_token_id(value[0])


def _is_token_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _prompt(value: Any, place: str) -> str | tuple[int, ...]:
    if isinstance(value, Mapping):
        keys = set(value)
        if keys not in ({"prompt"}, {"prompt_token_ids"}):
            raise InvalidRequestError(
                place, f"got a dictionary of {', '.join(map(repr, value))}; allowed are {_FORMS}."
            )
        [value] = value.values()
    if isinstance(value, str):
        return value
    if hasattr(value, "ndim"):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            raise InvalidRequestError(
                place, f"got an array of shape {value.shape} and dtype {value.dtype}; token ids are a row of integers."
            )
        return tuple(value.tolist())
    if isinstance(value, Sequence) and all(map(_is_token_id, value)):
        return tuple(map(int, value))
    raise InvalidRequestError(place, f"got {type(value).__name__} {value!r:.80}; allowed are {_FORMS}.")
