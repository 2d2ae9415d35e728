"""Connections that are not proper HTTP/2, and callers that never read. See `connections.CONNECTIONS`."""

import pytest

from tests.hostile.connections import CONNECTIONS
from tests.hostile.served import Served


@pytest.mark.parametrize("name", CONNECTIONS)
def test_connections_harm_nobody(served: Served, name: str, num_streams: int):
    with served.under_attack(name), CONNECTIONS[name].open(served.target):
        served.neighbour.wait_for_streams(num_streams - 1)
