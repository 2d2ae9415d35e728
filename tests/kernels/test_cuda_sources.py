"""Compiles all CUDA sources for their GPUs, without a GPU (make check). What is compiled is kept in build/cuda, and
compiled again when a source, a flag or a compiler has changed."""

import ctypes
import dataclasses
import hashlib
import re
from pathlib import Path

import pytest

from meshserve.kernels.cuda import build

HERE = Path(__file__).parent
KEPT = HERE.parents[1] / "build" / "cuda"


@pytest.fixture(scope="module")
def nvcc(request: pytest.FixtureRequest) -> Path:
    if not request.config.getoption("--compile-cuda"):
        pytest.skip("compiles for minutes after a change; `make check` passes --compile-cuda")
    found = build.find_nvcc()
    assert found is not None, "nvcc is neither on PATH nor in a Python package: install the test extra"
    return found


def built(library: build.Library) -> Path:
    path = build.build(KEPT, library)
    for other in set(KEPT.glob(f"{library.name}-*.so")) - {path}:
        other.unlink()
    return path


@pytest.fixture(scope="module")
def library(nvcc: Path) -> Path:
    return built(build.HOPPER)


@pytest.mark.parametrize(("kind", "least"), [(build.HOPPER, 100), (build.PORTABLE, 16)], ids=["hopper", "portable"])
def test_a_library_has_every_call_and_lists_its_kernels(nvcc: Path, kind: build.Library, least: int) -> None:
    opened = ctypes.CDLL(str(built(kind)))
    for target in kind.targets:
        assert getattr(opened, target)
    listed = opened.meshserve_num_kernels()
    assert listed > least, f"{listed} kernels are loaded before programs run"
    error = ctypes.create_string_buffer(200)
    assert opened.meshserve_load_kernels(None, 0, error, 200) or b"driver" in error.value, error.value


@pytest.mark.parametrize(
    ("unit", "target"),
    [
        ("p2p_on_one_gpu.cu", "arch=compute_90a,code=sm_90a"),
        ("portable_headers.cu", "arch=compute_89,code=sm_89"),  # what is outside of sm90 uses none of its instructions
    ],
)
def test_a_unit_of_the_tests_compiles(nvcc: Path, library: Path, unit: str, target: str, tmp_path: Path) -> None:
    """The library's name stands for the headers that the unit includes, and for the compiler."""
    key = hashlib.sha256(library.name.encode() + (HERE / unit).read_bytes()).hexdigest()[:20]
    stamp = KEPT / f"{unit}-{key}"
    if stamp.exists():
        return
    build.compile_unit(nvcc, HERE / unit, tmp_path / "unit.o", ("-std=c++17", "-O1", f"-gencode={target}"))
    for other in KEPT.glob(f"{unit}-*"):
        other.unlink()
    KEPT.mkdir(parents=True, exist_ok=True)
    stamp.touch()


ATTENTION, PRODUCTS = "attention/sm80/tile_launch.cu", "projection/sm80/few_tokens_launch.cu"
EXPERTS = {  # with the number of their kernels
    "experts/sm80/launch_bf16.cu": 11,
    "experts/sm80/launch_e4m3.cu": 12,
    "experts/sm80/launch_int4.cu": 12,
    "experts/sm80/launch_int4_coarse.cu": 12,
}


@pytest.mark.parametrize(
    ("unit", "num_kernels", "capability"),
    [(ATTENTION, 12, capability) for capability in build.CAPABILITIES]
    + [(PRODUCTS, 17, capability) for capability in ((8, 0), (8, 9), (12, 0))]
    + [(unit, number, capability) for unit, number in EXPERTS.items() for capability in ((8, 0), (8, 9), (12, 0))],
    ids=str,
)
def test_kernels_compile_for_each_gpu_and_keep_their_values_in_registers(
    nvcc: Path, unit: str, num_kernels: int, capability: tuple[int, int], tmp_path: Path
) -> None:
    target = "sm_{}{}".format(*capability)
    kind = dataclasses.replace(build.PORTABLE, target=target)
    name = f"{Path(unit).stem}-{target}"
    stamp = KEPT / f"{name}-{Path(build._file_name(nvcc, kind, kind.flags())).stem}"
    if stamp.exists():
        return
    printed = build.compile_unit(nvcc, build.SOURCES / unit, tmp_path / "unit.o", (*kind.flags(), "-Xptxas", "-v"))
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill stores", printed)]
    assert len(spilled) >= num_kernels and max(spilled) <= 192, (target, spilled)
    for other in KEPT.glob(f"{name}-*"):
        other.unlink()
    KEPT.mkdir(parents=True, exist_ok=True)
    stamp.touch()
