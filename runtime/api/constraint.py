"""What the whole output of a request is held to, as it was asked for. Knows no grammar library: `grammar.py` does."""

from dataclasses import dataclass
from typing import Literal, get_args

from .errors import InvalidRequestError

MAX_CONSTRAINT_CHARS = 65_536  # what compiles within half a second, whatever it says (measured; docs/decisions/014)
MAX_CHOICES = 1_024

ConstraintKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]
CONSTRAINT_KINDS: tuple[ConstraintKind, ...] = get_args(ConstraintKind)


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """One kind and what it says. Sizes are checked on construction, meaning where it is compiled.

    Raises:
      InvalidRequestError: it is empty or too large.
    """

    kind: ConstraintKind
    text: str = ""  # of json_schema, regex and grammar
    choices: tuple[str, ...] = ()  # of choice

    def __post_init__(self) -> None:
        def require(ok: bool, got: object, allowed: str) -> None:
            if not ok:
                raise InvalidRequestError(self.field, f"got {got}; allowed is {allowed}.")

        num_chars = len(self.text) + sum(map(len, self.choices))
        require(num_chars <= MAX_CONSTRAINT_CHARS, f"{num_chars} characters", f"{MAX_CONSTRAINT_CHARS} or fewer")
        if self.kind == "choice":
            num_choices = len(self.choices)
            require(1 <= num_choices <= MAX_CHOICES, f"{num_choices} choices", f"1 to {MAX_CHOICES}")
            require(all(self.choices), "an empty choice", "1 character or more")
        elif self.kind != "json_object":
            require(bool(self.text), "an empty text", "1 character or more")

    @property
    def field(self) -> str:
        """Its name in the public API."""
        return f"sampling.constraint.{self.kind}"
