"""Skips the tests of whole fleets unless they are asked for: `make test-fleet`."""

import pytest

from tests.fleet.replicas import SMG


@pytest.fixture(autouse=True)
def asked_for(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--fleet"):
        pytest.skip("make test-fleet runs it")
    assert SMG is not None, "smg comes with the extra gateway"
