"""The definition of an option: its help, its range, and how its value is parsed, shown and checked."""

import math
from argparse import ArgumentTypeError
from dataclasses import dataclass, field
from typing import Any

from ..api.errors import ConfigError

_KINDS = {int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True, kw_only=True)
class Option:
    """The definition of an option, except its name and default, which are those of its field in `ServeConfig`.

    Attributes:
      help: What the option sets, with its unit and the meaning of special values.
      section: The section of the help text.
      choices: The allowed values, if there are only a few.
      least, most: The bounds of a number.
      is_server_only: Whether the option has no effect without a server, as in `generate` and the benchmarks.
      may_differ: Whether the processes of one cluster may have different values.
      is_expert: Whether the option rarely needs to be changed; `--help` lists such options last.
      is_auto: Whether `auto` is allowed, which is stored as 0 and resolved at startup (in `planning`).
      is_list: Whether the flag may be given several times, each with a text. The value is a tuple of them. In TOML it
        is a list, or a table of NAME = VALUE for texts of the form NAME=VALUE.
    """

    help: str
    section: str
    choices: tuple[str, ...] = ()
    least: float = -math.inf
    most: float = math.inf
    is_server_only: bool = False
    may_differ: bool = False
    is_expert: bool = False
    is_auto: bool = False
    is_list: bool = False

    def parsed(self, text: str, kind: Any) -> Any:
        """Parses the text of a flag as a value of type `kind`.

        Raises:
          ArgumentTypeError: The text is no such value.
        """
        try:
            return kind(0) if self.is_auto and text == "auto" else kind(text)
        except ValueError:
            allowed = _KINDS[kind] + (" or auto" if self.is_auto else "")
            raise ArgumentTypeError(f"got {text!r}; allowed is {allowed}.") from None

    def shown(self, value: Any) -> str:
        """Returns a value as help texts show it."""
        return "auto" if self.is_auto and value == 0 else repr(value)

    def check(self, name: str, value: Any) -> None:
        """Checks a value of the option.

        Raises:
          ConfigError: The value is out of range or not among the choices.
        """
        if self.choices and value not in self.choices:
            raise ConfigError(f"{name} is {value!r}; allowed are {', '.join(self.choices)}.")
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise ConfigError(f"{name} is {value}; it must be finite.")
            if not self.least <= value <= self.most and not (self.is_auto and value == 0):
                allowed = f"{self.least:g} or more" if self.most == math.inf else f"{self.least:g} to {self.most:g}"
                raise ConfigError(f"{name} is {value}; it must be {allowed}.")


def option(default: Any, section: str, help: str, **rest: Any) -> Any:
    """Returns a field of `ServeConfig`; see `Option`."""
    return field(default=default, metadata={"option": Option(help=help, section=section, **rest)})
