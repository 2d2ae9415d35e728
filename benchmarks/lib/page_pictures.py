"""Makes the pictures of the page of the OpenAI port: of a chat, of a tool call, and of a server under load.

The model is the demo model as `thinking_demo` changes it. What it answers in the pictures is dictated by a constraint.
"""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshserve.benchmarks.lib.browser import chromium, emulate
from meshserve.benchmarks.lib.thinking_demo import save_thinking_demo
from meshserve.benchmarks.load import serve

_SERVE = (
    "serve", "--served-name=demo-thinking", "--port=0", "--openai-port=0", "--cpu-devices=2", "--tp=2",
    "--dtype=float32", "--page-size=16", "--max-running=16", "--max-step-tokens=64", "--num-pages=512",
)  # fmt: skip
_LOAD = (
    "--concurrency", "4", "12", "24", "--requests=64", "--input-tokens=uniform:16:96",
    "--output-tokens=uniform:32:128",
)  # fmt: skip
_WAIT_SECONDS = 120.0
_UNDER_LOAD_SECONDS = 18.0
_TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Elsinore"]}, "unit": {"enum": ["celsius"]}, "days": {"enum": [3]}},
            "required": ["city", "unit", "days"], "additionalProperties": False,
        },
    },
}]  # fmt: skip
_ANSWER = """The sea at **Elsinore** is calm today:

| hour | wind | waves |
|---|---|---|
| dawn | west, 4 knots | low |
| noon | *south*, 7 knots | low |

1. Set out at dawn.
2. Keep the castle to starboard:

```python
def heading(castle, ship):
    return atan2(castle.y - ship.y, castle.x - ship.x)
```

Then drop the anchor off the *northern* shore."""


def photograph_page(folder: Path) -> None:
    """Writes page_chat.png, page_tools.png and page_server.png to `folder`."""
    with _served() as (url, target), chromium(1280, 900) as driver:
        driver.get(url)
        _wait(driver, "document.getElementById('state').textContent === 'Ready'")
        _set(driver, {"budget": "64", "temperature": "0.8", "seed": "7", "others": _forced(_ANSWER)})
        _say(driver, "May we sail to Elsinore?")
        driver.save_screenshot(str(folder / "page_chat.png"))
        emulate(driver, dark=True)
        _set(driver, {"others": "", "tools": json.dumps(_TOOLS, indent=1), "tool-choice": "required"})
        _say(driver, "What will the weather be?")
        _set(driver, {"tool-choice": "none", "others": _forced("Three days of sun: a fair wind for **Elsinore**.")})
        driver.find_element("css selector", ".call textarea").send_keys('{"sky": "clear", "celsius": [17, 18, 18]}')
        driver.find_element("css selector", ".results button").click()
        _wait(driver, "document.querySelectorAll('#messages > .answer').length === 3")
        _wait(driver, "document.querySelector('#messages > .answer:last-child [data-again]')")
        driver.save_screenshot(str(folder / "page_tools.png"))
        emulate(driver, dark=False)
        driver.set_window_size(1280, 1240)
        driver.find_element("id", "tab-server").click()
        with tempfile.TemporaryDirectory() as scratch:
            options = [f"--target={target}", f"--json={scratch}/load.json", *_LOAD]
            load = threading.Thread(target=serve.main, args=(options,))
            load.start()
            load.join(_UNDER_LOAD_SECONDS)
            driver.save_screenshot(str(folder / "page_server.png"))
            load.join()


@contextlib.contextmanager
def _served() -> Iterator[tuple[str, str]]:
    """Serves the model until the block ends. Yields the addresses of the page and of gRPC."""
    with tempfile.TemporaryDirectory() as scratch:
        model = save_thinking_demo(Path(scratch) / "demo-thinking")
        command = [sys.executable, "-m", "meshserve", *_SERVE, f"--model={model}"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            said: dict[str, str] = {}
            for line in server.stdout:
                if found := re.search(r"meshserve listens on (?P<target>\S+)|browsers on (?P<url>\S+)", line):
                    said |= {name: text for name, text in found.groupdict().items() if text}
                if "is ready" in line:
                    break
            yield said["url"], said["target"]
        finally:
            server.terminate()
            server.wait()


def _forced(text: str) -> str:
    """Returns fields of a request whose answer is this text."""
    return json.dumps({"structured_outputs": {"regex": re.sub(r"([\\.^$*+?{}\[\]()|/])", r"\\\1", text)}})


def _set(driver: Any, values: dict[str, str]) -> None:
    for name, value in values.items():
        field = driver.find_element("id", name)
        driver.execute_script("arguments[0].value = arguments[1]", field, value)


def _say(driver: Any, text: str) -> None:
    """Sends a message and waits for the whole answer."""
    driver.find_element("id", "message").send_keys(f"{text}\n")
    _wait(driver, "document.querySelector('#messages > .answer:last-child [data-again]')")


def _wait(driver: Any, expression: str) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(driver, _WAIT_SECONDS).until(lambda page: page.execute_script(f"return Boolean({expression})"))
