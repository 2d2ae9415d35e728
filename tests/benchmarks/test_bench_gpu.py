"""Tests that the benchmarks of `make bench-gpu` accept its arguments, which are otherwise used on a GPU only."""

import importlib
import shlex
import subprocess
from pathlib import Path

import pytest

from meshserve.runtime.commands.cli import benchmarks

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("variables", [(), ("PYTHON_VLLM=/opt/vllm/bin/python", "STARTS=3")])
def test_the_arguments_of_every_benchmark_are_accepted(variables: tuple[str, ...]):
    done = subprocess.run(
        ["make", "-n", "bench-gpu", "PYTHON=python3", *variables], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = done.stdout.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line)[4:] for line in lines if line.startswith("python3 -m meshserve bench ")]
    assert [name for name, *_ in commands] == ["decode", "decode", "prefill", "full_load", "open_loop"]
    for name, *arguments in commands:
        module = importlib.import_module(benchmarks()[name][0])
        options = (getattr(module, "parser", None) or module._parser)().parse_args(arguments)
        if name in ("full_load", "open_loop"):
            assert options.engines == (["ours", "vllm"] if variables else ["ours"])
            assert options.markdown.parent == Path("build")
