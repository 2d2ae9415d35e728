"""Finds the name that somebody who misspelt one probably meant."""

import difflib
from collections.abc import Iterable

_CUTOFF = 0.75  # of difflib's ratio; below it, names share little more than a word
_NEGATIONS = ("no", "disable", "without", "skip")
_AFFIRMATIONS = ("enable", "use", "with")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that is most similar to `name`, or None if none is similar.

    A name that says the opposite, such as --no-prefix-cache for --enable-prefix-cache, is not similar.
    """
    is_negative, stem = _split(name)
    stems: dict[str, str] = {}
    for each in known:
        its_negative, its_stem = _split(each)
        if its_negative == is_negative:
            stems.setdefault(its_stem, each)
    found = difflib.get_close_matches(stem, stems, n=1, cutoff=_CUTOFF)
    return stems[found[0]] if found else None


def _split(name: str) -> tuple[bool, str]:
    """Returns whether a name negates something, and what is left without dashes and the word that says so."""
    plain = name.strip("-").lower().replace("_", "-")
    first, _, rest = plain.partition("-")
    if rest and first in (*_NEGATIONS, *_AFFIRMATIONS):
        return first in _NEGATIONS, rest
    return False, plain
