"""Reads the options of a server from a TOML file."""

import dataclasses
import logging
import sys
import tomllib
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from meshserve.sharding.guarded_files import read_guarded

from ..api.errors import ConfigError
from .foreign.translation import foreign_options, own_value, translate, typed
from .nearest import nearest
from .option import Option
from .serve_config import ServeConfig

Tell = Callable[[str], None]
_MAX_BYTES = 1 << 20
_log = logging.getLogger(__name__)


def read_toml(path: Path, tell: Tell = _log.info) -> dict[str, Any]:
    """Reads the options of a TOML file; see `checked_options`.

    Raises:
      ConfigError: The file does not exist or is not valid TOML, or see `checked_options`.
    """
    try:
        raw = tomllib.loads(read_guarded(path, _MAX_BYTES).data.decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}.") from None
    except (ValueError, RecursionError) as error:  # invalid TOML, or a number or nesting too large for Python
        raise ConfigError(f"--config {path}: {error}.") from None
    return checked_options(raw, f"--config {path}", tell)


def checked_options(given: Mapping[str, Any], source: str, tell: Tell = _log.info) -> dict[str, Any]:
    """Checks names and types of options, translates those of other servers, and returns arguments of `ServeConfig`.

    Args:
      given: The options by name. A whole number may stand for a float, and "auto" for an automatic value.
      source: Where they come from, for error messages.
      tell: Receives a line for each option of another server that changes nothing, or is taken as something else.

    Raises:
      ConfigError: Names are unknown, options are refused, or a value has the wrong type. The message has a line for
        each; that of an unknown name suggests another.
    """
    known = {each.name: (each.metadata["option"], each.type) for each in dataclasses.fields(ServeConfig)}
    own = {name: value for name, value in given.items() if name in known}
    foreign = {name: value for name, value in given.items() if name not in known and name in foreign_options()}
    problems = [_unknown(name, known) for name in given if name not in own and name not in foreign]
    found = translate(foreign, known, model=str(own.get("model", "")), spell=_spelled)
    problems += found.problems
    problems += [
        f"{name} and {found.sources[name]} are the same option. Omit one." for name in own.keys() & found.sources
    ]
    checked = {}
    for name, value in (own | found.options).items():
        try:
            checked[name] = _checked(name, value, *known[name])
        except ArgumentTypeError as error:
            problems.append(f"{found.sources.get(name, name)} {error}")
    if problems:
        raise ConfigError("\n".join(f"{source}: {problem}" for problem in problems))
    for note in found.notes:
        tell(f"{source}: {note}")
    return checked


def _spelled(name: str, value: Any) -> str:
    return name if value is None else f"{name} = {value!r}"


def _unknown(name: str, known: Iterable[str]) -> str:
    names = [*known, *(theirs for theirs, option in foreign_options().items() if not option.meaning.refusal)]
    near = nearest(name, names)
    return f"unknown key {name!r}." + (f" Did you mean {near}?" if near else "")


def _checked(name: str, value: Any, option: Option, expected: Any) -> Any:
    """Returns a value in the type of its option.

    Raises:
      ArgumentTypeError: It has another type, or is one that other servers have and that is refused.
    """
    if own_value(name, value) is not None:
        return typed(name, value, option, expected)
    if value == "auto" and option.is_auto:
        return expected(0)
    if option.is_list:
        return _listed(value)
    if expected is float and type(value) is int and abs(value) <= sys.float_info.max:
        return float(value)
    if type(value) is not expected:
        raise ArgumentTypeError(f"is {value!r}; it must be of type {expected.__name__}.")
    return value


def _listed(value: Any) -> tuple[str, ...]:
    """Returns the value of an option that is a list, from a list of texts or a table of texts."""
    if isinstance(value, Mapping):
        value = [f"{name}={text}" if isinstance(text, str | PathLike) else text for name, text in value.items()]
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise ArgumentTypeError(f"is {value!r}; it must be a list or a table of texts.")
    return tuple(value)
