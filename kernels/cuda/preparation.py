"""Names what compiled programs need of a process besides jax, and prepares it: libraries of kernels, and cuBLASLt.

Tracing a program prepares what it calls. One that is loaded without being traced needs it before: XLA looks up the
calls of a program while it loads it, and a kernel that multiplies with cuBLASLt finds the library only if it is open.
"""

import threading
from collections.abc import Sequence

from . import build, cublas_lt

CUBLAS_LT = "cuBLASLt"

_lock = threading.Lock()  # several programs are loaded at the same time, and a library once


def prepared() -> tuple[str, ...]:
    """Returns what this process has prepared so far, in order: digests of libraries, and `CUBLAS_LT` if it is open."""
    return (*build.loaded_libraries(), *([CUBLAS_LT] if cublas_lt.is_open() else []))


def prepare(names: Sequence[str]) -> tuple[str, ...]:
    """Prepares what `prepared` returned in another process, in its order. Thread-safe. Does nothing a second time.

    Returns:
      The names that this version cannot prepare, such as libraries of other sources.

    Raises:
      KernelBuildError: A library fails to build or to load.
    """
    with _lock:
        found = set(build.load_named([name for name in names if name != CUBLAS_LT]))
        if CUBLAS_LT in names:
            cublas_lt.open_library()
            found.add(CUBLAS_LT)
    return tuple(name for name in names if name not in found)
