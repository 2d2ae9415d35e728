"""Tests of the file of compiled kernels."""

import subprocess
from pathlib import Path

import pytest

from meshserve.kernels.cuda import build


def test_a_damaged_file_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that was cut short while it was copied: it would otherwise end every start."""
    library, source = tmp_path / "kernels.so", tmp_path / "kernels.c"
    source.write_text("int answer(void) { return 42; }")
    num_builds = 0

    def compiled() -> Path:
        nonlocal num_builds
        if not library.exists():
            num_builds += 1
            subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        return library

    library.touch()
    monkeypatch.setattr(build, "build", compiled)
    assert build._opened().answer() == 42
    assert "file too short" in caplog.text and num_builds == 1
    assert build._opened().answer() == 42 and num_builds == 1
