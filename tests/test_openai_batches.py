"""Files and batches on the OpenAI port, with the unmodified client, over a fake engine."""

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.openai.batches import batch_routes
from meshserve.runtime.openai.batches.file_routes import BatchLimits
from meshserve.runtime.openai.batches.records import Records
from meshserve.runtime.openai.openai_port import OpenAIPort
from meshserve.runtime.server.lifecycle import Listen

from .runtime.loopback import Running, running
from .waiting import WAIT_SECONDS, wait_for

openai = pytest.importorskip("openai", reason="comes with the test extra")
URL = "/v1/completions"


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


TOKENS = f"""
[tenants.one]
max_requests = 4
tokens = [{{ sha256 = "{digest("first")}" }}]

[tenants.other]
tokens = [{{ sha256 = "{digest("second")}" }}]
"""


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    path.chmod(0o600)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "batches"


def serving(folder: Path, tokens: Path | None = None, max_bytes: int = 2**20, seconds: float = 86_400) -> Any:
    limits = BatchLimits(directory=folder, max_bytes=max_bytes, seconds=seconds)
    listen = Listen(drain_seconds=WAIT_SECONDS, openai_port=0, open_api=partial(OpenAIPort, batches=limits))
    return running(listen=listen, tokens=tokens)


@pytest.fixture
def server(folder: Path) -> Iterator[Running]:
    with serving(folder) as server:
        yield server


def client_of(server: Running, token: str = "none") -> Any:
    url = f"http://127.0.0.1:{server.handle.openai_port}/v1"
    return openai.OpenAI(base_url=url, api_key=token, max_retries=0, timeout=WAIT_SECONDS)


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with client_of(server) as client:
        yield client


def lines_of(num_lines: int, **body: Any) -> bytes:
    body = {"prompt": "A", "max_tokens": 2, **body}
    lines = [{"custom_id": str(each), "method": "POST", "url": URL, "body": body} for each in range(num_lines)]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def begun(client: Any, content: bytes, **options: Any) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    options = {"endpoint": URL, "completion_window": "24h", **options}
    return client.batches.create(input_file_id=file.id, **options)


def ended(client: Any, batch: Any) -> Any:
    found: list[Any] = []

    def is_over() -> bool:
        found.append(client.batches.retrieve(batch.id))
        return found[-1].status in ("completed", "failed", "expired", "cancelled")

    wait_for(is_over)
    return found[-1]


def read(client: Any, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_is_answered(client, server: Running):
    bad = json.dumps({"custom_id": "bad", "method": "POST", "url": URL, "body": {"max_tokens": 2}}).encode()
    batch = begun(client, lines_of(6) + bad + b"\n{\n", metadata={"name": "mine"})
    assert batch.status in ("validating", "in_progress") and batch.metadata == {"name": "mine"}
    done = ended(client, batch)
    assert done.status == "completed" and done.errors is None
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (8, 6, 2)
    answers = read(client, done.output_file_id)
    assert sorted(answer["custom_id"] for answer in answers) == [str(each) for each in range(6)]
    assert {answer["response"]["body"]["choices"][0]["text"] for answer in answers} == {"66 67 "}
    failures = read(client, done.error_file_id)
    assert sorted(str(failure["custom_id"]) for failure in failures) == ["None", "bad"]
    assert {options.priority for options in server.engine.options} == {-100}, "other requests go first"
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    assert [each.id for each in client.batches.list()] == [batch.id]


def test_files_are_listed_read_and_removed(client):
    content = lines_of(3)
    files = [client.files.create(file=(f"{each}.jsonl", content), purpose="batch") for each in range(3)]
    assert [each.id for each in client.files.list(order="asc")] == [file.id for file in files]
    assert [each.id for each in client.files.list(limit=2)] == [file.id for file in files[::-1]], "two pages"
    found = client.files.retrieve(files[1].id)
    assert (found.filename, found.bytes, found.status) == ("1.jsonl", len(content), "processed")
    assert client.files.content(files[1].id).content == content
    assert client.files.delete(files[1].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(files[1].id)
    expiring = client.files.create(
        file=("a.jsonl", content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3_600}
    )
    assert expiring.expires_at - expiring.created_at == 3_600


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 10**9}}, "output_expires_after"),
        ({"extra_body": {"input": "x"}}, "input"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_batches_that_cannot_be_run_are_refused_by_name(client, options, field):
    file = client.files.create(file=("in.jsonl", lines_of(1)), purpose="batch")
    given = {"input_file_id": file.id, "endpoint": URL, "completion_window": "24h", **options}
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(**given)
    assert caught.value.body["param"].startswith(field)


def test_other_files_are_refused(folder: Path, client):
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("in.jsonl", b"{}"), purpose="fine-tune")
    with pytest.raises(openai.APIStatusError, match="batch_gib"):
        client.files.create(file=("in.jsonl", b" " * (2**20 + 1)), purpose="batch")
    empty = ended(client, begun(client, b"\n"))
    assert empty.status == "failed" and "0 lines" in empty.errors.data[0].message
    for path in ("file-" + "0" * 24, "file-..%2F..%2Flock", "..%2Flock"):
        with pytest.raises(openai.NotFoundError):
            client.files.content(path)
    assert not list(folder.rglob("*.part"))


