"""Keeps compiled programs in files, each found by what it was compiled from, so that a start need not trace them.

jax's own cache is found by the traced program, so each start traces and lowers all of them again, one after another.
Here the key is a digest of everything that is read for that (`program_key`), and the files are read and loaded by
several threads. A file begins with a digest of its key and content: one that is damaged, cut off or another program's
is told in the log, removed and compiled again, and never run. Whoever may write to the folder is trusted, as by jax.

Programs of several processes, and of devices on which loaded programs have not been tried, are left to jax's cache.
"""

import contextlib
import dataclasses
import hashlib
import logging
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from meshserve.kernels.cuda import preparation
from meshserve.sharding.guarded_files import read_guarded

from .batch import ProgramKey
from .compile_cache import LOADED, MAX_THREADS, compile_all, xla_cache_options
from .program_key import NoKeyError, digest_of, environment_digest

_log = logging.getLogger(__name__)

# Of JAX, on which loaded programs have been run (docs/decisions/098-programs-without-tracing.md).
AUTOMATIC_PLATFORMS = ("cpu",)
_FOLDER = "programs"
_MAGIC = b"meshserve program 1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_MAX_FILE_BYTES = 4 << 30
_MAX_INDEX_BYTES = 1 << 20
_MAX_INDEXED = 10_000

ToLower = Mapping[ProgramKey, Callable[[], jax.stages.Lowered]]
Programs = dict[ProgramKey, jax.stages.Compiled]


class DamagedProgramError(ValueError):
    """A file does not contain the program that its name promises. The message says why."""


@dataclasses.dataclass(frozen=True)
class _Stored:
    """The content of a file: what `serialize_executable` returns, and what must be prepared before it is loaded."""

    executable: bytes
    in_tree: Any
    out_tree: Any
    prepared: tuple[str, ...]  # see `preparation.prepared`


class ProgramStore:
    """The compiled programs of one cache folder, for one mesh of this process. Thread-safe.

    Args:
      folder: The cache folder, which may be read-only or not exist.
      mesh: The devices.
    """

    def __init__(self, folder: Path, mesh: Mesh):
        self._folder, self._mesh = folder / _FOLDER, mesh
        self._devices = list(mesh.devices.flat)
        self._lock = threading.Lock()
        self._fetched: dict[str, Future[jax.stages.Compiled | None]] = {}  # by key
        self._used: list[str] = []
        self._is_unwritable = False

    @classmethod
    def of(cls, folder: Path | None, mesh: Mesh, choice: str = "auto") -> "ProgramStore | None":
        """Returns the store of a folder; None without one, and where jax's cache serves instead.

        Args:
          folder: See the class.
          mesh: The devices.
          choice: The option `stored_programs`.
        """
        platform = mesh.devices.flat[0].platform
        is_automatic = platform in AUTOMATIC_PLATFORMS
        if folder is None or jax.process_count() > 1 or choice == "off" or (choice == "auto" and not is_automatic):
            return None
        if not is_automatic:
            _log.warning(
                "stored_programs is on: programs are loaded without tracing, which was not tried on %s", platform
            )
        return cls(folder, mesh)

    @cached_property
    def _environment(self) -> str:
        return environment_digest()

    def fetch(self, name: str, num_threads: int = 0) -> None:
        """Begins to load, in other threads, the programs that a start of this name used last; see `remember`."""
        try:
            text = read_guarded(self._index(name), _MAX_INDEX_BYTES).data.decode("ascii")
        except (OSError, UnicodeDecodeError):
            return
        keys = [key for key in text.split()[:_MAX_INDEXED] if key.isalnum()]
        pool = ThreadPoolExecutor(num_threads or _num_threads(), thread_name_prefix="programs")
        with self._lock:
            self._fetched |= {key: pool.submit(self._load, key) for key in keys}
        pool.shutdown(wait=False)

    def remember(self, name: str) -> None:
        """Notes which programs this start used, for `fetch`, and frees those that were fetched and not used."""
        with self._lock:
            keys, self._fetched = sorted(set(self._used)), {}
        content = "\n".join(keys).encode()
        path = self._index(name)
        with contextlib.suppress(OSError):
            if read_guarded(path, _MAX_INDEX_BYTES).data == content:
                return
        self._write(path, content)

    def compiled(self, declared: Any, to_lower: ToLower, num_threads: int = 0) -> Programs:
        """Returns programs: those that are stored are loaded, the others compiled and stored.

        Args:
          declared: The declaration of the programs, which with the key of each determines it.
          to_lower: Lowers each.
          num_threads: See `compile_all`.
        """
        keys = self._keys(declared, to_lower)
        if keys is None:
            return _compiled(to_lower, num_threads)
        with ThreadPoolExecutor(min(num_threads or _num_threads(), max(len(keys), 1))) as pool:
            found = dict(zip(keys, pool.map(self._taken, keys.values()), strict=True))
        missing = {program: lower for program, lower in to_lower.items() if found[program] is None}
        options = xla_cache_options()
        with _without_jax_cache():
            compiled = _compiled(missing, num_threads, options)
        for program, each in compiled.items():
            self._store(keys[program], each)
        return {program: found[program] or compiled[program] for program in to_lower}

    def number(self, declared: Any, program: ProgramKey, compute: Callable[[], int]) -> int:
        """Returns a number that a program determines, such as its scratch memory: stored, or computed and stored."""
        keys = self._keys(declared, {program: compute})
        if keys is None:
            return compute()
        path = self._folder / f"{keys[program]}.number"
        with contextlib.suppress(OSError, DamagedProgramError):
            return int.from_bytes(_checked(read_guarded(path, _MAX_INDEX_BYTES).data, keys[program]))
        number = compute()
        self._write(path, _sealed(number.to_bytes(8), keys[program]))
        return number

    def _keys(self, declared: Any, programs: Iterable[ProgramKey]) -> dict[ProgramKey, str] | None:
        """Returns the key of each program, or None if something has no description."""
        try:
            common = digest_of(self._environment, declared)
            return {program: digest_of(common, program) for program in programs}
        except NoKeyError as error:
            _log.info("programs are traced before they are looked up in jax's cache, because %s", error)
            return None

    def _taken(self, key: str) -> jax.stages.Compiled | None:
        with self._lock:
            self._used.append(key)
            fetched = self._fetched.pop(key, None)
        return fetched.result() if fetched is not None else self._load(key)

    def _load(self, key: str) -> jax.stages.Compiled | None:
        """Returns a stored program; None if there is none, or it cannot be used."""
        path, started = self._path(key), time.monotonic()
        try:
            stored = pickle.loads(_checked(read_guarded(path, _MAX_FILE_BYTES).data, key))
            _prepare(stored.prepared)
            loaded = serialize_executable.deserialize_and_load(
                stored.executable, stored.in_tree, stored.out_tree, execution_devices=self._devices
            )
        except FileNotFoundError:
            return None
        except Exception as error:  # XLA's, pickle's and the system's: whatever it is, the program can be compiled
            _log.warning("%s is compiled again, because the file cannot be used: %s", path, _first_line(error))
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        jax.monitoring.record_event(LOADED)
        jax.monitoring.record_event_duration_secs("/meshserve/programs/load_duration", time.monotonic() - started)
        return loaded

    def _store(self, key: str, compiled: jax.stages.Compiled) -> None:
        started = time.monotonic()
        try:
            executable, in_tree, out_tree = serialize_executable.serialize(compiled)
            content = pickle.dumps(_Stored(executable, in_tree, out_tree, preparation.prepared()))
        except Exception as error:  # such as a program with callbacks
            _log.info("a program is not kept for the next start: %s", _first_line(error))
            return
        self._write(self._path(key), _sealed(content, key))
        jax.monitoring.record_event_duration_secs("/meshserve/programs/store_duration", time.monotonic() - started)

    def _write(self, path: Path, content: bytes) -> None:
        """Writes a file as a whole or not at all. A folder that is read-only is told once."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                try:
                    file.write(content)
                    file.close()
                    os.chmod(file.name, 0o644)
                    os.replace(file.name, path)
                except BaseException:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            with self._lock:
                is_first, self._is_unwritable = not self._is_unwritable, True
            if is_first:
                _log.info("compiled programs are not kept in %s: %s", self._folder, error)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.program"

    def _index(self, name: str) -> Path:
        """Returns the file for starts of a name in this environment: another's programs may not even be loadable."""
        return self._folder / f"{digest_of(self._environment, name)}.index"


