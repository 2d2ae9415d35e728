"""What a model's files say about generating with it: its end tokens, and defaults of sampling parameters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..api.errors import InvalidRequestError, UnsupportedModelError
from ..api.sampling_params import SamplingParams, without_unset
from .model_config import read_json_if_present
from .number_bounds import BOUNDS, MAX_END_TOKENS, TOKEN_ID, shown

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


def read_eos_token_ids(directory: Path) -> frozenset[int]:
    """Returns the end tokens of the model in a directory: those of generation_config.json, or else of config.json.

    Raises:
      UnsupportedModelError: See `eos_token_ids_by_file`.
    """
    return eos_token_ids_by_file(directory)[1]


def eos_token_ids_by_file(directory: Path) -> tuple[str, frozenset[int]]:
    """Returns the name of the file that names the end tokens of a model, and these.

    Raises:
      UnsupportedModelError: A file is unreadable, or its `eos_token_id` is not a token or list of tokens.
    """
    for path in (directory / FILE, directory / "config.json"):
        value = read_json_if_present(path).get("eos_token_id")
        if value is not None:
            token_ids = value if isinstance(value, list) else [value]
            if len(token_ids) > MAX_END_TOKENS or not all(map(TOKEN_ID.accepts, token_ids)):
                raise UnsupportedModelError(
                    f"{path}: eos_token_id is {shown(value)}; allowed are token ids, at most {MAX_END_TOKENS}."
                )
            return path.name, frozenset(token_ids)
    return "", frozenset()


def read_eos_token(directory: Path) -> tuple[str, str]:
    """Returns the name of the file that names the tokenizer's end token, and the token, which is empty if none does.

    Raises:
      UnsupportedModelError: A file is unreadable.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        value = read_json_if_present(directory / name).get("eos_token")
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str) and token:
            return name, token
    return "", ""


def read_sampling_defaults(directory: Path) -> dict[str, Any]:
    """Returns the sampling parameters that a model's generation_config.json sets, by their names in `SamplingParams`.

    Other fields of the file are ignored, as by vLLM.

    Raises:
      UnsupportedModelError: The file is unreadable, or a value is out of range.
    """
    path = directory / FILE
    written = read_json_if_present(path)
    given = without_unset({name: written.get(theirs) for theirs, name in _SAMPLING_FIELDS.items()})
    return {
        name: _checked(path, theirs, name, given[name]) for theirs, name in _SAMPLING_FIELDS.items() if name in given
    }


def _checked(path: Path, field: str, name: str, value: Any) -> int | float:
    default = getattr(SamplingParams(), name)
    kind = int if default is None else type(default)
    problem = f"{field} is {shown(value)}; allowed is a {'number' if kind is float else 'whole number'}"
    if type(value) is kind or (kind is float and type(value) is int):
        try:
            SamplingParams(**{name: kind(value)})
            if field not in BOUNDS or BOUNDS[field].accepts(value):
                return kind(value)
            problem = f"{field} is {shown(value)}; allowed is {BOUNDS[field]}"
        except InvalidRequestError as error:
            problem = f"{field} {str(error).partition(': ')[2].removesuffix('.')}"
    raise UnsupportedModelError(f"{path}: {problem}. Correct it, or start with --generation-config=off.")
