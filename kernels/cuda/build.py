"""Compiles the CUDA kernels once and registers them as XLA FFI calls.

The sources ship beside this file, in a folder for each operation. They make two libraries: `HOPPER`, with what lies in
folders `sm90`, and `PORTABLE` for every GPU since Ampere, with what lies in folders `sm80`. Both have what is in
neither and needed by its calls. `load` takes a library that was compiled ahead into `PREBUILT` (see `prebuilt`), as in
a wheel or an image, or compiles it with nvcc into a cache folder, which takes about 20 seconds. Its name is a hash of
the sources, the flags, and the versions of CUDA and jax, so only a change of one of these triggers a rebuild. Nothing
happens at import.
"""

import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.monitoring

from meshserve.kernels.implementation import Device

from .support import HOPPER as HOPPER_CAPABILITY
from .support import no_ampere, no_hopper
from .user_folder import user_folder

SOURCES = Path(__file__).parent
PREBUILT = SOURCES / "libraries"  # of this installation; not there in a checkout
# Without -fno-gnu-unique, two libraries in one process would share lists of kernels.
FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC", "-Xcompiler", "-fno-gnu-unique")
_HOPPER_TARGETS = (
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
    "meshserve_decode_layers_quantized",
    "meshserve_decode_layers_wide",
    "meshserve_decode_qkv_quantized",
    "meshserve_project_residual_quantized",
    "meshserve_decode_gate_up_quantized",
    "meshserve_output_head",
    "meshserve_output_head_wide",
    "meshserve_sampling_threshold",
    "meshserve_p2p_all_reduce",
    "meshserve_p2p_all_gather",
    "meshserve_fp8_linear",
    "meshserve_write_tokens",
)
_PORTABLE_TARGETS = (
    "meshserve_tile_attention",
    "meshserve_few_token_product",
    "meshserve_tile_experts",
    "meshserve_qk_norm_rope",
    "meshserve_sampling_threshold",
    "meshserve_write_tokens",
)
# Compute capabilities that are compiled for. GPUs of others run what was compiled for the last one before, from PTX.
CAPABILITIES = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
_MAX_ERROR_BYTES = 1000
_NO_COMPILER = re.compile(r"(gcc|g\+\+|cc1plus|cl).*(No such file|not found)|Failed to preprocess host compiler")
_SIZES = (
    "meshserve_scratch_bytes",
    "meshserve_wide_scratch_bytes",
    "meshserve_expert_scratch_bytes",
    "meshserve_tile_expert_scratch_bytes",
)
_loading = threading.RLock()  # programs are loaded by several threads
_registered: set[str] = set()  # XLA calls of this process
_loaded_files: dict[str, None] = {}  # names of the libraries that this process has loaded, in order
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Library:
    """A library of kernels.

    Attributes:
      name: The beginning of its file's name.
      targets: Its XLA FFI calls.
      unsupported_device: Why its kernels cannot run on a device, or None if they can.
      folder: The name of the folders whose sources no other library has.
      shared: Further translation units; None means all that lie in no such folder.
      target: What it is compiled for, such as "sm_86" or, to be compiled by the driver, "compute_80"; empty means the
        GPUs of this process.
    """

    name: str
    targets: tuple[str, ...]
    unsupported_device: Callable[[Device], str | None]
    folder: str
    shared: tuple[str, ...] | None = None
    target: str = ""

    def sources(self) -> list[Path]:
        """Returns its translation units."""
        found = [unit for unit in SOURCES.rglob("*.cu") if _folder_of(unit) == self.folder]
        if self.shared is None:
            return sorted(found + [unit for unit in SOURCES.rglob("*.cu") if _folder_of(unit) is None])
        return sorted(found + [SOURCES / unit for unit in self.shared])

    def needed_targets(self) -> tuple[str, ...]:
        """Returns what it must be compiled for, which depends on this process's GPUs."""
        if self.target:
            return (self.target,)
        return tuple(map(_target_of, sorted(_present_capabilities()) or CAPABILITIES[:1]))

    def all_targets(self) -> tuple[str, ...]:
        """Returns what it is compiled for ahead: every listed GPU, and PTX for later ones."""
        if self.target:
            return (self.target,)
        return (*map(_target_of, CAPABILITIES), "compute_{}{}".format(*CAPABILITIES[-1]))

    def flags(self) -> tuple[str, ...]:
        """Returns what it is compiled with for this process's GPUs."""
        return flags_for(self.needed_targets())


def flags_for(targets: Sequence[str]) -> tuple[str, ...]:
    """Returns the flags of nvcc for targets such as "sm_90a"."""
    return (*FLAGS, *map(_generated, targets))


def _folder_of(unit: Path) -> str | None:
    return next((part for part in unit.parts if part in ("sm80", "sm90")), None)


def _generated(target: str) -> str:
    return f"-gencode=arch=compute_{target.partition('_')[2]},code={target}"


def _target_of(capability: tuple[int, int]) -> str:
    last = max((each for each in CAPABILITIES if each <= capability), default=CAPABILITIES[0])
    return "{}_{}{}".format("sm" if last == capability else "compute", *last)


