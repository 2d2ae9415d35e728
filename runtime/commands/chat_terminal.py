"""The chat in a terminal: line editing with history and completion by prompt_toolkit, markdown by rich."""

import contextlib
import time
from collections.abc import Callable, Iterator

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from meshserve.kernels.cuda.user_folder import user_folder

from ..text.answers.answer_parts import AnswerPart, ContentPart, ReasoningPart
from .chat_calls import ReadableCalls
from .chat_commands import COMMANDS

_PROMPT = "> "
_REFRESH_SECONDS = 0.1
_FENCES = ("```", "~~~")


class TerminalScreen:
    """A `Screen` of the conversation. History is kept in a file, if it can be written."""

    def __init__(self) -> None:
        words = WordCompleter([f"/{name}" for name in COMMANDS], sentence=True)
        self._console = Console(highlight=False)
        self._session: PromptSession[str] = PromptSession(history=_history(), completer=words, reserve_space_for_menu=4)

    def read(self) -> str | None:
        try:
            return self._session.prompt(_PROMPT, complete_while_typing=True).strip()
        except EOFError:
            return None

    @contextlib.contextmanager
    def answer(self) -> Iterator[Callable[[AnswerPart], None]]:
        shown = StreamedAnswer(self._console)
        try:
            yield shown.add
        finally:
            shown.close()

    def note(self, text: str) -> None:
        if text:
            self._console.print(Text(text, style="dim"))

    def error(self, text: str) -> None:
        self._console.print(Text(f"meshserve: {text}", style="red"))


def _history() -> History:
    try:
        path = user_folder() / "chat_history"
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


class StreamedAnswer:
    """Renders an answer while it arrives: content as markdown, reasoning dimmed, and tool calls on lines of their own.

    Blocks that are complete are printed for good. The last one is drawn again with each part of it, at most ten times
    per second, and cut to the height of the terminal.
    """

    def __init__(self, console: Console):
        self._console = console
        self._open = ""  # text of the blocks that are not complete
        self._kind: type = ContentPart  # of the open text
        self._calls = ReadableCalls()
        self._drawn = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def add(self, part: AnswerPart) -> None:
        """Adds a part."""
        kind = type(part) if isinstance(part, ContentPart | ReasoningPart) else ReadableCalls
        if kind is not self._kind:
            self._end_kind()
            self._kind = kind
        self._open += part.text if isinstance(part, ContentPart | ReasoningPart) else self._calls.text(part)
        if self._kind is not ReadableCalls:
            while (end := end_of_block(self._open)) is not None:
                self._print(self._open[:end])
                self._open = self._open[end:]
        now = time.monotonic()
        if now - self._drawn >= _REFRESH_SECONDS:
            self._drawn = now
            self._live.update(_Tail(self._rendered(self._open)), refresh=True)

    def close(self) -> None:
        """Prints what is left."""
        self._end_kind()
        self._live.update(Text(""), refresh=True)
        self._live.stop()

    def _end_kind(self) -> None:
        """Prints the rest of the reasoning, the content or the calls."""
        if self._kind is ReadableCalls:
            self._open += self._calls.end()
            self._calls = ReadableCalls()
        self._print(self._open)
        self._open = ""

    def _print(self, text: str) -> None:
        if text.strip():
            self._live.update(Text(""))
            self._console.print(self._rendered(text))

    def _rendered(self, text: str) -> Markdown | Text:
        if self._kind is ContentPart:
            return Markdown(text)
        return Text(text.strip(), style="dim italic" if self._kind is ReasoningPart else "cyan")


def end_of_block(text: str) -> int | None:
    """Returns the index behind the first markdown block of a text, at a blank line outside of code, or None."""
    fence, position = "", 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        stripped = line.strip()
        if fence:
            fence = "" if stripped.startswith(fence) else fence
        elif stripped.startswith(_FENCES):
            fence = stripped[:3]
        elif not stripped and line.endswith("\n") and text[:position].strip():
            return position
    return None


class _Tail:
    """Renders the last lines of something, as many as the terminal has."""

    def __init__(self, whole: Markdown | Text):
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._whole, options, pad=False)
        for line in lines[-max(1, console.height - 1) :]:
            yield from line
            yield Segment.line()
