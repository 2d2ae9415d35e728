"""Adapters over gRPC: who may load what from where, which requests may name them, and what is told about them."""

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.api.errors import InvalidRequestError
from meshserve.runtime.client.client import CallError, Client, call_errors
from meshserve.runtime.client.messages import bearer
from meshserve.runtime.server.adapter_methods import allowed_directory
from meshserve.runtime.telemetry.adapter_metrics import MAX_LABELS, OTHER, AdapterMetrics
from tests.runtime.fake_adapters import CONFIG, FakeCatalog, info, write_adapter
from tests.runtime.loopback import INFO, Running, running
from tests.waiting import WAIT_SECONDS, wait_for

Code = grpc.StatusCode


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


TOKENS = f"""
[tenants.law]
adapters = ["law-*", "shared"]
tokens = [{{ sha256 = "{digest("law")}" }}]

[tenants.base]
adapters = []
tokens = [{{ sha256 = "{digest("base")}" }}]

[tenants.anything]
tokens = [{{ sha256 = "{digest("anything")}" }}]

[tenants.operator]
permissions = ["admin", "info", "inference"]
tokens = [{{ sha256 = "{digest("operate")}" }}]
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    """A server with two adapters, and a root below which others may lie."""
    with running(adapters=FakeCatalog("fast", "law-1")) as server:
        server.edge.adapter_roots = (tmp_path / "root",)
        (tmp_path / "root").mkdir()
        yield server


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Running]:
    """A server whose callers need tokens."""
    tokens = tmp_path / "tokens.toml"
    tokens.write_text(TOKENS)
    tokens.chmod(0o600)
    with running(tokens=tokens, adapters=FakeCatalog("fast", "law-1", "shared")) as server:
        server.edge.adapter_roots = (tmp_path,)
        yield server


def admin(server: Running, method: str, token: str | None = None, **fields: Any) -> Any:
    """Calls a method of AdminService."""
    request = getattr(pb, f"{method}Request")(**fields)
    with grpc.insecure_channel(server.target) as channel, call_errors():
        stub = pb_grpc.AdminServiceStub(channel)
        return getattr(stub, method)(request, timeout=WAIT_SECONDS, metadata=bearer(token))


def test_an_operator_loads_lists_and_unloads(server, tmp_path):
    directory = write_adapter(tmp_path / "root" / "team" / "new")
    loaded = admin(server, "LoadAdapter", name="new", path="team/new").adapter
    assert (loaded.name, loaded.parent, loaded.path, loaded.rank) == ("new", INFO.name, str(directory), 8)
    assert [each.name for each in admin(server, "ListAdapters").adapters] == ["fast", "law-1", "new"]
    with Client(server.target) as client:
        assert client.complete((3,), max_tokens=2, adapter="new").token_ids == (4, 5)
        assert server.engine.options[-1].adapter_digest == loaded.digest
        admin(server, "UnloadAdapter", name="new")
        with pytest.raises(CallError, match="there are fast, law-1") as caught:
            client.complete((3,), max_tokens=2, adapter="new")
    assert caught.value.code is Code.NOT_FOUND
    with pytest.raises(CallError) as caught:
        admin(server, "UnloadAdapter", name="new")
    assert caught.value.code is Code.NOT_FOUND


def test_a_name_is_replaced_only_on_request(server, tmp_path):
    write_adapter(tmp_path / "root" / "a", '{"r": 1}')
    write_adapter(tmp_path / "root" / "b", '{"r": 2}')
    first = admin(server, "LoadAdapter", name="x", path="a").adapter.digest
    with pytest.raises(CallError) as caught:
        admin(server, "LoadAdapter", name="x", path="b")
    assert caught.value.code is Code.ALREADY_EXISTS
    assert admin(server, "LoadAdapter", name="x", path="b", replaces=True).adapter.digest != first


@pytest.mark.parametrize(
    "path", ["..", "../secret", "/etc", "missing", "", "link", "a\nb", "x" * 5_000, "outward", "file"]
)
def test_no_path_leads_out_of_the_roots(server, tmp_path, path):
    root = tmp_path / "root"
    write_adapter(tmp_path / "secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "file").write_text("")
    (root / "outward").mkdir()
    (root / "outward" / CONFIG).symlink_to(tmp_path / "secret" / CONFIG)
    with pytest.raises(CallError) as caught:
        admin(server, "LoadAdapter", name="x", path=path)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "path")
    assert [each.name for each in admin(server, "ListAdapters").adapters] == ["fast", "law-1"]


def test_what_is_outside_cannot_be_told_from_what_does_not_exist(tmp_path):
    (tmp_path / "root").mkdir()
    messages = []
    for path in ("/etc", "/etc-that-does-not-exist"):
        with pytest.raises(InvalidRequestError) as caught:
            allowed_directory((tmp_path / "root",), path)
        messages.append(str(caught.value).replace(path, ""))
    assert messages[0].replace("''", "") == messages[1].replace("''", "")


def test_a_root_may_be_a_link_and_paths_may_be_absolute(tmp_path):
    directory = write_adapter(tmp_path / "real" / "a")
    (tmp_path / "root").symlink_to(tmp_path / "real")
    (tmp_path / "other").mkdir()
    roots = (tmp_path / "other", tmp_path / "root")
    for path in ("a", str(tmp_path / "root" / "a"), str(directory)):
        assert allowed_directory(roots, path) == directory


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 257, "toy", "a\n"])
def test_names_that_are_refused(server, tmp_path, name):
    write_adapter(tmp_path / "root" / "a")
    with pytest.raises(CallError) as caught:
        admin(server, "LoadAdapter", name=name, path="a")
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, "name")


def test_a_server_without_roots_or_adapters_says_what_it_needs(server):
    server.edge.adapter_roots = ()
    with pytest.raises(CallError, match="--adapter-root") as caught:
        admin(server, "LoadAdapter", name="x", path="a")
    assert caught.value.code is Code.FAILED_PRECONDITION
    with running() as without, pytest.raises(CallError, match="--adapter-root") as caught:
        admin(without, "LoadAdapter", name="x", path="a")
    assert caught.value.code is Code.FAILED_PRECONDITION


def test_a_request_to_a_server_without_adapters(server):
    with running() as without, Client(without.target) as client, pytest.raises(CallError) as caught:
        client.complete((3,), max_tokens=2, adapter="x")
    assert caught.value.code is Code.FAILED_PRECONDITION and not without.engine.options


def test_tenants_use_and_see_their_adapters_only(guarded):
    expected = {"law": ["law-1", "shared"], "base": [], "anything": ["fast", "law-1", "shared"]}
    for token, names in expected.items():
        with Client(guarded.target, token=token) as client:
            seen = client.model_info().adapters
            assert [each.name for each in seen] == names
            assert all(not each.path and not each.num_bytes and not each.is_on_device for each in seen)
            for name in ("fast", "law-1", "shared"):
                if name in names:
                    assert client.complete((3,), max_tokens=1, adapter=name).token_ids == (4,)
                    continue
                with pytest.raises(CallError) as caught:
                    client.complete((3,), max_tokens=1, adapter=name)
                with pytest.raises(CallError) as unknown:
                    client.complete((3,), max_tokens=1, adapter="nothing")
                assert caught.value.code is unknown.value.code is Code.NOT_FOUND
                assert caught.value.message.replace(name, "") == unknown.value.message.replace("nothing", "")


def test_only_administrators_load(guarded):
    for method, fields in (
        ("LoadAdapter", {"name": "x", "path": "a"}),
        ("UnloadAdapter", {"name": "fast"}),
        ("ListAdapters", {}),
    ):
        with pytest.raises(CallError) as caught:
            admin(guarded, method, "anything", **fields)
        assert caught.value.code is Code.PERMISSION_DENIED
    assert len(admin(guarded, "ListAdapters", "operate").adapters) == 3


def test_the_first_message_has_the_digest_and_a_request_may_demand_one(server):
    with grpc.insecure_channel(server.target) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        asked = pb.GenerateRequest(
            token_ids=pb.TokenIds(token_ids=[3]), sampling=pb.SamplingParams(max_tokens=3), adapter="fast"
        )
        digests = [each.adapter_digest for each in stub.Generate(asked, timeout=WAIT_SECONDS)]
        assert digests[0] == info("fast").digest and not any(digests[1:])
        asked.adapter_digest = digests[0]
        assert len(list(stub.Generate(asked, timeout=WAIT_SECONDS))) == len(digests)
        asked.adapter_digest = "0" * 64
        with call_errors(), pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(asked, timeout=WAIT_SECONDS))
        assert caught.value.code() is Code.FAILED_PRECONDITION and digests[0] in caught.value.details()
        asked.ClearField("adapter"), asked.ClearField("adapter_digest")
        assert not any(each.adapter_digest for each in stub.Generate(asked, timeout=WAIT_SECONDS))


def test_chat_takes_an_adapter(server):
    with Client(server.target) as client:
        list(client.chat([{"role": "user", "content": "hi"}], max_tokens=1, adapter="law-1"))
    assert server.engine.options[-1].adapter == "law-1"


def test_requests_are_logged_and_counted_by_adapter(server, caplog):
    with caplog.at_level(logging.INFO, "meshserve.request"), Client(server.target) as client:
        client.complete((3, 4), max_tokens=3, adapter="fast")
        client.complete((3, 4), max_tokens=3)
        wait_for(lambda: len(server.edge.observer.recent) == 2)
    assert [record.adapter for record in caplog.records] == ["fast", ""]
    assert " with fast length: 2 prompt tokens" in caplog.records[0].getMessage()
    for what, count in (("requests", 1), ("prompt_tokens", 2), ("output_tokens", 3)):
        assert server.counted(f"meshserve_adapter_{what}_total", adapter="fast") == count


def test_metrics_have_a_bounded_number_of_labels():
    metrics = AdapterMetrics()
    metrics.read_adapters = FakeCatalog("fast", "slow").list
    for index in range(MAX_LABELS + 3):
        metrics.begin(f"adapter-{index}")
        metrics.end(f"adapter-{index}", 1, 2)
    metrics.end("adapter-0", 1, 2)
    families = {family.name: family for family in metrics.collect()}
    samples = {sample.labels["adapter"]: sample.value for sample in families["meshserve_adapter_requests"].samples}
    assert len(samples) == MAX_LABELS + 1 and samples["adapter-0"] == 2 and samples[OTHER] == 3
    metrics.forget("adapter-0")
    metrics.end("adapter-99", 1, 2)
    families = {family.name: family for family in metrics.collect()}
    samples = {sample.labels["adapter"]: sample.value for sample in families["meshserve_adapter_output_tokens"].samples}
    assert "adapter-0" not in samples and samples["adapter-99"] == 2
    [loaded], [on_device] = (families[f"meshserve_{name}"].samples for name in ("adapters", "device_adapters"))
    assert (loaded.value, on_device.value) == (2, 1)


def test_metrics_tell_no_names_that_tenants_may_not_know(server, guarded):
    for each, token in ((server, None), (guarded, "anything")):
        with Client(each.target, token=token) as client:
            for name in ("fast", "law-1"):
                client.complete((3,), max_tokens=3, adapter=name)
        each.edge.observer.metrics.adapters.max_on_device = 2
    assert server.counted("meshserve_adapter_requests_total", adapter="fast") == 1
    pages = [generate_latest(each.edge.observer.metrics.registry).decode() for each in (server, guarded)]
    assert ["fast" in page or "law" in page for page in pages] == [True, False]
    assert ["vllm:lora_requests_info{" in page for page in pages] == [True, False]
    for what, count in (("requests", 2), ("prompt_tokens", 2), ("output_tokens", 6)):
        assert guarded.counted(f"meshserve_adapter_{what}_total", adapter=OTHER) == count


def test_endpoint_pickers_learn_where_an_adapter_is():
    metrics = AdapterMetrics()
    metrics.read_adapters = FakeCatalog("fast", "slow", "idle").list
    assert "vllm:lora_requests_info" not in {family.name for family in metrics.collect()}
    metrics.max_on_device = 2
    for name in ("fast", "fast", "slow"):
        metrics.begin(name)
    metrics.end("fast", 1, 1)

    def picked() -> dict[str, str]:
        [family] = [family for family in metrics.collect() if family.name == "vllm:lora_requests_info"]
        return family.samples[0].labels

    expected = {"max_lora": "2", "running_lora_adapters": "fast", "waiting_lora_adapters": "slow"}
    assert picked() == expected
    metrics.end("fast", 1, 1)
    assert picked() == expected | {"running_lora_adapters": ""}