def _present_capabilities() -> set[tuple[int, int]]:
    """Returns the compute capabilities of this process's GPUs."""
    devices = [Device.of(device) for device in jax.local_devices() if device.platform == "gpu"]
    return {device.compute_capability for device in devices if device.compute_capability is not None}


HOPPER = Library("kernels", _HOPPER_TARGETS, no_hopper, "sm90", target="sm_90a")
PORTABLE = Library(
    "portable",
    _PORTABLE_TARGETS,
    no_ampere,
    "sm80",
    ("attention/qk_norm_rope_launch.cu", "common/launch.cu", "ffi/qk_norm_rope.cu", "ffi/sampling.cu"),
)


def present() -> Library:
    """Returns the library for calls that both have: Hopper's, unless this process has other GPUs."""
    return PORTABLE if _present_capabilities() - {HOPPER_CAPABILITY} else HOPPER


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
def unavailable_reason(device: jax.Device | None = None, library: Library = HOPPER) -> str | None:
    """Returns why a library's kernels cannot run on a device, or None if they can. They need a GPU and nvcc.

    Args:
      device: the device, which may be a compile-only one; None means this process's first device.
      library: the library.
    """
    if reason := library.unsupported_device(Device.of(device)):
        return reason
    if find_nvcc() is None and prebuilt(library) is None:
        return (
            "the CUDA kernels are compiled with nvcc, which is not on PATH, and this installation has none for its "
            "versions of jax and CUDA: install jax[cuda13] or the CUDA toolkit"
        )
    return None


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        output = f"{done.stdout}{done.stderr}"[-4000:]
        _log.error("%s failed with exit status %d:\n%s", " ".join(command), done.returncode, output)
        raise KernelBuildError(_problem(output))
    return done.stdout + done.stderr


def _problem(output: str) -> str:
    """Returns in one line why nvcc failed, and what to do about it."""
    lines = output.strip().splitlines() or ["nvcc failed without a message"]
    if _NO_COMPILER.search(output):
        return "nvcc finds no C++ compiler; install g++ (apt-get install g++)"
    if "unsupported GNU version" in output:
        return "nvcc does not support this version of g++; install an older one, or a newer CUDA toolkit"
    return next((line for line in lines if "error" in line.lower() or "fatal" in line.lower()), lines[-1]).strip(" .")


def build(cache_dir: Path | None = None, library: Library = HOPPER, *, is_prebuilt_taken: bool = True) -> Path:
    """Compiles a library unless it is there, and returns its path.

    Args:
      cache_dir: The folder to look into and to compile into; None means ~/.cache/meshserve, and before it what was
        compiled ahead.
      library: The library.
      is_prebuilt_taken: Whether one that was compiled ahead may be returned.

    Raises:
      KernelBuildError: nvcc was not found or failed, or the folder cannot be written to. The output is logged.
    """
    ahead = prebuilt(library) if cache_dir is None and is_prebuilt_taken else None
    if ahead is not None:
        return ahead
    nvcc = _nvcc()
    try:
        folder = cache_dir or user_folder()
        flags = library.flags()
        path = folder / _file_name(nvcc, library, flags)
        if not path.exists():
            started = time.monotonic()
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                unfinished = Path(scratch) / path.name
                compile_library(nvcc, library.sources(), Path(scratch), unfinished, flags)
                os.replace(unfinished, path)  # atomic: other processes see the whole file or none
            seconds = time.monotonic() - started
            jax.monitoring.record_event_duration_secs("/meshserve/kernels/compile_duration", seconds)
            _log.info("compiled the CUDA kernels (%s) in %.0f s", library.name, seconds)
    except OSError as error:
        raise KernelBuildError(f"the CUDA kernels cannot be kept: {error}") from None
    return path


def unbuildable_reason(library: Library | None = HOPPER) -> str | None:
    """Returns why this host cannot compile a library, or None if it can. Compiles it the first time.

    Args:
      library: the library; None means what `present` returns.
    """
    try:
        build(library=library or present())
    except KernelBuildError as error:
        return str(error)
    return None


def file_names(library: Library) -> tuple[str, ...]:
    """Returns the names that a library's file may have in this version, without compiling it."""
    ahead, nvcc = prebuilt(library), find_nvcc()
    names = () if ahead is None else (ahead.name,)
    return names if nvcc is None else (*names, _file_name(nvcc, library, library.flags()))


@functools.cache
def prebuilt(library: Library) -> Path | None:
    """Returns a library that was compiled ahead with these sources and versions and for these GPUs; None without one.

    A file that is damaged is told in the log and not returned.
    """
    cuda_major = _cuda_major()
    if cuda_major is None or not set(library.needed_targets()) <= set(library.all_targets()):
        return None
    path = PREBUILT / prebuilt_name(library, cuda_major)
    try:
        expected = path.with_suffix(".sha256").read_text(encoding="ascii").strip()
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return None
    if found != expected:
        _log.warning("%s is not used, because it is damaged", path)
        return None
    return path


