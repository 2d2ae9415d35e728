"""Compiles CUDA sources for the host, with files that replace CUDA."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from meshserve.kernels.cuda import build

COMPILER = shutil.which("c++") or shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on PATH")


def compiled(
    folder: Path,
    program: str,
    *,
    stand_ins: str = "emulated",
    replaced: Sequence[tuple[str, str, str]] = (),
    flags: tuple[str, ...] = (),
) -> ctypes.CDLL:
    """Builds the program of tests/kernels/`stand_ins` with the sources of kernels/cuda, in an empty folder.

    Files of `stand_ins` take the place of those that have the same path in kernels/cuda. `replaced` lists (path in
    kernels/cuda, old text, new text); each old text must occur exactly once in its file.
    """
    assert COMPILER is not None
    texts: dict[str, str] = {}
    for kernel, old, new in replaced:
        text = texts.get(kernel) or (build.SOURCES / kernel).read_text()
        assert text.count(old) == 1, (kernel, old)
        texts[kernel] = text.replace(old, new)
    for kernel, text in texts.items():
        (folder / kernel).parent.mkdir(parents=True, exist_ok=True)
        (folder / kernel).write_text(text)
    library, here = folder / "program.so", Path(__file__).parent
    searched = (folder, here / stand_ins, here / "emulated_numbers", build.SOURCES)
    options = ["-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas", *flags]
    source = here / stand_ins / program
    subprocess.run([COMPILER, *options, *(f"-I{path}" for path in searched), source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def compiled_projection(folder: Path, program: str) -> ctypes.CDLL:
    """Builds a program of tests/kernels/emulated around projection.cuh, in an empty folder."""
    memory = "extern __shared__ __align__(1024) uint8_t pipeline[];"
    replaced = [("projection/sm90/projection.cuh", memory, "uint8_t* const pipeline = of_block(pipeline_memory);")]
    return compiled(folder, program, replaced=replaced)
