"""One server for all attacks of a test process, and how long they are."""

from collections.abc import Iterator

import pytest

from tests.hostile.served import Served, percentile, serving


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Served]:
    """A server that every attack must leave as it was. At the end prints what the neighbour saw."""
    num_layers = 1 if pytestconfig.getoption("--fuzz") < 10_000 else 6
    with serving(tmp_path_factory.mktemp("served"), num_layers=num_layers) as served:
        yield served
        print("what the neighbour saw, in ms: gaps (median, P99, longest), time to a first message (median, longest)")
        for (name, kind), gaps in served.gaps.items():
            first = served.first[name, kind]
            figures = [
                *(percentile(gaps, share) for share in (0.5, 0.99, 1.0)),
                *(percentile(first, share) for share in (0.5, 1.0)),
            ]
            print(f"{name}, {kind} stream:", *(f"{figure:.1f}" for figure in figures), f"({len(gaps)})")


@pytest.fixture
def num_requests(pytestconfig: pytest.Config) -> int:
    """Number of mutated requests: few in `make test`, 100,000 in `make fuzz`."""
    return pytestconfig.getoption("--fuzz")


@pytest.fixture
def num_constraints(num_requests: int) -> int:
    """Number of random constraints: 60 in `make test`, 2,000 in `make fuzz`."""
    return num_requests // 50


@pytest.fixture
def num_streams(num_requests: int) -> int:
    """Number of the neighbour's streams beside each attack."""
    return 2 if num_requests < 10_000 else 6
