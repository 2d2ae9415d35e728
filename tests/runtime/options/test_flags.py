"""Tests the command line as it is typed: the model, aliases, misspelt flags and commands, help and version."""

import argparse
import importlib.metadata
import re
from pathlib import Path

import pytest

import meshserve
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.commands.cli import main
from meshserve.runtime.options.flags import Parser, add_options, serve_config
from meshserve.runtime.options.serve_config import ServeConfig


def parsed(*flags: str) -> ServeConfig:
    parser = Parser(prog="meshserve serve")
    add_options(parser)
    return serve_config(parser.parse_args(flags))


@pytest.mark.parametrize(
    "flags", [("Qwen/Qwen3-8B", "--tp=2"), ("--tp", "2", "Qwen/Qwen3-8B"), ("--model", "Qwen/Qwen3-8B", "--tp=2")]
)
def test_the_model_needs_no_flag(flags: tuple[str, ...]):
    assert parsed(*flags) == ServeConfig(model="Qwen/Qwen3-8B", tp=2)


def test_the_model_overrides_that_of_the_file(tmp_path: Path):
    file = tmp_path / "serve.toml"
    file.write_text("model = 'other'\n")
    assert parsed("demo", f"--config={file}").model == "demo"


def test_a_model_that_is_given_twice_is_an_error():
    with pytest.raises(ConfigError, match="the model is given twice, a and --model b"):
        parsed("a", "--model=b")
    assert parsed("a", "--model=a").model == "a"


def test_names_of_vllm_are_accepted(tmp_path: Path):
    flags = ("--tensor-parallel-size=2", "--max-model-len=100", "--max-num-seqs=9", "--gpu-memory-utilization=0.5")
    expected = ServeConfig(tp=2, max_context=100, max_running=9, memory_fraction=0.5)
    assert parsed(*flags) == expected
    file = tmp_path / "serve.toml"
    file.write_text("".join(f"{flag[2:].replace('-', '_')}\n" for flag in flags))
    assert parsed(f"--config={file}") == expected


def test_the_help_names_each_alias_once(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out.partition("options:")[2]
    for alias in ("tensor-parallel-size", "max-model-len", "max-num-seqs", "gpu-memory-utilization"):
        assert text.count(f"--{alias}") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--max-runing", "3"], "meshserve serve: unknown flag --max-runing. Did you mean --max-running?"),
        (["serve", "--tensor-paralel-size=2"], "unknown flag --tensor-paralel-size. Did you mean --tensor-parallel-"),
        (["serve", "--max-run", "3"], "meshserve serve: unknown flag --max-run."),  # no abbreviations
        (["chat", "--temprature=1"], "meshserve chat: unknown flag --temprature. Did you mean --temperature?"),
        (["serve", "--zzz"], "meshserve serve: unknown flag --zzz. `meshserve serve --help` explains"),
        (["serv", "demo"], "Did you mean serve?"),
        (["serve", "demo", "more"], "meshserve serve: unexpected argument 'more'."),
        (["serve", "--tp=two"], "got 'two'; allowed is a whole number or auto."),
        (["serve", "--drain-seconds=x"], "got 'x'; allowed is a number."),
        (
            ["serve", "--dtype=float23"],
            "allowed are auto, bfloat16, float32. Did you mean float32?",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_what_was_meant(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2 and message in said.err and said.err.count("\n") == 1 and not said.out


def test_auto_is_a_value():
    assert parsed("--tp=auto", "--max-running", "auto") == ServeConfig()


def test_without_arguments_there_is_help_with_examples(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    text = capsys.readouterr().out
    for command in ("serve", "generate", "chat", "plan", "convert", "bench", "token", "demo"):
        assert re.search(rf"^    {command} +\w", text, re.MULTILINE), command
    assert "meshserve serve Qwen/Qwen3-8B" in text


def test_every_example_of_the_help_is_accepted(capsys: pytest.CaptureFixture[str]):
    from meshserve.runtime.commands import cli

    lines = re.findall(r"^  meshserve (.+?)(?:  .*)?$", cli._EXAMPLES, re.MULTILINE)
    assert len(lines) >= 6
    for line in lines:
        assert isinstance(cli._parser().parse_args(line.split()), argparse.Namespace)


def test_the_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"meshserve {importlib.metadata.version('meshserve')}\n"
    assert meshserve.__version__ == importlib.metadata.version("meshserve")
