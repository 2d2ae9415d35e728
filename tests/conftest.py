"""Every test process serves on 8 virtual CPU devices."""

from meshserve.sharding.mesh import use_cpu_devices

use_cpu_devices(8)


def pytest_addoption(parser) -> None:
    parser.addoption("--fuzz", type=int, default=3000, help="mutated requests to send (make fuzz: 100,000)")
