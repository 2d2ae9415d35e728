"""Reads options of other servers whose values are JSON, or are bounded."""

import json
from collections.abc import Mapping
from typing import Any

from ...api.sampling_params import MAX_LOGPROBS
from .meaning import ANYWAY, Meaning, refused, sets

_HEADS = ("eagle3", "dflash", "draft_model")  # methods with a model of their own
_IGNORED = ("prompt_lookup_max", "draft_tensor_parallel_size", "max_model_len")


def speculation(value: Any) -> Meaning:
    """Returns the meaning of vLLM's speculative_config: a mapping, or its JSON."""
    config = _mapping(value)
    if config is None:
        return refused(f'got {value!r}; allowed is a JSON object such as {{"method": "ngram"}}')
    method = config.get("method", "draft_model" if "model" in config else "ngram")
    if method not in (*_HEADS, "ngram"):
        return refused(f"the method is {method!r}; allowed are ngram, {', '.join(_HEADS)}")
    names = {"num_speculative_tokens": "draft_tokens"}
    names |= {"model": "draft_model"} if method in _HEADS else {"prompt_lookup_min": "draft_min_match"}
    unknown = config.keys() - names.keys() - {"method", *_IGNORED}
    if unknown:
        return refused(f"it has {', '.join(sorted(unknown))}; allowed are method, {', '.join(names)}")
    return sets(**{ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None})


def adapters(value: Any) -> Meaning:
    """Returns the meaning of vLLM's lora_modules and SGLang's lora_paths: texts NAME=PATH, objects, or their JSON."""
    given = [value] if isinstance(value, str | Mapping) else value
    found = []
    for each in given if isinstance(given, list | tuple) else [given]:
        config = _mapping(each)
        if config is None and isinstance(each, str) and all(each.partition("=")):
            found.append(each)
            continue
        known = config or {}
        name, path = (known.get(key, known.get(f"lora_{key}")) for key in ("name", "path"))
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            return refused(f"got {each!r}; allowed are NAME=PATH and objects with name and path")
        found.append(f"{name}={path}")
    return sets(adapter=tuple(found))


def log_probabilities(value: Any) -> Meaning:
    """Returns the meaning of vLLM's max_logprobs."""
    is_served = str(value).isdigit() and int(value) <= MAX_LOGPROBS
    return ANYWAY if is_served else refused(f"up to {MAX_LOGPROBS} log-probabilities are returned for a token")


def _mapping(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    return value if isinstance(value, Mapping) else None
