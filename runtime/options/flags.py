"""The flags of the command line that are options of a server, and the configuration that they and a TOML file give."""

import argparse
import dataclasses
from functools import partial
from pathlib import Path

from .option import Option
from .serve_config import SECTIONS, ServeConfig
from .toml_file import read_toml


def add_options(parser: argparse.ArgumentParser, *, left_out: frozenset[str] = frozenset()) -> None:
    """Adds --config and one flag per option of ServeConfig, grouped by section. Expert options come last."""
    parser.add_argument("--config", type=Path, help="TOML file with the same options as keys; flags override it")
    titles = {section: parser.add_argument_group(section) for section in SECTIONS}
    expert = parser.add_argument_group("expert options", "These rarely need to be changed.")
    for field in dataclasses.fields(ServeConfig):
        if field.name in left_out:
            continue
        about: Option = field.metadata["option"]
        group = expert if about.is_expert else titles[about.section]
        flag, text = "--" + field.name.replace("_", "-"), f"{about.help} (default: {about.shown(field.default)})"
        if field.type is bool:
            group.add_argument(
                flag, dest=field.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            group.add_argument(
                flag,
                dest=field.name,
                type=partial(about.parsed, kind=field.type),  # int, float or str
                choices=about.choices or None,
                default=argparse.SUPPRESS,
                help=text,
            )


def serve_config(namespace: argparse.Namespace) -> ServeConfig:
    """Merges the TOML file and the flags into a ServeConfig.

    Raises:
      ConfigError: See `read_toml` and `ServeConfig`.
    """
    names = {field.name for field in dataclasses.fields(ServeConfig)}
    from_file = read_toml(namespace.config) if namespace.config else {}
    from_flags = {name: value for name, value in vars(namespace).items() if name in names}
    return ServeConfig(**(from_file | from_flags))
