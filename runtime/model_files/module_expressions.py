"""Matches names of modules with regular expressions of a model's files, in bounded time.

Python's `re` may backtrack without end, and cannot be interrupted. So it matches only with expressions whose number of
paths through a name is small. Any other is matched by `_Ends`, which follows all paths together: it computes at which
places a part of the expression may end, and takes a polynomial time. Both find the same, which a test compares.
"""

import math
import re
import time
from collections.abc import Iterable
from re import _parser  # type: ignore[attr-defined]  # the parser of `re` itself, so that both read the same
from typing import Any

from ..api.errors import UnsupportedModelError
from .number_bounds import shown

_MAX_CHARS = 2_000  # of an expression
_MAX_NAME_CHARS = 100  # twice as many as any module of a model has
_MAX_PATHS = 100_000_000  # a second or two
_SECONDS = 60.0  # of processor time, for all names; published models take milliseconds
_FLAGS = re.UNICODE | re.VERBOSE  # the others change what characters match

_CATEGORIES = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_NOT_DIGIT": lambda char: not char.isdecimal(),
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_NOT_SPACE": lambda char: not char.isspace(),
    "CATEGORY_WORD": lambda char: char.isalnum() or char == "_",
    "CATEGORY_NOT_WORD": lambda char: not (char.isalnum() or char == "_"),
}
_CHARS = ("LITERAL", "NOT_LITERAL", "ANY", "IN")
_REPEATS = ("MAX_REPEAT", "MIN_REPEAT")
_KNOWN = frozenset({*_CHARS, *_REPEATS, "AT", "BRANCH", "SUBPATTERN", "ASSERT", "ASSERT_NOT"})


class Expressions:
    """Some regular expressions, which have been checked by `check_expression`."""

    def __init__(self, expressions: Iterable[str]):
        self._matchers = [_matcher(expression) for expression in expressions]
        self._seconds = 0.0

    def match(self, name: str) -> bool:
        """Returns whether one of them matches the beginning of a module's name, as `re.match` does.

        Raises:
          UnsupportedModelError: The name is too long, or all names together took too long.
        """
        if not self._matchers:
            return False
        if len(name) > _MAX_NAME_CHARS:
            raise UnsupportedModelError(
                f"the module {shown(name)} has {len(name)} characters; allowed: {_MAX_NAME_CHARS}."
            )
        began = time.thread_time()
        for matcher in self._matchers:
            if matcher.match(name):
                return True
            if self._seconds + time.thread_time() - began > _SECONDS:
                raise UnsupportedModelError(
                    f"the regular expressions of config.json took more than {_SECONDS:g} s; list the names of modules."
                )
        self._seconds += time.thread_time() - began
        return False


def check_expression(expression: str) -> None:
    """Checks that an expression can be matched in bounded time.

    Raises:
      ValueError: It cannot; or it is no regular expression.
    """
    _matcher(expression)


def _matcher(expression: str) -> "re.Pattern[str] | _Ends":
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"it has {len(expression)} characters; allowed: {_MAX_CHARS}")
    try:
        parsed = _parser.parse(expression)
        _check(parsed, parsed.state.flags)
        if _paths(parsed, _MAX_NAME_CHARS) <= _MAX_PATHS:
            return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return _Ends(parsed)


def _check(part: Any, flags: int) -> None:
    """
    Raises:
      ValueError: A construct, such as a reference to a group, cannot be matched in bounded time.
    """
    if flags & ~_FLAGS:
        raise ValueError("flags such as (?i) are not supported")
    for operation, argument in part:
        name = str(operation)
        if name not in _KNOWN or (name == "AT" and "BOUNDARY" in str(argument)):
            raise ValueError(
                f"{name} is not supported: references, conditions, boundaries and possessive repeats are not"
            )
        for inner in _parts(name, argument):
            _check(inner, argument[1] if name == "SUBPATTERN" else 0)


