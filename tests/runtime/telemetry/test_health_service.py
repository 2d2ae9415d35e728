"""Watchers of the health that do not read delay no other."""

import contextlib
import runpy
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from meshserve.runtime.server.method_permissions import SERVICE_NAME
from meshserve.runtime.telemetry import health_service
from meshserve.runtime.telemetry.health_service import _MAX_WATCHES
from tests.hostile.connections import UNREAD_HEALTH
from tests.runtime.loopback import Running, running
from tests.waiting import WAIT_SECONDS

Status = health_pb2.HealthCheckResponse


@pytest.fixture
def server() -> Iterator[Running]:
    with running() as server:
        yield server


@contextlib.contextmanager
def health(target: str) -> Iterator[health_pb2_grpc.HealthStub]:
    with grpc.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield health_pb2_grpc.HealthStub(channel)


@pytest.mark.parametrize("service", ["", SERVICE_NAME, "nobody"])
def test_watchers_learn_of_the_end_although_others_do_not_read(server: Running, service: str):
    with UNREAD_HEALTH.open(server.target), health(server.target) as stub:
        found = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=WAIT_SECONDS)
        known = service != "nobody"
        assert next(found).status == (Status.SERVING if known else Status.SERVICE_UNKNOWN)
        server.handle.request_stop()
        if known:
            assert next(found).status == Status.NOT_SERVING
        server.join()


def test_a_connection_has_so_many_watchers(server: Running):
    with health(server.target) as stub, health(server.target) as other:
        request = health_pb2.HealthCheckRequest()
        watching = [stub.Watch(request) for _ in range(_MAX_WATCHES)]
        assert {next(call).status for call in watching} == {Status.SERVING}
        with pytest.raises(grpc.RpcError, match="End some of them") as caught:
            next(stub.Watch(request))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert next(other.Watch(request)).status == Status.SERVING
        assert stub.Check(request).status == Status.SERVING


def test_loads_with_a_release_of_the_protocol_without_list(monkeypatch: pytest.MonkeyPatch):
    for name in ("HealthListRequest", "HealthListResponse"):  # 1.85 brought them
        monkeypatch.delattr(health_pb2, name, raising=False)
    assert "HealthService" in runpy.run_path(health_service.__file__)
