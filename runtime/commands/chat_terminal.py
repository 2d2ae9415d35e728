"""The chat in a terminal: line editing with history and completion by prompt_toolkit, markdown by rich."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from .chat_commands import COMMANDS

_PROMPT = "> "
_REFRESH_SECONDS = 0.1
_END_OF_THINKING = "</think>"
_FENCES = ("```", "~~~")


class TerminalScreen:
    """A `Screen` of the conversation. History is kept in a file, if it can be written."""

    def __init__(self, history: Path):
        words = WordCompleter([f"/{name}" for name in COMMANDS], sentence=True)
        self._console = Console(highlight=False)
        self._session: PromptSession[str] = PromptSession(
            history=_history(history), completer=words, reserve_space_for_menu=4
        )

    def read(self) -> str | None:
        try:
            return self._session.prompt(_PROMPT, complete_while_typing=True).strip()
        except EOFError:
            return None

    @contextlib.contextmanager
    def answer(self) -> Iterator[Callable[[str], None]]:
        shown = StreamedMarkdown(self._console)
        try:
            yield shown.add
        finally:
            shown.close()

    def note(self, text: str) -> None:
        if text:
            self._console.print(Text(text, style="dim"))

    def error(self, text: str) -> None:
        self._console.print(Text(f"meshserve: {text}", style="red"))


def _history(path: Path) -> History:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


class StreamedMarkdown:
    """Renders markdown while it arrives.

    Blocks that are complete are printed for good. The last one is drawn again with each part of it, at most ten times
    per second, and cut to the height of the terminal.
    """

    def __init__(self, console: Console):
        self._console = console
        self._open = ""  # text of the blocks that are not complete
        self._is_thinking = False
        self._has_begun = False
        self._drawn = 0.0
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def add(self, text: str) -> None:
        """Adds a part of the text."""
        self._open += text
        if not self._has_begun and self._open.strip():
            self._has_begun, self._is_thinking = True, self._open.lstrip().startswith("<think>")
        while (end := self._end_of_block()) is not None:
            self._print(self._open[:end])
            self._open = self._open[end:]
        now = time.monotonic()
        if now - self._drawn >= _REFRESH_SECONDS:
            self._drawn = now
            self._live.update(_Tail(self._rendered(self._open)), refresh=True)

    def close(self) -> None:
        """Prints what is left."""
        self._live.update(Text(""), refresh=True)
        self._live.stop()
        if self._open.strip():
            self._console.print(self._rendered(self._open))

    def _print(self, text: str) -> None:
        if text.strip():
            self._live.update(Text(""))
            self._console.print(self._rendered(text))
        if _END_OF_THINKING in text:
            self._is_thinking = False

    def _end_of_block(self) -> int | None:
        """Returns where the first complete block of the open text ends, or None if there is none."""
        if self._is_thinking:
            end = self._open.find(_END_OF_THINKING)
            return end + len(_END_OF_THINKING) if end >= 0 else None
        return end_of_block(self._open)

    def _rendered(self, text: str) -> Markdown | Text:
        return Text(text.strip(), style="dim italic") if self._is_thinking else Markdown(text)


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
