"""What a model's files say about generating with it: its end tokens, and defaults of sampling parameters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import InvalidRequestError, UnsupportedModelError
from .model_config import read_json
from .sampling_params import SamplingParams

FILE = "generation_config.json"
# Fields of the file that are defaults of sampling parameters, with their names in `SamplingParams`.
_SAMPLING_FIELDS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
_EVERY_TOKEN = -1  # a top_k that Hugging Face's older files use for "off"


def read_eos_token_ids(directory: Path) -> frozenset[int]:
    """Returns the end tokens of the model in a directory: those of generation_config.json, or else of config.json.

    Raises:
      UnsupportedModelError: A file is unreadable, or its `eos_token_id` is not a token or list of tokens.
    """
    for path in (directory / FILE, directory / "config.json"):
        value = _read(path).get("eos_token_id")
        if value is not None:
            token_ids = value if isinstance(value, list) else [value]
            if not all(type(token_id) is int and token_id >= 0 for token_id in token_ids):
                raise UnsupportedModelError(f"{path}: eos_token_id is {value!r}; allowed are token ids.")
            return frozenset(token_ids)
    return frozenset()


def read_sampling_defaults(directory: Path) -> dict[str, Any]:
    """Returns the sampling parameters that a model's generation_config.json sets, by their names in `SamplingParams`.

    Other fields of the file are ignored, as by vLLM.

    Raises:
      UnsupportedModelError: The file is unreadable, or a value is out of range.
    """
    path, defaults = directory / FILE, {}
    for theirs, name in _SAMPLING_FIELDS.items():
        value = _read(path).get(theirs)
        if value is not None:
            defaults[name] = _checked(path, theirs, name, value)
    return defaults


def _checked(path: Path, field: str, name: str, value: Any) -> int | float:
    default = getattr(SamplingParams(), name)
    kind = int if default is None else type(default)
    problem = f"{field} is {value!r}; allowed is a {'number' if kind is float else 'whole number'}"
    if type(value) is kind or (kind is float and type(value) is int):
        if (name, value) == ("top_k", _EVERY_TOKEN):
            return 0
        try:
            SamplingParams(**{name: kind(value)})
            return kind(value)
        except InvalidRequestError as error:
            problem = f"{field} {str(error).partition(': ')[2].removesuffix('.')}"
    raise UnsupportedModelError(f"{path}: {problem}. Correct it, or start with --generation-config=off.")


def _read(path: Path) -> dict[str, Any]:
    """Returns the parsed file, or an empty dict if it does not exist."""
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
