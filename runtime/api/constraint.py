"""The constraint on the output of a request, as requested. `text/grammar.py` compiles it."""

from dataclasses import dataclass
from typing import Literal, get_args

from .errors import InvalidRequestError

MAX_CONSTRAINT_CHARS = 65_536
MAX_CHOICES = 1_024

ConstraintKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]
CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = get_args(ConstraintKind)


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """A constraint of one kind. Its size is validated on construction, and its meaning when it is compiled.

    Raises:
      InvalidRequestError: The constraint is empty or too large.
    """

    kind: ConstraintKind
    text: str = ""  # for json_schema, regex and grammar
    choices: tuple[str, ...] = ()  # for choice

    def __post_init__(self) -> None:
        def require(ok: bool, got: object, allowed: str) -> None:
            if not ok:
                raise InvalidRequestError(self.field, f"got {got}; allowed is {allowed}.")

        num_chars = self.num_chars
        require(num_chars <= MAX_CONSTRAINT_CHARS, f"{num_chars} characters", f"{MAX_CONSTRAINT_CHARS} or fewer")
        if self.kind == "choice":
            num_choices = len(self.choices)
            require(1 <= num_choices <= MAX_CHOICES, f"{num_choices} choices", f"1 to {MAX_CHOICES}")
            require(all(self.choices), "an empty choice", "1 character or more")
        elif self.kind != "json_object":
            require(bool(self.text), "an empty text", "1 character or more")

    @property
    def num_chars(self) -> int:
        """Its size."""
        return len(self.text) + sum(map(len, self.choices))

    @property
    def field(self) -> str:
        """The name of its field in the public API."""
        return f"sampling.constraint.{self.kind}"
