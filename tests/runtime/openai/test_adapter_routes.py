"""Adapters over HTTP: the model of a body names them, the models list them, and vLLM's routes load and unload them."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.fake_adapters import FakeCatalog, write_adapter
from tests.runtime.loopback import INFO, Running, running
from tests.waiting import WAIT_SECONDS

from .test_openai_port import BODIES, CHAT, LISTEN, digest

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


TOKENS = f"""
[tenants.law]
adapters = ["law-*"]
tokens = [{{ sha256 = "{digest("law")}" }}]

[tenants.operator]
permissions = ["admin", "info", "inference"]
tokens = [{{ sha256 = "{digest("operate")}" }}]
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(listen=LISTEN, adapters=FakeCatalog("fast", "law-1")) as server:
        server.edge.adapter_roots = (tmp_path,)
        yield server


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Running]:
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    with running(listen=LISTEN, tokens=tokens, adapters=FakeCatalog("fast", "law-1")) as server:
        server.edge.adapter_roots = (tmp_path,)
        yield server


def answered(server: Running, path: str, body: Any = None, token: str | None = None, **headers: str) -> tuple[int, str]:
    assert server.handle.openai_port is not None
    connection = http.client.HTTPConnection("127.0.0.1", server.handle.openai_port, timeout=WAIT_SECONDS)
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_the_model_of_a_body_names_an_adapter(server, path, stream):
    for model, adapter in (("fast", "fast"), (INFO.name, ""), (None, "")):
        status, text = answered(server, path, BODIES[path] | {"model": model, "stream": stream})
        assert status == 200 and f'"{adapter or INFO.name}"' in text
        assert server.engine.options[-1].adapter == adapter


@pytest.mark.parametrize("path", [*BODIES, "/tokenize", "/v1/messages/count_tokens"])
def test_an_unknown_model_is_404(server, path):
    body = {"messages": CHAT["messages"]} if path not in BODIES else BODIES[path]
    status, text = answered(server, path, body | {"model": "gpt-4"})
    assert status == 404 and "fast, law-1" in text
    if not path.startswith("/v1/messages"):
        assert json.loads(text)["error"]["code"] == "model_not_found"


def test_the_models_list_adapters_with_their_parent(server):
    status, text = answered(server, "/v1/models")
    found = [(each["id"], each["parent"], each["root"]) for each in json.loads(text)["data"]]
    assert status == 200
    assert found == [(INFO.name, None, INFO.name), ("fast", INFO.name, INFO.name), ("law-1", INFO.name, INFO.name)]


def test_a_tenant_has_its_own_models(guarded):
    _, text = answered(guarded, "/v1/models", token="law")
    assert [each["id"] for each in json.loads(text)["data"]] == [INFO.name, "law-1"]
    for path in BODIES:
        assert answered(guarded, path, BODIES[path] | {"model": "law-1"}, "law")[0] == 200
        status, text = answered(guarded, path, BODIES[path] | {"model": "fast"}, "law")
        assert status == 404 and "this server has toy, law-1." in text


def test_vllms_routes_load_and_unload(server, tmp_path):
    write_adapter(tmp_path / "a")
    write_adapter(tmp_path / "b", "other")
    status, text = answered(server, LOAD, {"lora_name": "new", "lora_path": str(tmp_path / "a")})
    assert (status, text) == (200, "Success: LoRA adapter 'new' added successfully.")
    assert answered(server, "/v1/completions", BODIES["/v1/completions"] | {"model": "new"})[0] == 200
    again = {"lora_name": "new", "lora_path": "b"}
    assert answered(server, LOAD, again)[0] == 409
    assert answered(server, LOAD, again | {"load_inplace": True})[0] == 200
    assert answered(server, UNLOAD, {"lora_name": "new"}) == (200, "Success: LoRA adapter 'new' removed successfully.")
    assert answered(server, UNLOAD, {"lora_name": "new"})[0] == 404
    assert answered(server, "/v1/completions", BODIES["/v1/completions"] | {"model": "new"})[0] == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_path": "x"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "/etc"}, "lora_path"),
        ({"lora_name": "x y", "lora_path": "a"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "a", "path": "b"}, "path"),
    ],
)
def test_what_loading_refuses(server, tmp_path, body, field):
    write_adapter(tmp_path / "a")
    status, text = answered(server, LOAD, body)
    assert status == 400 and json.loads(text)["error"]["param"] == field


def test_only_administrators_load_and_no_web_page(guarded, server, tmp_path):
    for path, body in ((LOAD, {"lora_name": "x", "lora_path": "a"}), (UNLOAD, {"lora_name": "fast"})):
        assert answered(guarded, path, body)[0] == 401
        assert answered(guarded, path, body, "law")[0] == 403
        assert answered(server, path, body, **{"Origin": "https://example.com"})[0] == 403
    write_adapter(tmp_path / "a")
    assert answered(guarded, LOAD, {"lora_name": "x", "lora_path": "a"}, "operate")[0] == 200
