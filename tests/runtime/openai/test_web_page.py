"""The page of the OpenAI port over plain HTTP, without a model: its files, headers, permissions, and its status."""

import asyncio
import contextlib
import hashlib
import html.parser
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from yarl import URL

from meshserve.runtime.openai.openai_port import OpenAIPort
from meshserve.runtime.openai.web_page.page_files import FILES, HEADERS
from meshserve.runtime.openai.web_page.server_status import COUNTERS, HISTOGRAMS, figures
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.server.edge import Edge
from meshserve.runtime.server.method_permissions import new_access
from meshserve.runtime.server.output_queue import OutputQueues
from meshserve.runtime.startup.serve import listen_of
from meshserve.runtime.telemetry.metrics import Metrics

FOLDER = Path(__file__).parents[3] / "runtime" / "openai" / "web_page" / "files"
TOKENS = "\n".join(
    f'[tenants.{name}]\npermissions = {json.dumps(permissions)}\n'
    f'tokens = [{{ sha256 = "{hashlib.sha256(name.encode()).hexdigest()}" }}]'
    for name, permissions in (
        ("alice", ["inference", "info"]), ("bob", ["inference", "info"]), ("blind", ["inference"]),
        ("root", ["inference", "info", "admin"]),
    )
)  # fmt: skip

Get = Callable[..., Awaitable[tuple[int, Any, bytes]]]  # receives a path and headers; returns status, headers, body


@contextlib.asynccontextmanager
async def opened(edge: Edge | None = None, *, has_page: bool = True) -> AsyncIterator[Get]:
    """Opens a port and yields what sends GET requests to it."""
    port = OpenAIPort(edge if edge is not None else Edge(OutputQueues()), has_page=has_page)
    number = await port.start("127.0.0.1", 0)
    async with aiohttp.ClientSession() as session:

        async def get(path: str, **headers: str) -> tuple[int, Any, bytes]:
            url = URL(f"http://127.0.0.1:{number}{path}", encoded=True)
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            async with session.get(url, headers=names) as answer:
                return answer.status, answer.headers, await answer.read()

        try:
            yield get
        finally:
            await port.stop()


def test_the_files_are_served_as_they_are():
    async def check() -> None:
        async with opened() as get:
            for path, name, kind in FILES:
                status, headers, body = await get(path)
                assert (status, body) == (200, (FOLDER / name).read_bytes())
                assert headers["Content-Type"] == f"{kind}; charset=utf-8"
                assert {key: headers[key] for key in HEADERS} == HEADERS and "Set-Cookie" not in headers
                status, headers, body = await get(path, If_None_Match=headers["ETag"])
                assert (status, body) == (304, b"") and {key: headers[key] for key in HEADERS} == HEADERS

    asyncio.run(check())
    assert {name for _, name, _ in FILES} == {each.name for each in FOLDER.iterdir() if each.name != "__pycache__"}


def test_the_policy_allows_nothing_inline_and_nothing_from_elsewhere():
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    sources = {value for name, value in policy.items() if name.endswith("-src")}
    assert sources == {"'none'", "'self'"} and "unsafe" not in str(policy)


def test_nothing_else_is_a_file():
    async def check() -> None:
        async with opened() as get:
            for path in (
                "/files/index.html", "/index.html", "/page_files.py", "/../pyproject.toml", "/%2e%2e/pyproject.toml",
                "/..%2f..%2fpyproject.toml", "/page.css/../../page_files.py", "//etc/passwd", "/page.js%00",
            ):  # fmt: skip
                status, _, _ = await get(path)
                assert status == 404, path
            assert (await get("/", Host="attacker.example"))[0] == 403
            assert (await get("/status.json", Host="attacker.example"))[0] == 403

    asyncio.run(check())


def test_the_page_can_be_turned_off():
    async def check() -> None:
        async with opened(has_page=False) as get:
            for path in (*(path for path, _, _ in FILES), "/status.json"):
                assert (await get(path))[0] == 404, path
            assert (await get("/version"))[0] == 200

    asyncio.run(check())
    for has_page in (True, False):
        listen = listen_of(ServeConfig(openai_port=0, page=has_page))
        assert listen.open_api is not None and listen.open_api(Edge(OutputQueues())).has_page is has_page


