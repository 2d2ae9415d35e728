"""Compiles the CUDA kernels once and registers them as XLA FFI calls.

The sources ship beside this file. `load` compiles them with nvcc into a cache folder, which takes about 20 seconds. The
library's name is a hash of the sources, the flags, and the versions of nvcc and jax, so only a change of one of these
triggers a rebuild. Nothing happens at import.
"""

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-gencode=arch=compute_90a,code=sm_90a")
TARGETS = (
    "meshserve_decode_layers",
    "meshserve_prompt_layers",
    "meshserve_decode_expert_layers",
    "meshserve_decode_expert_layers_fp8",
    "meshserve_decode_qkv",
    "meshserve_paged_attention",
    "meshserve_prefill_attention",
    "meshserve_qk_norm_rope",
    "meshserve_project_residual",
    "meshserve_decode_gate_up",
    "meshserve_experts",
    "meshserve_experts_fp8",
    "meshserve_decode_layers_quantised",
    "meshserve_decode_layers_wide",
    "meshserve_decode_qkv_quantised",
    "meshserve_project_residual_quantised",
    "meshserve_decode_gate_up_quantised",
    "meshserve_output_head",
    "meshserve_output_head_wide",
    "meshserve_sampling_threshold",
    "meshserve_p2p_all_reduce",
    "meshserve_p2p_all_gather",
    "meshserve_fp8_linear",
    "meshserve_write_tokens",
)
_MAX_ERROR_BYTES = 1000


class KernelBuildError(RuntimeError):
    """The CUDA kernels cannot be built or loaded on this host; the message says why."""


def find_nvcc() -> Path | None:
    """Returns nvcc from PATH, else from the packages that jax's CUDA extra installs, else None."""
    on_path = shutil.which("nvcc")
    if on_path:
        return Path(on_path)
    for folder in sys.path:
        for found in sorted(Path(folder or ".").glob("nvidia/*/bin/nvcc")):
            return found
    return None


@functools.cache
def unavailable_reason(device: jax.Device | None = None) -> str | None:
    """Returns why the kernels cannot run on a device, or None if they can. They need a Hopper GPU and nvcc.

    Args:
      device: the device, which may be a compile-only one; None means this process's first device.
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
    """Compiles the library unless `cache_dir` (default: ~/.cache/meshserve) already holds it, and returns its path.

    Raises:
      KernelBuildError: nvcc was not found or failed; the message includes its output.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelBuildError("nvcc is not on PATH nor in a Python package: install jax[cuda13] or the CUDA toolkit")
    folder = cache_dir or Path.home() / ".cache" / "meshserve"
    library = folder / _file_name(nvcc)
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            unfinished = Path(scratch) / library.name
            _compile(str(nvcc), Path(scratch), unfinished)
            os.replace(unfinished, library)  # atomic: other processes see the whole file or none
    return library


def _file_name(nvcc: Path) -> str:
    digest = hashlib.sha256()
    for text in (*FLAGS, _run([str(nvcc), "--version"]), jax.__version__, jax.lib.__version__):
        digest.update(text.encode() + b"\0")
    for source in sorted((*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return f"kernels-{digest.hexdigest()[:20]}.so"


def _compile(nvcc: str, scratch: Path, library: Path) -> None:
    """Compiles all sources at the same time, in processes of their own, and links them."""

    def compiled(source: Path) -> str:
        target = str(scratch / f"{source.stem}.o")
        _run([nvcc, *FLAGS, "-isystem", jax.ffi.include_dir(), "-c", str(source), "-o", target])
        return target

    with ThreadPoolExecutor() as threads:
        objects = list(threads.map(compiled, sorted(SOURCES.glob("*.cu"))))
    _run([nvcc, *FLAGS, "-shared", *objects, "-ldl", "-o", str(library)])


def _opened() -> ctypes.CDLL:
    """Builds the library if needed and loads it. A file that does not load, cut short perhaps, is built anew, once."""
    path = build()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        logging.getLogger(__name__).warning("compiling the CUDA kernels again, because they do not load: %s", error)
        path.unlink(missing_ok=True)
    return ctypes.CDLL(str(build()))


@functools.cache
def load() -> ctypes.CDLL:
    """Builds the library if needed, registers the XLA calls in TARGETS, and loads the kernels onto this process's GPUs.

    Further calls do nothing. No GPU is needed: programs that call the kernels can be compiled without one.

    Raises:
      KernelBuildError: jax's CUDA build is not installed, the kernels fail to build, or a GPU cannot load them.
    """
    if not any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13)):
        raise KernelBuildError("the CUDA kernels need jax's CUDA build: install jax[cuda13]")
    library = _opened()
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="CUDA")
    library.meshserve_scratch_bytes.restype = ctypes.c_size_t
    library.meshserve_wide_scratch_bytes.restype = ctypes.c_size_t
    library.meshserve_expert_scratch_bytes.restype = ctypes.c_size_t
    ordinals = [int(device.local_hardware_id) for device in jax.local_devices() if device.platform == "gpu"]
    array, error = (ctypes.c_int * len(ordinals))(*ordinals), ctypes.create_string_buffer(_MAX_ERROR_BYTES)
    if ordinals and not library.meshserve_load_kernels(array, len(ordinals), error, _MAX_ERROR_BYTES):
        raise KernelBuildError(f"GPUs {ordinals}: {error.value.decode()}")
    return library