def test_a_batch_is_cancelled_and_its_answers_are_kept(client, server: Running):
    with server.engine.holding(max_tokens=3):
        quick, slow = lines_of(2), lines_of(2, max_tokens=3).replace(b'"custom_id": "', b'"custom_id": "slow')
        batch = begun(client, quick + slow)
        wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 2)
        with pytest.raises(openai.ConflictError, match="uses"):
            client.files.delete(batch.input_file_id)
        assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
        done = ended(client, batch)
    assert done.status == "cancelled" and len(read(client, done.output_file_id)) == 2
    wait_for(lambda: not server.engine.jobs)
    assert ended(client, begun(client, lines_of(1))).status == "completed", "the next one is run"


def test_long_lines_are_answered(client):
    """They are read in a thread; the prompts are too long for the model."""
    done = ended(client, begun(client, lines_of(2, prompt="A" * 2**17)))
    assert (done.status, done.request_counts.failed) == ("completed", 2)
    assert {failure["response"]["status_code"] for failure in read(client, done.error_file_id)} <= {400, 413}


def test_another_server_goes_on(folder: Path):
    """What was answered before a server has stopped is not computed again."""
    with serving(folder) as server, client_of(server) as client:
        with server.engine.holding(max_tokens=3):
            slow = lines_of(2, max_tokens=3).replace(b'"custom_id": "', b'"custom_id": "slow')
            batch = begun(client, lines_of(4) + slow)
            wait_for(lambda: client.batches.retrieve(batch.id).request_counts.completed == 4)
            server.handle.request_stop()
            server.stop()
    with serving(folder) as server, client_of(server) as client:
        done = ended(client, batch)
        assert (done.status, done.request_counts.completed) == ("completed", 6)
        assert len(read(client, done.output_file_id)) == 6
        assert server.engine.num_submits == 2


def test_what_is_not_answered_in_time_has_an_error(client, server: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_routes, "_WINDOW_SECONDS", 0)
    with server.engine.holding(max_tokens=3):
        done = ended(client, begun(client, lines_of(3, max_tokens=3)))
    assert (done.status, done.request_counts.failed) == ("expired", 3) and done.output_file_id is None
    failures = read(client, done.error_file_id)
    assert [failure["error"]["code"] for failure in failures] == ["batch_expired"] * 3
    assert sorted(failure["custom_id"] for failure in failures) == ["0", "1", "2"]


def test_files_are_removed_when_they_expire(folder: Path):
    with serving(folder, seconds=0) as server, client_of(server) as client:
        file = client.files.create(file=("in.jsonl", lines_of(1)), purpose="batch")
    assert list(folder.rglob(f"{file.id}*"))
    with serving(folder) as server, client_of(server) as client:
        wait_for(lambda: not list(client.files.list()) and not list(folder.rglob(f"{file.id}*")))


def test_a_folder_has_one_server(folder: Path, server: Running):
    with pytest.raises(ConfigError, match="another server uses"):
        Records(folder)
    open_folder = folder.parent / "open"
    open_folder.mkdir(mode=0o755)
    open_folder.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        Records(open_folder)


def test_tenants_see_their_own_and_keep_to_their_quotas(folder: Path, tokens: Path):
    with serving(folder, tokens) as server, client_of(server, "first") as one, client_of(server, "second") as other:
        batch = begun(one, lines_of(12))
        done = ended(one, batch)
        assert (done.status, done.request_counts.completed) == ("completed", 12)
        assert {options.tenant for options in server.engine.options} == {"one"}
        for call in (
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.files.content(done.output_file_id),
            lambda: other.files.delete(batch.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                call()
        assert not list(other.files.list()) and not list(other.batches.list())
        with pytest.raises(openai.BadRequestError, match="input_file_id"):
            other.batches.create(input_file_id=batch.input_file_id, endpoint=URL, completion_window="24h")
        with client_of(server, "wrong") as stranger, pytest.raises(openai.AuthenticationError):
            stranger.files.list()


def test_without_a_folder_there_are_neither(tmp_path: Path):
    with running(listen=Listen(openai_port=0, open_api=OpenAIPort)) as server, client_of(server) as client:
        with pytest.raises(openai.NotFoundError, match="--batch-dir"):
            client.files.list()
