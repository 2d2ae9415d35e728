"""The flags of the command line that are options of a server, and the configuration that they and a TOML file give."""

import argparse
import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from ..api.errors import ConfigError
from .nearest import nearest
from .option import Option
from .serve_config import SECTIONS, ServeConfig
from .toml_file import read_toml

_EXIT_USAGE = 2
_MODEL_ARGUMENT = "model_argument"
_NONE: Mapping[str, str] = MappingProxyType({})
_CHOICE = re.compile(r"argument (?P<what>.+): invalid choice: '(?P<got>.*)' \(choose from (?P<known>.*)\)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line that names the nearest flag or command. Takes no abbreviations."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses arguments. Called for commands, too, so that their unknown flags are errors of the command itself."""
        parsed, unknown = super().parse_known_args(args, namespace)
        # Before Python 3.13, an optional positional argument behind a flag is not recognised.
        if len(unknown) == 1 and not unknown[0].startswith("-") and getattr(parsed, _MODEL_ARGUMENT, "") is None:
            setattr(parsed, _MODEL_ARGUMENT, unknown.pop())
        if unknown:
            self.error(self._unknown(unknown[0]))
        return parsed, []

    def _unknown(self, argument: str) -> str:
        if not argument.startswith("-"):
            return f"unexpected argument {argument!r}."
        flag = argument.partition("=")[0]
        near = nearest(flag, self._option_string_actions)
        return f"unknown flag {flag}." + (f" Did you mean {near}?" if near else "")

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits."""
        if (choice := _CHOICE.fullmatch(message)) is not None:
            known = [name.strip("' ") for name in choice["known"].split(",")]
            near = nearest(choice["got"], known)
            hint = f" Did you mean {near}?" if near else ""
            message = f"{choice['what']} is {choice['got']!r}; allowed are {', '.join(known)}.{hint}"
        message = message if message.endswith((".", "?")) else f"{message}."
        print(f"{self.prog}: {message} `{self.prog} --help` explains all arguments.", file=sys.stderr)
        sys.exit(_EXIT_USAGE)


def add_options(
    parser: argparse.ArgumentParser, *, left_out: frozenset[str] = frozenset(), helps: Mapping[str, str] = _NONE
) -> None:
    """Adds the model, --config and one flag per option of ServeConfig, by section. Expert options come last.

    Args:
      parser: The parser of a command.
      left_out: Names of options that the command does not have.
      helps: The whole help texts of options that mean something else to the command, by name.
    """
    parser.add_argument(_MODEL_ARGUMENT, nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", type=Path, help="TOML file with the same options as keys; flags override it")
    titles = {section: parser.add_argument_group(section) for section in SECTIONS}
    expert = parser.add_argument_group("expert options", "These rarely need to be changed.")
    for field in dataclasses.fields(ServeConfig):
        if field.name in left_out:
            continue
        about: Option = field.metadata["option"]
        group = expert if about.is_expert else titles[about.section]
        flags = [_flag(name) for name in (field.name, about.alias) if name]
        text = helps.get(field.name) or f"{about.help} (default: {about.shown(field.default)})"
        if field.type is bool:
            group.add_argument(
                *flags, dest=field.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
        else:
            group.add_argument(
                *flags,
                dest=field.name,
                type=partial(about.parsed, kind=field.type),  # int, float or str
                choices=about.choices or None,
                default=argparse.SUPPRESS,
                metavar=None if about.choices else field.name.upper(),
                help=text,
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def serve_config(namespace: argparse.Namespace) -> ServeConfig:
    """Merges the TOML file and the flags into a ServeConfig.

    Raises:
      ConfigError: The model is given twice, or see `read_toml` and `ServeConfig`.
    """
    names = {field.name for field in dataclasses.fields(ServeConfig)}
    from_file = read_toml(namespace.config) if namespace.config else {}
    from_flags = {name: value for name, value in vars(namespace).items() if name in names}
    model = getattr(namespace, _MODEL_ARGUMENT, None)
    if model is not None:
        if from_flags.setdefault("model", model) != model:
            raise ConfigError(f"the model is given twice, {model} and --model {from_flags['model']}. Omit one.")
    return ServeConfig(**(from_file | from_flags))
