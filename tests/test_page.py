"""The page of the OpenAI port in a real browser, at a real server of a model that thinks and calls tools."""

import hashlib
import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from meshserve.benchmarks.lib.browser import chromium, emulate, missing
from meshserve.benchmarks.lib.thinking_demo import save_thinking_demo

from .openai_server import serving
from .waiting import wait_for

TOKEN = "a token of the tests"
TOKENS = f"""
[tenants.tests]
tokens = [{{ sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}" }}]
"""
TOOLS = [{
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object", "properties": {"city": {"enum": ["Elsinore"]}, "days": {"enum": [3]}},
            "required": ["city", "days"], "additionalProperties": False,
        },
    },
}]  # fmt: skip
MARKDOWN = """A **bold** _word_ and `code`, 2 * 3 * 4 and snake_case_name.

| a | b |
|---|---|
| 1 | 2 |

1. one
   - inner
2. two

```python
x = "**not bold**"
```"""
HOSTILE = """<img src=x onerror=alert(1)> <script>alert(2)</script>
[here](javascript:alert(3)) ![picture](https://evil.example/x.png) [there](https://good.example/)"""


class Page:
    """The page as a person uses it."""

    def __init__(self, driver: Any, url: str):
        self.driver, self.url = driver, url
        driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, expression: str) -> None:
        """Waits until a JavaScript expression is true."""
        wait_for(lambda: self.run(f"return Boolean({expression})"), lambda: self.run("return document.body.innerText"))

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def set(self, **values: str) -> None:
        """Sets options by their ids."""
        for name, value in values.items():
            script = (
                "const e = arguments[0]; e.value = arguments[1]; e.dispatchEvent(new Event('input', {bubbles: true}))"
            )
            self.run(script, self.find(f"#{name.replace('_', '-')}"), value)

    def answer(self, text: str = "Who art thou?") -> str:
        """Sends a message and returns the text of the whole answer."""
        self.find("#message").send_keys(f"{text}\n")
        return self.answered()

    def answered(self) -> str:
        self.wait("document.querySelector('#messages > .answer:last-child [data-again]')")
        return self.find("#messages > .answer:last-child").text


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("page")
    (folder / "tokens.toml").write_text(TOKENS)
    (folder / "tokens.toml").chmod(0o600)
    model = save_thinking_demo(folder / "thinker")
    flags = (f"--model={model}", "--tp=1", "--cpu-devices=1", f"--tokens={folder / 'tokens.toml'}")
    with serving(folder / "log", *flags) as server:
        yield server.url.removesuffix("v1")


@pytest.fixture
def page(server_url: str) -> Iterator[Page]:
    """The page, with the token, in a new browser; nothing may go wrong in it, or be fetched from elsewhere."""
    with chromium() as driver:
        page = Page(driver, server_url)
        page.wait("!document.getElementById('token-form').hidden")
        assert page.find("#notice").text == "This server needs an access token."
        assert page.run("return document.activeElement.id") == "token"
        page.find("#token").send_keys(f"{TOKEN}\n")
        page.wait("document.getElementById('state').textContent === 'Ready'")
        page.set(budget="8", seed="3", max_tokens="400")
        yield page
        fetched = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
        assert fetched and all(url.startswith(server_url) for url in fetched), fetched
        entries = [entry["message"] for entry in driver.get_log("browser")]
        refused = re.compile("Failed to load resource: .* status of 40[01]")
        assert not [entry for entry in entries if not refused.search(entry)], entries


def forced(text: str) -> str:
    """Returns fields of a request whose answer is this text."""
    pattern = "".join(rf"\{char}" if char in r"\.^$*+?{}[]()|/" else char for char in text)
    return json.dumps({"structured_outputs": {"regex": pattern}})


def test_a_chat_with_reasoning(page: Page):
    page.set(others=forced(MARKDOWN))
    text = page.answer()
    assert "A bold word and code, 2 * 3 * 4 and snake_case_name." in text and 'x = "**not bold**"' in text
    inner = "document.querySelector('.markdown')"
    tags = page.run(f"return [...{inner}.querySelectorAll('*')].map((each) => each.tagName)")
    for tag in ("STRONG", "EM", "CODE", "TABLE", "OL", "UL", "PRE"):
        assert tag in tags, tag
    assert page.run(f"return {inner}.querySelectorAll('ol > li').length") == 2
    assert page.run(f"return {inner}.querySelectorAll('ol > li > ul > li').length") == 1
    assert page.run("return document.querySelector('.reasoning').open") is False
    assert re.match(r"Reasoning · \d+ tokens, ", page.find(".reasoning summary").text)
    assert re.search(r"\d tokens/s.*first token .* m?s.*complete", page.find(".foot").text, re.DOTALL)
    page.find(".reasoning summary").click()
    assert page.find(".reasoning p").text
    page.set(others=forced("Indeed."))
    assert "Indeed." in page.answer("Truly?"), "a second turn, with the first one before it"
    page.find("#messages > .answer:last-child [data-again]").click()
    page.answered()
    assert page.run("return document.querySelectorAll('#messages > li').length") == 4


