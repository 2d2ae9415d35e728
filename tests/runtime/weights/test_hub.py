"""Models by id: from a hub on localhost and from a cache, in fresh processes, since huggingface_hub reads HF_* once."""

import dataclasses
import functools
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshserve.benchmarks.lib.terminal import terminal
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.weights.hub import is_hub_id
from meshserve.runtime.weights.locate import DEMO_DIRECTORY, model_directory, model_name
from tests.runtime.loopback import INFO
from tests.waiting import WAIT_SECONDS

DEMO = DEMO_DIRECTORY
ID, GATED = "Tiny/Qwen3-Demo", "Gated/Model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESOLVE = """
import sys
from meshserve.runtime.api.errors import MeshserveError
from meshserve.runtime.weights.locate import model_directory
model, revision, has_weights = sys.argv[1:]
try:
    print(model_directory(model, revision=revision, has_weights=has_weights == "yes"))
except MeshserveError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """What `snapshot_download` asks a hub for: the commit of a revision, its files, and their bytes."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments: object, hub: "Running"):
        self.files, self.asked, self.hub = hub.files, hub.asked, hub
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(path)
        if self.headers.get("Authorization") == "Bearer mistyped":
            reason = "Invalid credentials in Authorization header"
            self._answer(401, json.dumps({"error": reason}).encode(), {"X-Error-Message": reason})
        elif "/Gated/" in path and "/resolve/" in path:  # any caller may see what it is
            self._answer(401, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "/Refused/" in path:
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif ID not in path and GATED not in path:
            self._answer(self.hub.missing_status, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith((f"/api/models/{ID}/tree/", f"/api/models/{GATED}/tree/")):
            self._answer(200, json.dumps([self._entry(name) for name in self.files]).encode())
        elif path.startswith("/api/models/"):
            revision = path.rpartition("/revision/")[2] if "/revision/" in path else "main"
            if revision not in ("main", "v1", COMMIT):
                self._answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            else:
                siblings = [{"rfilename": name} for name in self.files]
                self._answer(200, json.dumps({"id": ID, "sha": COMMIT, "siblings": siblings}).encode())
        elif (name := path.partition(f"/resolve/{COMMIT}/")[2]) in self.files:
            headers = {"ETag": f'"{self._entry(name)["oid"]}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            self._send_file(name, headers)
        else:
            self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET

    def _send_file(self, name: str, headers: dict[str, str]) -> None:
        """Sends a file from the byte that is asked for; the first time, a file of `hub.broken` only in part."""
        contents = self.files[name]
        if self.command == "HEAD" or "Range" not in self.headers:
            start, status = 0, 200
        else:
            start, status = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")), 206
            self.hub.starts.append(start)
            headers["Content-Range"] = f"bytes {start}-{len(contents) - 1}/{len(contents)}"
        if self.command == "HEAD" or name not in self.hub.broken:
            self._answer(status, contents[start:], headers)
            return
        self.hub.broken.remove(name)
        self.send_response(status)
        for key, value in {"Content-Length": str(len(contents) - start), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(contents[start : len(contents) // 2])
        self.wfile.flush()
        self.hub.is_broken.set()
        self.hub.may_go_on.wait()
        self.close_connection = True

    def _entry(self, name: str) -> dict[str, object]:
        contents = self.files[name]
        return {"type": "file", "path": name, "size": len(contents), "oid": hashlib.sha1(contents).hexdigest()}

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


class Running:
    """A hub on localhost with the demo model, and a cache of its own."""

    def __init__(self, cache: Path):
        self.files = {path.name: path.read_bytes() for path in DEMO.iterdir() if path.is_file()}
        self.files |= {"README.md": b"# A card", "pytorch_model.bin": b"pickles", "onnx/config.json": b"{}"}
        self.asked: list[str] = []
        self.starts: list[int] = []  # where the requested parts of files start
        self.broken: set[str] = set()  # files whose next download breaks off
        self.is_broken, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        self.missing_status = 404
        handler = functools.partial(Hub, hub=self)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.cache = cache

    def resolve(self, model: str = ID, revision: str = "", has_weights: bool = True, **environment: str) -> str:
        """The directory, or what went wrong."""
        command = [sys.executable, "-c", RESOLVE, model, revision, "yes" if has_weights else "no"]
        environment = self.environment() | environment
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS)
        return (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]

    def environment(self) -> dict[str, str]:
        """The environment of a process that uses this hub and no other."""
        own = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(self.cache), "NO_PROXY": "127.0.0.1"}
        return {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | own


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path / "cache")
    thread = threading.Thread(target=running.server.serve_forever, daemon=True)
    thread.start()
    yield running
    running.server.shutdown()
    running.server.server_close()
    thread.join()


def names(directory: str) -> set[str]:
    return {str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("Qwen/Qwen3-8B", ("Qwen/Qwen3-8B", "Qwen3-8B")),
        ("/models/Qwen3-8B/", ("Qwen3-8B",)),
        ("./Qwen3-8B", ("Qwen3-8B",)),
        ("gs://bucket/models/Qwen3-8B", ("Qwen3-8B",)),
        ("demo", ("demo",)),
        (".", (Path.cwd().name,)),
    ],
)
def test_a_model_is_served_by_its_id_as_given_and_by_the_short_name(model: str, names: tuple[str, ...]):
    assert dataclasses.replace(INFO, name=model_name(model)).names == names


def test_a_model_is_downloaded_once_and_then_served_offline(hub: Running) -> None:
    directory = hub.resolve()
    wanted = {name for name in hub.files if name.endswith((".json", ".safetensors", ".jinja"))} - {"onnx/config.json"}
    assert Path(directory).name == COMMIT and names(directory) == wanted
    for name in ("config.json", "model.safetensors"):
        assert (Path(directory) / name).read_bytes() == hub.files[name]
    hub.asked.clear()
    assert hub.resolve() == directory
    assert not [path for path in hub.asked if "/resolve/" in path]
    hub.asked.clear()
    assert hub.resolve(HF_HUB_OFFLINE="1") == directory
    assert not hub.asked
    assert hub.resolve(HF_ENDPOINT="http://127.0.0.1:9") == directory  # the hub is down


ADAPTERS = """
import sys
from meshserve.runtime.api.errors import MeshserveError
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.weights.local_adapters import with_local_adapters
try:
    config = ServeConfig(model="demo", adapter=tuple(sys.argv[2:]))
    print(*with_local_adapters(config, has_weights=sys.argv[1] == "yes").adapter)
