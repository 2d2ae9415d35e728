"""Compiles the libraries of kernels ahead, for a wheel or an image: `python -m meshserve.kernels.cuda.prebuilt`.

Writes `build.PREBUILT`, a folder of this installation or checkout, which a wheel that is built from it contains. A
server takes a library from there if it was compiled from the same sources with the same flags, for the same version of
jax and the same first part of CUDA's, and for its GPUs. It then needs neither nvcc nor a C++ compiler; any other
compiles as without. No GPU is needed here.
"""

import argparse
import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from . import build

_RELEASE = re.compile(r"release (\d+)\.")
_LIBRARIES = {library.name: library for library in (build.HOPPER, build.PORTABLE)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit status."""
    parser = argparse.ArgumentParser(prog="prebuilt", description="Compile the libraries of CUDA kernels ahead.")
    parser.add_argument(
        "libraries",
        nargs="*",
        choices=(*_LIBRARIES, []),
        help="default: all; kernels is for Hopper, portable for others",
    )
    options = parser.parse_args(arguments)
    for name in options.libraries or _LIBRARIES:
        path = compile_ahead(_LIBRARIES[name])
        print(f"{path} has {path.stat().st_size / 1e6:.1f} MB", flush=True)
    return 0


def compile_ahead(library: build.Library, folder: Path = build.PREBUILT) -> Path:
    """Compiles a library for all its targets into a folder, with the digest of the file beside it. Returns its path.

    Removes what the folder has of other versions of it, which nothing would use.

    Raises:
      KernelBuildError: nvcc was not found or failed.
    """
    nvcc = build.find_nvcc()
    if nvcc is None:
        raise build.KernelBuildError("nvcc is not on PATH nor in a Python package: install jax[cuda13]")
    path = folder / build.prebuilt_name(library, cuda_major(nvcc))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        unfinished = Path(scratch) / path.name
        flags = build.flags_for(library.all_targets())
        build.compile_library(nvcc, library.sources(), Path(scratch), unfinished, flags)
        digest = hashlib.sha256(unfinished.read_bytes()).hexdigest()
        os.replace(unfinished, path)
    path.with_suffix(".sha256").write_text(f"{digest}\n", encoding="ascii")
    for old in folder.glob(f"{library.name}-*"):
        if old.stem != path.stem:
            old.unlink()
    return path


def cuda_major(nvcc: Path) -> int:
    """Returns the first part of the version of CUDA that a compiler belongs to.

    Raises:
      KernelBuildError: The compiler does not say it.
    """
    output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    if (found := _RELEASE.search(output)) is None:
        raise build.KernelBuildError(f"{nvcc} --version names no release: {output[:200]!r}")
    return int(found[1])


if __name__ == "__main__":
    raise SystemExit(main())
