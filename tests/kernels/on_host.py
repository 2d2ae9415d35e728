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
    stand_ins: str,
    program: str,
    *kernels: str,
    replaced: Sequence[tuple[str, str]] = (),
    flags: tuple[str, ...] = (),
) -> ctypes.CDLL:
    """Builds the program of tests/kernels/`stand_ins` with the sources `kernels` of kernels/cuda, in an empty folder.

    `replaced` lists (old, new) texts; each old text must occur exactly once in the sources.
    """
    assert COMPILER is not None
    for source in (Path(__file__).parent / stand_ins).iterdir():
        shutil.copy(source, folder)
    texts = {kernel: (build.SOURCES / kernel).read_text() for kernel in kernels}
    for old, new in replaced:
        assert sum(text.count(old) for text in texts.values()) == 1, old
        texts = {kernel: text.replace(old, new) for kernel, text in texts.items()}
    for kernel, text in texts.items():
        (folder / kernel).write_text(text)
    library = folder / "program.so"
    numbers = str(Path(__file__).parent / "emulated_numbers")
    options = ["-std=c++20", "-I", numbers, "-O2", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas", *flags]
    subprocess.run([COMPILER, *options, folder / program, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def compiled_projection(folder: Path, program: str) -> ctypes.CDLL:
    """Builds a program of tests/kernels/emulated around projection.cuh, in an empty folder."""
    sources = (
        "weight_formats.cuh", "quantised.cuh", "split_product.cuh", "integer_product.cuh", "e4m3_cache.cuh", "p2p.cuh",
        "expert_choices.cuh", "expert_parts.cuh", "router_part.cuh", "rounding.cuh", "context_parts.cuh",
        "attention_tiles.cuh", "head_attention.cuh", "projection.cuh",
    )  # fmt: skip
    memory = "extern __shared__ __align__(1024) uint8_t ring[];"
    replaced = [(memory, "uint8_t* const ring = of_block(ring_memory);")]
    return compiled(folder, "emulated", program, *sources, replaced=replaced)
