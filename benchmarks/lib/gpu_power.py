"""The clock and the power of this machine's GPUs while a benchmark runs, by NVIDIA's management library.

A GPU at its power limit lowers its clock, and what it computes then takes longer than the same work a moment earlier.
"""

import dataclasses
import statistics
import threading
import time
from typing import Any, Self

import jax

try:
    import pynvml
except ImportError:  # of the extra `cuda`: no NVIDIA GPU here
    pynvml = None


@dataclasses.dataclass(frozen=True)
class Reading:
    """Of one GPU."""

    clock_mhz: float  # of the multiprocessors
    most_mhz: float  # that the GPU allows
    watts: float
    limit_watts: float

    def __str__(self) -> str:
        return f"{self.clock_mhz:.0f} of {self.most_mhz:.0f} MHz, {self.watts:.0f} of {self.limit_watts:.0f} W"


def at_power(reading: Reading | None) -> str:
    """For the end of a line of figures."""
    return "" if reading is None else f", at {reading}"


class PowerWatch:
    """Reads every GPU ten times a second, as a context manager. Nothing where JAX runs elsewhere, or without NVIDIA's
    library.
    """

    def __init__(self, interval_seconds: float = 0.1):
        self._interval_seconds = interval_seconds
        self._readings: list[tuple[float, list[Reading]]] = []  # when, and of each GPU
        self._devices: list[Any] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="power", daemon=True)

    def __enter__(self) -> Self:
        if pynvml is not None and jax.default_backend() == "gpu":
            try:
                pynvml.nvmlInit()
                self._devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
            except pynvml.NVMLError:  # no driver
                self._devices = []
        if self._devices:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._devices:
            self._thread.join()

    def between(self, started: float, ended: float) -> Reading | None:
        """The medians of the GPU that took most, between two `time.perf_counter`; None if nothing was read."""
        moments = [readings for moment, readings in self._readings if started <= moment <= ended]
        medians = (
            Reading(*(statistics.median(values) for values in zip(*map(dataclasses.astuple, of_one), strict=True)))
            for of_one in zip(*moments, strict=True)
        )
        return max(medians, key=lambda reading: reading.watts, default=None)

    def _read(self) -> None:
        while not self._ended.wait(self._interval_seconds):
            try:
                self._readings.append((time.perf_counter(), [_read(device) for device in self._devices]))
            except pynvml.NVMLError:  # a GPU that does not tell, or is gone: the benchmark says nothing of power
                self._readings.clear()
                return


def _read(device: Any) -> Reading:
    return Reading(
        clock_mhz=pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM),
        most_mhz=pynvml.nvmlDeviceGetMaxClockInfo(device, pynvml.NVML_CLOCK_SM),
        watts=pynvml.nvmlDeviceGetPowerUsage(device) / 1000,
        limit_watts=pynvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1000,
    )
