"""The flags of the command line that are options of a server, and the configuration that they and a TOML file give."""

import argparse
import dataclasses
import logging
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from ..api.errors import ConfigError
from .foreign.meaning import flag
from .foreign.translation import foreign_options, translate, typed, vllm_names
from .nearest import nearest
from .option import Option
from .serve_config import SECTIONS, ServeConfig
from .toml_file import Tell, read_toml

_EXIT_USAGE = 2
_MODEL_ARGUMENT = "model_argument"
_FOREIGN = "foreign"  # options of other servers by name, with their values as text
_NOTES = "notes"
_NONE: Mapping[str, str] = MappingProxyType({})
_CHOICE = re.compile(r"argument (?P<what>.+): invalid choice: '(?P<got>.*)' \(choose from (?P<known>.*)\)", re.DOTALL)
_log = logging.getLogger(__name__)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are lines that name the nearest flag or command. Takes no abbreviations.

    With `add_options`, it also takes the flags of other servers.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _HelpFormatter, **options})
        self.server_options: Mapping[str, tuple[Option, Any]] = {}  # those that `add_options` has added

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parses arguments. Called for commands, too, so that their unknown flags are errors of the command itself."""
        if self.server_options:
            self._add_foreign_flags()
        parsed, unknown = super().parse_known_args(args, namespace)
        # Before Python 3.13, an optional positional argument behind a flag is not recognised.
        if len(unknown) == 1 and not unknown[0].startswith("-") and getattr(parsed, _MODEL_ARGUMENT, "") is None:
            setattr(parsed, _MODEL_ARGUMENT, unknown.pop())
        flags = [argument.partition("=")[0] for argument in unknown if argument.startswith("-")]
        problems = [self._unknown(each) for each in flags] + self._translated(parsed) + _taken_out(parsed)
        if unknown and not flags:  # next to an unknown flag, it may be its value
            problems.append(f"unexpected argument {unknown[0]!r}.")
        if problems:
            self.error("\n".join(problems))
        return parsed, []

    def _unknown(self, unknown: str) -> str:
        refused = {each for option in foreign_options().values() if option.meaning.refusal for each in option.flags}
        near = nearest(unknown, [each for each in self._option_string_actions if each not in refused])
        return f"unknown flag {unknown}." + (f" Did you mean {near}?" if near else "")

    def _add_foreign_flags(self) -> None:
        """Adds the flags of other servers, without help, where the command has no flag of the same name."""
        for name, option in foreign_options().items():
            spelled = [flag(name), *(option.short if name == option.names[0] else ())]
            for flags, is_on in ((spelled, True), ([f"--no-{spelled[0][2:]}"], False)):
                if (is_on or option.is_switch) and not self._option_string_actions.keys() & set(flags):
                    nargs = 0 if option.is_switch else "+" if option.is_list else None
                    self.add_argument(
                        *flags, dest=name, action=_Foreign, nargs=nargs, const=is_on, help=argparse.SUPPRESS
                    )

    def _translated(self, parsed: argparse.Namespace) -> list[str]:
        """Stores the options that flags of other servers stand for, and returns the problems with them."""
        given: dict[str, Any] = parsed.__dict__.pop(_FOREIGN, {})
        if not given:
            return []
        model = getattr(parsed, "model", None) or getattr(parsed, _MODEL_ARGUMENT, None) or ""
        found = translate(given, self.server_options, model=model, spell=flag)
        for name, value in found.options.items():
            if name in parsed:
                found.problems.append(f"{flag(name)} and {found.sources[name]} are the same option. Omit one.")
                continue
            setattr(parsed, name, _value(value, name, *self.server_options[name], what=found.sources[name]))
        setattr(parsed, _NOTES, found.notes)
        return found.problems

    def error(self, message: str) -> NoReturn:
        """Prints a line for each problem and exits."""
        if (choice := _CHOICE.fullmatch(message)) is not None:
            known = [name.strip("' ") for name in choice["known"].split(",")]
            near = nearest(choice["got"], known)
            hint = f" Did you mean {near}?" if near else ""
            message = f"{choice['what']} is {choice['got']!r}; allowed are {', '.join(known)}.{hint}"
        message = message if message.endswith((".", "?")) else f"{message}."
        lines = [f"{self.prog}: {line}" for line in message.split("\n")]
        lines.append(f"`{self.prog} --help` explains all arguments.")
        print(("\n" if len(lines) > 2 else " ").join(lines), file=sys.stderr)
        sys.exit(_EXIT_USAGE)


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps help texts at spaces only, so that the names of flags stay whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Foreign(argparse.Action):
    """Keeps the value of an option of another server until all arguments have been parsed."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:  # type: ignore[no-untyped-def]
        given = getattr(namespace, _FOREIGN, {})
        value = self.const if self.nargs == 0 else values
        if isinstance(value, list):
            value = [*given.get(self.dest, ()), *value]
        setattr(namespace, _FOREIGN, {**given, self.dest: value})


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Stands for a value that cannot be used until all arguments have been parsed, so that all problems are told."""

    message: str


def _value(text: Any, name: str, option: Option, kind: Any, what: str) -> Any:
    """Returns the value of an option, or why it cannot be used."""
    try:
        return typed(name, text, option, kind)
    except argparse.ArgumentTypeError as error:
        return _Problem(f"{what}: {error}")


def _taken_out(parsed: argparse.Namespace) -> list[str]:
    """Removes values that cannot be used, and returns why."""
    found = {name: value.message for name, value in vars(parsed).items() if isinstance(value, _Problem)}
    for name in found:
        delattr(parsed, name)
    return list(found.values())


def add_options(parser: Parser, *, left_out: frozenset[str] = frozenset(), helps: Mapping[str, str] = _NONE) -> None:
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
    taken: dict[str, tuple[Option, Any]] = {}
    for field in dataclasses.fields(ServeConfig):
        if field.name in left_out:
            continue
        about: Option = field.metadata["option"]
        group = expert if about.is_expert else titles[about.section]
        taken[field.name] = about, field.type
        theirs = ", ".join(flag(name) for name in vllm_names(field.name))
        also = f"; in vLLM {theirs}" if theirs else ""
        text = helps.get(field.name) or f"{about.help} (default: {about.shown(field.default)}{also})"
        if field.type is bool:
            group.add_argument(
                flag(field.name),
                dest=field.name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=text,
            )
        elif about.is_list:
            group.add_argument(
                flag(field.name),
                dest=field.name,
                action="append",
                default=argparse.SUPPRESS,
                metavar="NAME=VALUE",
                help=text,
            )
        else:
            group.add_argument(
                flag(field.name),
                dest=field.name,
                type=partial(_value, name=field.name, option=about, kind=field.type, what=flag(field.name)),
                default=argparse.SUPPRESS,
                metavar=f"{{{','.join(about.choices)}}}" if about.choices else field.name.upper(),
                help=text,
            )
    parser.server_options = taken


def serve_config(namespace: argparse.Namespace, tell: Tell = _log.info) -> ServeConfig:
    """Merges the TOML file and the flags into a ServeConfig.

    Args:
      namespace: The parsed flags.
      tell: Receives a line for each option of another server that changes nothing, or is taken as something else.

    Raises:
      ConfigError: The model is given twice, or see `read_toml` and `ServeConfig`.
    """
    names = {field.name for field in dataclasses.fields(ServeConfig)}
    from_file = read_toml(namespace.config, tell) if namespace.config else {}
    from_flags = {name: value for name, value in vars(namespace).items() if name in names}
    from_flags |= {name: tuple(value) for name, value in from_flags.items() if isinstance(value, list)}
    model = getattr(namespace, _MODEL_ARGUMENT, None)
    if model is not None:
        if from_flags.setdefault("model", model) != model:
            raise ConfigError(f"the model is given twice, {model} and --model {from_flags['model']}. Omit one.")
    for note in getattr(namespace, _NOTES, ()):
        tell(note)
    return ServeConfig(**(from_file | from_flags))
