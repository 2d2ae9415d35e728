"""Reads the options of a server from a TOML file."""

import dataclasses
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..api.errors import ConfigError
from .nearest import nearest
from .serve_config import ServeConfig, aliases, options


def read_toml(path: Path) -> dict[str, Any]:
    """Reads the options of a TOML file. The error for an unknown key suggests a similar one.

    Raises:
      ConfigError: The file does not exist or is not valid TOML, a key is unknown, or a value has the wrong type.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}.") from None
    except (ValueError, RecursionError) as error:  # invalid TOML, or a number or nesting too large for Python
        raise ConfigError(f"--config {path}: {error}.") from None
    return checked_options(raw, f"--config {path}")


def checked_options(given: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Checks names and types of options, and returns arguments of `ServeConfig`.

    Args:
      given: The options by name or alias. A whole number may stand for a float, and "auto" for an automatic value.
      source: Where they come from, for error messages.

    Raises:
      ConfigError: A name is unknown, or a value has the wrong type. The error for an unknown name suggests another.
    """
    types: dict[str, Any] = {option_field.name: option_field.type for option_field in dataclasses.fields(ServeConfig)}
    checked = {}
    for alias, name in aliases().items():
        if alias in given and name in given:
            raise ConfigError(f"{source}: {alias} and {name} are the same option. Omit one.")
    for key, value in ((aliases().get(key, key), value) for key, value in given.items()):
        if key not in types:
            near = nearest(key, types)
            hint = f" Did you mean {near}?" if near else f" Known keys: {', '.join(types)}."
            raise ConfigError(f"{source}: unknown key {key!r}.{hint}")
        expected = types[key]
        if value == "auto" and options()[key].is_auto:
            value = expected(0)
        elif expected is float and type(value) is int and abs(value) <= sys.float_info.max:
            value = float(value)
        if type(value) is not expected:
            raise ConfigError(
                f"{source}: {key} is {value!r}; it must be of type {getattr(expected, '__name__', expected)}."
            )
        checked[key] = value
    return checked
