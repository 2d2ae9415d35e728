"""Opens cuBLASLt, which jax's CUDA packages install, for the kernels that call it (cublas_lt.cuh)."""

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from .build import KernelBuildError, load

_NAMES = ("libcublasLt.so.13", "libcublasLt.so.12")  # names in the CUDA versions that jax supports
_MAX_ERROR_BYTES = 1000


def _candidates() -> Iterator[str]:
    """Yields where the library may be: what the process has loaded, then jax's packages, then the system's path."""
    for name in _NAMES:
        try:
            ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            continue
        yield name
    for folder in sys.path:
        for name in _NAMES:
            yield from map(str, sorted(Path(folder or ".").glob(f"nvidia/*/lib/{name}")))
    yield from _NAMES


@functools.cache
def open_library() -> None:
    """Opens the library for this process's GPUs, if there are any. Further calls do nothing.

    Raises:
      KernelBuildError: the library was not found or is too old, or the kernels fail to build.
    """
    library = load()
    ordinals = [int(device.local_hardware_id) for device in jax.local_devices() if device.platform == "gpu"]
    if not ordinals:  # programs that call it can be compiled without a GPU
        return
    array, text = (ctypes.c_int * len(ordinals))(*ordinals), ctypes.create_string_buffer(_MAX_ERROR_BYTES)
    errors = []
    for path in dict.fromkeys(_candidates()):
        if library.meshserve_open_cublas_lt(path.encode(), array, len(ordinals), text, _MAX_ERROR_BYTES):
            return
        errors.append(text.value.decode())
    raise KernelBuildError("; ".join(dict.fromkeys(errors)))


def is_open() -> bool:
    """Returns whether this process has called `open_library`, which programs that call it need."""
    return open_library.cache_info().currsize > 0


def unavailable_reason() -> str | None:
    """Returns why this host cannot call the library, or None if it can. Compiles the kernels the first time."""
    try:
        open_library()
    except KernelBuildError as error:
        return str(error)
    return None
