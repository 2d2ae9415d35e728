"""Tests that the benchmarks and targets that the documentation names exist, with the options that it gives them.

Decisions and the log are records: they name commands of their day.
"""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from meshserve.runtime.commands.cli import benchmarks

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted(path for folder in ("deploy", "tests", "kernels") for path in (ROOT / folder).rglob("*.md")),
    *sorted(path for path in (ROOT / "benchmarks").rglob("*.py")),
]
# A command stands in a code block, indented, or in backticks.
COMMAND = re.compile(
    r"(?:^\s+(?:\S*python3? -m |\$\(\w+\) -m )?meshserve |`(?:meshserve )?)bench (\w+)([^`\n]*)", re.MULTILINE
)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Returns the benchmarks that a text names, each with its options."""
    found = []
    for name, rest in COMMAND.findall(text.replace("\\\\\n", " ").replace("\\\n", " ")):
        words = shlex.split(rest.split(" # ")[0].split("; ")[0].replace("$", ""), posix=False)
        found.append((name, [word.partition("=")[0] for word in words if word.startswith("--")]))
    return found


def named(pattern: str) -> list[str]:
    return sorted({found for path in PAGES for found in re.findall(pattern, path.read_text(), re.MULTILINE)})


def test_commands_are_found():
    text = """
    meshserve bench decode --model a \\
        --batch 1 # --not this
Use `bench serve --rate=4` or `meshserve bench top`.
"""
    assert commands(text) == [("decode", ["--model", "--batch"]), ("serve", ["--rate"]), ("top", [])]
    assert len({name for path in PAGES for name, _ in commands(path.read_text())}) > 15


def test_every_benchmark_has_the_options_that_pages_give_it(capsys: pytest.CaptureFixture[str]):
    helps: dict[str, str] = {}
    for name, (module, _) in benchmarks().items():
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(module).main(["--help"])
        helps[name] = capsys.readouterr().out
        assert ended.value.code == 0 and "usage:" in helps[name], name
    for path in PAGES:
        for name, flags in commands(path.read_text()):
            assert name in helps, f"{path} names `bench {name}`; there are {', '.join(helps)}"
            for flag in flags:
                assert re.search(rf"{flag}\b", helps[name]), f"{path}: `bench {name}` has no {flag}"


def test_every_target_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    phony = re.search(r"^\.PHONY:((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None and set(phony[1].replace("\\", "").split()) == targets
    asked = set(named(r"(?:^ +|`)make ([\w-]+)"))
    assert len(asked) > 10 and asked <= targets, asked - targets


def test_every_file_of_a_benchmark_exists():
    for module in named(r"python3? -m meshserve\.(benchmarks[\w.]+)"):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    for file in named(r"(?<!tests/)(benchmarks/[\w/]+\.py)"):
        assert (ROOT / file).exists(), file
