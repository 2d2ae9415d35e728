"""The commands of `meshserve chat`, which begin with a slash."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from ..options.nearest import nearest
from .chat_conversation import Conversation

HINT = "Ctrl-C stops an answer; /help lists the commands; /quit or Ctrl-D exits."

_NAME = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
_NUMBERS: Mapping[str, type] = {
    "max_tokens": int, "temperature": float, "top_p": float, "top_k": int, "min_p": float, "seed": int,
}  # fmt: skip


class Command(NamedTuple):
    """A command: what it takes and does, and its function, which returns "quit" to end the chat."""

    arguments: str
    about: str
    run: Callable[[Conversation, str], str | None]


def run_command(conversation: Conversation, line: str) -> str | None:
    """Runs a line: a command, or a message to the model. Returns "quit" if the chat is to end.

    A line whose first word is not a slash and letters, such as a path, is a message, and so is one that begins with
    two slashes, of which one is sent.
    """
    if not line:
        return None
    found = _NAME.fullmatch(line)
    if found is None:
        conversation.say(line.removeprefix("/") if line.startswith("//") else line)
        return None
    name = found[1]
    command = COMMANDS.get(name)
    if command is None:
        near = nearest(name, COMMANDS)
        hint = f"Did you mean /{near}?" if near else "/help lists the commands."
        conversation.screen.error(f"there is no command /{name}. {hint} To send it as a message, begin with //.")
        return None
    return command.run(conversation, (found[2] or "").strip())


def _help(conversation: Conversation, argument: str) -> None:
    names = {name: f"/{name} {command.arguments}".rstrip() for name, command in COMMANDS.items()}
    width = max(map(len, names.values()))
    lines = [f"{names[name]:<{width}}  {command.about}" for name, command in COMMANDS.items()]
    conversation.screen.note("\n".join([*lines, HINT]))


def _reset(conversation: Conversation, argument: str) -> None:
    conversation.reset()


def _retry(conversation: Conversation, argument: str) -> None:
    question = _take_last_turn(conversation)
    if question is None:
        conversation.screen.error("there is no message to repeat.")
    else:
        conversation.say(question)


def _undo(conversation: Conversation, argument: str) -> None:
    if _take_last_turn(conversation) is None:
        conversation.screen.error("there is no message to forget.")


def _take_last_turn(conversation: Conversation) -> str | None:
    """Removes the last message and all that follows it. Returns the message, or None if there is none."""
    roles = [message["role"] for message in conversation.messages]
    if "user" not in roles:
        return None
    last = len(roles) - 1 - roles[::-1].index("user")
    question: str = conversation.messages[last]["content"]
    del conversation.messages[last:]
    conversation.open_calls = []
    return question


def _system(conversation: Conversation, argument: str) -> None:
    conversation.system = argument
    conversation.reset()
    conversation.screen.note("The conversation begins anew" + (" with this system message." if argument else "."))


def _set(conversation: Conversation, argument: str) -> None:
    """Sets a sampling parameter, removes it if there is no value, or lists all if there is no name."""
    name, _, text = argument.partition(" ")
    if not name:
        fields = conversation.fields
        listed = [f"{key} {fields[key]}" if key in fields else f"{key} (the server's)" for key in _NUMBERS]  # type: ignore[literal-required]
        conversation.screen.note("\n".join(listed))
        return
    if name not in _NUMBERS:
        near = nearest(name, _NUMBERS)
        hint = f" Did you mean {near}?" if near else ""
        conversation.screen.error(f"{name!r} is not a parameter; allowed are {', '.join(_NUMBERS)}.{hint}")
    elif not text:
        conversation.fields.pop(name, None)  # type: ignore[misc]
    else:
        try:
            conversation.fields[name] = _NUMBERS[name](text)  # type: ignore[literal-required]
        except ValueError:
            conversation.screen.error(f"{name} is {text!r}; it must be a number.")


def _think(conversation: Conversation, argument: str) -> None:
    """Turns reasoning on or off, or bounds its tokens; without an argument, both are the model's own again."""
    fields = conversation.fields
    fields.pop("enable_thinking", None)
    fields.pop("answer", None)
    if argument in ("on", "off"):
        fields["enable_thinking"] = argument == "on"
    elif argument.isdecimal():
        fields["answer"] = {"thinking_token_budget": int(argument)}
    elif argument:
        conversation.screen.error(f"{argument!r} is neither on nor off nor a number of tokens.")


def _tools(conversation: Conversation, argument: str) -> None:
    """Reads the tools that the model may call."""
    conversation.fields.pop("tools", None)
    if not argument:
        return
    try:
        tools = json.loads(Path(argument).expanduser().read_text(encoding="utf-8"))
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError("it is no list of objects")
    except (OSError, RuntimeError, ValueError) as error:
        conversation.screen.error(f"{argument} cannot be read as tools: {error}.")
        return
    conversation.fields["tools"] = tools
    conversation.screen.note(f"The model may call {len(tools)} tools.")


def _result(conversation: Conversation, argument: str) -> None:
    if conversation.open_calls:
        conversation.give_result(argument)
    else:
        conversation.screen.error("there is no tool call without a result.")


def _info(conversation: Conversation, argument: str) -> None:
    conversation.screen.note(conversation.about_server())


def _save(conversation: Conversation, argument: str) -> None:
    if not argument:
        conversation.screen.error("/save needs the name of a file.")
        return
    path = Path(argument)
    try:
        path = path.expanduser()
        path.write_text(json.dumps(conversation.messages, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except (OSError, RuntimeError) as error:  # RuntimeError: the home of `~` is not known
        conversation.screen.error(f"{path} cannot be written: {error}.")
        return
    conversation.screen.note(f"{len(conversation.messages)} messages were written to {path}.")


def _quit(conversation: Conversation, argument: str) -> str:
    return "quit"


COMMANDS: Mapping[str, Command] = {
    "help": Command("", "list the commands", _help),
    "reset": Command("", "forget the conversation, except the system message", _reset),
    "retry": Command("", "ask the last message again", _retry),
    "undo": Command("", "forget the last message and its answer", _undo),
    "system": Command("[TEXT]", "begin anew with this system message, or with none", _system),
    "set": Command("[NAME [VALUE]]", f"sampling parameters: {', '.join(_NUMBERS)}", _set),
    "think": Command("[on|off|TOKENS]", "turn reasoning on or off, or bound its tokens", _think),
    "tools": Command("[FILE]", "functions that the model may call, a JSON list, or none", _tools),
    "result": Command("TEXT", "the result of the tool that the model has called", _result),
    "info": Command("", "the model, the server's load, and the speed of the last answer", _info),
    "save": Command("FILE", "write the messages to a file, as JSON", _save),
    "quit": Command("", "end the chat", _quit),
}
