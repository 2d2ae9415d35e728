"""Compiles programs, caches them on disk between starts, and watches for compiles after the server is ready.

All programs are declared (`step.ServerPrograms`) and compiled before the server is ready, and compiled programs never
recompile. A later compile is therefore an error: it is counted, logged with the shapes that caused it, and with
`strict` refused before XLA starts.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
from tqdm import tqdm

_log = logging.getLogger(__name__)

_PROGRESS_DELAY_SECONDS = 2.0
MAX_THREADS = 8  # compiling a program of an unrolled model takes about 1 GB of host memory

LOADED = "/meshserve/programs/loaded"  # see `program_store`
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_CACHE_MISS = "/jax/compilation_cache/cache_misses"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # the last event before XLA compiles
_COMPILED = "/jax/core/compile/backend_compile_duration"


def use_cache(directory: Path, *, is_autotuned: bool = True) -> None:
    """Caches compiled programs by what they are after tracing, and on GPUs the results of XLA's autotuning.

    Programs of a server are looked for in a `ProgramStore` before. The key includes the program, the compiler, its
    flags and the kind of device, so hosts may share a directory. With autotuning it also includes the directory's name,
    so it must then have the same one everywhere.

    Args:
      directory: The directory, which may be read-only.
      is_autotuned: Whether the devices may be GPUs, on which XLA times implementations.
    """
    is_writable = not directory.exists() or os.access(directory, os.W_OK)
    jax.config.update("jax_compilation_cache_dir", str(directory / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_enable_xla_caches", "all" if is_autotuned and is_writable else "none")


def xla_cache_options() -> dict[str, str | bool]:
    """Returns the options with which XLA keeps kernels and the results of autotuning as `use_cache` says.

    jax sets them itself, but only for programs that it looks for in its own cache. Empty if nothing is kept.
    """
    if jax.config.values["jax_persistent_cache_enable_xla_caches"] != "all":
        return {}
    folder = Path(jax.config.values["jax_compilation_cache_dir"])
    return {
        "xla_gpu_kernel_cache_file": str(folder / "xla_gpu_kernel_cache_file"),
        "xla_gpu_enable_llvm_module_compilation_parallelism": True,
        "xla_gpu_per_fusion_autotune_cache_dir": str(folder / "xla_gpu_per_fusion_autotune_cache_dir"),
    }


def compile_all(
    lowered: Iterable[jax.stages.Lowered],
    num_programs: int,
    num_threads: int = 0,
    options: Mapping[str, str | bool] | None = None,
) -> list[jax.stages.Compiled]:
    """Compiles programs, `num_threads` at a time, and returns them in order; 0 uses a thread per core, at most 8.

    Tracing and lowering need the interpreter lock and run one after another. XLA releases the lock, so compilations
    overlap with lowering and with each other. The threads are daemons, so a process that stops does not wait for XLA.
    `options` are XLA's, for all of them.
    """
    given = dict(options) if options else None
    num_threads = num_threads or min(os.cpu_count() or 1, MAX_THREADS)
    with ThreadPool(min(num_threads, max(num_programs, 1))) as pool:
        programs = pool.imap(lambda program: program.compile(given), lowered)
        bar = tqdm(
            programs,
            desc="programs",
            unit="",
            total=num_programs,
            delay=_PROGRESS_DELAY_SECONDS,
            leave=False,
            disable=None,
        )
        return list(bar)


class LateCompileError(RuntimeError):
    """A program would have been compiled after the server was ready, which `strict` forbids."""


@dataclass(frozen=True, kw_only=True)
class CompileCounts:
    """Counts since the watch began. A program from jax's cache counts as a cache hit and as a compile."""

    num_loaded: int = 0  # programs of a `ProgramStore`, which were neither traced nor compiled
    num_compiles: int
    num_cache_hits: int
    num_cache_misses: int
    num_late_compiles: int  # after `ready`


class CompileWatch:
    """Counts compiles in this process from construction to `close`. Use it as a context manager."""

    def __init__(self, *, is_strict: bool = False):
        self._is_strict = is_strict
        self._is_ready = False
        self._lock = threading.Lock()
        self._events = dict.fromkeys((LOADED, _CACHE_HIT, _CACHE_MISS, _COMPILED), 0)
        self._num_late = 0
        jax.monitoring.register_event_listener(self._on_event)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)

    def __enter__(self) -> "CompileWatch":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        jax.monitoring.unregister_event_listener(self._on_event)
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        if self._is_ready:
            jax.config.update("jax_log_compiles", False)

    def ready(self) -> None:
        """Treats every further compile as an error. jax logs its shapes."""
        self._is_ready = True
        jax.config.update("jax_log_compiles", True)

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """Allows compiles within the context, for programs that are compiled on purpose."""
        was_ready, self._is_ready = self._is_ready, False
        jax.config.update("jax_log_compiles", False)
        try:
            yield
        finally:
            self._is_ready = was_ready
            jax.config.update("jax_log_compiles", was_ready)

    @property
    def counts(self) -> CompileCounts:
        with self._lock:
            return CompileCounts(
                num_loaded=self._events[LOADED],
                num_compiles=self._events[_COMPILED],
                num_cache_hits=self._events[_CACHE_HIT],
                num_cache_misses=self._events[_CACHE_MISS],
                num_late_compiles=self._num_late,
            )

    def _on_event(self, event: str, **_: Any) -> None:
        self._count(event)

    def _on_duration(self, event: str, duration_secs: float, **details: Any) -> None:
        self._count(event)
        if not self._is_ready or event != _LOWERED:
            return
        with self._lock:
            self._num_late += 1
        name = details.get("fun_name", "a program")
        if self._is_strict:
            raise LateCompileError(f"{name} would be compiled after the server was ready; --strict forbids it.")
        _log.error("%s is compiled after the server was ready; see jax's log message for the shapes", name)

    def _count(self, event: str) -> None:
        with self._lock:
            if event in self._events:
                self._events[event] += 1
