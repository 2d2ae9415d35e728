"""Tests the readings of GPU clock and power in benchmarks, with a fake management library."""

import time

import pytest

from meshserve.benchmarks.lib import gpu_power
from meshserve.benchmarks.lib.gpu_power import PowerWatch, Reading, at_power
from tests.waiting import wait_for


class Nvml:
    """A fake of two GPUs, the second of which runs at its power limit."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at = fails_at
        self.num_read = 0

    def nvmlInit(self) -> None:
        self._fail("start")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetClockInfo(self, device: int, clock: int) -> int:
        assert clock == self.NVML_CLOCK_SM
        return (1980, 1545)[device]

    def nvmlDeviceGetMaxClockInfo(self, device: int, clock: int) -> int:
        return 1980

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        self.num_read += 1
        self._fail("reading")
        return (80_160, 692_400)[device]

    def nvmlDeviceGetEnforcedPowerLimit(self, device: int) -> int:
        return 700_000

    def _fail(self, where: str) -> None:
        if self.fails_at == where:
            raise self.NVMLError(where)


@pytest.fixture(autouse=True)
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_power.jax, "default_backend", lambda: "gpu")


def test_the_gpu_that_takes_most_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr(gpu_power, "pynvml", nvml)
    started = time.perf_counter()
    with PowerWatch(interval_seconds=0.001) as watch:
        wait_for(lambda: nvml.num_read >= 6)
    ended = time.perf_counter()
    reading = watch.between(started, ended)
    assert reading == Reading(clock_mhz=1545, most_mhz=1980, watts=692.4, limit_watts=700)
    assert at_power(reading) == ", at 1545 of 1980 MHz, 692 of 700 W"
    assert watch.between(ended, ended + 1) is None


@pytest.mark.parametrize(("visible", "watts"), [("0", 80.16), ("1", 692.4), ("0,1", 692.4), ("GPU-8d2f", 692.4)])
def test_only_visible_gpus_are_read(monkeypatch: pytest.MonkeyPatch, visible: str, watts: float) -> None:
    nvml = Nvml()
    monkeypatch.setattr(gpu_power, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    started = time.perf_counter()
    with PowerWatch(interval_seconds=0.001) as watch:
        wait_for(lambda: nvml.num_read >= 6)
    reading = watch.between(started, time.perf_counter())
    assert reading is not None
    assert reading.watts == watts


@pytest.mark.parametrize("library", [None, Nvml("start"), Nvml("reading")], ids=["none", "no driver", "no reading"])
def test_without_readings_nothing_is_said(monkeypatch: pytest.MonkeyPatch, library: Nvml | None) -> None:
    monkeypatch.setattr(gpu_power, "pynvml", library)
    started = time.perf_counter()
    with PowerWatch(interval_seconds=0.001) as watch:
        if library is not None and library.fails_at == "reading":
            wait_for(lambda: library.num_read > 0)
    assert watch.between(started, time.perf_counter()) is None
    assert at_power(None) == ""


def test_gpus_beside_a_run_on_cpu_devices_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml("start")
    monkeypatch.setattr(gpu_power, "pynvml", nvml)
    monkeypatch.setattr(gpu_power.jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(nvml, "nvmlInit", lambda: pytest.fail("asked"))
    with PowerWatch() as watch:
        pass
    assert watch.between(0.0, time.perf_counter()) is None
