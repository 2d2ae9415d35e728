"""Makes the pictures of the documentation from a real server: `make screenshots` writes them to docs/images.

Starts the embedded model on virtual CPU devices, talks to it in `meshserve chat`, puts load on it, and draws `meshserve
top`, the page of the OpenAI port and that of `bench report`. Pages need Chromium.
"""

import io
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pyte
from rich.console import Console, RenderableType
from rich.style import Style
from rich.text import Text

from meshserve.benchmarks.lib.browser import FLAGS, find_browser, missing
from meshserve.benchmarks.lib.page_pictures import photograph_page
from meshserve.benchmarks.lib.terminal import COLUMNS, terminal
from meshserve.benchmarks.load import report, serve
from meshserve.runtime.client.client import Client
from meshserve.runtime.client.dashboard.screen import SCREEN_LINES, screen
from meshserve.runtime.client.dashboard.top import Reader

_SERVE = (
    "serve", "--model=demo", "--port=0", "--http-port=0", "--cpu-devices=2", "--tp=2", "--dtype=float32",
    "--page-size=16", "--max-running=16", "--max-step-tokens=64", "--num-pages=512",
)  # fmt: skip
_LOADS = (
    "--concurrency", "1", "2", "4", "8", "16", "--requests=32", "--input-tokens=uniform:16:64",
    "--output-tokens=uniform:32:96",
)  # fmt: skip
_INTERVAL_SECONDS = 0.5
_WAIT_SECONDS = 120.0
_CHAT_LINES = 50  # more than the conversation takes
_PAGE_PIXELS = (1240, 1400)
_COLOURS = {"brown": "yellow", "brightbrown": "bright_yellow"}  # names of pyte that rich has otherwise


def main(folder: Path) -> None:
    """Writes all pictures to `folder`: top.svg, chat.svg, bench_report.png, and those of `page_pictures`."""
    with tempfile.TemporaryDirectory() as scratch:
        figures = Path(scratch) / "demo model, 2 virtual CPU devices.json"
        server = subprocess.Popen([sys.executable, "-m", "meshserve", *_SERVE], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            said = {}
            for line in server.stdout:
                if found := re.search(r"(listens|answers probes) on (?:http://)?(\S+)", line):
                    said[found[1]] = found[2]
                if len(said) == 2:
                    break
            top = _watched(said["listens"], said["answers probes"], figures)
            chat = _talked(said["listens"], Path(scratch))
        finally:
            server.terminate()
            server.wait()
        (folder / "top.svg").write_text(top, encoding="utf-8")
        (folder / "chat.svg").write_text(chat, encoding="utf-8")
        report.main([str(figures), f"--output={scratch}/report.html"])
        _photograph(Path(scratch) / "report.html", folder / "bench_report.png")
    if reason := missing():
        print(f"left out the pictures of the page: {reason}")
    else:
        photograph_page(folder)


def _photograph(page: Path, picture: Path) -> None:
    """Draws a page as a browser does."""
    browser = find_browser()
    if browser is None:
        print(f"left out {picture}: no Chromium is on the PATH (on Debian, `apt-get install chromium`)")
        return
    width, height = _PAGE_PIXELS
    flags = [*FLAGS, f"--user-data-dir={page.parent / 'browser'}", f"--window-size={width},{height}"]
    subprocess.run([browser, *flags, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True)


def _talked(target: str, home: Path) -> str:
    """Holds a conversation in a terminal, and returns a picture of it."""
    command = [sys.executable, "-m", "meshserve", "chat", f"--target={target}", "--max-tokens=60", "--temperature=0.6"]
    environment = {**os.environ, "HOME": str(home)}
    with terminal(command, environment=environment, lines=_CHAT_LINES, locate=_cursor) as shown:
        shown.wait_for(r">\s", _WAIT_SECONDS)
        for line in ("Who art thou?", "/info", "What news of the battle?", "/help"):
            shown.type(f"{line}\r")
            shown.wait_for(re.escape(line), _WAIT_SECONDS)
            shown.wait_for(r"\n>\s", _WAIT_SECONDS)
        picture = _picture(_screen(shown.shown))
        return _svg(picture, "meshserve chat", picture.plain.count("\n") + 1)


def _screen(shown: bytes) -> pyte.Screen:
    """Returns the screen of the chat after some output."""
    screen = pyte.Screen(COLUMNS, _CHAT_LINES)
    pyte.ByteStream(screen).feed(shown)
    return screen


def _cursor(shown: bytes) -> tuple[int, int]:
    cursor = _screen(shown).cursor
    return cursor.y + 1, cursor.x + 1


def _picture(screen: pyte.Screen) -> Text:
    """Returns what a screen shows, with its colours, without the empty lines at the end."""
    lines = []
    for row in range(screen.lines):
        line = Text()
        for column in range(screen.columns):
            cell = screen.buffer[row][column]
            style = Style(color=_colour(cell.fg), bgcolor=_colour(cell.bg), bold=cell.bold, italic=cell.italics)
            line.append(cell.data, style)
        line.rstrip()
        lines.append(line)
    while not lines[-1]:
        lines.pop()
    return Text("\n").join(lines)


def _colour(name: str) -> str | None:
    if name == "default":
        return None
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return _COLOURS.get(name, name.replace("bright", "bright_"))


def _svg(picture: RenderableType, title: str, lines: int) -> str:
    """Draws something as a window of a terminal."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(picture, height=lines)
    svg = console.export_svg(title=title, unique_id=title.split()[1])
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # fonts of another site; the viewer has monospace


def _watched(target: str, metrics: str, figures: Path) -> str:
    """Puts load on the server, and returns the last screen of `meshserve top` on which it was busy."""
    with Client(target) as client:
        client.model_info()  # waits until the server is ready
        load = threading.Thread(target=serve.main, args=([f"--target={target}", f"--json={figures}", *_LOADS],))
        load.start()
        reader = Reader(client, "127.0.0.1:50051", metrics)
        readings = [reader.read()]
        while load.is_alive():
            load.join(_INTERVAL_SECONDS)
            readings.append(reader.read())
    busy = [index for index, each in enumerate(readings) if each.load is not None and each.load.num_running]
    last = screen(reader.target, reader.info, readings[: busy[-1] + 1], "Ctrl-C ends.")
    return _svg(last, "meshserve top --target 127.0.0.1:50051", SCREEN_LINES)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
