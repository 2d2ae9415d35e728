"""Tests how compute-sanitizer's output is read, without a GPU."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import pytest

from meshserve.benchmarks.checks import nan_fill, sanitize

ROOT = Path(__file__).parents[2]

MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at void meshserve::projection_kernel<64>+0x10
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """========= Error: Race reported between Write access at void meshserve::prefill_kernel<128>()+0x4d0
=========     and Read access at void meshserve::prefill_kernel<128>()+0x8a0 [272 hazards]
========= Error: Race reported between Write access at void meshserve::attention_kernel<128>()+0x10
"""


def test_reports_are_counted_by_their_first_line():
    unknown, num_known = sanitize.classify("memcheck", MEMCHECK)
    assert (unknown, num_known) == (Counter({"Invalid __global__ read of size 16 bytes": 1}), 0)


def test_known_reports_are_those_of_the_tool_and_the_kernel():
    unknown, num_known = sanitize.classify("racecheck", RACECHECK)
    assert num_known == 1 and len(unknown) == 1 and "attention_kernel" in next(iter(unknown))
    assert sanitize.classify("memcheck", RACECHECK)[1] == 0


def test_lost_tests_are_told_from_reports():
    assert sanitize.problem(0, "12 passed in 3 s") == ""
    assert sanitize.problem(86, "12 passed in 3 s") == ""
    assert "exit status -11" in sanitize.problem(-11, "....")
    assert "exit status 1" in sanitize.problem(1, "1 failed, 3 passed in 3 s")


def test_every_suite_selects_tests():
    """In one process, because each imports jax."""
    suites = [["--noconftest", "--collect-only", "-q", path, "-k", words] for path, words in sanitize.SUITES.values()]
    program = f"import pytest; print([int(pytest.main(suite)) for suite in {suites}])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    statuses = done.stdout.splitlines()[-1:]
    assert statuses == [str([0] * len(sanitize.SUITES))], done.stdout + done.stderr  # 5: no tests


def test_free_memory_is_filled_in_halves_up_to_the_limit():
    assert nan_fill.fill_free_memory(jax.devices()[0], 1 << 20, 1 << 16) == 1 << 20
    assert nan_fill.fill_free_memory(jax.devices()[0], (1 << 20) + (1 << 16), 1 << 16) == (1 << 20) + (1 << 16)


def test_the_fill_ends_where_nothing_more_can_be_allocated(monkeypatch: pytest.MonkeyPatch):
    """A device of 300,000 bytes takes arrays of 262,144 and 32,768 bytes, and no smaller ones are tried."""
    taken = []

    def full(size: int, *arguments, **options) -> "FilledArray":
        if sum(taken) + size > 300_000:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        taken.append(size)
        return FilledArray()

    monkeypatch.setattr(nan_fill.jnp, "full", full)
    assert nan_fill.fill_free_memory(jax.devices()[0], 1 << 20, 1 << 15) == 294_912 and taken == [262_144, 32_768]


class FilledArray:
    """Stands for an array on a device."""

    def block_until_ready(self) -> "FilledArray":
        """Returns at once."""
        return self
