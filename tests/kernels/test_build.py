"""Tests of the file of compiled kernels."""

import re
import subprocess
from pathlib import Path

import pytest

from meshserve.kernels.cuda import build


def test_a_damaged_file_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that was cut short while it was copied: it would otherwise end every start."""
    path, source = tmp_path / "kernels.so", tmp_path / "kernels.c"
    source.write_text("int answer(void) { return 42; }")
    num_builds = 0

    def compiled(library: build.Library, *, is_prebuilt_taken: bool = True) -> Path:
        nonlocal num_builds
        if not path.exists():
            num_builds += 1
            subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
        return path

    path.touch()
    monkeypatch.setattr(build, "build", compiled)
    assert build._opened().answer() == 42
    assert "file too short" in caplog.text and num_builds == 1
    assert build._opened().answer() == 42 and num_builds == 1


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (
            "gcc: No such file or directory\nnvcc fatal   : Failed to preprocess host compiler properties.",
            "nvcc finds no C++ compiler; install g++ (apt-get install g++)",
        ),
        ("sh: 1: g++: not found", "nvcc finds no C++ compiler; install g++ (apt-get install g++)"),
        (
            "#error -- unsupported GNU version! gcc versions later than 14 are not supported!",
            "nvcc does not support this version of g++; install an older one, or a newer CUDA toolkit",
        ),
        ("a.cu(3): warning\na.cu(7): error: expected a ';'\n1 error detected", "a.cu(7): error: expected a ';'"),
        ("", "nvcc failed without a message"),
    ],
)
def test_why_nvcc_failed_is_one_line(
    output: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\ncase $1 in --version) echo 13 ;; *) cat {tmp_path}/output >&2; exit 1 ;; esac\n")
    nvcc.chmod(0o755)
    (tmp_path / "output").write_text(output)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(build.KernelBuildError, match=f"^{re.escape(problem)}$"):
        build.build(tmp_path)
    assert f"failed with exit status 1:\n{output}" in caplog.text
    assert not list(tmp_path.glob("*.so"))
