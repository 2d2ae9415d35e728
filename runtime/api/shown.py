"""Shows values of callers in errors, however large they are."""

import itertools
from typing import Any

_MAX_ITEMS = 8
_MAX_DEPTH = 3


def shown(value: Any, num_chars: int = 80) -> str:
    """Returns the beginning of a value's `repr`, for which the rest of the value is not read."""
    return _shown(value, num_chars, _MAX_DEPTH)[:num_chars]


def _shown(value: Any, num_chars: int, depth: int) -> str:
    if isinstance(value, str | bytes):
        return repr(value[:num_chars])
    if not isinstance(value, list | tuple | dict):
        return repr(value)
    is_dict = isinstance(value, dict)
    opening, closing = ("{", "}") if is_dict else ("[", "]")
    if not depth:
        return f"{opening}...{closing}" if value else opening + closing
    found = []
    for each in itertools.islice(value, _MAX_ITEMS):
        item = _shown(each, num_chars, depth - 1)
        found.append(f"{item}: {_shown(value[each], num_chars, depth - 1)}" if is_dict else item)
    return opening + ", ".join(found) + (", ..." if len(value) > _MAX_ITEMS else "") + closing