class Outline(html.parser.HTMLParser):
    """Collects what the rules below are about. Raises where tags are not nested."""

    VOID = ("meta", "link", "img", "input", "br", "hr")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.named: set[int] = set()  # elements that contain text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"<{tag}> has an attribute twice"
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> on line {self.getpos()[0]} closes another element"

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.named.add(len(self.elements) - 1)


def test_the_html_is_valid_and_accessible():
    outline, text = Outline(), (FOLDER / "index.html").read_text()
    outline.feed(text)
    outline.close()
    assert text.startswith("<!doctype html>\n<html lang=") and not outline.open
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    labelled = {attributes["for"] for tag, attributes in outline.elements if tag == "label"}
    for index, (tag, attributes) in enumerate(outline.elements):
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
        for name in ("for", "aria-controls", "aria-labelledby", "aria-describedby"):
            assert set(attributes.get(name, "").split()) <= set(ids), (tag, attributes)
        if tag in ("input", "select", "textarea"):
            assert attributes["id"] in labelled, attributes
        if tag == "button":
            assert attributes["type"] and index in outline.named
        if tag == "img":
            assert "alt" in attributes
    assert not [
        tag for tag, attributes in outline.elements if tag == "style" or (tag == "script" and "src" not in attributes)
    ]


def test_nothing_comes_from_elsewhere():
    html_text, css, script = ((FOLDER / name).read_text() for name in ("index.html", "page.css", "page.js"))
    links = re.findall(r'\b(?:src|href)="([^"]*)"', html_text)
    assert {link for link in links if not link.startswith("#")} == {"icon.svg", "page.css", "page.js"}
    assert "url(" not in css and "@import" not in css
    assert set(re.findall(r"https?://[\w.]+", html_text + css + script)) == {"http://www.w3.org"}, "SVG's namespace"
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|\bimport\b|new Function", script
    )


def test_the_status_needs_the_permission_of_get_load(tmp_path: Path):
    (tmp_path / "tokens.toml").write_text(TOKENS)
    (tmp_path / "tokens.toml").chmod(0o600)
    edge = Edge(OutputQueues(), access=new_access(tmp_path / "tokens.toml"))
    for tenant, request_id in (("alice", "a1"), ("bob", "b1"), ("alice", "a2")):
        edge.observer.begin(
            method="Chat", request_id=request_id, tenant=tenant, num_prompt_tokens=3, metadata={}, began=0.0
        ).end("stop")

    async def seen(get: Get, tenant: str) -> list[str]:
        status, headers, body = await get("/status.json", Authorization=f"Bearer {tenant}")
        assert status == 200 and headers["Cache-Control"] == "no-store"
        return [request["request_id"] for request in json.loads(body)["requests"]]

    async def check() -> None:
        async with opened(edge) as get:
            assert (await get("/"))[0] == 200, "the files are the same for everybody"
            assert (await get("/status.json"))[0] == 401
            assert (await get("/status.json", Authorization="Bearer blind"))[0] == 403
            assert await seen(get, "alice") == ["a2", "a1"]
            assert await seen(get, "bob") == ["b1"]
            assert await seen(get, "root") == ["a2", "b1", "a1"]

    asyncio.run(check())


def test_the_status_of_a_server_that_starts():
    async def check() -> dict[str, Any]:
        async with opened() as get:
            status, _, body = await get("/status.json")
            assert status == 200
            return json.loads(body, parse_constant=pytest.fail)  # Infinity and NaN are no JSON

    found = asyncio.run(check())
    assert (found["state"], found["model"], found["load"], found["requests"]) == ("STARTING", None, None, [])
    assert found["progress"] == "the process has begun"


def test_the_status_has_every_figure_that_the_page_shows():
    found = figures(Metrics().registry.collect())
    assert found["values"].keys() == COUNTERS and found["histograms"].keys() == HISTOGRAMS
    assert all(each.keys() == {"buckets", "sum", "count"} for each in found["histograms"].values())
    shown = set(re.findall(r'"(meshserve_\w+)"', (FOLDER / "page.js").read_text()))
    assert shown <= COUNTERS | HISTOGRAMS and HISTOGRAMS <= shown
