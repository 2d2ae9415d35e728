"""Translates options of other servers to ours, for the command line, TOML files and `meshserve.LLM`."""

from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ..nearest import nearest
from ..option import Option
from .meaning import VLLM, ForeignOption, Meaning, flag
from .table import OWN_VALUES, TABLE

Spell = Callable[[str, Any], str]  # returns an option as the caller writes it, from its name and value


@dataclass
class Translation:
    """What options of other servers mean.

    Attributes:
      options: Our options by name.
      sources: The names of theirs that our options come from, as the caller writes them.
      notes: Which options change nothing, and which are taken as something else.
      problems: Options that are refused, with the reason, or given twice.
    """

    options: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@cache
def foreign_options() -> Mapping[str, ForeignOption]:
    """Returns the options of other servers by each of their names."""
    return {name: option for option in TABLE for name in option.names}


def vllm_names(option: str) -> list[str]:
    """Returns the names that an option of ours has in vLLM."""
    found = [each for each in TABLE if each.meaning.alias == option and each.read is None]
    return [each.names[0] for each in found if VLLM in each.servers]


def translate(
    given: Mapping[str, Any], known: Mapping[str, tuple[Option, Any]], *, model: str, spell: Spell
) -> Translation:
    """Translates options of other servers.

    Args:
      given: Their values by name: of any type, or texts of flags.
      known: Our options that the caller takes, with their types.
      model: The model, if it is given.
      spell: See `Spell`.
    """
    found = Translation()
    for name, value in given.items():
        option = foreign_options()[name]
        meaning = option.of(value, model)
        spelled = spell(name, value if option.tells_values else None)
        what = f"{spelled} ({option.servers})"
        options = {meaning.alias: value} if meaning.alias else dict(meaning.options)
        if meaning.refusal:
            found.problems.append(f"{what} is refused: {meaning.refusal}.")
        elif meaning.note:
            found.notes.append(f"{what} changes nothing: {meaning.note}.")
        elif meaning.options and not option.is_switch:
            shown = ", ".join(flag(ours, its_value) for ours, its_value in options.items())
            found.notes.append(f"{what} is taken as {shown}.")
        for ours, its_value in options.items():
            if ours not in known:
                found.problems.append(f"{what} has no effect here. Leave it out.")
            elif found.options.setdefault(ours, its_value) != its_value:
                found.problems.append(f"{found.sources[ours]} and {spelled} are the same option. Omit one.")
            found.sources.setdefault(ours, spelled)
    return found


def own_value(name: str, value: Any) -> Meaning | None:
    """Returns what a value of an option of ours means in other servers; None if it is not one of theirs."""
    return OWN_VALUES.get(name, {}).get(str(value).lower())


def typed(name: str, value: Any, option: Option, kind: Any) -> Any:
    """Returns the value of an option of ours, from the text of a flag if it is one.

    Raises:
      ArgumentTypeError: The text is no value of the option, or one that other servers have and that is refused.
    """
    if (meaning := own_value(name, value)) is not None:
        if meaning.refusal:
            raise ArgumentTypeError(f"{value} is refused: {meaning.refusal}.")
        return meaning.options[name]
    if option.choices and value not in option.choices:
        near = nearest(str(value), option.choices)
        hint = f" Did you mean {near}?" if near else ""
        raise ArgumentTypeError(f"got {value!r}; allowed are {', '.join(option.choices)}.{hint}")
    return option.parsed(value, kind) if isinstance(value, str) and kind is not bool else value
