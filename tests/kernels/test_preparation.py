"""What a loaded program needs is prepared once, in the order in which it was prepared when the program was compiled."""

import threading
import time

import pytest

from meshserve.kernels.cuda import build, cublas_lt, preparation


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns what is loaded, in order. Two libraries are there, as `kernels-1.so` and `portable-2.so`."""
    done: list[str] = []
    files = {"kernels": "kernels-1.so", "portable": "portable-2.so"}

    def loaded(library: build.Library) -> None:
        if files[library.name] not in build._loaded_files:
            time.sleep(0.02)  # another thread could begin meanwhile
            done.append(files[library.name])
            build._loaded_files[files[library.name]] = None

    def opened() -> None:
        done.append(preparation.CUBLAS_LT)

    monkeypatch.setattr(build, "_loaded_files", {})
    monkeypatch.setattr(build, "file_names", lambda library: (files[library.name],))
    monkeypatch.setattr(build, "load", loaded)
    monkeypatch.setattr(cublas_lt, "open_library", opened)
    return done


def test_what_was_prepared_is_prepared_again_in_order(loads: list[str]):
    assert preparation.prepare(["portable-2.so", "kernels-1.so", preparation.CUBLAS_LT]) == ()
    assert loads == ["portable-2.so", "kernels-1.so", preparation.CUBLAS_LT]


def test_a_program_that_calls_nothing_needs_nothing(loads: list[str]):
    assert preparation.prepare([]) == () and not loads


def test_kernels_of_other_sources_are_named_and_not_compiled(loads: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "build", lambda **_: pytest.fail("no library is compiled to learn its name"))
    assert preparation.prepare(["kernels-0.so", "portable-2.so", "other-2.so"]) == ("kernels-0.so", "other-2.so")
    assert loads == ["portable-2.so"]


def test_threads_load_a_library_once(loads: list[str]):
    threads = [threading.Thread(target=preparation.prepare, args=(["kernels-1.so"],)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loads == ["kernels-1.so"]


def test_an_open_cublas_lt_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "_loaded_files", {"kernels-1.so": None})
    monkeypatch.setattr(cublas_lt, "load", lambda: None)
    cublas_lt.open_library.cache_clear()
    assert preparation.prepared() == ("kernels-1.so",)
    cublas_lt.open_library()  # without a GPU it only loads the kernels
    try:
        assert preparation.prepared() == ("kernels-1.so", preparation.CUBLAS_LT)
    finally:
        cublas_lt.open_library.cache_clear()
