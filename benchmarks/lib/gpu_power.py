"""Reads the clock and power of this machine's GPUs during a benchmark, through NVIDIA's management library.

A GPU at its power limit lowers its clock, so the same work takes longer than a moment before.
"""

import dataclasses
import os
import statistics
import threading
import time
from typing import Any, Self

import jax

try:
    import pynvml
except ImportError:  # installed by the extra `cuda`; without it there is no NVIDIA GPU
    pynvml = None


@dataclasses.dataclass(frozen=True)
class Reading:
    """A reading of one GPU."""

    clock_mhz: float  # clock of the multiprocessors
    most_mhz: float  # maximum that the GPU allows
    watts: float
    limit_watts: float

    def __str__(self) -> str:
        return f"{self.clock_mhz:.0f} of {self.most_mhz:.0f} MHz, {self.watts:.0f} of {self.limit_watts:.0f} W"


def at_power(reading: Reading | None) -> str:
    """Formats a reading for the end of a line of figures."""
    return "" if reading is None else f", at {reading}"


class PowerWatch:
    """A context manager that reads every GPU of this process ten times per second.

    It reads nothing if JAX runs on another platform, or without NVIDIA's library.

    Args:
      is_gpu_expected: Do not ask JAX, which would take the GPU's memory for this process.
    """

    def __init__(self, interval_seconds: float = 0.1, *, is_gpu_expected: bool = False):
        self._interval_seconds = interval_seconds
        self._is_gpu_expected = is_gpu_expected
        self._readings: list[tuple[float, list[Reading]]] = []  # time, and a reading of each GPU
        self._devices: list[Any] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="power", daemon=True)

    def __enter__(self) -> Self:
        if pynvml is not None and (self._is_gpu_expected or jax.default_backend() == "gpu"):
            try:
                pynvml.nvmlInit()
                self._devices = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in _visible_gpus()]
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
        """Returns the medians of the GPU with the highest power between two `time.perf_counter` values.

        Returns None if nothing was read.
        """
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
            except pynvml.NVMLError:  # a GPU without readings, or lost: the benchmark reports no power
                self._readings.clear()
                return


def _visible_gpus() -> list[int]:
    """Returns the indices of CUDA_VISIBLE_DEVICES, or of all GPUs where it is not set or names GPUs otherwise."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [int(name) for name in names] if all(map(str.isdecimal, names)) else [*range(pynvml.nvmlDeviceGetCount())]


def _read(device: Any) -> Reading:
    return Reading(
        clock_mhz=pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM),
        most_mhz=pynvml.nvmlDeviceGetMaxClockInfo(device, pynvml.NVML_CLOCK_SM),
        watts=pynvml.nvmlDeviceGetPowerUsage(device) / 1000,
        limit_watts=pynvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1000,
    )