def test_what_the_model_writes_stays_text(page: Page):
    page.set(others=forced(HOSTILE))
    text = page.answer("<b>bold</b>")
    assert "<img src=x onerror=alert(1)> <script>alert(2)</script>" in text and "[here](javascript:alert(3))" in text
    assert page.find(".user .text").text == "<b>bold</b>"
    hosts = page.run("return [...document.querySelectorAll('.answer a')].map((link) => link.host)")
    assert hosts == ["evil.example", "good.example"]
    assert not page.run("return document.querySelectorAll('#messages :is(img, script, b)').length")


def test_a_tool_is_called_and_its_result_returned(page: Page):
    page.set(tools=json.dumps(TOOLS), tool_choice="required")
    page.answer("What will the weather be?")
    assert page.find(".call h3").text == "Tool call get_weather"
    assert json.loads(page.find(".call pre").text) == {"city": "Elsinore", "days": 3}
    page.set(tool_choice="none", others=forced("Rain."))
    page.find(".call textarea").send_keys("It rains.")
    page.find(".results button[type=submit]").click()
    page.wait("document.querySelectorAll('#messages > .answer').length === 2")
    assert "Rain." in page.answered()
    assert page.run("return document.querySelectorAll('.call pre')[1].textContent") == "It rains."


def test_an_answer_is_stopped(page: Page):
    page.set(budget="", max_tokens="900", others=json.dumps({"ignore_eos": True, "enable_thinking": False}))
    page.find("#message").send_keys("Speak on.\n")
    page.wait("document.querySelector('.markdown')?.textContent.length > 10")
    page.find("#stop").click()
    assert "stopped" in page.answered()
    request = urllib.request.Request(f"{page.url}status.json", headers={"Authorization": f"Bearer {TOKEN}"})

    def has_ended() -> bool:
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)
        return found["load"]["num_running"] == 0 and found["requests"][0]["outcome"] == "cancelled"

    wait_for(has_ended)
    assert not page.find("#stop").is_displayed() and page.find("#send").is_displayed()


def test_errors_are_shown_and_options_checked(page: Page):
    page.set(others='{"temprature": 1}')
    assert "did you mean temperature" in page.answer()
    page.set(tools="[{")
    page.find("#message").send_keys("Again?\n")
    page.wait("document.activeElement.id === 'tools'")
    assert page.find("#tools").get_attribute("aria-invalid") == "true" and page.find("#tools-error").text
    assert page.run("return document.querySelectorAll('#messages > li').length") == 2


def test_the_server_is_shown_and_the_keyboard_suffices(page: Page):
    page.set(others=forced("Ay."))
    page.answer()
    page.run("document.getElementById('tab-chat').focus()")
    page.driver.switch_to.active_element.send_keys("\ue014")  # the right arrow
    assert page.run("return document.activeElement.id") == "tab-server" and not page.find("#view-chat").is_displayed()
    page.wait("document.querySelector('#requests tbody tr')")
    row = page.find("#requests tbody tr").text
    assert "chat/completions" in row and "stop" in row
    page.wait("document.getElementById('figures').innerText.includes('256 pages')")
    page.wait("/first token\\s+[\\d.]+/.test(document.getElementById('times').innerText)")
    assert len(page.driver.find_elements("css selector", "#times tbody tr")) == 6
    page.driver.execute_cdp_cmd("Accessibility.enable", {})
    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    controls = [
        each for each in nodes if each["role"]["value"] in ("button", "tab", "textbox", "table", "region", "image")
    ]
    assert len(controls) > 8 and all(each["name"]["value"] for each in controls if not each["ignored"])


def test_light_and_dark(page: Page):
    grounds = []
    for dark in (False, True):
        emulate(page.driver, dark=dark)
        grounds.append(page.run("return getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(247, 248, 248)", "rgb(17, 19, 21)"]
