"""Describes what a program is compiled from, so that a compiled one is found again without tracing it.

Tracing and lowering take most of a second start. The key of a stored program is therefore a digest of everything that
tracing reads: the declaration of the program with all its fields, the sources of this package, the versions of what
compiles, flags, and the devices. What cannot be described exactly, such as a function that was made at run time, has no
key, and the program is compiled as before.
"""

import dataclasses
import enum
import functools
import hashlib
import os
import platform
import re
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..api.versions import installed_version

_ROOT = Path(__file__).parents[2]  # of runtime, sharding and kernels, installed or in a checkout
# All sources that declaring, tracing and lowering may run, with what these import.
_FOLDERS = (
    "sharding", "kernels",
    *(f"runtime/{package}" for package in (
        "api", "model_files", "options", "scheduler", "host_cache", "backend", "model", "adapters", "weights",
        "program", "resolve", "draft",
    )),
)  # fmt: skip
_DISTRIBUTIONS = (
    "jax", "jaxlib", "flax", "numpy", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-cuda12-pjrt",
    "jax-cuda13-pjrt", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
)  # fmt: skip
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "TF_CPU_ENABLE_ONEDNN_OPTS")
# Settings of jax that decide on where and how something is kept or told, but not on programs.
_TOLD = re.compile("cache|log|dump|traceback|profil|distributed|coordinat|heartbeat|hijack|explain|leaks|ephemeral")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")
_MAX_DEPTH = 64


class NoKeyError(ValueError):
    """Something that a program is compiled from cannot be described, so the program cannot be stored."""


def digest_of(*values: Any) -> str:
    """Returns a digest of the descriptions of values.

    Raises:
      NoKeyError: One of them cannot be described.
    """
    digest = hashlib.sha256()
    for value in values:
        for part in _described(value, 0):
            digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def environment_digest() -> str:
    """Returns a digest of what this process compiles programs with, besides their declarations."""
    devices = jax.devices()
    client = devices[0].client
    settings = {name: repr(value) for name, value in jax.config.values.items() if not _TOLD.search(name)}
    return digest_of(
        sources_digest(),
        sys.version,
        platform.machine(),
        _processor() if devices[0].platform == "cpu" else "",
        [(name, installed_version(name)) for name in _DISTRIBUTIONS],
        [(name, os.environ.get(name, "")) for name in _FLAGS],
        sorted(settings.items()),
        (client.platform, client.platform_version, client.runtime_type, jax.process_count(), jax.process_index()),
        [(int(each.id), each.device_kind) for each in devices],
        [(str(getattr(each, "compute_capability", "")), str(getattr(each, "core_count", ""))) for each in devices],
    )


@functools.cache
def sources_digest() -> str:
    """Returns a digest of all Python sources from which programs are made."""
    digest = hashlib.sha256()
    for folder in _FOLDERS:
        for path in sorted((_ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _processor() -> str:
    """Returns the model and the instructions of this machine's processor, for which XLA compiles."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))


def _described(value: Any, depth: int) -> Iterator[str]:
    """Yields the parts of a description."""
    if depth > _MAX_DEPTH:
        raise NoKeyError("a value contains itself")
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, nnx.GraphDef)):
        yield f"{type(value).__module__}.{type(value).__qualname__}"
        yield from _described({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, depth)
    else:
        yield from _parts(value, depth + 1)


@functools.singledispatch
def _parts(value: Any, depth: int) -> Iterator[str]:
    raise NoKeyError(f"a {type(value).__module__}.{type(value).__qualname__} has no description")


@_parts.register(type(None))
@_parts.register(int)
@_parts.register(float)
@_parts.register(complex)
@_parts.register(str)
@_parts.register(bytes)
@_parts.register(type)
@_parts.register(np.dtype)
@_parts.register(Path)
@_parts.register(PartitionSpec)
@_parts.register(nnx.GraphDef)
def _parts_of_text(value: Any, depth: int) -> Iterator[str]:
    text = repr(value)
    if found := _ADDRESS.search(text):
        raise NoKeyError(f"a description has an address: {text[max(found.start() - 60, 0) : found.end()]}")
    yield f"{type(value).__qualname__}:{text}"


@_parts.register
def _parts_of_enum(value: enum.Enum, depth: int) -> Iterator[str]:
    yield f"{type(value).__qualname__}.{value.name}"


@_parts.register
def _parts_of_partial(value: functools.partial, depth: int) -> Iterator[str]:
    yield "partial"
    yield from _described((value.func, value.args, value.keywords), depth)


@_parts.register
def _parts_of_method(value: types.MethodType, depth: int) -> Iterator[str]:
    yield from _described((value.__func__, value.__self__), depth)


@_parts.register(types.FunctionType)
@_parts.register(types.BuiltinFunctionType)
def _parts_of_function(value: Any, depth: int) -> Iterator[str]:
    """The sources have a digest of their own, so a function is its place in them, and what it was made with."""
    yield f"function:{value.__module__}.{value.__qualname__}"
    if isinstance(value, types.FunctionType):
        yield f"line:{value.__code__.co_firstlineno}"
        yield from _described((value.__defaults__, value.__kwdefaults__), depth)
        yield from _described(tuple(cell.cell_contents for cell in value.__closure__ or ()), depth)


@_parts.register
def _parts_of_mesh(value: Mesh, depth: int) -> Iterator[str]:
    ids = [int(device.id) for device in value.devices.flat]
    yield f"mesh:{value.axis_names}:{value.devices.shape}:{ids}:{value.axis_types}"


@_parts.register
def _parts_of_sharding(value: NamedSharding, depth: int) -> Iterator[str]:
    yield f"sharding:{value.memory_kind}"
    yield from _described((value.mesh, value.spec), depth)


@_parts.register(jax.Array)
@_parts.register(jax.ShapeDtypeStruct)
def _parts_of_array(value: Any, depth: int) -> Iterator[str]:
    yield f"array:{value.shape}:{value.dtype}:{getattr(value, 'weak_type', False)}"
    yield from _described(value.sharding, depth)


@_parts.register(np.ndarray)
@_parts.register(np.generic)
def _parts_of_numbers(value: Any, depth: int) -> Iterator[str]:
    yield f"numbers:{value.shape}:{value.dtype}:{hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"


@_parts.register
def _parts_of_state(value: nnx.State, depth: int) -> Iterator[str]:
    yield from _described(sorted(nnx.to_flat_state(value), key=lambda item: repr(item[0])), depth)


@_parts.register
def _parts_of_variable(value: nnx.Variable, depth: int) -> Iterator[str]:
    yield type(value).__qualname__
    yield from _described((value.get_value(), dict(value.get_metadata())), depth)


@_parts.register
def _parts_of_mapping(value: Mapping, depth: int) -> Iterator[str]:
    yield f"mapping:{len(value)}"
    for pair in sorted(value.items(), key=lambda item: repr(item[0])):
        yield from _described(pair, depth)


@_parts.register(tuple)
@_parts.register(list)
def _parts_of_sequence(value: Any, depth: int) -> Iterator[str]:
    yield f"{type(value).__qualname__}:{len(value)}"
    for each in value:
        yield from _described(each, depth)


@_parts.register(set)
@_parts.register(frozenset)
def _parts_of_set(value: Any, depth: int) -> Iterator[str]:
    yield from sorted("\0".join(_described(each, depth)) for each in value)
