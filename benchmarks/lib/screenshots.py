"""Makes the pictures of the documentation from a real server: `make screenshots` writes them to docs/images.

Starts the embedded model on virtual CPU devices, puts load on it, and draws `meshserve top` and the plots of `bench
report`.
"""

import io
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from rich.console import Console

from meshserve.benchmarks.load import report, serve
from meshserve.runtime.client.client import Client
from meshserve.runtime.dashboard.screen import SCREEN_LINES, screen
from meshserve.runtime.dashboard.top import Reader

_SERVE = (
    "serve", "--model=demo", "--port=0", "--http-port=0", "--cpu-devices=2", "--tp=2", "--dtype=float32",
    "--page-size=16", "--max-running=16", "--max-step-tokens=64", "--num-pages=512",
)  # fmt: skip
_LOADS = (
    "--concurrency", "1", "2", "4", "8", "16", "--requests=32", "--input-tokens=uniform:16:64",
    "--output-tokens=uniform:32:96",
)  # fmt: skip
_INTERVAL_SECONDS = 0.5
_COLUMNS = 110


def main(folder: Path) -> None:
    """Writes top.svg and bench_report.png to `folder`."""
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
            svg = _watched(said["listens"], said["answers probes"], figures)
        finally:
            server.terminate()
            server.wait()
        (folder / "top.svg").write_text(svg, encoding="utf-8")
        report.image({figures.stem: report.read(figures)}, folder / "bench_report.png")


def _watched(target: str, metrics: str, figures: Path) -> str:
    """Puts load on the server, and returns the last screen of `meshserve top` on which it was busy."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
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
    console.print(screen(reader.target, reader.info, readings[: busy[-1] + 1], "Ctrl-C ends."), height=SCREEN_LINES)
    svg = console.export_svg(title="meshserve top --target 127.0.0.1:50051", unique_id="top")
    return re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # fonts of another site; the viewer has monospace


if __name__ == "__main__":
    main(Path(sys.argv[1]))
