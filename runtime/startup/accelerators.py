"""Starts JAX's devices, and says in one line why an accelerator that jax was installed for cannot be used.

Without this, jax prints the traceback of each backend that failed, and computes on the CPU.
"""

import contextlib
import ctypes
import importlib.util
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from ..api.errors import ConfigError

_CUDA_PLUGINS = {13: "580", 12: "525"}  # major versions of CUDA with a plugin of jax, and the driver that each needs
_GPU_FILES = ("nvidia[0-9]*", "nvidiactl", "dxg")  # the last one is that of WSL 2
_TPU_FILES = ("accel[0-9]*", "vfio/[0-9]*")
_TPU_LOCK = Path("/tmp/libtpu_lockfile")
_DRIVER_VERSION = Path("/proc/driver/nvidia/version")
_DEVICES = Path("/dev")
_OTHERWISE = "To serve on the CPU instead, set --cpu-devices 1 (cpu_devices=1 in Python)."
_GET_GPUS = (
    "Start a container with its GPUs (docker run --gpus all; in Kubernetes, a limit of nvidia.com/gpu). Elsewhere, "
    "install NVIDIA's driver, after which nvidia-smi lists the GPUs."
)
_JAX_LOGGER = "jax._src.xla_bridge"


def started_devices() -> list[jax.Device]:
    """Starts JAX's devices, unless they have been, and returns those of all processes.

    Raises:
      ConfigError: jax is installed for an accelerator, and none can be used. If the CPU is meant, JAX must have been
        told to use it.
    """
    kinds = _installed_kinds()
    if not kinds:
        return jax.devices()
    if all(kinds.values()):
        raise ConfigError(next(iter(kinds.values())))  # without starting them: libtpu prints what is of no help
    failures: list[str] = []
    try:
        with _collected_failures(failures):
            devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: jax skips GPUs without a device file
        failures.append(_told(error))
    else:
        if devices[0].platform != "cpu":
            return devices
    kind = next(kind for kind, missing in kinds.items() if not missing)
    raise ConfigError(_reason(kind, failures))


def _installed_kinds() -> dict[str, str]:
    """Returns the accelerators that jax is installed for and may use, each with why none is there; "" if one may be."""
    allowed = (jax.config.values["jax_platforms"] or "").split(",")
    found = {}
    if _cuda_version() and allowed[0] in ("", "cuda", "gpu"):
        found["GPU"] = _gpus_missing()
    if importlib.util.find_spec("libtpu") is not None and allowed[0] in ("", "tpu"):
        found["TPU"] = "" if _has_file(_TPU_FILES) else _unusable("TPU", "this machine has none", "")
    return found


def _cuda_version() -> int:
    """Returns the major version of CUDA that jax is installed for, or 0."""
    return next((version for version in _CUDA_PLUGINS if importlib.util.find_spec(f"jax_cuda{version}_plugin")), 0)


def _gpus_missing() -> str:
    """Returns why this process sees no GPU, or "" if there may be one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible.strip() or visible.strip().startswith("-1")):
        return _unusable("GPU", f"CUDA_VISIBLE_DEVICES is {visible!r} in the environment", "Unset it.")
    if not _has_file(_GPU_FILES):
        return _unusable("GPU", "there is no device file such as /dev/nvidia0", _GET_GPUS)
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return _unusable("GPU", "the driver's library libcuda.so.1 is not there", _GET_GPUS)
    return ""


def _has_file(patterns: tuple[str, ...]) -> bool:
    return any(True for pattern in patterns for _ in _DEVICES.glob(pattern))


def _reason(kind: str, failures: list[str]) -> str:
    """Returns the message for an accelerator that is there and could not be started, from what jax said about it."""
    text = " ".join(failures)
    if "TPU is already in use" in text or _TPU_LOCK.name in text:
        return f"{_tpu_owner(text)} {_OTHERWISE}"
    if "driver version is insufficient" in text:
        version = _cuda_version()
        why = f"the driver{_driver_version()} is too old for CUDA {version}"
        return _unusable("GPU", why, f"Install driver {_CUDA_PLUGINS[version]} or later; nvidia-smi shows its version.")
    if "Unable to load" in text:
        return _unusable("GPU", failures[0], "Install meshserve with the extra [cuda] again, which has this library.")
    what_to_do = "nvidia-smi must list it." if kind == "GPU" else ""
    return _unusable(kind, failures[0] if failures else "jax found none", what_to_do)


def _unusable(kind: str, why: str, what_to_do: str) -> str:
    return " ".join(f"jax is installed for a {kind}, but none can be used: {why}. {what_to_do} {_OTHERWISE}".split())


def _tpu_owner(text: str) -> str:
    """Returns which process has the TPU, and what to do. A TPU serves one process at a time, which locks a file."""
    found = re.search(r"in use by process with pid (\d+)", text)
    process_id = int(found[1]) if found else _lock_holder(_TPU_LOCK)
    if process_id is None:
        return (
            f"The TPU is in use by a process that this one cannot see, of another user or container: `sudo lsof -w "
            f"/dev/accel0` names it. If there is none, remove {_TPU_LOCK}."
        )
    command = ""
    with contextlib.suppress(OSError):
        command = " ".join(Path(f"/proc/{process_id}/cmdline").read_text(errors="replace").replace("\0", " ").split())
    shown = f" ({command:.100})" if command else ""
    return f"The TPU is in use by process {process_id}{shown}. Stop it, or wait until it has ended."


def _lock_holder(path: Path) -> int | None:
    """Returns the process that has locked a file, if this one can see it."""
    with contextlib.suppress(OSError):
        inode = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            number, _, _, _, process_id, file, *_ = line.split()
            if number.endswith(":") and file.rpartition(":")[2] == inode and int(process_id) > 0:
                return int(process_id)
    return None


def _driver_version() -> str:
    """Returns the version of NVIDIA's driver with a space before it, or ""."""
    with contextlib.suppress(OSError):
        if found := re.search(r"\d+\.\d+(\.\d+)?", _DRIVER_VERSION.read_text()):
            return f" {found[0]}"
    return ""


@contextlib.contextmanager
def _collected_failures(failures: list[str]) -> Iterator[None]:
    """Collects what jax logs about backends that fail, instead of printing it with tracebacks."""
    others: list[logging.LogRecord] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                failures.append(_told(record.exc_info[1]))
            elif record.getMessage().startswith("Unable to initialize backend"):
                failures.append(_one_line(record.getMessage()))
            elif record.levelno >= logging.WARNING:
                others.append(record)

    log, collector = logging.getLogger(_JAX_LOGGER), Collector()
    before = log.level, log.propagate
    log.addHandler(collector)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(collector)
        log.setLevel(before[0])
        log.propagate = before[1]
        for record in others:
            log.handle(record)


def _told(error: BaseException) -> str:
    """Returns what an error says, and what its cause does."""
    cause = f" ({_one_line(str(error.__cause__))})" if error.__cause__ is not None else ""
    return f"{_one_line(str(error)) or type(error).__name__}{cause}"


def _one_line(text: str) -> str:
    """Returns the first line of a text without the period at its end."""
    return text.strip().partition("\n")[0].rstrip(".")
