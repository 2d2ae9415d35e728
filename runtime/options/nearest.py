"""Finds the name that somebody who misspelt one probably meant."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is most similar to `name`, or None if none is similar."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return found[0] if found else None
