"""A compile after "ready" is counted, logged with its shapes, and refused if strict; the cache on disk is hit."""

import logging
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.runtime.program.compile_cache import CompileWatch, LateCompileError, compile_all
from tests.waiting import WAIT_SECONDS


def test_compiles_before_ready_are_counted_and_allowed() -> None:
    with CompileWatch(is_strict=True) as watch:
        jax.jit(lambda x: x + 1)(jnp.ones(3))
        counts = watch.counts
    assert counts.num_compiles >= 1
    assert counts.num_late_compiles == 0


def test_a_late_compile_is_counted_and_logged_with_its_shapes(caplog: pytest.LogCaptureFixture) -> None:
    x = jnp.ones((3, 7))
    with CompileWatch() as watch, caplog.at_level(logging.WARNING):
        watch.ready()
        jax.jit(lambda x: x * 2 + 1)(x)
        assert watch.counts.num_late_compiles == 1
    assert "compiled after the server was ready" in caplog.text
    assert "float32[3,7]" in caplog.text


def test_strict_refuses_before_xla_compiles() -> None:
    x = jnp.ones((3, 5))
    program = jax.jit(lambda x: x * 3 - 1)
    with CompileWatch(is_strict=True) as watch:
        watch.ready()
        before = watch.counts.num_compiles
        with pytest.raises(LateCompileError, match="--strict"):
            program(x)
        assert watch.counts.num_compiles == before
    assert program(x)[0, 0] == 2.0  # the watch is over


def test_a_program_that_is_ready_is_no_compile() -> None:
    x = jnp.ones((2, 9))
    program = jax.jit(lambda x: x - 4).lower(x).compile()
    with CompileWatch(is_strict=True) as watch:
        watch.ready()
        np.testing.assert_array_equal(np.asarray(program(x)), -3.0)
        assert watch.counts.num_late_compiles == 0


def test_programs_are_compiled_at_a_time_and_kept_in_order() -> None:
    """Each waits until the one before or after it is also being compiled."""
    barrier = threading.Barrier(2, timeout=WAIT_SECONDS)

    class Lowered:
        def __init__(self, name: int):
            self.name = name

        def compile(self, options: dict[str, str | bool] | None = None) -> int:
            barrier.wait()
            return self.name

    assert compile_all(map(Lowered, range(6)), 6, 2) == list(range(6))  # type: ignore[arg-type]


def test_what_a_program_fails_with_is_raised() -> None:
    def lowered() -> Iterator[jax.stages.Lowered]:
        yield jax.jit(lambda x: x + 2).lower(1.0)
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        compile_all(lowered(), 2, 2)


def test_the_cache_is_hit_by_the_next_process(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, jax, jax.numpy as jnp\n"
        "from meshserve.runtime.program.compile_cache import CompileWatch, use_cache\n"
        "use_cache(pathlib.Path(sys.argv[1]))\n"
        "with CompileWatch() as watch:\n"
        "    jax.jit(lambda x: x @ x)(jnp.ones((8, 8))).block_until_ready()\n"
        "    print(watch.counts.num_cache_hits, watch.counts.num_cache_misses)\n"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    (cold_hits, cold_misses), (warm_hits, warm_misses) = (map(int, output.split()) for output in outputs)
    assert cold_hits == 0 and cold_misses > 0
    assert warm_hits == cold_misses and warm_misses == 0


@pytest.mark.parametrize(("is_autotuned", "num_found"), [(False, 1), (True, 0)])
def test_what_a_read_only_copy_of_the_cache_holds(is_autotuned: bool, num_found: int, tmp_path: Path) -> None:
    """On GPUs nothing: jax's keys contain the path of XLA's file of kernels, which XLA keeps where it may write."""
    code = (
        "import os, sys, pathlib, jax\n"
        "from meshserve.runtime.program.compile_cache import CompileWatch, use_cache\n"
        "if sys.argv[2]: os.access = lambda *_: False\n"  # permissions do not bind root
        f"use_cache(pathlib.Path(sys.argv[1]), is_autotuned={is_autotuned})\n"
        "with CompileWatch() as watch:\n"
        "    jax.jit(lambda x: x * 5).lower(1.0).compile()\n"
        "    print(watch.counts.num_cache_hits)\n"
    )

    def started(folder: str, is_read_only: str) -> int:
        command = [sys.executable, "-c", code, str(tmp_path / folder), is_read_only]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert started("made", "") == 0 and started("made", "") == 1
    shutil.copytree(tmp_path / "made", tmp_path / "mounted")
    assert started("mounted", "read-only") == num_found
