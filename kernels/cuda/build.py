"""Compiles the CUDA kernels once, and registers them as XLA calls.

The sources ship beside this file. `load` compiles them with nvcc into a cache folder, under a name made of the sources,
the flags, the compiler and the headers, so a change of any builds anew and nothing else does. About 15 seconds.
Nothing happens at import.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", "-gencode=arch=compute_90a,code=sm_90a")
TARGETS = (
    "meshserve_decode_layers",
    "meshserve_decode_qkv",
    "meshserve_paged_attention",
    "meshserve_prefill_attention",
    "meshserve_prepare_heads",
    "meshserve_project_residual",
    "meshserve_decode_gate_up",
    "meshserve_sampling_floor",
    "meshserve_peer_sum",
    "meshserve_peer_exchange",
)
_MAX_ERROR_BYTES = 1000


class KernelBuildError(RuntimeError):
    """The CUDA kernels cannot be built here; the message says why."""


def find_nvcc() -> Path | None:
    """nvcc of PATH, else of the packages that jax's CUDA extra installs, else None."""
    on_path = shutil.which("nvcc")
    if on_path:
        return Path(on_path)
    for folder in sys.path:
        for found in sorted(Path(folder or ".").glob("nvidia/*/bin/nvcc")):
            return found
    return None


@functools.cache
def unavailable_reason(device: jax.Device | None = None) -> str | None:
    """Why the kernels cannot serve a device, or None where they can: they need a Hopper GPU and nvcc.

    The device may be one that programs are only compiled for; None is this process's first.
    """
    device = device or jax.devices()[0]
    if device.platform != "gpu":
        return f"the CUDA kernels need an NVIDIA Hopper GPU; this is a {device.platform} device"
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != "9.0":
        return f"the CUDA kernels need compute capability 9.0 (Hopper); {device.device_kind} has {capability}"
    if find_nvcc() is None:
        return "the CUDA kernels are compiled with nvcc, which is not on PATH: install jax[cuda13] or the CUDA toolkit"
    return None


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise KernelBuildError(f"{' '.join(command)} failed with exit status {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def build(cache_dir: Path | None = None) -> Path:
    """The compiled library's path; compiles it where it is not in `cache_dir` (~/.cache/meshserve) yet.

    Raises:
      KernelBuildError: there is no nvcc, or it fails; carries its message.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelBuildError("nvcc is neither on PATH nor among the installed packages (jax[cuda13] brings it)")
    headers = Path(jax.ffi.include_dir())
    digest = hashlib.sha256()
    for text in (*FLAGS, _run([str(nvcc), "--version"]), jax.__version__, jax.lib.__version__):
        digest.update(text.encode() + b"\0")
    for source in sorted((*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    folder = cache_dir or Path.home() / ".cache" / "meshserve"
    library = folder / f"kernels-{digest.hexdigest()[:20]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unfinished = Path(scratch) / library.name
            _run([str(nvcc), *FLAGS, "-isystem", str(headers), str(SOURCES / "ffi.cu"), "-o", str(unfinished)])
            os.replace(unfinished, library)  # atomic: another process sees all of it or nothing
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """Builds if needed, registers the XLA calls of TARGETS, and loads their kernels onto this process's GPUs.

    The second time it does nothing. Needs no GPU: programs that call the kernels can be compiled without one.

    Raises:
      KernelBuildError: jax has no CUDA build here, the kernels' build fails, or a GPU cannot load them.
    """
    if not any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13)):
        raise KernelBuildError("the CUDA kernels need jax's CUDA build: install jax[cuda13]")
    library = ctypes.CDLL(str(build()))
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="CUDA")
    library.meshserve_scratch_bytes.restype = ctypes.c_size_t
    ordinals = [int(device.local_hardware_id) for device in jax.local_devices() if device.platform == "gpu"]
    array, error = (ctypes.c_int * len(ordinals))(*ordinals), ctypes.create_string_buffer(_MAX_ERROR_BYTES)
    if ordinals and not library.meshserve_load_kernels(array, len(ordinals), error, _MAX_ERROR_BYTES):
        raise KernelBuildError(f"GPUs {ordinals}: {error.value.decode()}")
    return library
