"""Reads the options of a server from a TOML file."""

import dataclasses
import sys
import tomllib
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
    for alias, name in aliases().items():
        if alias in raw and name in raw:
            raise ConfigError(f"--config {path}: {alias} and {name} are the same option. Omit one.")
    raw = {aliases().get(key, key): value for key, value in raw.items()}
    types = {option_field.name: option_field.type for option_field in dataclasses.fields(ServeConfig)}
    for key, value in raw.items():
        if value == "auto" and key in types and options()[key].is_auto:
            raw[key] = value = types[key](0)  # type: ignore[operator]
        if key not in types:
            near = nearest(key, types)
            hint = f" Did you mean {near}?" if near else f" Known keys: {', '.join(types)}."
            raise ConfigError(f"--config {path}: unknown key {key!r}.{hint}")
        expected = types[key]
        if expected is float and type(value) is int and abs(value) <= sys.float_info.max:
            raw[key] = float(value)
        elif type(value) is not expected:
            raise ConfigError(
                f"--config {path}: {key} is {value!r}; it must be of type {getattr(expected, '__name__', expected)}."
            )
    return raw