except MeshserveError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def adapters(hub: Running, *pairs: str, has_weights: bool = True, **environment: str) -> str:
    """What `--adapter` of these values means, or what went wrong."""
    command = [sys.executable, "-c", ADAPTERS, "yes" if has_weights else "no", *pairs]
    done = subprocess.run(
        command, env=hub.environment() | environment, capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    return (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]


def test_an_adapter_is_downloaded_by_its_id_and_then_found_offline(hub: Running, tmp_path: Path) -> None:
    """A directory stays as it is given. Of the hub's files, only those of an adapter are taken."""
    config, matrices = "adapter_config.json", "adapter_model.safetensors"
    hub.files |= {config: b"{}", matrices: b"matrices", "training_args.bin": b"pickles"}
    first, second = adapters(hub, f"law={ID}", f"other={tmp_path}", has_weights=False).split()
    directory = Path(first.removeprefix("law="))
    assert directory.name == COMMIT and names(str(directory)) == {config} and second == f"other={tmp_path}"
    assert adapters(hub, f"law={ID}") == first and names(str(directory)) == {config, matrices}
    assert (directory / matrices).read_bytes() == b"matrices"
    hub.asked.clear()
    assert adapters(hub, f"law={ID}", HF_HUB_OFFLINE="1") == first and not hub.asked


def test_a_repository_without_an_adapter_is_refused(hub: Running) -> None:
    assert "has no adapter_config.json. If there is none on the hub" in adapters(hub, f"law={ID}")
    missing = adapters(hub, "law=No/Such")
    assert missing.startswith("ConfigError: --adapter No/Such: there is no such local directory, and no such model")


def test_a_revision_and_no_weights(hub: Running) -> None:
    directory = hub.resolve(revision="v1", has_weights=False)
    assert {"config.json", "tokenizer.json"} <= names(directory) and "model.safetensors" not in names(directory)
    assert f"/api/models/{ID}/revision/v1" in hub.asked
    assert "HF_HUB_OFFLINE is set, and the cache" in hub.resolve(revision="v1", HF_HUB_OFFLINE="1")


def test_what_cannot_be_served_is_refused_before_its_weights_are_downloaded(hub: Running) -> None:
    raw = json.loads(hub.files["config.json"])
    hub.files["config.json"] = json.dumps(raw | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}).encode()
    message = hub.resolve()
    assert message.startswith("UnsupportedModelError: ") and "llama" in message.lower()
    assert not [path for path in hub.asked if path.endswith(".safetensors")]
    hub.files["config.json"] = json.dumps(raw).encode() + b" "
    del hub.files["model.safetensors"]
    hub.cache = hub.cache.with_name("other")
    assert "has no safetensors files" in hub.resolve()


