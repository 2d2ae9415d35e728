"""The parts of the table of other servers' options."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

VLLM, SGLANG, BOTH = "vLLM", "SGLang", "vLLM, SGLang"


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What an option, or one of its values, means here. Without any of these, it asks for what happens anyway.

    Attributes:
      alias: Our option, which takes the same values.
      options: Our options with the values that they get.
      note: Why it changes nothing; logged.
      refusal: Why it is refused, and what to do instead.
    """

    alias: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    refusal: str = ""

    def shown(self) -> str:
        """Returns the meaning for the documentation."""
        if self.refusal:
            return f"refused: {self.refusal}"
        if self.note:
            return f"nothing changes: {self.note}"
        flags = [f"`{flag(name, value)}`" for name, value in self.options.items()]
        return ", ".join(flags) or (f"`{flag(self.alias)}`" if self.alias else "accepted")


def alias(option: str) -> Meaning:
    return Meaning(alias=option)


def sets(**options: Any) -> Meaning:
    return Meaning(options=options)


def nothing(note: str) -> Meaning:
    return Meaning(note=note)


def refused(refusal: str) -> Meaning:
    return Meaning(refusal=refusal)


ANYWAY = Meaning()


@dataclass(frozen=True, kw_only=True)
class ForeignOption:
    """An option of another server.

    Attributes:
      names: Its names, as in Python: `tensor_parallel_size` is the flag --tensor-parallel-size.
      servers: The servers that have it.
      meaning: What it means; of a switch, if it is on.
      values: The meanings of particular values, in lower case; of a switch, "false" is off.
      is_switch: Whether its flag takes no value.
      short: Its flags with one dash.
      may_be_model: Whether the served model is a value that asks for what happens anyway.
      is_list: Whether its flag takes several values.
      read: Returns the meaning of a value of many parts, in place of `meaning`.
      about: What `read` does, for the documentation.
    """

    names: tuple[str, ...]
    servers: str
    meaning: Meaning
    values: Mapping[str, Meaning] = field(default_factory=dict)
    is_switch: bool = False
    short: tuple[str, ...] = ()
    may_be_model: bool = False
    is_list: bool = False
    read: Callable[[Any], Meaning] | None = None
    about: str = ""

    def of(self, value: Any, model: str) -> Meaning:
        """Returns the meaning of a value, which may be the text of a flag. None is what Python callers leave out."""
        text = str(value).lower()
        if value is None or (self.may_be_model and value == model):
            return ANYWAY
        if text in self.values:
            return self.values[text]
        if self.is_switch and text == "false":
            return ANYWAY
        return self.meaning if self.read is None else self.read(value)

    @property
    def tells_values(self) -> bool:
        """Whether messages have the value: not of options that are refused altogether, since keys are among them."""
        return self.is_switch or bool(self.values) or self.read is not None or not self.meaning.refusal

    @property
    def flags(self) -> list[str]:
        return [flag(name) for name in self.names]

    def shown(self) -> str:
        """Returns what it means for the documentation."""
        main, by_meaning = self.about or self.meaning.shown(), dict[str, list[str]]()
        for value, meaning in self.values.items():
            if not self.is_switch or meaning not in (ANYWAY, self.meaning):
                by_meaning.setdefault(meaning.shown(), []).append("off" if self.is_switch else f"`{value}`")
        parts = [f"{', '.join(values)}: {shown}" for shown, values in by_meaning.items()]
        return "; ".join([main, *parts] if self.is_switch or not parts else [*parts, f"others: {main}"])


def flag(name: str, value: Any = None) -> str:
    """Returns the flag of an option, with a value if one is given."""
    dashed = name.replace("_", "-")
    if isinstance(value, tuple):  # of an option of ours, whose flag is repeated
        return " ".join(f"--{dashed} {each}" for each in value)
    if isinstance(value, list):
        value = " ".join(map(str, value))
    if isinstance(value, bool):
        return f"--{dashed}" if value else f"--no-{dashed}"
    return f"--{dashed}" if value is None else f"--{dashed} {value}"
