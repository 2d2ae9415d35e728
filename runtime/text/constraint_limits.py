"""Limits on constraints: what may be sent, and what compiling and following it may take.

The limits on size are checked before a constraint reaches a parser. The others are enforced on the process that
compiles it; see `grammar`.
"""

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..api.constraint import Constraint
from ..api.errors import InvalidRequestError, QuotaExceededError

# The names by which refused constraints are counted; "crash" is an unexpected end of the parser.
LIMITS = ("rules", "references", "depth", "seconds", "memory", "stack", "slow_constraints", "crash")
MAX_RULES = 2_000
MAX_REFERENCES = 1_000
MAX_DEPTH = 200

_MAX_SLOW = 4  # constraints that may take long to compile at the same time; more wait, suspended
_MAX_SLOW_WAITING = 8
_RETRY_SECONDS = 1.0

_RULE = re.compile(r"^[ \t]*[?!]?[\w.-]+[ \t]*(?:\[[^\]\n]*\][ \t]*)?(?:::=|:)", re.MULTILINE)
_ESCAPED = re.compile(r"\\.", re.DOTALL)
# Escaped characters come first, so that none of these looks at any part of a text twice.
_QUOTED = re.compile(r'\\.|"(?:[^"\\\n]|\\.)*"')
_EXPRESSION = re.compile(r"\\.|/(?:[^/\\\n]|\\.)+/")  # in a Lark grammar
_CLASS = re.compile(r"\[\^?\]?[^\[\]]*\]")  # in a regular expression


@dataclass(frozen=True, kw_only=True)
class ConstraintLimits:
    """What one constraint may take. `seconds` is for compiling it, and for the masks of one step."""

    seconds: float = 10.0
    memory_bytes: int = 512 << 20


class LimitError(InvalidRequestError):
    """A constraint exceeds a limit. `limit` is the limit's name."""

    def __init__(self, constraint: Constraint, limit: str, message: str):
        super().__init__(constraint.field, message)
        self.limit = limit


def check_size(constraint: Constraint) -> None:
    """Checks the number of rules and references, and the depth of nesting.

    Raises:
      LimitError: There are too many, or they are nested too deeply.
    """

    def require(got: int, most: int, limit: str) -> None:
        if got > most:
            raise LimitError(constraint, limit, f"has {limit} {got}; allowed is {most} or less. Simplify it.")

    text = constraint.text
    if constraint.kind == "grammar":
        require(len(_RULE.findall(text)), MAX_RULES, "rules")
        require(_depth(_EXPRESSION.sub("", _QUOTED.sub("", text)), "(", ")"), MAX_DEPTH, "depth")
    elif constraint.kind == "regex":
        require(_depth(_CLASS.sub("", _ESCAPED.sub("", text)), "(", ")"), MAX_DEPTH, "depth")
    elif constraint.kind == "json_schema":
        require(_depth(_QUOTED.sub("", text), "[{", "]}"), MAX_DEPTH, "depth")
        try:
            schema = json.loads(text)
        except ValueError:  # the parser says what is wrong
            return
        require(_num_references(schema), MAX_REFERENCES, "references")


def _depth(text: str, opening: str, closing: str) -> int:
    """Returns how deeply brackets are nested in a text."""
    depth = deepest = 0
    for char in text:
        if char in opening:
            depth += 1
            deepest = max(deepest, depth)
        elif char in closing:
            depth = max(depth - 1, 0)
    return deepest


def _num_references(schema: Any) -> int:
    count, rest = 0, [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            count += "$ref" in part
            rest.extend(part.values())
        elif isinstance(part, list):
            rest.extend(part)
    return count


class SlowCompiles:
    """Counts the constraints that take long to compile, and divides the room for them between tenants.

    Each tenant may have half of the room, so that one cannot take it from all others.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()

    @contextmanager
    def turn(self, tenant: str) -> Iterator["Turn"]:
        """Registers a constraint for the time that it takes.

        Raises:
          QuotaExceededError: Too many wait already.
        """
        turn = Turn(self, tenant)
        with self._changed:
            if not turn.begin() and not self._has_room(self._waiting, tenant, _MAX_SLOW_WAITING):
                raise QuotaExceededError(
                    f"{self._running.total()} constraints that take long to compile are being compiled and "
                    f"{self._waiting.total()} wait (limit slow_constraints); a caller may have "
                    f"{_MAX_SLOW // 2} and {_MAX_SLOW_WAITING // 2}. Retry later, or simplify the constraint.",
                    f"tenant:{tenant}",
                    _RETRY_SECONDS,
                )
            self._waiting[tenant] += not turn.has_begun
        try:
            yield turn
        finally:
            with self._changed:
                (self._running if turn.has_begun else self._waiting)[tenant] -= 1
                self._changed.notify_all()

    @staticmethod
    def _has_room(counter: Counter[str], tenant: str, most: int) -> bool:
        return counter.total() < most and counter[tenant] < most // 2


class Turn:
    """The place of one slow constraint."""

    def __init__(self, compiles: SlowCompiles, tenant: str):
        self.has_begun = False
        self._compiles = compiles
        self._tenant = tenant

    def begin(self) -> bool:
        """Takes a place if there is one. Called with the lock held."""
        compiles = self._compiles
        self.has_begun = compiles._has_room(compiles._running, self._tenant, _MAX_SLOW)
        compiles._running[self._tenant] += self.has_begun
        return self.has_begun

    def wait(self, seconds: float) -> bool:
        """Waits for a place. Returns whether there is one."""
        compiles = self._compiles
        with compiles._changed:
            if not self.has_begun and compiles._changed.wait_for(self.begin, max(seconds, 0.0)):
                compiles._waiting[self._tenant] -= 1
        return self.has_begun