@pytest.mark.parametrize(
    ("model", "revision", "environment", "expected"),
    [
        ("Nobody/Nothing", "", {}, "no such local directory, and no such model on the Hugging Face hub"),
        ("Refused/Model", "", {}, "its authors grant access on request. Ask for it at"),
        (ID, "", {"HF_TOKEN": "mistyped"}, "the hub refused the token of HF_TOKEN or `hf auth login`"),
        (GATED, "", {}, "its authors grant access on request. Ask for it at"),
        (ID, "v7", {}, f"--model {ID} at revision v7: the model has no such branch, tag or commit"),
        (ID, "", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, and the cache"),
        (ID, "", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached (ConnectError)"),
        ("Tiny/a..b", "", {}, "this is neither a local directory nor a valid model id"),
    ],
)
def test_errors_say_what_to_do(
    hub: Running, model: str, revision: str, environment: dict[str, str], expected: str
) -> None:
    message = hub.resolve(model, revision, **environment)
    assert message.startswith("ConfigError: ") and expected in message


def test_a_missing_model_of_a_caller_without_a_token(hub: Running) -> None:
    """The hub says 401, since it could be a private model."""
    hub.missing_status = 401
    assert "no such model on the Hugging Face hub" in hub.resolve("Nobody/Nothing")


LARGE = "model-00002.safetensors"  # huggingface_hub stores what it has received in parts of 10 MB


def test_a_broken_download_goes_on_where_it_was(hub: Running) -> None:
    hub.files[LARGE] = bytes(24_000_000)
    hub.broken = {LARGE}
    directory = hub.resolve()
    assert (Path(directory) / LARGE).read_bytes() == hub.files[LARGE]
    assert [start > 0 for start in hub.starts] == [True]


def test_a_download_shows_its_progress_and_can_be_repeated_after_a_kill(hub: Running) -> None:
    hub.files[LARGE] = bytes(24_000_000)
    hub.broken = {LARGE}
    hub.may_go_on.clear()
    try:
        with terminal([sys.executable, "-c", RESOLVE, ID, "", "yes"], environment=hub.environment()) as shown:
            shown.wait_for(r"Fetching \d+ files: +\d+%", WAIT_SECONDS)
            assert hub.is_broken.wait(WAIT_SECONDS)
    finally:
        hub.may_go_on.set()
    assert (Path(hub.resolve()) / LARGE).read_bytes() == hub.files[LARGE]


def test_what_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_hub_id("Qwen/Qwen3-8B")
    for name in ("qwen3-8b", "./Qwen/Qwen3-8B", "/models/Qwen3-8B", "a/b/c", "../x", "gs://b/m", "a/", "~/m", ""):
        assert not is_hub_id(name), name
    (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert Path(model_directory("Qwen/Qwen3-8B")) == tmp_path / "Qwen" / "Qwen3-8B"
    with pytest.raises(ConfigError, match="--revision v1: only models of the Hugging Face hub have one"):
        model_directory("Qwen/Qwen3-8B", revision="v1")