def _parts(name: str, argument: Any) -> list[Any]:
    """Returns the expressions within a construct."""
    if name in _REPEATS:
        return [argument[2]]
    if name == "BRANCH":
        return list(argument[1])
    if name == "SUBPATTERN":
        return [argument[3]]
    return [argument[1]] if name.startswith("ASSERT") else []


def _paths(part: Any, num_chars: int) -> float:
    """Returns a bound of the ways in which `re` tries a part on a name of so many characters; infinite for nested ones.

    The repeats of a part share the characters, so that `k` of them have as many ways as `num_chars` has sums of `k`.
    """
    ways, repeats = 1.0, 0

    def visit(part: Any) -> None:
        nonlocal ways, repeats
        for operation, argument in part:
            name = str(operation)
            if name in _REPEATS:
                low, high, inner = argument
                if int(high) <= 1:
                    ways *= 2
                elif len(inner) == 1 and str(inner[0][0]) in _CHARS:
                    repeats += 1
                else:
                    ways = math.inf
            elif name == "BRANCH":
                ways *= len(argument[1])
            for each in _parts(name, argument):
                visit(each)

    visit(part)
    return ways * math.comb(num_chars + repeats, repeats)


class _Ends:
    """An expression that is matched by following all paths together."""

    def __init__(self, parsed: Any):
        self._parsed = parsed

    def match(self, name: str) -> bool:
        """Returns whether it matches the beginning of a name."""
        return bool(self._ends(self._parsed, name, frozenset({0})))

    def _ends(self, part: Any, name: str, starts: frozenset[int]) -> frozenset[int]:
        """Returns where a part may end if it begins at one of the places `starts`."""
        for operation, argument in part:
            if not starts:
                break
            starts = self._after(str(operation), argument, name, starts)
        return starts

    def _after(self, operation: str, argument: Any, name: str, starts: frozenset[int]) -> frozenset[int]:
        if operation in _CHARS:
            return frozenset(at + 1 for at in starts if at < len(name) and _fits(operation, argument, name[at]))
        if operation == "SUBPATTERN":
            return self._ends(argument[3], name, starts)
        if operation == "BRANCH":
            return frozenset().union(*(self._ends(branch, name, starts) for branch in argument[1]))
        if operation == "AT":
            is_start = "BEGINNING" in str(argument)
            return frozenset(at for at in starts if at == (0 if is_start else len(name)))
        if operation in _REPEATS:
            return self._repeated(argument, name, starts)
        direction, body = argument
        found = (at for at in starts if self._is_beside(body, name, at, direction))
        return frozenset(found) if operation == "ASSERT" else starts - frozenset(found)

    def _is_beside(self, body: Any, name: str, at: int, direction: int) -> bool:
        if direction > 0:
            return bool(self._ends(body, name, frozenset({at})))
        start = at - body.getwidth()[0]  # `re` allows only one width
        return start >= 0 and at in self._ends(body, name, frozenset({start}))

    def _repeated(self, argument: Any, name: str, starts: frozenset[int]) -> frozenset[int]:
        """Repeats a part until it comes to no other places. Repeats that have no characters need no second one."""
        low, high, body = int(argument[0]), int(argument[1]), argument[2]
        reached = starts
        for _ in range(low):
            before, reached = reached, self._ends(body, name, reached)
            if reached == before:  # also none at all
                break
        found = latest = reached
        for _ in range(high - low):
            latest = self._ends(body, name, latest) - found
            if not latest:
                break
            found |= latest
        return found


def _fits(operation: str, argument: Any, char: str) -> bool:
    if operation == "LITERAL":
        return ord(char) == argument
    if operation == "NOT_LITERAL":
        return ord(char) != argument
    if operation == "ANY":
        return char != "\n"
    is_negated = str(argument[0][0]) == "NEGATE"
    return is_negated != any(_is_in(str(kind), value, char) for kind, value in argument[is_negated:])


def _is_in(kind: str, value: Any, char: str) -> bool:
    if kind == "LITERAL":
        return ord(char) == value
    if kind == "RANGE":
        return bool(value[0] <= ord(char) <= value[1])
    return bool(_CATEGORIES[str(value)](char))