def prebuilt_name(library: Library, cuda_major: int) -> str:
    """Returns the name of a library that is compiled ahead with a version of CUDA, of which only the first part counts.

    Within it, code runs with every driver that jax's CUDA build runs with.
    """
    versions = (f"CUDA {cuda_major}", jax.__version__, jax.lib.__version__)
    return _named(library, (*flags_for(library.all_targets()), *versions))


def _cuda_major() -> int | None:
    """Returns the version of CUDA that the installed jax is built for; None if it is not built for GPUs."""
    return next((major for major in (13, 12) if importlib.util.find_spec(f"jax_cuda{major}_plugin")), None)


def _nvcc() -> Path:
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelBuildError("nvcc is not on PATH nor in a Python package: install jax[cuda13] or the CUDA toolkit")
    return nvcc


def _file_name(nvcc: Path, library: Library, flags: Sequence[str]) -> str:
    return _named(library, (*flags, _run([str(nvcc), "--version"]), jax.__version__, jax.lib.__version__))


def _named(library: Library, texts: Sequence[str]) -> str:
    """Returns a file name with a digest of texts and of the library's sources."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    for source in (*library.sources(), *sorted(SOURCES.rglob("*.cuh"))):
        digest.update(source.relative_to(SOURCES).as_posix().encode() + b"\0" + source.read_bytes() + b"\0")
    return f"{library.name}-{digest.hexdigest()[:20]}.so"


def compile_unit(nvcc: Path, unit: Path, target: Path, flags: Sequence[str]) -> str:
    """Compiles one translation unit to an object file, and returns what nvcc prints.

    Raises:
      KernelBuildError: nvcc failed; the message includes its output.
    """
    headers = ["-I", str(SOURCES), "-isystem", jax.ffi.include_dir()]
    return _run([str(nvcc), *flags, *headers, "-c", str(unit), "-o", str(target)])


def compile_library(
    nvcc: Path, translation_units: list[Path], scratch: Path, library: Path, flags: Sequence[str]
) -> None:
    """Compiles translation units at the same time, in processes of their own, and links them.

    Raises:
      KernelBuildError: nvcc failed. Its output is logged.
    """
    objects = [scratch / f"{number}-{unit.stem}.o" for number, unit in enumerate(translation_units)]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda unit, target: compile_unit(nvcc, unit, target, flags), translation_units, objects))
    _run([str(nvcc), *flags, "-shared", *map(str, objects), "-ldl", "-o", str(library)])


def _opened(library: Library = HOPPER) -> ctypes.CDLL:
    """Builds a library if needed and loads it. A file that does not load, perhaps truncated, is built again, once."""
    path = build(library=library)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        _log.warning("compiling the CUDA kernels again, because they do not load: %s", error)
        if path.parent != PREBUILT:
            path.unlink(missing_ok=True)
    return ctypes.CDLL(str(build(library=library, is_prebuilt_taken=False)))


def loaded_libraries() -> tuple[str, ...]:
    """Returns the file names of the libraries that this process has loaded, in order. A name is a digest."""
    return tuple(_loaded_files)


def load_named(names: Sequence[str]) -> tuple[str, ...]:
    """Loads libraries by names of `loaded_libraries`, in this order, and returns those that this version has.

    Raises:
      KernelBuildError: See `load`.
    """
    for name in names:
        for library in (HOPPER, PORTABLE):
            is_known = name.startswith(f"{library.name}-") and name not in _loaded_files
            if is_known and name in file_names(library):  # a library of other sources is not compiled for its name
                load(library)
    return tuple(name for name in names if name in _loaded_files)


def load(library: Library = HOPPER) -> ctypes.CDLL:
    """Builds a library if needed, registers its XLA calls, and loads its kernels onto this process's GPUs.

    Further calls do nothing. A call that both libraries have is that of the one that was loaded first. No GPU is
    needed: programs that call the kernels can be compiled without one.

    Raises:
      KernelBuildError: jax's CUDA build is not installed, the kernels fail to build, or a GPU cannot load them.
    """
    with _loading:
        return loaded(library)


@functools.cache
def loaded(library: Library) -> ctypes.CDLL:
    """See `load`."""
    if _cuda_major() is None:
        raise KernelBuildError("the CUDA kernels need jax's CUDA build: install jax[cuda13]")
    opened = _opened(library)
    for name in library.targets:
        if name not in _registered:
            jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(opened, name)), platform="CUDA")
            _registered.add(name)
    for function in _SIZES:
        if hasattr(opened, function):
            getattr(opened, function).restype = ctypes.c_size_t
    ordinals = [int(device.local_hardware_id) for device in jax.local_devices() if device.platform == "gpu"]
    array, error = (ctypes.c_int * len(ordinals))(*ordinals), ctypes.create_string_buffer(_MAX_ERROR_BYTES)
    if ordinals and not opened.meshserve_load_kernels(array, len(ordinals), error, _MAX_ERROR_BYTES):
        raise KernelBuildError(f"GPUs {ordinals}: {error.value.decode()}")
    _loaded_files[Path(opened._name).name] = None
    return opened