@contextlib.contextmanager
def _without_jax_cache() -> Iterator[None]:
    """Compiles without jax's own cache. What was loaded from it cannot be serialized again.

    Such a program for CPUs loads, and misses its functions when it runs.
    """
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax looks at the setting once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def start_name(*values: Any) -> str:
    """Returns a name for starts with these values, for `ProgramStore.fetch`; "" if they cannot be described."""
    try:
        return digest_of(*values)
    except NoKeyError as error:
        _log.info("programs are not loaded beside the weights, because %s", error)
        return ""


def compile_programs(declared: Any, to_lower: ToLower, num_threads: int, store: ProgramStore | None) -> Programs:
    """Returns compiled programs, from a store if there is one; see `ProgramStore.compiled`."""
    return store.compiled(declared, to_lower, num_threads) if store is not None else _compiled(to_lower, num_threads)


def _compiled(to_lower: ToLower, num_threads: int, options: Mapping[str, str | bool] | None = None) -> Programs:
    if not to_lower:
        return {}
    compiled = compile_all((lower() for lower in to_lower.values()), len(to_lower), num_threads, options)
    return dict(zip(to_lower, compiled, strict=True))


def _num_threads() -> int:
    return min(os.cpu_count() or 1, MAX_THREADS)


def _sealed(content: bytes, key: str) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + content).digest() + content


def _checked(data: bytes, key: str) -> bytes:
    """Returns the content of a file.

    Raises:
      DamagedProgramError: It is not what was written under this key.
    """
    start = len(_MAGIC) + _DIGEST_BYTES
    if not data.startswith(_MAGIC):
        raise DamagedProgramError("it is not a file of programs, or one of another version")
    content = data[start:]
    if hashlib.sha256(key.encode() + content).digest() != data[len(_MAGIC) : start]:
        raise DamagedProgramError("it is damaged or incomplete, or another program's")
    return content


def _prepare(names: Sequence[str]) -> None:
    """Prepares what a program calls, which otherwise happens while it is traced.

    Raises:
      DamagedProgramError: It calls other kernels than those of this version.
    """
    if missing := preparation.prepare(names):
        raise DamagedProgramError(f"it calls kernels that are not here: {', '.join(sorted(missing))}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
