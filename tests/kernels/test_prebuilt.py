"""A library that was compiled ahead is found by its sources, flags and versions, and is used without nvcc."""

import dataclasses
import hashlib
import logging
from pathlib import Path

import jax
import pytest

from meshserve.kernels.cuda import build, prebuilt

SOURCE = 'extern "C" int answer(void) { return 42; }\n'


@dataclasses.dataclass(frozen=True)
class OneUnit(build.Library):
    """A library of one C++ file, which the stand-in for nvcc compiles with g++."""

    unit: Path = Path()

    def sources(self) -> list[Path]:
        return [self.unit]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneUnit:
    """A library that is compiled ahead, and a machine with jax's CUDA build and without nvcc."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "answer.cu").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "PREBUILT", folder / "libraries")
    monkeypatch.setattr(build, "_cuda_major", lambda: 13)
    build.prebuilt.cache_clear()
    found = OneUnit("kernels", ("answer",), lambda _: None, "sm90", target="sm_90a", unit=folder / "answer.cu")
    compiler = _compiler(tmp_path)
    monkeypatch.setattr(build, "find_nvcc", lambda: compiler)
    prebuilt.compile_ahead(found, folder / "libraries")
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    return found


def _compiler(folder: Path) -> Path:
    """Returns a stand-in for nvcc that compiles C++ and links."""
    path = folder / "nvcc"
    path.write_text(
        "#!/usr/bin/env python3\n"
        "import subprocess, sys\n"
        "if '--version' in sys.argv: print('Cuda compilation tools, release 13.4, V13.4.1'); sys.exit()\n"
        "left = [each for each in sys.argv[1:] if not each.startswith('-gencode') and each != '-Xcompiler']\n"
        "left = ['-xc++' if each == '-c' else each for each in left]\n"
        "sys.exit(subprocess.run(['g++', *(['-c'] if '-xc++' in left else []), *left]).returncode)\n"
    )
    path.chmod(0o755)
    return path


def test_it_is_loaded_without_nvcc(library: OneUnit):
    assert build.find_nvcc() is None
    path = build.build(library=library)
    assert path.parent == build.PREBUILT and build.file_names(library) == (path.name,)
    assert build._opened(library).answer() == 42
    build.unavailable_reason.cache_clear()
    assert build.unavailable_reason(library=library) is None


@pytest.mark.parametrize("changed", ["source", "header", "jax", "CUDA", "flags", "target", "removed"])
def test_any_other_version_is_compiled(library: OneUnit, changed: str, monkeypatch: pytest.MonkeyPatch):
    if changed == "source":
        library.unit.write_text(SOURCE.replace("42", "43"))
    elif changed == "header":
        (library.unit.parent / "new.cuh").write_text("// new\n")
    elif changed == "jax":
        monkeypatch.setattr(jax, "__version__", "0.0.1")
    elif changed == "CUDA":
        monkeypatch.setattr(build, "_cuda_major", lambda: 12)
    elif changed == "flags":
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    elif changed == "target":
        library = dataclasses.replace(library, target="sm_100a")
    else:
        build.prebuilt(library).unlink()  # type: ignore[union-attr]
    build.prebuilt.cache_clear()
    assert build.prebuilt(library) is None and build.file_names(library) == ()
    with pytest.raises(build.KernelBuildError, match="nvcc is not on PATH"):
        build.build(library=library)
    build.unavailable_reason.cache_clear()
    assert "this installation has none for its versions" in (build.unavailable_reason(library=library) or "")


def test_a_damaged_file_is_told_and_not_used(library: OneUnit, caplog: pytest.LogCaptureFixture):
    path = build.build(library=library)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    build.prebuilt.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert build.prebuilt(library) is None
    assert f"{path} is not used, because it is damaged" in caplog.text


def test_one_that_does_not_load_here_is_compiled_beside_it(
    library: OneUnit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """As one that was linked with a later C library: its digest is right."""
    path = build.build(library=library)
    path.write_bytes(b"not a library")
    path.with_suffix(".sha256").write_text(hashlib.sha256(b"not a library").hexdigest())
    build.prebuilt.cache_clear()
    compiler = _compiler(tmp_path)
    monkeypatch.setattr(build, "find_nvcc", lambda: compiler)
    monkeypatch.setattr(build, "user_folder", lambda: tmp_path / "user")
    assert build._opened(library).answer() == 42
    assert "compiling the CUDA kernels again, because they do not load" in caplog.text
    assert path.exists() and len(list((tmp_path / "user").glob("kernels-*.so"))) == 1


def test_a_gpu_that_is_not_listed_compiles_for_itself(library: OneUnit, monkeypatch: pytest.MonkeyPatch):
    portable = build.PORTABLE
    assert portable.all_targets()[0] == "sm_80" and portable.all_targets()[-1] == "compute_121"
    monkeypatch.setattr(build, "_present_capabilities", lambda: {(8, 6), (12, 1)})
    assert set(portable.needed_targets()) <= set(portable.all_targets())
    monkeypatch.setattr(build, "_present_capabilities", lambda: {(8, 8)})
    build.prebuilt.cache_clear()
    assert portable.needed_targets() == ("compute_87",) and build.prebuilt(portable) is None


def test_what_other_versions_left_is_removed(library: OneUnit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = build.build(library=library)
    library.unit.write_text(SOURCE.replace("42", "43"))
    compiler = _compiler(tmp_path)
    monkeypatch.setattr(build, "find_nvcc", lambda: compiler)
    after = prebuilt.compile_ahead(library, build.PREBUILT)
    assert sorted(path.name for path in build.PREBUILT.iterdir()) == sorted(
        [after.with_suffix(".sha256").name, after.name]
    )
    assert before.name != after.name
